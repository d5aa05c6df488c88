"""Compare schedules side by side: time, idle time, memory, and distance from the lower bound."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

from fpipe.limits import check_whole_number
from fpipe.program import HtmlRepr, Program, Value
from fpipe.schedules.notations import parse
from fpipe.timing.amounts import NamedBytes, align_columns, checked_count, format_amount
from fpipe.timing.bounds import bounds
from fpipe.timing.costs import Costs, PerStage, checked_costs, compute_ranks
from fpipe.timing.lengths import require_equal_microbatches
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

Compared = str | Transform | Program | tuple[str, Transform | Program]
UNKNOWN = float("nan")


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and its numbers, which are NaN if it was refused.

    Attributes:
        name: the name that was given.
        ranks, microbatches: its sizes.
        makespan: seconds from the first start to the last end.
        span: the longest that any rank takes from its first op to its last, in seconds.
        bubble, bubble_span: the idle share of each.
        idle: makespan less the mean work of a rank, in seconds.
        peak: the most microbatches held on a rank, where a whole rank's share is 1.
        bound: seconds that no order in this placement and memory goes below (`fpipe.bounds`).
        above: how far the makespan is above the bound, as a share of the bound.
        refused: why it refuses these sizes, or "".
        timeline: start and end of each op.
    """

    name: str
    ranks: int = 0
    microbatches: int = 0
    makespan: float = UNKNOWN
    span: float = UNKNOWN
    bubble: float = UNKNOWN
    bubble_span: float = UNKNOWN
    idle: float = UNKNOWN
    peak: float = UNKNOWN
    bound: float = UNKNOWN
    above: float = UNKNOWN
    refused: str = ""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class Comparison(HtmlRepr):
    """Schedules side by side, in the given order. Prints as a table.

    >>> found = compare(["gpipe", "zbv", "chimera"], 3, 4)
    >>> found["zbv"].peak, found["chimera"].refused[:27]
    (3.0, 'the number of ranks is even')
    >>> min(found, key=lambda row: row.makespan).name
    'zbv'
    >>> found.records()[0]["idle"]
    6.0
    """

    rows: tuple[ScheduleRow, ...]

    def __iter__(self) -> Iterator[ScheduleRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> ScheduleRow:
        if isinstance(key, int):
            return self.rows[key]
        matching_row = next((row for row in self.rows if row.name == key), None)
        if matching_row is None:
            raise KeyError(f"no row {key!r}; there are {', '.join(row.name for row in self.rows)}.")
        return matching_row

    def records(self) -> list[dict[str, str | float]]:
        """Return the rows as dicts without timelines, for `json` or a data frame."""
        names = [row_field.name for row_field in fields(ScheduleRow) if row_field.name != "timeline"]
        return [{name: getattr(row, name) for name in names} for row in self.rows]

    @property
    def pictured(self) -> Mapping[str, Timeline]:
        """The timelines of the first four schedules that were not refused."""
        return dict([(row.name, row.timeline) for row in self.rows if row.timeline is not None][:4])

    @property
    def cells(self) -> list[list[str]]:
        """The table as text, heading first, without refused schedules."""
        served = [row for row in self.rows if row.timeline is not None]
        sizes_differ = len({(row.ranks, row.microbatches) for row in served}) > 1
        heading = ["makespan", "span", "bubble", "bubble of span", "idle", "peak", "bound", "above"]
        table = [["schedule", *(["ranks", "microbatches"] if sizes_differ else []), *heading]]
        for row in served:
            sizes = [str(row.ranks), str(row.microbatches)] if sizes_differ else []
            times = [f"{row.makespan:.6g}", f"{row.span:.6g}", f"{row.bubble:.1%}", f"{row.bubble_span:.1%}"]
            peak = format_amount(row.peak, row.timeline is not None and row.timeline.in_bytes)
            table.append([row.name, *sizes, *times, f"{row.idle:.6g}", peak, f"{row.bound:.6g}", f"{row.above:.1%}"])
        return table

    def __str__(self) -> str:
        lines = align_columns(self.cells, [heading == "schedule" for heading in self.cells[0]])
        refused = [f"{row.name}: {row.refused}" for row in self.rows if row.refused]
        refusals = [textwrap.fill(refusal, 100, subsequent_indent="  ") for refusal in refused]
        return "\n".join((lines if len(lines) > 1 else []) + refusals)

    def __repr__(self) -> str:
        served = [row for row in self.rows if row.timeline is not None]
        best = min(served, key=lambda row: row.makespan, default=None)
        shortest = f", shortest {best.name} ({best.makespan:g})" if best else ""
        return f"<Comparison: {len(served)} schedules, {len(self) - len(served)} refused{shortest}>"


def compare(
    schedules: Iterable[Compared] | str,
    ranks: int,
    microbatches: int,
    costs: Costs | Callable[[float], Costs] | None = None,
    *,
    stages: int | None = None,
) -> Comparison:
    """Compare schedules at one size: time, bubble, idle time, memory, lower bound.

    Args:
        schedules: names, with options behind a colon (`"hanayo:waves=2"`, `"interleaved:stages=12"`); transforms; and
            programs, which have their own sizes. The last two alone or as `(name, ...)`. Schedules that order by costs
            get the costs, if there are any.
        ranks, microbatches: the size.
        costs: seconds of a microbatch on a whole rank, as `Costs.per_rank(F=, B=, W=)` takes them; by default one for
            each F, I and W. A rank that cuts its share into v stages, and each microbatch into Q slices, takes 1/(vQ)
            of them for an op. Or `f(parts) -> Costs` for vQ parts.
        stages: of transforms, by default one a rank, and of names, by default as many as the schedule wants.

    Returns:
        A `Comparison` with a row for each schedule; the row of one that refuses the size says why.

    Raises:
        ValueError: an unknown schedule or option; an invalid size; a single schedule that refuses the size.

    >>> import fpipe
    >>> mine = fpipe.schedules.from_table("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1")
    >>> print(fpipe.compare(["one_f_one_b", "hanayo:waves=2", ("mine", mine)], ranks=2, microbatches=2))
    schedule        makespan  span  bubble  bubble of span  idle  peak  bound  above
    one_f_one_b            9     9   33.3%           33.3%     3     2      9   0.0%
    hanayo:waves=2         7     7   14.3%           14.3%     1     2      7   0.0%
    mine                   9     9   33.3%           33.3%     3     2      9   0.0%
    """
    for size_name, size in (("ranks", ranks), ("microbatches", microbatches)):
        check_whole_number(size_name, size)
    checked = costs if callable(costs) else checked_costs(costs)
    named_or_made: Sequence[Compared] = [schedules] if isinstance(schedules, str) else list(schedules)
    costs_of_parts = None if costs is None else checked if callable(checked) else partial(share_costs, checked)
    makers = [
        named_program_maker(schedule, number, ranks, microbatches, costs_of_parts, stages)
        for number, schedule in enumerate(named_or_made, 1)
    ]
    # A schedule that refuses the sizes is a row of the table, but alone it is an error.
    rows: list[ScheduleRow] = []
    for name, make in makers:
        try:
            rows.append(_measured_row(name, make(), checked))
        except ValueError as error:
            if len(makers) == 1:
                raise
            refusal = str(error).removeprefix(f"{name.partition(':')[0]}: ")
            rows.append(ScheduleRow(name, ranks, microbatches, refused=refusal))
    return Comparison(tuple(rows))


def parts_of_a_rank(program: Program) -> float:
    """Return how many ops a rank cuts its share of a microbatch into, on ranks that compute."""
    return program.stages / max(1, len(compute_ranks(program))) * program.slices


def named_program_maker(
    schedule: Compared,
    number: int,
    ranks: int,
    microbatches: int,
    costs_of_parts: Callable[[float], Costs] | None,
    stages: int | None,
) -> tuple[str, Callable[[], Program]]:
    """Return the name of a schedule and a function that builds its program; an unknown name is refused at once."""
    if isinstance(schedule, str):
        named = parse(schedule)
        named = replace(named, stages=named.stages or stages)
        return schedule, lambda: named.program(ranks, microbatches, costs_of_parts)
    name, transform_or_program = (
        cast("tuple[str, Transform | Program]", schedule) if isinstance(schedule, tuple) else (str(number), schedule)
    )
    if isinstance(transform_or_program, Program):
        return name, lambda: transform_or_program
    steps = chain(split(microbatches), transform_or_program, merge())
    return name, lambda: steps(base_program(ranks if stages is None else stages))


def _measured_row(name: str, program: Program, costs_or_rule: Costs | Callable[[float], Costs]) -> ScheduleRow:
    parts = parts_of_a_rank(program)
    # `Costs` are those of a whole rank, and are divided; a function gives the costs of an op itself.
    costs = costs_or_rule(parts) if callable(costs_or_rule) else share_costs(costs_or_rule, parts, program.slices)
    timeline, lower_bounds = simulate(program, costs), bounds(program, costs)
    times = (timeline.makespan, timeline.span, timeline.bubble, timeline.bubble_span, timeline.idle)
    peak_and_bound = (max(timeline.peak), lower_bounds.makespan, lower_bounds.gap(timeline))
    return ScheduleRow(name, program.ranks, program.microbatches, *times, *peak_and_bound, timeline=timeline)


def share_costs(costs: Costs, parts: float, slices: int = 1) -> Costs:
    """Return the costs of one op if a rank cuts its share into this many parts, stages times slices.

    Bytes of residuals are divided too, those of parameters and gradients among the stages alone, whether they are given
    by name or by a function; `fpipe.sizes` has those of each value.

    >>> share_costs(Costs(4, 4, 4, bytes={"y": 8, "res": 40, "params": 40}), 4, slices=2).bytes
    {'y': 8, 'res': 10.0, 'params': 20.0}
    >>> of_all = share_costs(Costs(4, 4, 4, bytes=lambda value: 40), 4, slices=2)
    >>> [of_all.size(Value(name, 0)) for name in ("y", "res", "params")]
    [40.0, 10.0, 20.0]
    """
    if parts == 1:
        return costs
    require_equal_microbatches(costs, "a cut of a rank's share")
    # Seconds and residuals belong to an op, so they are divided by all parts. Parameters and gradients belong to a
    # stage, whatever its slices. Other values, such as what is sent, have their size for every cut.
    costs_by_field = {field_name: getattr(costs, field_name) for field_name in SHARED_SECONDS}
    bytes_table = costs.bytes.bytes_by_name if isinstance(costs.bytes, NamedBytes) else costs.bytes
    sizes = cast("Mapping[str, PerStage]", bytes_table) if isinstance(bytes_table, Mapping) else {}
    amounts = [*costs_by_field.items(), *sizes.items()]
    listed_field = next((name for name, amount in amounts if isinstance(amount, Sequence)), None)
    # A list has the costs of each stage, which says nothing about another number of stages.
    if listed_field is not None:
        raise ValueError(
            f"{listed_field} lists a cost for each stage, but a rank cuts its share into {parts:g} ops here. "
            "Use costs=lambda parts: Costs(...)."
        )
    seconds: dict[str, Any] = {name: amount / parts for name, amount in costs_by_field.items() if amount is not None}
    parts_by_value: dict[str, float] = dict.fromkeys(SHARED_BY_PARTS, parts)
    parts_by_value |= dict.fromkeys(SHARED_BY_STAGES, parts / slices)
    if sizes:
        own_sizes: dict[str, Any] = {
            name: cast("float", size) / parts_by_value[name] if name in parts_by_value else size
            for name, size in sizes.items()
        }
        total = costs.bytes
        seconds["bytes"] = replace(total, bytes_by_name=own_sizes) if isinstance(total, NamedBytes) else own_sizes
    elif callable(costs.bytes) and not hasattr(costs.bytes, "storages"):
        seconds["bytes"] = partial(share_of_bytes, costs.bytes, parts_by_value)
    return replace(costs, **seconds)


def share_of_bytes(size_of: Callable[[Value], float], parts_by_value: Mapping[str, float], value: Value) -> float:
    """Return the bytes of a value divided by the parts that its rank has of it."""
    return checked_count(f"the bytes of {value}", size_of(value)) / parts_by_value.get(value.name, 1)


SHARED_SECONDS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load")
SHARED_BY_PARTS = ("res", "wres")
SHARED_BY_STAGES = ("params", "g", "sum", "shard", "cut", "all")
