"""Time how fast every schedule of the registry is generated, checked and simulated, in milliseconds of CPU time.

Other work on the machine changes CPU time less than wall time. The last column is the sum with `merge()`, whose
additions are ops too.

    python benchmarks/schedules.py [NAME ...]

The goals: 1F1B at 8 ranks and 64 microbatches in 10 ms; ZB-V at 16 ranks and 128 microbatches in 300 ms, which is what
torch 2.13 takes to lower it alone (296 ms).
"""

import argparse
import itertools
import time
from collections.abc import Callable

import fpipe

Transform = Callable[[fpipe.Program], fpipe.Program]
SIZES = [(8, 64), (16, 128)]
GOALS = {("one_f_one_b", 8, 64): 10.0, ("zbv", 16, 128): 300.0}
PATIENCE = 1.0
"""Seconds for which one size is tried again and again."""


def milliseconds(name: str, ranks: int, microbatches: int, *transforms: Transform) -> tuple[int, list[float]] | None:
    """Return the number of ops and the best times to generate (with `transforms`), check, simulate, and of all three.

    None if the schedule refuses these sizes."""
    schedule = fpipe.schedules.about(name)
    stages = ranks * schedule.stages_per_rank
    if schedule.refuses(ranks, stages, microbatches) is not None:
        return None
    best, since, ops = [float("inf")] * 4, time.process_time(), 0
    while True:
        times = [time.process_time()]
        program = fpipe.chain(fpipe.split(microbatches), schedule.factory(ranks), *transforms)(fpipe.program(stages))
        times.append(time.process_time())
        fpipe.check(program)
        times.append(time.process_time())
        fpipe.simulate(program)
        times.append(time.process_time())
        durations = [*(end - start for start, end in itertools.pairwise(times)), times[-1] - times[0]]
        best = [min(pair) for pair in zip(best, durations, strict=True)]
        ops = len(program.ops)
        del program
        if time.process_time() - since > PATIENCE:
            return ops, [1e3 * seconds for seconds in best]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="schedules to measure; all of them by default")
    names = parser.parse_args().names or fpipe.schedules.names()
    headings = f"{'ops':>7} {'generate':>9} {'check':>7} {'simulate':>9} {'all':>8} {'merged':>8}  goal"
    print(f"{'schedule':18} {'p':>3} {'m':>4} {headings}")
    for name in names:
        for ranks, microbatches in SIZES:
            timing = milliseconds(name, ranks, microbatches)
            merged = milliseconds(name, ranks, microbatches, fpipe.merge())
            if timing is not None and merged is not None:
                ops, (generate, check, simulate, total) = timing
                goal = GOALS.get((name, ranks, microbatches))
                print(
                    f"{name:18} {ranks:>3} {microbatches:>4} {ops:>7,} {generate:>9.2f} {check:>7.2f} {simulate:>9.2f} "
                    f"{total:>8.2f} {merged[1][-1]:>8.2f}" + (f"  {goal:g}" if goal else "")
                )
