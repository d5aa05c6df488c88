"""A list scheduler on numbers: whenever a rank is free, one of the ops that could start there does.

Which of the ready ops a rank takes is decided by `pick`: memory caps, priorities and patience are rules of picking. It
is apart from the clock of `order.py` and from `simulate`, which are given the order that is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

NOTHING = -1
"""Answer of `pick` to be asked again as soon as something changes on this rank."""
LATER = -2
"""Answer of `pick` to be asked again as soon as anything happens anywhere."""

Pick = Callable[[int, float, list[int]], int]
"""`pick(rank, time, ready) -> op`, one of the ready ops, or `NOTHING` or `LATER`."""


class TaskGraph(NamedTuple):
    """Ops as numbers: how many ranks there are, where each op runs and how long it takes, the ops that wait for it,
    each with the seconds that the way there takes, and how many ops it waits for."""

    ranks: int
    rank: Sequence[int]
    seconds: Sequence[float]
    readers: Sequence[Sequence[tuple[int, float]]]
    needs: Sequence[int]

    @classmethod
    def of(
        cls, ranks: int, rank: Sequence[int], seconds: Sequence[float], needs: Sequence[Mapping[int, float]]
    ) -> TaskGraph:
        """The graph of ops each of which waits for these, so many seconds away; -1 is the caller."""
        readers: list[list[tuple[int, float]]] = [[] for _ in rank]
        for reader, waits in enumerate(needs):
            for source, way in waits.items():
                if source >= 0:
                    readers[source].append((reader, way))
        return cls(ranks, rank, seconds, readers, [sum(source >= 0 for source in waits) for waits in needs])


class Scheduled(NamedTuple):
    """A list schedule: the ops of each rank in order, when each one starts, and those that could not start."""

    rows: list[list[int]]
    start: list[float]
    stuck: list[list[int]]


def list_schedule(work: TaskGraph, pick: Pick, earliest: Sequence[float] | None = None) -> Scheduled:
    """Let every rank go on as far as `pick` lets it; ops that are ready in the end and were never picked are `stuck`.

    No op starts before its `earliest` time.

    >>> graph = TaskGraph(2, [0, 1, 0], [1.0, 1.0, 1.0], [[(1, 0.5)], [], []], [0, 1, 0])
    >>> list_schedule(graph, lambda rank, time, ready: ready[0])
    Scheduled(rows=[[0, 2], [1]], start=[0.0, 1.5, 1.0], stuck=[[], []])
    """
    ranks, rank_of, seconds, readers, _ = work
    needs = list(work.needs)
    start, arrival = [0.0] * len(needs), [0.0] * len(needs) if earliest is None else list(earliest)
    free = [0.0] * ranks
    rows: list[list[int]] = [[] for _ in range(ranks)]
    ready: list[list[int]] = [[] for _ in range(ranks)]
    same = 1e-6 * min([second for second in seconds if second], default=0.0)  # times that rounding has set apart
    events: list[tuple[float, int]] = []  # (when, an op that is ready then, or the complement of a rank that is free)
    for op, count in enumerate(needs):
        if not count:
            if arrival[op] > 0:
                heappush(events, (arrival[op], op))
            else:
                ready[rank_of[op]].append(op)
    awake, patient = set(range(ranks)), set[int]()
    now = 0.0
    while True:
        for rank in sorted(awake):
            while ready[rank] and free[rank] <= now + same:
                op = pick(rank, now, ready[rank])
                if op < 0:
                    if op == LATER:
                        patient.add(rank)
                    break
                ready[rank].remove(op)
                rows[rank].append(op)
                start[op] = now
                free[rank] = end = now + seconds[op]
                for reader, way in readers[op]:
                    if end + way > arrival[reader]:
                        arrival[reader] = end + way
                    needs[reader] -= 1
                    if not needs[reader]:
                        if arrival[reader] <= now:
                            ready[rank_of[reader]].append(reader)
                            if rank_of[reader] != rank:
                                heappush(events, (now, ~rank_of[reader]))
                        else:
                            heappush(events, (arrival[reader], reader))
                if end > now:
                    heappush(events, (end, ~rank))
        if not events:
            return Scheduled(rows, start, ready)
        now = events[0][0]
        awake = patient
        patient = set()
        while events and events[0][0] <= now + same:
            found = heappop(events)[1]
            if found >= 0:
                ready[rank_of[found]].append(found)
                awake.add(rank_of[found])
            else:
                awake.add(~found)
