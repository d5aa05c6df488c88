"""Search for the best schedule for some costs and memory, and compare it with the named schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fpipe.cli import options
from fpipe.cli.output import number, print_error, print_program, progress, table
from fpipe.finding.search import Objective, Policy, Solver
from fpipe.finding.search import search as find
from fpipe.interop import to_json
from fpipe.program import Program
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.place import place
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

HALVES: dict[str, bool | Literal["auto"]] = {"auto": "auto", "all": True, "none": False}


def placement(text: str) -> Any:
    """Read a word, or the rank of each stage.

    >>> placement("v"), placement("0/1/1/0")
    ('v', [0, 1, 1, 0])
    """
    if "/" not in text:
        return text
    try:
        return [int(part) for part in text.split("/")]
    except ValueError:
        raise ValueError(f"a placement is a word, or the rank of each stage as in 0/1/1/0; found {text!r}.") from None


Stages = Annotated[int | None, options.whole_number("--stages", "-s", help="Stages; by default one a rank.")]
Placement = Annotated[
    Any, options.parsed_by(placement, "--placement", metavar="WORD", help="any, linear, looped, v; or ranks: 0/1/1/0.")
]
Cap = Annotated[
    Any,
    options.parsed_by(
        options.amount,
        "--memory-cap",
        metavar="N",
        help="Microbatches that a rank may hold at most; bytes, as in 40GiB, where --costs has bytes.",
    ),
]
Seconds = Annotated[float, typer.Option("--seconds", help="How long to search.")]
ExcludedStarts = Annotated[list[str] | None, typer.Option("--without", metavar="NAME", help="Do not start from NAME.")]
_WRITERS: dict[str, Callable[[Program], str]] = {".fpipe": str, ".json": to_json, ".csv": options.table_of}
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write it: .fpipe (text), .json or .csv (a table).")
]


@dataclass(frozen=True)
class Goal:
    """The schedules to search, and the objective by which one is best."""

    placement: Placement = "any"
    memory_cap: Cap = None
    objective: Objective = "makespan"
    split_backward: Literal["auto", "all", "none"] = "auto"
    checkpoint: Policy = "never"
    without: ExcludedStarts = None
    shard: options.Shard = None


@dataclass(frozen=True)
class Effort:
    """How long to search, and by which engine."""

    seconds: Seconds = 10
    solver: Solver = "auto"
    seed: options.Seed = 0


def search(
    priced: options.Priced,
    goal: Goal,
    effort: Effort,
    files: options.Pictures,
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    stages: Stages = None,
    output: Output = None,
) -> None:
    """Search for the schedule that takes least time (fpipe.search).

    Draws it, says how good it is and how long the schedules by name take. Costs
    are of a whole rank (letters), which its stages share, or of one stage.
    Ctrl-C ends the search with the best so far.

    \b
    Examples:
      python -m fpipe search -p 4 -m 8 --costs F=10,B=12,W=8,c=0.5
      python -m fpipe search -p 4 -m 8 -s 8 --placement v --memory-cap 2 -c F=10,B=12,W=8
      python -m fpipe search -p 4 -m 1024 --memory-cap 4 --solver local --output mine.csv
    """
    if output is not None and output.suffix not in _WRITERS:
        raise typer.BadParameter(f"--output writes {', '.join(_WRITERS)}; found {str(output)!r}.")
    options.refuse_other_unit(goal.memory_cap, has_bytes=bool(priced.costs.bytes))
    # Costs of a whole rank are shared by its stages: as many as a linear placement has on each rank.
    base = chain(split(microbatches), merge())(base_program(ranks if stages is None else stages))
    seconds_of: Costs = priced.on_cluster.of(place("linear", ranks=ranks)(base))
    typed_goal = {name: option for name, option in vars(goal).items() if option is not None}
    # 1) Search, with a bar for the share of the time.
    with progress("searching") as bar:

        def show_progress(share: float, best: float, bound: float) -> None:
            status = f"best {best:.6g}, at least {bound:.6g}" if best < float("inf") else "nothing fits yet"
            bar(completed=share, total=1.0, description=status)

        best = find(
            base,
            seconds_of,
            ranks=ranks,
            **typed_goal | {"split_backward": HALVES[goal.split_backward]},
            **vars(effort),
            progress=show_progress,
        )
    # 2) Print the schedule, and a table of it and the named ones.
    if not best.complete:
        print_error("stopped; this is the best so far.")
    print_program(best.program, seconds_of if priced.on_cluster.are_typed else None)
    print(best)
    rows = [("found", best.timeline.makespan, best.timeline.span, max(best.timeline.peak), True)]
    rows += [(row.name, row.makespan, row.span, row.peak, row.fits) for row in best.named]
    table(
        ("schedule", "makespan", "span", "peak", "memory"),
        [(name, *map(number, values), "fits" if fits else "too much") for name, *values, fits in rows],
    )
    # 3) Write files.
    if output is not None:
        output.write_text(_WRITERS[output.suffix](best.program), encoding="utf-8")
        print(f"wrote {output}")
    files.write(best.program, costs=seconds_of, names=["found"])
