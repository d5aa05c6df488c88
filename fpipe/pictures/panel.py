"""What a picture shows of one timeline: bars, the waits between them, transfers, and what each rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fpipe.costs import Costs
from fpipe.pictures.axis import amount, clock
from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.simulate import Event, Timeline, simulate

Lane = tuple[int, str]
"""A rank and one of its lanes: "main", or "copy" for transfers that take time."""


class Bar(NamedTuple):
    """An op of its lane from start to end, in seconds. `top` and `depth`: its share of the lane's height, 0 and 1
    where it has the lane for itself; parts of a PAIR share it, and so do ops that ran at once. `shade`: `fill`."""

    op: Op
    start: float
    end: float
    top: float = 0.0
    depth: float = 1.0
    shade: float = 0.0


class Wait(NamedTuple):
    """A rank that does nothing from start to end; `cause` is the op elsewhere whose `value` it needs, if it does."""

    rank: int
    start: float
    end: float
    cause: Op | None = None
    value: Value | None = None


class Transfer(NamedTuple):
    """A value on its way: from the end of `writer` to its arrival at the rank of `reader`."""

    value: Value
    writer: Op
    reader: Op
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """A timeline under its name, and from here on independent of how it is drawn."""

    name: str
    timeline: Timeline

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.timeline.ranks

    @cached_property
    def end(self) -> float:
        """When all is done, in seconds."""
        return self.timeline.makespan

    @property
    def facts(self) -> str:
        """The title's numbers: makespan, span, bubble and the highest peak."""
        time, of = clock(self.end), self.timeline
        peak = amount(max(of.peak, default=0.0), self.in_bytes)
        return f"makespan {time.full(self.end)}, span {time.full(of.span)}, bubble {of.bubble:.1%}, peak {peak}"

    @cached_property
    def lanes(self) -> dict[Lane, list[Event]]:
        """The events that take time, by lane and in order of time; lanes without any are not there."""
        found: dict[Lane, list[Event]] = defaultdict(list)
        for event in self.timeline.events:
            if event.end > event.start:
                found[event.op.rank, kind_of(event.op.kind).lane].append(event)
        for events in found.values():
            events.sort(key=lambda event: (event.start, event.end))
        return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "main")))

    @cached_property
    def bars(self) -> dict[Lane, list[Bar]]:
        """Every op that takes time, once; a PAIR as its parts."""
        shade = self.shade
        found: dict[Lane, list[Bar]] = {}
        for lane, events in self.lanes.items():
            bars = found[lane] = []
            for event, top, depth in _side_by_side(events):
                parts = event.op.parts or (event.op,)
                share = depth / len(parts)
                bars += [
                    Bar(part, event.start, event.end, top + at * share, share, shade(part))
                    for at, part in enumerate(parts)
                ]
        return found

    @cached_property
    def shade(self) -> Callable[[Op], float]:
        """How light an op is drawn: by the way its microbatch takes, or, where all take one, its rank's chunk."""
        forwards = [op for op in parts_of([event.op for event in self.timeline.events]) if op.kind == "F"]
        ranks: dict[int | None, set[int]] = defaultdict(set)
        for op in forwards:
            ranks[op.stage].add(op.rank)
        first = min((op.stage for op in forwards if op.stage is not None), default=0)
        if any(len(found) > 1 for found in ranks.values()):
            ways = {op.microbatch: op.rank for op in forwards if op.stage == first}
            shades = _ladder(ways.values())
            return lambda op: shades.get(ways.get(op.microbatch, -1), 0.0)
        chunks: dict[int, list[int]] = defaultdict(list)
        for stage, (rank, *_) in sorted((stage, tuple(found)) for stage, found in ranks.items() if stage is not None):
            chunks[rank].append(stage)
        by_stage = {stage: shade for stages in chunks.values() for stage, shade in _ladder(stages).items()}
        return lambda op: by_stage.get(op.stage or 0, 0.0)

    @cached_property
    def transfers(self) -> list[Transfer]:
        """Every value that goes from a rank to another, once."""
        writers = self._writers
        found: dict[tuple[Value, int], Transfer] = {}
        for reader, _, end in self.timeline.events:
            for value in reader.reads:
                event = writers.get(value)
                if event and event.op.rank != reader.rank and (value, reader.rank) not in found:
                    arrival = end if reader.kind == "RECV" else event.end
                    found[value, reader.rank] = Transfer(value, event.op, reader, event.end, arrival)
        return list(found.values())

    @cached_property
    def _writers(self) -> dict[Value, Event]:
        return {value: event for event in self.timeline.events for value in event.op.writes}

    @cached_property
    def waits(self) -> list[Wait]:
        """The times in which a rank's main lane does nothing before its next op."""
        found: list[Wait] = []
        for (rank, lane), events in self.lanes.items():
            now = 0.0
            for op, start, end in events if lane == "main" else ():
                if start > now:
                    found.append(Wait(rank, now, start, *self._last(op, now)))
                now = max(now, end)
        return found

    def _last(self, op: Op, now: float) -> tuple[Op | None, Value | None]:
        """The op elsewhere that is the last to write what an op reads, if it is not done now."""
        event, value = max(
            ((self._writers[value], value) for value in op.reads if value in self._writers),
            key=lambda found: found[0].end,
            default=(None, None),
        )
        while event and event.op.kind in ("RECV", "SEND"):
            value = event.op.reads[0]
            event = self._writers.get(value)
        return (event.op, value) if event and event.op.rank != op.rank and event.end > now else (None, None)

    def held(self, rank: int) -> list[tuple[float, float]]:
        """What a rank holds from each time on, in the units of `Timeline.peak`."""
        share = max(1, len({op.stage for op, _, _ in self.timeline.events if op.rank == rank and op.kind == "F"}))
        steps: list[tuple[float, float]] = []
        for event in self.timeline.events:
            for op in event.op.parts or (event.op,):
                if op.rank == rank and op.kind in "FR" and any(value.name == "res" for value in op.writes):
                    steps.append((event.start, 1 / share))
                if op.rank == rank and op.kind in "BW":
                    steps.append((event.end, -1 / share))
        now, found = 0.0, {0.0: 0.0}
        for time, change in sorted(steps):
            now += change
            found[time] = now
        return list(found.items())

    @property
    def in_bytes(self) -> bool:
        """Whether what is held is counted in bytes."""
        return max(self.timeline.peak, default=0) > 1e4


