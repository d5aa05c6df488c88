"""A panel: the content of one timeline's picture, that is bars, waits, transfers and memory curves.

All that a picture shows is chosen here, in seconds and ranks. Where it goes, and how it looks, is `layout.py`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

from fpipe.pictures.drawn_shapes import clock
from fpipe.pictures.style import PLAIN, Style
from fpipe.program import LANES, Op, Program, Value, lane_of, parts_of
from fpipe.timing.amounts import format_amount
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import Transfer
from fpipe.timing.memory import HOLDERS
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import Event, PathStep, Wait

Lane = tuple[int, str]
"""A rank and one of its lanes: "main", or others for transfers and collectives that take time."""


class Bar(NamedTuple):
    """An op of its lane from start to end, in seconds.

    `top` and `depth`: its share of the lane's height, 0 and 1 if it has the lane for itself; parts of a PAIR share it,
    and so do ops that ran at once. `shade`: as in `Style.colour_of`.
    """

    op: Op
    start: float
    end: float
    top: float = 0.0
    depth: float = 1.0
    shade: float = 0.0


@dataclass(frozen=True)
class Panel:
    """A timeline with its name, independent of how it is drawn.

    `window`: from when to when it is shown, in seconds; what overlaps that is there, whole. `rank_names`: what to call
    its ranks. `differences`: by cell, the seconds of the ops that differ most from a first timeline, and those in it.
    """

    name: str
    timeline: Timeline
    window: tuple[float, float] = (0.0, inf)
    rank_names: Sequence[str] | None = None
    differences: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank."""
        return f"rank {rank}" if self.rank_names is None else self.rank_names[rank]

    def is_shown(self, start: float, end: float) -> bool:
        """Whether what lasts from start to end is in the window."""
        # What takes no time counts at the start of the window, and not at its end: windows in a row show it once.
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
    def last_end(self) -> float:
        """When all ops are over and all values delivered, in seconds."""
        last_arrival = max((transfer.end for transfer in self._all_transfers), default=0.0)
        op_ends = (event.end for event in self.timeline.events)
        return max(self.timeline.makespan, self.timeline.delivered, last_arrival, *op_ends)

    @cached_property
    def end(self) -> float:
        """Where the picture ends, in seconds."""
        return max(self.start, min(self.window[1], self.last_end))

    @cached_property
    def events(self) -> list[Event]:
        """All events of the window, including events of no time."""
        return [event for event in self.timeline.events if self.is_shown(event.start, event.end)]

    @property
    def caption(self) -> str:
        """The name and the title's numbers."""
        return f"{self.name}: {self.figures}".removeprefix(": ")

    @property
    def figures(self) -> str:
        """The title's numbers: makespan, span, bubble, the highest peak, and what differs from the first timeline."""
        makespan, span, bubble = self.timeline.makespan, self.timeline.span, self.timeline.bubble
        time, peak = clock(makespan), self.format_amount(max(self.timeline.peak, default=0.0))
        figures = f"makespan {time.full(makespan)}, span {time.full(span)}, bubble {bubble:.1%}, peak {peak}"
        excesses = [(cell, seconds - baseline) for cell, (seconds, baseline) in self.differences.items()]
        texts = (f"{cell} {excess * time.per_second:+.3g} {time.unit}".rstrip() for cell, excess in excesses)
        return f"{figures}; differs most: {', '.join(texts)}" if excesses else figures

    @cached_property
    def lanes(self) -> dict[Lane, list[Event]]:
        """All events that take time, by lane and in order of time; lanes without events are left out."""
        lanes: dict[Lane, list[Event]] = defaultdict(list)
        for event in self.timeline.events:
            if event.end > event.start:
                lanes[event.op.rank, lane_of(event.op)].append(event)
        for events in lanes.values():
            events.sort(key=lambda event: (event.start, event.end))
        return dict(sorted(lanes.items(), key=lambda lane_events: (lane_events[0][0], LANES.index(lane_events[0][1]))))

    @cached_property
    def bars(self) -> dict[Lane, list[Bar]]:
        """Bars of all ops of the window that take time; a PAIR has one for each part."""
        bars: dict[Lane, list[Bar]] = {lane: [] for lane in self.lanes}
        for lane, events in self.lanes.items():
            for event, top, depth in _stack_overlaps(events):
                if self.is_shown(event.start, event.end):
                    parts = event.op.parts or (event.op,)
                    share = depth / len(parts)
                    for number, part in enumerate(parts):
                        top_of_part = top + number * share
                        bars[lane].append(Bar(part, event.start, event.end, top_of_part, share, self.shade(part)))
        return bars

    @cached_property
    def shading(self) -> tuple[str, dict[int, float], Callable[[Op], int | None]]:
        """The shading of ops: a word for it, the shades by number, and a function from an op to its number.

        With pipelines in two directions the shade is the direction of the microbatch, else the chunk of its rank.
        """
        # Microbatches go in several directions if a stage is on several ranks. The rank of its first stage tells the
        # direction of a microbatch.
        forwards = [op for op in parts_of([event.op for event in self.timeline.events]) if op.kind == "F"]
        stage_ranks = sorted({(op.stage or 0, op.rank) for op in forwards})
        if len(stage_ranks) > len({stage for stage, _ in stage_ranks}):
            first_ranks = {op.microbatch: op.rank for op in forwards if op.stage == stage_ranks[0][0]}
            directions = sorted({*first_ranks.values()})
            direction_by_microbatch = {microbatch: directions.index(rank) for microbatch, rank in first_ranks.items()}
            return "direction", _spread_shades(len(directions)), lambda op: direction_by_microbatch.get(op.microbatch)
        chunks: Counter[int] = Counter()
        chunk_by_stage: dict[int, int] = {}
        for stage, rank in stage_ranks:
            chunk_by_stage[stage] = chunks[rank]
            chunks[rank] += 1
        return "chunk", _spread_shades(max(chunks.values(), default=1)), lambda op: chunk_by_stage.get(op.stage or 0)

    def shade(self, op: Op) -> float:
        """Return how light an op is drawn, from 0 to 1."""
        _, shades, number_of = self.shading
        return shades.get(number_of(op) or 0, 0.0)

    @cached_property
    def _all_transfers(self) -> Sequence[Transfer]:
        return self.timeline.transfers or list(self._inferred_transfers())

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """Transfers between ranks in the window, inferred if none were recorded."""
        return [transfer for transfer in self._all_transfers if self.is_shown(transfer.start, transfer.end)]

    def _inferred_transfers(self) -> Iterator[Transfer]:
        writers = {value: event for event in self.timeline.events for value in event.op.writes}
        # Measured timelines record ops alone. With SEND and RECV a transfer lasts from one to the other, else from the
        # writer to the first reader.
        known_copies: set[tuple[Value, int]] = set()
        for reader in self.timeline.events:
            rank = reader.op.rank
            for value in reader.op.reads:
                writer = writers.get(value)
                if writer is None or writer.op.rank == rank or (value, rank) in known_copies:
                    continue
                known_copies.add((value, rank))
                is_recv = reader.op.kind == "RECV"
                start, end = (writer.start, reader.end) if is_recv else (writer.end, reader.start)
                yield Transfer(value._replace(location="") if is_recv else value, writer.op.rank, rank, start, end)

    @cached_property
    def waits(self) -> list[Wait]:
        """Idle times of main lanes before their next op; a rank that is done waits for nothing."""
        return [wait for wait in self.timeline.waits if wait.op and self.is_shown(wait.start, wait.end)]

    @cached_property
    def path(self) -> list[PathStep]:
        """Ops and transfers of the critical path in the window that take time, each to its own end."""
        # In a measured step an op may end before the next one starts; the path lets each last until then.
        ends: dict[tuple[object, float], float] = {event[:2]: event.end for event in self.timeline.events}
        steps = self.timeline.critical_path
        path = (step._replace(end=ends.get((step.activity, step.start), step.end)) for step in steps)
        return [step for step in path if step.end > step.start and self.is_shown(step.start, step.end)]

    def memory_by_holder(self, rank: int) -> list[tuple[float, dict[str, float]]]:
        """Return the memory of a rank in the window: (seconds, amounts by holder) from each change on."""
        states = self.timeline.memory_by_holder(rank)
        initial = [(self.start, amounts) for seconds, amounts in states if seconds < self.start][-1:]
        return initial + [(seconds, amounts) for seconds, amounts in states if self.start <= seconds <= self.end]

    @cached_property
    def holders(self) -> list[str]:
        """Holders of memory on any rank in the window, in the order of `HOLDERS`."""
        names = {name for rank in range(self.ranks) for _, amounts in self.memory_by_holder(rank) for name in amounts}
        return [holder for holder in HOLDERS if holder in names]

    @cached_property
    def blocking_transfers(self) -> list[Transfer]:
        """Transfers that keep the main lane of their sender busy."""
        costs = self.timeline.costs
        return list(self.transfers) if costs is not None and costs.sender == "busy" else []

    def format_amount(self, amount: float) -> str:
        """Write an amount held, in the four digits of pictures."""
        return format_amount(amount, self.timeline.in_bytes, 4)


