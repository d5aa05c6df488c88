"""Plan a run: rank the ways to run a model, or costs, on ranks with memory and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fpipe.cli import options
from fpipe.cli.cost_options import TypedCosts, parse
from fpipe.cli.options import parsed_by
from fpipe.cli.output import print_error, progress, table
from fpipe.planning.candidates import POLICIES, Candidates, Machine, checked_policy
from fpipe.planning.plan_run import plan_run
from fpipe.timing.cluster import Cluster


def costs_of_rows(text: str) -> tuple[int | None, TypedCosts]:
    """Parse costs, with the rows of their microbatch before a colon: 8:F=1,B=1,W=1."""
    rows, colon, costs = text.rpartition(":")
    if colon and not rows.strip().isdecimal():
        raise ValueError(f"costs of microbatches of 8 rows read 8:F=1,B=1,W=1, found {text!r}.")
    return int(rows) if colon else None, parse(costs.strip())


Names = Annotated[
    list[str] | None,
    parsed_by(options.schedule_name, metavar="NAME", help="Schedules, with options behind a colon; none: all."),
]
Ranks = Annotated[int, options.whole_number("--ranks", "-p", help="Ranks.")]
Counts = Annotated[
    Any, parsed_by(options.numbers, "--microbatches", "-m", metavar="LIST", help="Numbers to try: 8/16/32.")
]
Costs = Annotated[
    list[Any] | None,
    parsed_by(
        costs_of_rows,
        "--costs",
        "-c",
        metavar="[ROWS:]LIST",
        help="In place of a model: as for show, F=1,B=1,W=1,y=8MiB,res=40MiB. For microbatches of several sizes more "
        "than once, each with its rows: 8:F=10,B=12,W=8.",
    ),
]
Rows = Annotated[int | None, options.whole_number("--rows", help="Of the batch, with --costs.")]
Stages = Annotated[
    int | None, options.whole_number("--stages", "-s", help="With --costs; by default as a schedule wants.")
]
Policies = Annotated[
    list[str] | None,
    parsed_by(checked_policy, "--checkpoint", metavar="|".join(POLICIES), help="What is tried; by default all three."),
]
Memory = Annotated[
    Any, parsed_by(options.amount, "--memory", metavar="N", help="Of a rank: 40GiB; without bytes, rows it may hold.")
]
Replicas = Annotated[
    int | None, options.whole_number("--replicas", help="Of all ranks, for --shard; or of the cluster.")
]
Search = Annotated[float, typer.Option("--search", min=0, metavar="SECONDS", help="Search a schedule, too.")]
Profiled = Annotated[
    Any,
    parsed_by(
        options.numbers, "--profiled", metavar="LIST", help="Measure a model at these; interpolate between them."
    ),
]
Repeats = Annotated[int, options.whole_number("--repeats", help="How often each op is timed.")]
Flops = Annotated[
    float | None,
    typer.Option("--flops", metavar="N", help="Operations a second of a rank, 400e12: nothing is timed, or on meta."),
]
Top = Annotated[int, options.whole_number("--top", help="How many of the best to list, beside the front.")]


@dataclass(frozen=True)
class TypedWork:
    """The step to plan: a model that is measured, or costs."""

    model: options.OfModel = None
    costs: Costs = None
    rows: Rows = None
    stages: Stages = None
    profiled: Profiled = None
    repeats: Repeats = 3


@dataclass(frozen=True)
class TypedMachine:
    """The fields of a `Machine`."""

    ranks: Ranks = 4
    memory: Memory = None
    cluster: options.OnCluster = None
    replicas: Replicas = None
    flops: Flops = None


@dataclass(frozen=True)
class TypedCandidates:
    """The fields of `Candidates`, but for schedules, which are arguments."""

    microbatches: options.Counts = "8"
    checkpoint: Policies = None
    shard: options.Shard = None
    search: Search = 0
    seed: options.Seed = 0


def run(
    typed: typer.Context,
    work: TypedWork,
    machine: TypedMachine,
    candidates: TypedCandidates,
    files: options.Charts,
    names: Names = None,
    top: Top = 12,
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
      python -m fpipe plan run -p 4 -m 8/16 --costs F=10,B=12,W=8,c=0.5
      python -m fpipe plan run -p 4 --rows 32 -m 4/8 -c 8:F=20,B=24,W=16 -c 4:F=11,B=13,W=9 --search 5
    """
    model, costs = work.model, work.costs
    if model is not None and costs:
        raise typer.BadParameter("a --model is measured, and --costs are given: choose one of them.", ctx=typed)
    options.refuse_other_unit(machine.memory, has_bytes=model is not None or any(cost.bytes for _, cost in costs or ()))
    # Options that were not typed keep the defaults of `Candidates`.
    chosen = {field: value for field, value in vars(candidates).items() if value not in (None, [])}
    space = Machine(**vars(machine)), Candidates(**chosen, schedules=names or None)
    keywords: dict[str, Any] = {"rows": work.rows, "stages": work.stages}
    keywords |= {"profiled": work.profiled, "repeats": work.repeats}
    # Without --model nothing is measured: costs that were typed, or 1 for each of F, B and W.
    with progress("planning") as bar:

        def show(done: int, total: int, description: str) -> None:
            bar(completed=done, total=total, description=description)

        if model is None:
            planned = _costs_by_rows(costs or [(None, parse(""))], machine.cluster)
            plan = plan_run(planned, *space, progress=show, **keywords)
        else:
            built, params, batch, state = options.call_model(model)
            plan = plan_run(built, *space, example=(params, batch, state), progress=show, **keywords)
    if not plan.complete:
        print_error("stopped; these are the ways that were tried.")
    heading, *cells = plan.cells(plan.rows_to_show(top))
    table(heading, cells)
    schedules = {row.schedule for row in plan}
    fit = sum(row.fits for row in plan)
    print(f"{len(plan)} ways of {len(schedules)} schedules, {fit} fit; the best is {plan.best.name}")
    if model is not None and machine.cluster is None:
        print("transfers take no time here: --cluster says what links there are")
    for name, reason in plan.refused:
        print(f"{name}: {reason}")
    files.write(plan)


def _costs_by_rows(costs: list[tuple[int | None, TypedCosts]], cluster: Cluster | None) -> Any:
    """Return costs as `plan_run` takes them: of one size, or a dict by rows."""
    sizes = [rows for rows, _ in costs]
    if sizes == [None]:
        return costs[0][1].on_cluster(cluster).for_library
    # Several costs need the rows of each, once. None is the mark of costs without rows, 0 that nothing is wrong.
    wrong_rows = next((rows for rows in sizes if rows is None or sizes.count(rows) > 1), 0)
    if wrong_rows != 0:
        mistake = "once without its rows" if wrong_rows is None else f"twice of {wrong_rows} rows"
        raise ValueError(f"--costs for several sizes read 8:F=10,B=12,W=8, each size once; found them {mistake}.")
    return {rows: typed.on_cluster(cluster).for_library for rows, typed in costs}
