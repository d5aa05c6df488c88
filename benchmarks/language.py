"""How fast programs are built and simulated: split, 1F1B and check, then simulate, at growing sizes; and next to each
one plain Python pass, the floor: one that only makes as many tuples, and one that only adds up as many times. And how
long it takes to share parameters out, beside replicas that keep them all. In CPU time, which others on the machine
change less than they change the clock on the wall.

    python benchmarks/language.py [--quick]
"""

import argparse
import gc
import resource
import statistics
import time

import fpipe


def build(ranks: int, microbatches: int) -> fpipe.Program:
    """What is measured: a step split and scheduled."""
    pipeline = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))
    return pipeline(fpipe.program(ranks))


def floor(ops: int) -> float:
    """Seconds to make and keep, for each op, the six tuples it is and a dict of its values, twice: before and after."""
    gc.disable()
    start = time.process_time()
    kept = []
    for _ in range(2):
        store = {}
        for number in range(ops):
            first, second = ("y", number, 0, None, 0, ""), ("res", number, 0, None, 0, "")
            store[first] = store[second] = number
            kept.append(("F", number, 0, None, 0, (first, store), (first, second), (number, ops)))
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def simulating(program: fpipe.Program, makespan: float) -> float:
    """Seconds for starts, ends and peaks of all ops."""
    start = time.process_time()
    timeline = fpipe.simulate(program)
    seconds = time.process_time() - start
    assert timeline.makespan == makespan
    return seconds


def floor_of_time(program: fpipe.Program) -> float:
    """Seconds to look at each op's sources once, add what it costs, and keep when it starts and ends."""
    gc.disable()
    sources = program.sources
    start = time.process_time()
    starts, ends = [], [0.0] * (len(sources) + 1)
    for number, before in enumerate(sources):
        now = max([ends[source] for source in before])
        starts.append(now)
        ends[number] = now + 1.0
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def one(ranks: int, microbatches: int) -> None:
    """One size, in seconds, with its peak memory."""
    start = time.process_time()
    program = build(ranks, microbatches)
    built = time.process_time()
    fpipe.check(program)
    checked = time.process_time()
    simulated = min(simulating(program, 3 * (microbatches + ranks - 1)) for _ in range(3))
    ops = len(program.ops)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    adding = min(floor_of_time(program) for _ in range(3))
    del program
    whole = checked - start
    print(
        f"{ops:>9,} ops ({ranks} ranks, {microbatches} microbatches): split + schedule {built - start:7.3f} s, check "
        f"{checked - built:6.3f} s; {ops / whole:>7,.0f} ops/s, {whole / floor(ops):4.1f}x the floor, {memory:.2f} "
        f"GiB; simulate {simulated:6.3f} s, best of 3, {simulated / adding:4.1f}x the floor"
    )


def small(rounds: int = 60) -> None:
    """1F1B at 8 ranks and 64 microbatches, again and again."""
    times: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        program = build(8, 64)
        fpipe.check(program)
        times.append(time.process_time() - start)
        del program
    print(
        f"1F1B, 8 ranks, 64 microbatches, built and checked: {min(times) * 1e3:.2f} ms at best, median "
        f"{statistics.median(times) * 1e3:.2f} ms"
    )


def sharding(rounds: int = 60) -> None:
    """Replicas added to 1F1B at 8 ranks and 64 microbatches: with all parameters, then gathered at each policy."""
    merged = fpipe.merge(outputs=False)(build(8, 64))
    ways = {
        "data_parallel": fpipe.data_parallel(),
        **{word: fpipe.shard(gather=word) for word in ("step", "run", "use")},
    }
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for word, way in ways.items():
            start = time.process_time()
            program = way(merged)
            times[word] = min(times[word], time.process_time() - start)
            del program
    base = times.pop("data_parallel")
    said = ", ".join(f"{word} {seconds * 1e3:.2f} ms, {seconds / base:.2f}x" for word, seconds in times.items())
    print(f"Added to 8 ranks, 64 microbatches, at best: data_parallel {base * 1e3:.2f} ms; shard: {said}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the million ops")
    quick = parser.parse_args().quick
    small()
    sharding()
    for sizes in [(50, 100), (128, 400)] + ([] if quick else [(512, 1024)]):
        one(*sizes)
