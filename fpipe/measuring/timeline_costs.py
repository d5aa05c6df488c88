"""Read a measured timeline as costs: for how long each op keeps its rank, and what it takes to move a value.

    rank 1: RECV(y) ... |1F0|ADD|SEND(dx)|RECV(y) ... |1F1        1F0 keeps its rank from its start to that of SEND

The small ops behind an op that a schedule names, and what the runtime does between them, are that op's time. SENDs and
RECVs have a time of their own, and what a RECV waits for is nobody's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from fpipe.program import Op, Value, is_exchange
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
    SENDs, RECVs and waits between the two take; and for how many each exchange keeps its lane."""
    found = _exchanged(timeline)
    brought = {value for op, _ in found for value in op.writes}
    for row in _rows(timeline).values():
        ends: list[tuple[Op, float, float]] = []
        before = row[0].start
        for op, start, end in row:
            if op.kind in ("SEND", "RECV") and ends:
                last, seconds, since = ends[-1]
                ends[-1] = last, seconds + before - since, end
            elif is_scheduled(op.kind):
                if ends:
                    last, seconds, since = ends[-1]
                    until = start if brought.isdisjoint(op.reads) else before
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


def _exchanged(timeline: Timeline) -> list[tuple[Op, float]]:
    """The seconds of each exchange, from when its lane was free."""
    found: list[tuple[Op, float]] = []
    for row in _rows(timeline, exchanges=True).values():
        free = 0.0
        for op, start, end in row:
            found.append((op, max(0.0, end - max(start, free))))
            free = max(free, end)
    return found


def _rows(timeline: Timeline, exchanges: bool = False) -> dict[int, list[Event]]:
    """The events of each rank, by time: its exchanges, or all others."""
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        named = is_scheduled(event.op.kind) or event.op.kind in ("SEND", "RECV")
        if is_exchange(event.op) == exchanges and (named or event.end > event.start):
            rows[event.op.rank].append(event)
    return rows
