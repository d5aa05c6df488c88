"""Read a program as time: when does each op start, what waits, and how much is held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fpipe.costs import Costs
from fpipe.program import Op, Program, building, kind_of, parts_of, the_program


class Event(NamedTuple):
    """An op with its start and end, in seconds from the first op of the program."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens. Seconds throughout; ranks by number.

    `makespan` is the last end; `span` the longest any rank takes from its first start to its last end (what the
    zero-bubble papers report). `bubble` and `bubble_span` are the idle share of each. `peak` is, per rank, the most
    microbatches' activations held at once (one microbatch of all the rank's stages is 1), from the start of F (or R) to
    the end of W or of a full backward; `peak_released` lets go of them at the end of I. In a measured timeline
    (`build(record=True)`) peaks are bytes. `delivered`: when the last result reached its last home, if that is away.

    >>> import fpipe
    >>> print(fpipe.simulate(fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2))(fpipe.program(2))))
    makespan 15, span 15, bubble 20.0%, peak per rank [4, 4]
    """

    events: tuple[Event, ...]
    ranks: int
    peak: tuple[float, ...]
    peak_released: tuple[float, ...]
    delivered: float = 0.0

    @cached_property
    def _busy(self) -> list[tuple[float, float, float]]:
        """Per rank: work, first start, last end."""
        found = [[0.0, float("inf"), 0.0] for _ in range(self.ranks)]
        for op, start, end in self.events:
            if kind_of(op.kind).lane == "main" and end > start:
                row = found[op.rank]
                row[0] += end - start
                row[1] = min(row[1], start)
                row[2] = max(row[2], end)
        return [(work, min(first, last), last) for work, first, last in found]

    @cached_property
    def makespan(self) -> float:
        """Last end over all ranks, in seconds."""
        return max([self.delivered, *(event.end for event in self.events)])

    @cached_property
    def span(self) -> float:
        """Longest time of a rank from its first start to its last end, in seconds."""
        return max((last - first for _, first, last in self._busy), default=0.0)

    @cached_property
    def idle(self) -> float:
        """Makespan less the mean work of a rank, in seconds."""
        return self.makespan - self._work

    @cached_property
    def bubble(self) -> float:
        """Idle share of the makespan."""
        return self.idle / self.makespan if self.makespan else 0.0

    @cached_property
    def bubble_span(self) -> float:
        """Idle share of the span."""
        return 1 - self._work / self.span if self.span else 0.0

    @cached_property
    def _work(self) -> float:
        working = [work for work, _, _ in self._busy if work]
        return sum(working) / len(working) if working else 0.0

    def __str__(self) -> str:
        peaks = ", ".join(f"{peak:g}" for peak in self.peak)
        return f"makespan {self.makespan:g}, span {self.span:g}, bubble {self.bubble:.1%}, peak per rank [{peaks}]"


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """Run a program against costs: each rank does its ops in order, each as soon as what it reads is there.

    Args:
        program: any program; transfers need not be ops, a value read on another rank arrives `costs.transfer` later.
        costs: seconds per op; by default one for each F, I, W and R, and so two for B.

    Returns:
        A `Timeline`.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2))(fpipe.program(2))
    >>> timeline = fpipe.simulate(program)
    >>> timeline.makespan, timeline.bubble, timeline.peak
    (15.0, 0.2, (2.0, 1.0))
    """
    program = the_program(program)
    with building():
        events = _events(program, costs or Costs())
        return Timeline(events, program.ranks, *_peaks(program), _delivered(program, events, costs or Costs()))


def _delivered(program: Program, events: tuple[Event, ...], costs: Costs) -> float:
    """When the last result has reached its last home."""
    if not costs.transfer:
        return 0.0
    writers = ((program.writer[end.value], end.homes) for end in program.outputs)
    return max(
        (
            events[at].end + costs.transfer
            for at, homes in writers
            if at >= 0 and any(rank != events[at].op.rank for rank in homes)
        ),
        default=0.0,
    )


def _events(program: Program, costs: Costs) -> tuple[Event, ...]:
    transfer, ops = costs.transfer, program.ops
    seconds: dict[tuple[str, int | None], float] = {}
    lanes = {kind: kind_of(kind).lane for kind in {op.kind for op in ops}}
    away = {end.value: end.homes for end in program.inputs if transfer and len(end.homes) < program.ranks}
    free = [0.0] * program.ranks
    ends: list[float] = []
    events: list[Event] = []
    for op, sources in zip(ops, program.sources, strict=True):
        kind, stage, rank = op[0], op[1], op[4]
        start = free[rank]
        for source in sources:
            if source >= 0:
                ready = ends[source]
                if transfer and ops[source].rank != rank:
                    ready += transfer
                if ready > start:
                    start = ready
        if away and any(rank not in away.get(value, (rank,)) for value in op[5]):
            start = max(start, transfer)
        cost = seconds.get((kind, stage))
        if cost is None or op[7]:
            cost = seconds[kind, stage] = costs.seconds(op)
        end = start + cost
        if cost and lanes[kind] == "main":
            free[rank] = end
        ends.append(end)
        events.append(_new(Event, (op, start, end)))
    return tuple(events)


_new = tuple.__new__


def _peaks(program: Program) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The most activations held at once on each rank: to the end of W, and to the end of I. A rank does one op at a
    time, so its order is enough."""
    forwards = Counter((op.rank, op.microbatch) for op in parts_of(program.ops) if op.kind == "F")
    share = [1] * program.ranks
    for (rank, _), count in forwards.items():
        share[rank] = max(share[rank], count)
    held, released = [0] * program.ranks, [0] * program.ranks
    peak, peak_released = [0] * program.ranks, [0] * program.ranks
    for op in parts_of(program.ops):
        rank = op.rank
        if op[0] in "FR" and any(value[0] == "res" for value in op[6]):
            held[rank] += 1
            released[rank] += 1
            peak[rank] = max(peak[rank], held[rank])
            peak_released[rank] = max(peak_released[rank], released[rank])
        if op.kind in "BW":
            held[rank] -= 1
        if op.kind in "BI":
            released[rank] -= 1
    return (
        tuple(most / count for most, count in zip(peak, share, strict=True)),
        tuple(most / count for most, count in zip(peak_released, share, strict=True)),
    )