def panels_of(things: Sequence[object], names: Sequence[str] | None, costs: Costs | None) -> list[Panel]:
    """What `plot` was given, as panels: programs are simulated, timelines stay as they are."""
    if names is not None and (isinstance(names, str) or len(names) != len(things)):
        said = "a string" if isinstance(names, str) else f"{len(names)}"
        raise ValueError(f"names= is a list with one name for each of the {len(things)} schedules; found {said}.")
    if costs is not None and not any(isinstance(thing, Program) for thing in things):
        raise ValueError("costs= is for programs; a Timeline has its times already: leave costs out.")
    given = names or ([""] if len(things) == 1 else [f"{at}" for at in range(1, len(things) + 1)])
    found: list[Panel] = []
    for thing, name in zip(things, given, strict=True):
        if isinstance(thing, Timeline):
            found.append(Panel(name, thing))
        elif isinstance(thing, Program):
            found.append(Panel(name, simulate(thing, costs)))
        else:
            raise TypeError(f"plot draws a Program or a Timeline; found {type(thing).__name__}.")
    return found


def _ladder(rungs: Iterable[int]) -> dict[int, float]:
    """The distinct numbers in order, spread over 0 to 1."""
    distinct = sorted(set(rungs))
    return {rung: at / max(1, len(distinct) - 1) for at, rung in enumerate(distinct)}


def _side_by_side(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Each event with its share of the lane: where several ran at once, they lie one above the other."""
    at = 0
    while at < len(events):
        end, stop = events[at].end, at + 1
        while stop < len(events) and events[stop].start < end:
            end, stop = max(end, events[stop].end), stop + 1
        free: list[float] = []
        rows: list[int] = []
        for event in events[at:stop]:
            row = next((row for row, until in enumerate(free) if until <= event.start), len(free))
            free[row : row + 1] = [event.end]
            rows.append(row)
        for event, row in zip(events[at:stop], rows, strict=True):
            yield event, row / len(free), 1 / len(free)
        at = stop
