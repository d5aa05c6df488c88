"""Read a measured timeline as costs: for how long each op keeps its rank, and how long a value is on its way.

    rank 1: RECV(y) ... |1F0|ADD|SEND(dx)|RECV(y) ... |1F1        1F0 keeps its rank from its start to that of RECV

The small ops behind an op that a schedule names, and what the runtime does between them, are that op's time; what a
RECV waits for is nobody's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from fpipe.program import Op, Value
from fpipe.timing.lanes import is_scheduled
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import Event


def kept(timeline: Timeline) -> list[tuple[Op, float]]:
    """For how many seconds each op that a schedule names keeps its rank, until the next of its rank begins, less what a
    RECV between the two waits."""
    found: list[tuple[Op, float]] = []
    for row in _rows(timeline).values():
        ends: list[tuple[Op, float, float]] = []
        before = row[0].start
        for op, start, end in row:
            if op.kind == "RECV" and ends:
                last, seconds, since = ends[-1]
                ends[-1] = last, seconds + before - since, end
            elif is_scheduled(op.kind):
                if ends:
                    last, seconds, since = ends[-1]
                    ends[-1] = last, seconds + start - since, start
                ends.append((op, 0.0, start))
            before = end
        if ends:
            last, seconds, since = ends[-1]
            ends[-1] = last, seconds + before - since, before
        found += [(op, seconds) for op, seconds, _ in ends]
    return found


def on_the_way(timelines: Iterable[Timeline]) -> float:
    """Seconds from the end of a SEND to that of its RECV, where that was waiting: the median; 0 where none was."""
    found: list[float] = []
    for timeline in timelines:
        sent: dict[Value, float] = {}
        received: list[tuple[Value, float, float]] = []
        for row in _rows(timeline).values():
            before = row[0].start
            for op, _, end in row:
                if op.kind == "SEND":
                    sent.update((value, end) for value in op.writes)
                if op.kind == "RECV":
                    received += [(value, before, end) for value in op.reads]
                before = end
        waited = ((end, sent[value]) for value, since, end in received if since < sent.get(value, 0.0))
        found += [max(0.0, end - left) for end, left in waited]
    return statistics.median(found) if found else 0.0


def _rows(timeline: Timeline) -> dict[int, list[Event]]:
    """The events of each rank, by time."""
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        rows[event.op.rank].append(event)
    return rows
