"""A panel, the content of one timeline's picture: bars, the waits between them, transfers, amounts held."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from fpipe.pictures.drawn_shapes import clock
from fpipe.program import LANES, Op, Program, Value, lane_of, parts_of
from fpipe.timing.amounts import amount
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import Transfer
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import Event, PathStep, Wait

Lane = tuple[int, str]
"""A rank and one of its lanes: "main", or others for transfers and collectives that take time."""


class Bar(NamedTuple):
    """An op of its lane from start to end, in seconds. `top` and `depth`: its share of the lane's height, 0 and 1
    where it has the lane for itself; parts of a PAIR share it, and so do ops that ran at once. `shade`: `fill`."""

    op: Op
    start: float
    end: float
    top: float = 0.0
    depth: float = 1.0
    shade: float = 0.0


@dataclass(frozen=True)
class Panel:
    """A timeline under its name, and from here on independent of how it is drawn.

    `window`: from when to when it is shown, in seconds; what overlaps that is there, whole. `rank_names`: what to call
    its ranks.
    """

    name: str
    timeline: Timeline
    window: tuple[float, float] = (0.0, inf)
    rank_names: Sequence[str] | None = None

    def rank_name(self, rank: int) -> str:
        """The name of a rank."""
        return f"rank {rank}" if self.rank_names is None else self.rank_names[rank]

    def shows(self, start: float, end: float) -> bool:
        """Whether something from start to end is in the window."""
        return start < self.window[1] and (end > self.window[0] or start == end == self.window[0])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.timeline.ranks

    @property
    def start(self) -> float:
        """Where the picture starts, in seconds."""
        return self.window[0]

    @cached_property
    def done(self) -> float:
        """When all is done and delivered, in seconds."""
        last = max((transfer.end for transfer in self._all_transfers), default=0.0)
        return max(self.timeline.makespan, self.timeline.delivered, last, *(end for _, _, end in self.timeline.events))

    @cached_property
    def end(self) -> float:
        """Where the picture ends, in seconds."""
        return max(self.start, min(self.window[1], self.done))

    @cached_property
    def events(self) -> list[Event]:
        """The events of the window, those that take no time too."""
        return [event for event in self.timeline.events if self.shows(event.start, event.end)]

    @property
    def caption(self) -> str:
        """The name and the title's numbers."""
        return f"{self.name}: {self.facts}".removeprefix(": ")

    @property
    def facts(self) -> str:
        """The title's numbers: makespan, span, bubble and the highest peak."""
        makespan, span, bubble = self.timeline.makespan, self.timeline.span, self.timeline.bubble
        time, peak = clock(makespan), self.amount(max(self.timeline.peak, default=0.0))
        return f"makespan {time.full(makespan)}, span {time.full(span)}, bubble {bubble:.1%}, peak {peak}"

    @cached_property
    def lanes(self) -> dict[Lane, list[Event]]:
        """All events that take time, by lane and in order of time; lanes without any are not there."""
        lanes: dict[Lane, list[Event]] = defaultdict(list)
        for event in self.timeline.events:
            if event.end > event.start:
                lanes[event.op.rank, lane_of(event.op)].append(event)
        for events in lanes.values():
            events.sort(key=lambda event: (event.start, event.end))
        return dict(sorted(lanes.items(), key=lambda item: (item[0][0], LANES.index(item[0][1]))))

    @cached_property
    def bars(self) -> dict[Lane, list[Bar]]:
        """Every op of the window that takes time, once; a PAIR as its parts."""
        bars: dict[Lane, list[Bar]] = {lane: [] for lane in self.lanes}
        for lane, events in self.lanes.items():
            for event, top, depth in _side_by_side(events):
                if self.shows(event.start, event.end):
                    parts = event.op.parts or (event.op,)
                    share = depth / len(parts)
                    for number, part in enumerate(parts):
                        top_of_part = top + number * share
                        bars[lane].append(Bar(part, event.start, event.end, top_of_part, share, self.shade(part)))
        return bars

    @cached_property
    def shading(self) -> tuple[str, dict[int, float], Callable[[Op], int | None]]:
        """The shading of ops: a word for it, the shades, and which of them an op has: by the way its microbatch
        takes, or, where all take one, by its rank's chunk."""
        forwards = [op for op in parts_of([event.op for event in self.timeline.events]) if op.kind == "F"]
        homes = sorted({(op.stage or 0, op.rank) for op in forwards})
        if len(homes) > len({stage for stage, _ in homes}):
            first_ranks = {op.microbatch: op.rank for op in forwards if op.stage == homes[0][0]}
            directions = sorted({*first_ranks.values()})
            by_microbatch = {microbatch: directions.index(rank) for microbatch, rank in first_ranks.items()}
            return "direction", _ladder(len(directions)), lambda op: by_microbatch.get(op.microbatch)
        chunks: Counter[int] = Counter()
        by_stage: dict[int, int] = {}
        for stage, rank in homes:
            by_stage[stage] = chunks[rank]
            chunks[rank] += 1
        return "chunk", _ladder(max(chunks.values(), default=1)), lambda op: by_stage.get(op.stage or 0)

    def shade(self, op: Op) -> float:
        """How light an op is drawn."""
        _, shades, rung = self.shading
        return shades.get(rung(op) or 0, 0.0)

    @cached_property
    def _all_transfers(self) -> Sequence[Transfer]:
        return self.timeline.transfers or list(self._handed_over())

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """Every value that goes from a rank to another in the window; where nobody noted it, from its writer to its
        first reader."""
        return [transfer for transfer in self._all_transfers if self.shows(transfer.start, transfer.end)]

    def _handed_over(self) -> Iterator[Transfer]:
        writers = {value: event for event in self.timeline.events for value in event.op.writes}
        seen: set[tuple[Value, int]] = set()
        for reader in self.timeline.events:
            rank = reader.op.rank
            for value in reader.op.reads:
                writer = writers.get(value)
                if writer is None or writer.op.rank == rank or (value, rank) in seen:
                    continue
                seen.add((value, rank))
                received = reader.op.kind == "RECV"
                start, end = (writer.start, reader.end) if received else (writer.end, reader.start)
                yield Transfer(value._replace(at="") if received else value, writer.op.rank, rank, start, end)

    @cached_property
    def waits(self) -> list[Wait]:
        """The times in which a rank's main lane does nothing before its next op; one that is done waits for nobody."""
        return [wait for wait in self.timeline.waits if wait.op and self.shows(wait.start, wait.end)]

    @cached_property
    def path(self) -> list[PathStep]:
        """The ops and transfers of the critical path in the window that take time, each to its own end: in a measured
        step the next one may start later."""
        ends: dict[tuple[object, float], float] = {event[:2]: event.end for event in self.timeline.events}
        path = [step._replace(end=ends.get((step.what, step.start), step.end)) for step in self.timeline.critical_path]
        return [step for step in path if step.end > step.start and self.shows(step.start, step.end)]

    def held(self, rank: int) -> list[tuple[float, float]]:
        """The amounts that a rank holds in the window, as (seconds, amount) from each change on."""
        whole = self.timeline.held(rank)
        before = [(self.start, amount) for when, amount in whole if when < self.start][-1:]
        return before + [(when, amount) for when, amount in whole if self.start <= when <= self.end]

    @cached_property
    def sending(self) -> list[Transfer]:
        """The transfers that keep the main lane of their sender busy."""
        costs = self.timeline.costs
        return list(self.transfers) if costs is not None and costs.sender == "busy" else []

    def amount(self, held: float) -> str:
        """An amount held, as the picture says it."""
        return amount(held, self.timeline.in_bytes, 4)


