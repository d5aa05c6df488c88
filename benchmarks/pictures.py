"""Time how fast pictures are drawn: each file ending, in seconds of CPU time, simulated anew each time.

    python benchmarks/pictures.py [ENDING ...]

The goal: 32 ranks and 128 microbatches in 1.5 s, as SVG, page and trace.
"""

import argparse
import tempfile
import time
from pathlib import Path

import fpipe

SIZES = [(8, 32), (16, 64), (32, 128)]
ENDINGS = ["svg", "html", "json", "png"]


def seconds(program: fpipe.Program, costs: fpipe.Costs, file: Path) -> float:
    """Return the better of two times: a program's own tables are made once, as in a session."""
    best = float("inf")
    for _ in range(2):
        since = time.process_time()
        fpipe.plot(program, costs=costs, file=file)
        best = min(best, time.process_time() - since)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endings", nargs="*", metavar="ENDING", help=f"of {', '.join(ENDINGS)}; by default all")
    endings = parser.parse_args().endings or ENDINGS
    print(f"{'':18} {'p':>3} {'m':>4} {'ops':>7} {' '.join(f'{ending:>6}' for ending in endings)}")
    with tempfile.TemporaryDirectory() as folder:
        for ranks, microbatches in SIZES:
            for name in ("one_f_one_b", "interleaved"):
                program = fpipe.schedules.about(name).program(ranks, microbatches)
                costs = fpipe.Costs(transfer=0.1)
                timings = [seconds(program, costs, Path(folder, f"it.{ending}")) for ending in endings]
                row = " ".join(f"{elapsed:6.2f}" for elapsed in timings)
                print(f"{name:18} {ranks:3} {microbatches:4} {len(program.ops):7} {row}", flush=True)
