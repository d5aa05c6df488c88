"""Put schedules side by side: the time each takes, what it holds, and how far it is from the shortest there can be."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

from fpipe.limits import whole
from fpipe.program import HtmlRepr, Program, Value
from fpipe.schedules.named import parse
from fpipe.timing.amounts import NamedBytes, aligned, amount, checked_count
from fpipe.timing.bounds import bounds
from fpipe.timing.costs import Costs, PerStage, computing, the_costs
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split

Compared = str | Transform | Program | tuple[str, Transform | Program]
_NONE = float("nan")


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule and its numbers; NaN where it was refused.

    Attributes:
        name: what it is called.
        ranks, microbatches: its sizes.
        makespan: seconds from the first start to the last end.
        span: the longest that any rank takes from its first op to its last, in seconds.
        bubble, bubble_span: the idle share of each.
        idle: makespan less the mean work of a rank, in seconds.
        peak: the most microbatches held on a rank, where a whole rank's share is 1.
        bound: seconds that no order in this placement and memory goes below (`fpipe.bounds`).
        above: how far above it the makespan is, as a share of it.
        refused: why it does not serve these sizes, or "".
        timeline: when everything happens.
    """

    name: str
    ranks: int = 0
    microbatches: int = 0
    makespan: float = _NONE
    span: float = _NONE
    bubble: float = _NONE
    bubble_span: float = _NONE
    idle: float = _NONE
    peak: float = _NONE
    bound: float = _NONE
    above: float = _NONE
    refused: str = ""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class Comparison(HtmlRepr):
    """Schedules side by side, in the order in which they were named. Prints as a table.

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

    def __getitem__(self, which: int | str) -> ScheduleRow:
        """A row by its number from 0 on, or by its name."""
        if isinstance(which, int):
            return self.rows[which]
        found = next((row for row in self.rows if row.name == which), None)
        if found is None:
            raise KeyError(f"there is no row {which!r}; there are {', '.join(row.name for row in self.rows)}.")
        return found

    def records(self) -> list[dict[str, str | float]]:
        """The rows as dicts, without their timelines: for `json`, or for a data frame."""
        words = [one.name for one in fields(ScheduleRow) if one.name != "timeline"]
        return [{word: getattr(row, word) for word in words} for row in self.rows]

    @property
    def pictured(self) -> Mapping[str, Timeline]:
        """The timelines of at most the first four that are served."""
        return dict([(row.name, row.timeline) for row in self.rows if row.timeline is not None][:4])

    @property
    def cells(self) -> list[list[str]]:
        """The table of what was not refused, as text: its heading, then row by row."""
        served = [row for row in self.rows if row.timeline is not None]
        sized = len({(row.ranks, row.microbatches) for row in served}) > 1  # a program has sizes of its own
        heading = ["makespan", "span", "bubble", "bubble of span", "idle", "peak", "bound", "above"]
        return [["schedule", *(["ranks", "microbatches"] if sized else []), *heading]] + [
            [
                row.name,
                *([str(row.ranks), str(row.microbatches)] if sized else []),
                f"{row.makespan:.6g}",
                f"{row.span:.6g}",
                f"{row.bubble:.1%}",
                f"{row.bubble_span:.1%}",
                f"{row.idle:.6g}",
                amount(row.peak, row.timeline is not None and row.timeline.in_bytes),
                f"{row.bound:.6g}",
                f"{row.above:.1%}",
            ]
            for row in served
        ]

    def __str__(self) -> str:
        lines = aligned(self.cells, [word == "schedule" for word in self.cells[0]])
        refused = [f"{row.name}: {row.refused}" for row in self.rows if row.refused]
        return "\n".join(
            (lines if len(lines) > 1 else []) + [textwrap.fill(one, 100, subsequent_indent="  ") for one in refused]
        )

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
    """Put schedules side by side at one size: time, bubble, idle time, memory, lower bound.

    Args:
        schedules: names, each with options of its own behind a colon (`"hanayo:waves=2"`, `"interleaved:stages=12"`);
            transforms, and programs, which have their own sizes, by themselves or as `(name, ...)`. Schedules that
            order by costs are told them, if there are any.
        ranks, microbatches: the size.
        costs: seconds of a microbatch on a whole rank, as `Costs.per_rank(F=, B=, W=)` tells them; by default one for
            each F, I and W. A rank that cuts its share into v stages, and each microbatch into Q slices, takes 1/(vQ)
            of them for an op. Or `f(parts) -> Costs` for vQ parts.
        stages: of transforms; by default one a rank.

    Returns:
        A `Comparison`: a row for each of them, that of one which does not serve the size says why.

    Raises:
        ValueError: no such schedule, or no such option of it; a size that is none; what is compared alone is refused.

    >>> import fpipe
    >>> mine = fpipe.schedules.from_table("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1")
    >>> print(fpipe.compare(["one_f_one_b", "hanayo:waves=2", ("mine", mine)], ranks=2, microbatches=2))
    schedule        makespan  span  bubble  bubble of span  idle  peak  bound  above
    one_f_one_b            9     9   33.3%           33.3%     3     2      9   0.0%
    hanayo:waves=2         7     7   14.3%           14.3%     1     2      7   0.0%
    mine                   9     9   33.3%           33.3%     3     2      9   0.0%
    """
    for word, size in (("ranks", ranks), ("microbatches", microbatches)):
        whole(word, size)
    said = costs if callable(costs) else the_costs(costs)
    given: Sequence[Compared] = [schedules] if isinstance(schedules, str) else list(schedules)
    told = None if costs is None else said if callable(said) else partial(shared, said)
    entries = [_entry(one, at, ranks, microbatches, told, stages) for at, one in enumerate(given, 1)]
    rows: list[ScheduleRow] = []
    for name, make in entries:
        try:
            rows.append(_row(name, make(), said))
        except ValueError as error:
            if len(entries) == 1:
                raise
            rows.append(
                ScheduleRow(name, ranks, microbatches, refused=str(error).removeprefix(f"{name.partition(':')[0]}: "))
            )
    return Comparison(tuple(rows))


def parts_of_a_rank(program: Program) -> float:
    """Into how many ops a rank cuts its share of a microbatch; a rank that computes nothing, as a host, has none."""
    return program.stages / max(1, len(computing(program))) * program.slices


def _entry(
    given: Compared, at: int, ranks: int, microbatches: int, told: Callable[[float], Costs] | None, stages: int | None
) -> tuple[str, Callable[[], Program]]:
    """Name of a schedule, and how its program is made. A name that is none is refused at once."""
    if isinstance(given, str):
        named = parse(given)
        return given, lambda: named.program(ranks, microbatches, told)
    name, what = cast("tuple[str, Transform | Program]", given) if isinstance(given, tuple) else (str(at), given)
    if isinstance(what, Program):
        return name, lambda: what
    steps = chain(split(microbatches), what, merge())
    return name, lambda: steps(base_program(ranks if stages is None else stages))


def _row(name: str, program: Program, said: Costs | Callable[[float], Costs]) -> ScheduleRow:
    parts = parts_of_a_rank(program)
    costs = said(parts) if callable(said) else shared(said, parts, program.slices)
    found, least = simulate(program, costs), bounds(program, costs)
    return ScheduleRow(
        name,
        program.ranks,
        program.microbatches,
        found.makespan,
        found.span,
        found.bubble,
        found.bubble_span,
        found.idle,
        max(found.peak),
        least.makespan,
        least.gap(found),
        timeline=found,
    )


def shared(costs: Costs, parts: float, slices: int = 1) -> Costs:
    """The costs of one op of a rank that cuts its share into some parts: stages times slices of a microbatch.

    Bytes of what stays with a stage are shared too, those of parameters and gradients among the stages alone, whether
    they are said by name or by a function; `fpipe.sizes` has those of each value.

    >>> shared(Costs(4, 4, 4, bytes={"y": 8, "res": 40, "params": 40}), 4, slices=2).bytes
    {'y': 8, 'res': 10.0, 'params': 20.0}
    >>> of_all = shared(Costs(4, 4, 4, bytes=lambda value: 40), 4, slices=2)
    >>> [of_all.size(Value(name, 0)) for name in ("y", "res", "params")]
    [40.0, 10.0, 20.0]
    """
    if parts == 1:
        return costs
    said = {word: getattr(costs, word) for word in _OF_OPS}
    table = costs.bytes.said if isinstance(costs.bytes, NamedBytes) else costs.bytes
    sizes = cast("Mapping[str, PerStage]", table) if isinstance(table, Mapping) else {}
    listed = next((word for word, each in [*said.items(), *sizes.items()] if isinstance(each, Sequence)), None)
    if listed is not None:
        raise ValueError(
            f"{listed} lists a cost for each stage, but here a rank cuts its share into {parts:g} ops. Say "
            "costs=lambda parts: ..., which gives the costs of an op for each number of parts."
        )
    seconds: dict[str, Any] = {word: each / parts for word, each in said.items() if each is not None}
    among = dict[str, float](dict.fromkeys(_OF_MICROBATCHES, parts)) | dict.fromkeys(_OF_PARAMETERS, parts / slices)
    if sizes:
        own: dict[str, Any] = {
            name: cast("float", size) / among[name] if name in among else size for name, size in sizes.items()
        }
        seconds["bytes"] = replace(costs.bytes, said=own) if isinstance(costs.bytes, NamedBytes) else own
    elif callable(costs.bytes) and not hasattr(costs.bytes, "storages"):
        seconds["bytes"] = partial(_part_of, costs.bytes, among)
    return replace(costs, **seconds)


def _part_of(whole: Callable[[Value], float], among: Mapping[str, float], value: Value) -> float:
    """The bytes of a value, of which a rank has so many."""
    return checked_count(f"the bytes of {value}", whole(value)) / among.get(value.name, 1)


_OF_OPS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load")
_OF_MICROBATCHES = ("res", "wres")
_OF_PARAMETERS = ("params", "g", "sum", "shard", "cut", "all")