def make_panels(
    subjects: Sequence[object],
    names: Sequence[str] | None = None,
    costs: Costs | None = None,
    style: Style = PLAIN,
) -> list[Panel]:
    """Make panels from the arguments of `plot`; programs are simulated first."""
    window, ranks = style.window, style.ranks
    if names is not None and (isinstance(names, str) or len(names) != len(subjects)):
        count = "a string" if isinstance(names, str) else f"{len(names)}"
        raise ValueError(f"names= lists {len(subjects)} names, one a schedule; found {count}.")
    if costs is not None and not any(isinstance(subject, Program) for subject in subjects):
        raise ValueError("costs= is for programs; a Timeline has its times already.")
    names = names or ([""] if len(subjects) == 1 else [f"{number}" for number in range(1, len(subjects) + 1)])
    panels: list[Panel] = []
    for subject, name in zip(subjects, names, strict=True):
        timeline = simulate(subject, costs) if isinstance(subject, Program) else subject
        if not isinstance(timeline, Timeline):
            raise TypeError(f"plot draws a Program or a Timeline; found {type(subject).__name__}.")
        differences = _largest_differences(timeline, panels[0].timeline, style.differences) if panels else {}
        panels.append(Panel(name, timeline, window or (0.0, inf), ranks, differences))
    for panel in panels:
        if ranks is not None and len(ranks) != panel.ranks:
            raise ValueError(f"ranks= lists {panel.ranks} names, one a rank; found {len(ranks)}.")
    last_end = max(panel.last_end for panel in panels)
    if window is not None and window[0] >= last_end:
        raise ValueError(f"window= starts at {window[0]:g}, when all is done: the end is {last_end:g}.")
    return panels


