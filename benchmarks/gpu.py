"""Measure on one GPU what fpipe promises there, the most important rows first, and compare it with the goals.

    PYTHONPATH=. python benchmarks/gpu.py [--budget 450] [--row-budget 100] [--json gpu.json] [--device cpu --quick]

Rows are those of `python -m fpipe bench --against eager,compile,torch,fsdp2`, in another order: first the two GPTs, one
of which launches kernels for most of a step and one computes, then FSDP2, then the other nets. The file has each row as
soon as it is measured, so a run that is killed loses nothing.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from fpipe.cli.race_nets import NETS
from fpipe.cli.race_report import as_text, write_json
from fpipe.cli.race_runtimes import Job, Row, Setting, jobs_of, race
from fpipe.cli.racers import RACERS
from fpipe.timing.amounts import align_columns

LAUNCHES, COMPUTES = "gpt", "gpt-wide"
AGAINST = "eager", "compile", "torch", "fsdp2"
Figure = Callable[[Callable[[str, bool], Row]], float]
"""A figure from a function that finds a net's row by its racer, with an update or without."""


class Goal(NamedTuple):
    """A figure of one net, and the bound that it is to keep."""

    name: str
    net: str
    is_met: Callable[[float], bool]
    bound: str
    figure: Figure


def at_most(bound: float) -> tuple[Callable[[float], bool], str]:
    return lambda figure: figure <= bound, f"<= {bound:.2f}"


def share(numerator: str, denominator: str, field: str = "ms") -> Figure:
    return lambda row: getattr(row(numerator, False), field) / getattr(row(denominator, False), field)


GOALS = (
    Goal("graph / eager captured", LAUNCHES, *at_most(1.00), share("fpipe, graph", "eager loop, captured")),
    Goal("graph / eager captured", COMPUTES, *at_most(0.97), share("fpipe, graph", "eager loop, captured")),
    *(
        Goal(
            "compile + graph / torch.compile captured",
            net,
            *at_most(bound),
            share("fpipe, compile + graph", "torch.compile, captured"),
        )
        for net, bound in ((LAUNCHES, 0.93), (COMPUTES, 0.95))
    ),
    Goal(
        "compile + graph, TFLOP/s (H100)",
        COMPUTES,
        lambda figure: figure >= 490,
        ">= 490",
        lambda row: row("fpipe, compile + graph", False).tflops,
    ),
    *(
        goal
        for net in (LAUNCHES, COMPUTES)
        for goal in (
            Goal(
                "graph / its kernels alone",
                net,
                *at_most(1.05),
                lambda row: row("fpipe, graph", False).ms / row("fpipe, graph", False).kernel_ms,
            ),
            Goal("kernels of plain / eager, ms", net, *at_most(0.98), share("fpipe", "eager loop", "kernel_ms")),
            Goal("kernels of plain / eager, number", net, *at_most(1.00), share("fpipe", "eager loop", "kernels")),
            Goal(
                "graph with AdamW and clip / without",
                net,
                *at_most(1.10),
                lambda row: row("fpipe, graph", True).ms / row("fpipe, graph", False).ms,
            ),
            Goal(
                "eager loop with torch.optim(fused) / without, beside it",
                net,
                lambda figure: True,
                "-",
                lambda row: row("eager loop", True).ms / row("eager loop", False).ms,
            ),
            Goal(
                "host us an op / torch.distributed.pipelining's",
                net,
                lambda figure: figure < 1,
                "< 1",
                share("fpipe", "torch pipelining", "host_us"),
            ),
        )
    ),
)


def jobs_by_importance() -> list[Job]:
    """Return all rows: first the rows of goals, then FSDP2, which starts processes, and the small nets."""
    jobs = jobs_of([*NETS], AGAINST)
    nets = {net: index for index, net in enumerate((LAUNCHES, COMPUTES, *NETS))} | {LAUNCHES: 0, COMPUTES: 1}

    def importance(job: Job) -> tuple[bool, bool, int]:
        is_for_goals = job.net in (LAUNCHES, COMPUTES) and job.ranks == 1
        # Compiled steps with an update are no goal's, and compile anew.
        is_late = job.has_update and "compile" in RACERS[job.racer].options
        return not is_for_goals, is_late or job.ranks > 1, nets[job.net]

    return sorted(jobs, key=importance)


def print_goals(rows: list[Row], setting: Setting) -> None:
    """Print each goal with its figure, or with the row that it lacks."""
    cells = [("goal", "net", "bound", "", "figure")]
    for goal in GOALS:
        title = setting.net(goal.net).title

        def find(racer: str, has_update: bool, title: str = title) -> Row:
            return next(row for row in rows if (row.net, row.racer, row.has_update) == (title, racer, has_update))

        try:
            figure = goal.figure(find)
            verdict = "" if goal.bound == "-" else "met" if goal.is_met(figure) else "MISSED"
            cells.append((goal.name, title, goal.bound, verdict, f"{figure:.3g}"))
        # A row without this number, or no row at all.
        except (TypeError, StopIteration):
            cells.append((goal.name, title, goal.bound, "", "not measured"))
    print("\n".join(align_columns(cells, [True, True, False, True, False])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=450, help="seconds (%(default)s)")
    parser.add_argument("--row-budget", type=float, default=100, help="seconds of a row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="of a row (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file of the rows (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="small nets")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here, so nothing was measured; --device cpu --quick shows that this file runs.")
        return
    setting, rows, start = Setting(options.device, options.quick, options.rounds), list[Row](), time.monotonic()
    for row in race(jobs_by_importance(), setting, options.budget, options.row_budget):
        rows.append(row)
        write_json(options.json, rows)
        reason = f": {row.reason}" if row.reason else ""
        print(
            f"{time.monotonic() - start:5.0f} s  {row.net}, {row.racer}{', AdamW' * row.has_update}{reason}", flush=True
        )
    # Nets of the same kind are neighbours in the table, in whatever order they ran.
    order = [setting.net(name).title for name in NETS]
    print(as_text(sorted(rows, key=lambda row: order.index(row.net))))
    print()
    print_goals(rows, setting)


if __name__ == "__main__":
    main()