def panels_of(
    drawn: Sequence[object],
    names: Sequence[str] | None = None,
    costs: Costs | None = None,
    window: tuple[float, float] | None = None,
    ranks: Sequence[str] | None = None,
) -> list[Panel]:
    """Make panels of the arguments of `plot`: programs are simulated, timelines stay as they are."""
    if names is not None and (isinstance(names, str) or len(names) != len(drawn)):
        found = "a string" if isinstance(names, str) else f"{len(names)}"
        raise ValueError(f"names= is a list with one name for each of the {len(drawn)} schedules; found {found}.")
    if costs is not None and not any(isinstance(what, Program) for what in drawn):
        raise ValueError("costs= is for programs; a Timeline has its times already: leave costs out.")
    names = names or ([""] if len(drawn) == 1 else [f"{number}" for number in range(1, len(drawn) + 1)])
    panels: list[Panel] = []
    for what, name in zip(drawn, names, strict=True):
        timeline = simulate(what, costs) if isinstance(what, Program) else what
        if not isinstance(timeline, Timeline):
            raise TypeError(f"plot draws a Program or a Timeline; found {type(what).__name__}.")
        panels.append(Panel(name, timeline, window or (0.0, inf), ranks))
    for panel in panels:
        if ranks is not None and len(ranks) != panel.ranks:
            raise ValueError(f"ranks= has one name for each of the {panel.ranks} ranks; found {len(ranks)}.")
    last = max(panel.done for panel in panels)
    if window is not None and window[0] >= last:
        raise ValueError(f"window= starts at {window[0]:g}, when all is done: the end is {last:g}.")
    return panels


def awaited(wait: Wait) -> str:
    """Name the op of another rank that a rank waits for: the last that its next one needs."""
    if wait.on is None or wait.source in (wait.rank, None):
        return ""
    return f"for {wait.on.cell} on rank {wait.source}"


def _ladder(rungs: int) -> dict[int, float]:
    """So many shades, spread over 0 to 1."""
    return {rung: rung / max(1, rungs - 1) for rung in range(rungs)}


def _side_by_side(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Give each event its share of the lane: where several ran at once, they lie one above the other."""
    first = 0
    while first < len(events):
        end, stop = events[first].end, first + 1
        while stop < len(events) and events[stop].start < end:
            end, stop = max(end, events[stop].end), stop + 1
        free: list[float] = []
        rows: list[int] = []
        for event in events[first:stop]:
            row = next((row for row, until in enumerate(free) if until <= event.start), len(free))
            free[row : row + 1] = [event.end]
            rows.append(row)
        for event, row in zip(events[first:stop], rows, strict=True):
            yield event, row / len(free), 1 / len(free)
        first = stop
