"""Plan a run: from a model or costs, ranks, memory and links to the ways to run it, the best first."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fpipe.cli.bench import schedule_name
from fpipe.cli.costs import TypedCosts, parse
from fpipe.cli.options import (
    ClusterSaid,
    Jitter,
    ModelSaid,
    Samples,
    Seed,
    SlowLink,
    SlowRank,
    amount,
    made_by,
    refuse_bytes,
    usage,
)
from fpipe.cli.output import print_error, table
from fpipe.cli.see import Pdf, Png, Svg
from fpipe.pictures.plot import plot
from fpipe.planning.asked import POLICIES, policy
from fpipe.planning.plan_run import plan_run
from fpipe.timing.cluster import Cluster
from fpipe.timing.noise import Noise
from fpipe.timing.robustness import At


def numbers(text: str) -> list[int]:
    """Whole numbers, as in 8/16/32.

    >>> numbers("8/16")
    [8, 16]
    """
    try:
        return [int(part) for part in text.split("/")]
    except ValueError:
        raise ValueError(f"several numbers read 8/16/32, found {text!r}.") from None


def costs_of_rows(text: str) -> tuple[int | None, TypedCosts]:
    """Costs, and before a colon of how many rows.

    >>> rows, costs = costs_of_rows("8: F=1,B=1,W=1")
    >>> rows, costs.text
    (8, 'F=1,B=1,W=1')
    """
    rows, colon, costs = text.rpartition(":")
    if colon and not rows.strip().isdecimal():
        raise ValueError(f"costs of microbatches of 8 rows read 8:F=1,B=1,W=1, found {text!r}.")
    return int(rows) if colon else None, parse(costs.strip())


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME", parser=usage(schedule_name), help="Schedules, with options behind a colon; none: all."
    ),
]
Ranks = Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks.")]
Counts = Annotated[
    Any, typer.Option("--microbatches", "-m", metavar="LIST", parser=usage(numbers), help="Numbers to try: 8/16/32.")
]
Costs = Annotated[
    list[Any] | None,
    typer.Option(
        "--costs",
        "-c",
        metavar="[ROWS:]LIST",
        parser=usage(costs_of_rows),
        help="In place of a model: as for show, F=1,B=1,W=1,y=8MiB,res=40MiB. For microbatches of several sizes more "
        "than once, each with its rows: 8:F=10,B=12,W=8.",
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Of the batch, with --costs.")]
Stages = Annotated[
    int | None, typer.Option("--stages", "-s", min=1, help="With --costs; by default as a schedule wants.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint", metavar="|".join(POLICIES), parser=usage(policy), help="What is tried; by default all three."
    ),
]
Memory = Annotated[
    Any,
    typer.Option(
        "--memory", metavar="N", parser=usage(amount), help="Of a rank: 40GiB; without bytes, rows it may hold."
    ),
]
Search = Annotated[float, typer.Option("--search", min=0, metavar="SECONDS", help="Search a schedule, too.")]
Profiled = Annotated[
    Any,
    typer.Option(
        "--profiled", metavar="LIST", parser=usage(numbers), help="Measure a model at these; interpolate between them."
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="How often each op is timed.")]
Compared = Annotated[At, typer.Option("--at", help="Compare makespans as said, or of 50 or 95 of 100 draws.")]
Top = Annotated[int, typer.Option("--top", min=1, help="How many of the best to list, beside the front.")]


def run(
    typed: typer.Context,
    what: Names = None,
    ranks: Ranks = 4,
    microbatches: Counts = "8",
    model: ModelSaid = None,
    costs: Costs = None,
    rows: Rows = None,
    stages: Stages = None,
    checkpoint: Policies = None,
    cluster: ClusterSaid = None,
    memory: Memory = None,
    search: Search = 0,
    profiled: Profiled = None,
    repeats: Repeats = 3,
    jitter: Jitter = 0.0,
    slow_rank: SlowRank = 1.0,
    slow_link: SlowLink = 1.0,
    at: Compared = "said",
    samples: Samples = 100,
    seed: Seed = 0,
    top: Top = 12,
    svg: Svg = None,
    png: Png = None,
    pdf: Pdf = None,
) -> None:
    """Rank ways to run a step by time and memory (fpipe.plan_run).

    Tries schedules, numbers of microbatches and what to recompute. A star marks
    the front: nothing is both shorter and smaller. Ctrl-C ends it with the best
    so far. What a rank holds is parameters, gradients and values of the step;
    leave room for an optimizer.

    \b
    Examples:
      python -m fpipe plan run --model mine.py:step -p 4 -m 8/16/32 --memory 40GiB --svg front.svg
      python -m fpipe plan run --model mine.py:step -m 4/8/16 --profiled 4/16 --cluster "4 ranks; inside 5us 50GB/s"
      python -m fpipe plan run -p 4 -m 8/16 --costs F=10,B=12,W=8,c=0.5 --jitter 0.1 --at p95
      python -m fpipe plan run -p 4 --rows 32 -m 4/8 -c 8:F=20,B=24,W=16 -c 4:F=11,B=13,W=9 --search 5
    """
    if model is not None and costs:
        raise typer.BadParameter("a --model is measured, and --costs are said: choose one of them.", ctx=typed)
    noise = Noise(jitter, slow_rank, slow_link)
    refuse_bytes(memory, known=model is not None or any(one.bytes for _, one in costs or ()))
    words: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "rows": rows, "stages": stages}
    words |= {"cluster": cluster, "memory": memory, "search": search, "profiled": profiled, "repeats": repeats}
    words |= {"schedules": what or None, "noise": None if noise == Noise() else noise, "at": at}
    words |= {"samples": samples, "seed": seed}
    if checkpoint:
        words["checkpoint"] = checkpoint
    with _progress() as progress:
        if model is None:
            found = plan_run(_said(costs or [(None, parse(""))], cluster), progress=progress, **words)
        else:
            built, params, batch, state = made_by(model)
            found = plan_run(built, params, batch, state=state, progress=progress, **words)
    if not found.complete:
        print_error("stopped; these are the ways that were tried.")
    heading, *cells = found.cells(found.shown(top))
    table(heading, cells)
    served = {row.schedule for row in found}
    fit = sum(row.fits for row in found)
    print(f"{len(found)} ways of {len(served)} schedules, {fit} fit; the best is {found.best.name}")
    for note in found.notes:
        print(note)
    if model is not None and cluster is None:
        print("transfers take no time here: --cluster says what links there are")
    for name, why in found.refused:
        print(f"{name}: {why}")
    for file in (svg, png, pdf):
        if file is not None:
            print(f"wrote {plot(found, file=file)}")


def _said(costs: list[tuple[int | None, TypedCosts]], cluster: Cluster | None) -> Any:
    """Costs as they were typed: of one size, or by their rows."""
    sizes = [rows for rows, _ in costs]
    if sizes == [None]:
        return costs[0][1].on(cluster).given
    odd = next((rows for rows in sizes if rows is None or sizes.count(rows) > 1), 0)
    if odd != 0:
        said = "once without its rows" if odd is None else f"twice of {odd} rows"
        raise ValueError(f"--costs for several sizes read 8:F=10,B=12,W=8, each size once; found them {said}.")
    return {rows: one.on(cluster).given for rows, one in costs}


@contextmanager
def _progress() -> Generator[Callable[[int, int, str], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda done, every, what: bar.update(task, completed=done, total=every, description=what)
