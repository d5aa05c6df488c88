"""Read a measured timeline as costs: for how long each op keeps its rank, and what it takes to move a value.

    rank 1: RECV(y) ... |1F0|ADD|SEND(dx)|RECV(y) ... |1F1        1F0 keeps its rank from its start to that of SEND

The small ops behind an op that a schedule names, and what the runtime does between them, are that op's time. SENDs and
RECVs have a time of their own, and what a rank waits for is nobody's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from fpipe.program import Op, Value, lane_of
from fpipe.timing.lanes import is_scheduled
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import Event


class Moving(NamedTuple):
    """Seconds for which a rank sends a value, for which that is on its way, and for which a rank takes it."""

    send: float
    transfer: float
    receive: float


def kept(timeline: Timeline) -> list[tuple[Op, float]]:
    """For how many seconds each op that a schedule names keeps its rank, until the next of its rank begins, less what
    SENDs, RECVs and waits between the two take; and for how many each exchange and each collective over replicas keeps
    its lane. What a rank does to start one is part of the op before it."""
    found = _beside(timeline)
    brought = {value for op, _ in found for value in op.writes}
    for row in _rows(timeline).values():
        ends: list[tuple[Op, float, float]] = []
        before, over = row[0].start, set[float]()
        for op, start, end in row:
            waits = not brought.isdisjoint(op.reads)
            if _is_beside(op):
                if lane_of(op) == "wire" and start not in over:  # it has waited for its lane then
                    before = max(before, start)
                over.add(end)
                continue
            if (op.kind in ("SEND", "RECV") or (waits and not is_scheduled(op.kind))) and ends:
                last, seconds, since = ends[-1]
                ends[-1] = last, seconds + before - since, end if op.kind in ("SEND", "RECV") else start
            elif is_scheduled(op.kind):
                if ends:
                    last, seconds, since = ends[-1]
                    until = before if waits else start
                    ends[-1] = last, seconds + until - since, until
                ends.append((op, 0.0, start))
            before = end
        if ends:
            last, seconds, since = ends[-1]
            ends[-1] = last, seconds + before - since, before
        found += [(op, seconds) for op, seconds, _ in ends]
    return found


def moving(timelines: Iterable[Timeline]) -> Moving:
    """Seconds to move a value, by medians; 0 for what was not seen.

    A RECV that was waiting when its SEND ended tells from then on the way and its own time; one that came after all of
    that, its own time alone.
    """
    sends: list[float] = []
    received: list[tuple[float, float, float]] = []
    for timeline in timelines:
        sent: dict[Value, float] = {}
        taken: list[tuple[Value, float, float]] = []
        for row in _rows(timeline).values():
            before = row[0].start
            for op, start, end in row:
                if lane_of(op) == "wire":
                    before = max(before, start)
                if _is_beside(op):
                    continue
                if op.kind == "SEND":
                    sent.update((value, end) for value in op.writes)
                    sends.append(end - start)
                if op.kind == "RECV":
                    taken += [(value, before, end) for value in op.reads]
                before = end
        received += [(sent[value], since, end) for value, since, end in taken if value in sent]
    both = _median(end - left for left, since, end in received if since < left)
    receive = _median(end - since for left, since, end in received if since >= left + both)
    return Moving(_median(sends), max(0.0, both - receive), receive)


def _median(found: Iterable[float]) -> float:
    return statistics.median(each) if (each := [*found]) else 0.0


def _is_beside(op: Op) -> bool:
    return lane_of(op) in ("wire", "exchange")


def _beside(timeline: Timeline) -> list[tuple[Op, float]]:
    """The seconds of each exchange and collective over replicas, from when its lane was free; of those before the first
    other op of a rank with what it takes to start them."""
    found: list[tuple[Op, float]] = []
    for row in _rows(timeline).values():
        free, begun = defaultdict[str, float](float), False
        for op, start, end in row:
            lane = lane_of(op)
            if _is_beside(op):
                since = max(start, free[lane]) if begun or lane == "exchange" else free[lane]
                found.append((op, max(0.0, end - since)))
                free[lane] = max(free[lane], end)
            begun = begun or (lane == "main" and is_scheduled(op.kind))
    return found


def _rows(timeline: Timeline) -> dict[int, list[Event]]:
    """The events of each rank, by time."""
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        op = event.op
        if is_scheduled(op.kind) or op.kind in ("SEND", "RECV") or _is_beside(op) or event.end > event.start:
            rows[op.rank].append(event)
    return rows