def _largest_differences(timeline: Timeline, baseline: Timeline, count: int) -> dict[str, tuple[float, float]]:
    """Return the seconds in both timelines of the ops, by cell, that differ most, the largest difference first."""
    if not count:
        return {}
    seconds, baseline_seconds = map(_seconds_by_cell, (timeline, baseline))
    pairs = [(cell, (seconds[cell], baseline_seconds[cell])) for cell in seconds.keys() & baseline_seconds.keys()]
    pairs.sort(key=lambda pair: (-abs(pair[1][0] - pair[1][1]), pair[0]))
    return {cell: times for cell, times in pairs[:count] if times[0] != times[1]}


def _seconds_by_cell(timeline: Timeline) -> dict[str, float]:
    seconds_by_cell: defaultdict[str, float] = defaultdict(float)
    for event in timeline.events:
        seconds_by_cell[event.op.cell] += event.end - event.start
    return seconds_by_cell


def awaited_op(wait: Wait) -> str:
    """Return a text on the op of another rank that a rank waits for; empty if it waits for none."""
    if wait.writer is None or wait.source in (wait.rank, None):
        return ""
    return f"for {wait.writer.cell} on rank {wait.source}"


def _spread_shades(count: int) -> dict[int, float]:
    """Return shades by number, spread evenly over 0 to 1."""
    return {number: number / max(1, count - 1) for number in range(count)}


def _stack_overlaps(events: Sequence[Event]) -> Iterator[tuple[Event, float, float]]:
    """Yield each event with its share of the lane, (top, depth); events that ran at once lie above each other."""
    # Cut the events, which are in order of start, into groups that overlap in a chain. Within a group each event takes
    # the first row that is free again, and all rows have the same height.
    start_index = 0
    while start_index < len(events):
        end, stop_index = events[start_index].end, start_index + 1
        while stop_index < len(events) and events[stop_index].start < end:
            end, stop_index = max(end, events[stop_index].end), stop_index + 1
        row_ends: list[float] = []
        row_by_event: list[int] = []
        for event in events[start_index:stop_index]:
            row = next((row for row, row_end in enumerate(row_ends) if row_end <= event.start), len(row_ends))
            row_ends[row : row + 1] = [event.end]
            row_by_event.append(row)
        for event, row in zip(events[start_index:stop_index], row_by_event, strict=True):
            yield event, row / len(row_ends), 1 / len(row_ends)
        start_index = stop_index
