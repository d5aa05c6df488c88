"""List scheduling on numbers: whenever a rank is free, it starts one of its ready ops.

`pick` chooses the op: memory caps, priorities and patience are rules of picking. The clock of `order.py` and `simulate`
are separate, since they replay an order that is given; this one makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

NOTHING = -1
"""Answer of `pick`: ask again when something changes on this rank."""
LATER = -2
"""Answer of `pick`: ask again when anything happens on any rank."""

Pick = Callable[[int, float, list[int]], int]
"""`pick(rank, time, ready) -> op`, one of the ready ops, or `NOTHING` or `LATER`."""


class TaskGraph(NamedTuple):
    """Ops as numbers.

    Args:
        ranks: the number of ranks.
        rank, seconds: where each op runs, and for how long.
        readers: for each op the ops that wait for it, each with the delay of the transfer.
        needs: how many ops each op waits for.
    """

    ranks: int
    rank: Sequence[int]
    seconds: Sequence[float]
    readers: Sequence[Sequence[tuple[int, float]]]
    needs: Sequence[int]

    @classmethod
    def of(
        cls, ranks: int, rank: Sequence[int], seconds: Sequence[float], needs: Sequence[Mapping[int, float]]
    ) -> TaskGraph:
        """Build the graph from the sources of each op, with delays in seconds; -1 is the caller, ready at the start."""
        readers: list[list[tuple[int, float]]] = [[] for _ in rank]
        for reader, waits in enumerate(needs):
            for source, delay in waits.items():
                if source >= 0:
                    readers[source].append((reader, delay))
        return cls(ranks, rank, seconds, readers, [sum(source >= 0 for source in waits) for waits in needs])


class ListSchedule(NamedTuple):
    """The ops of each rank in order, their start times, and the ready ops that were never picked."""

    rows: list[list[int]]
    start: list[float]
    stuck: list[list[int]]


def list_schedule(work: TaskGraph, pick: Pick, earliest: Sequence[float] | None = None) -> ListSchedule:
    """Run every rank as far as `pick` lets it; no op starts before its `earliest` time.

    >>> graph = TaskGraph(2, [0, 1, 0], [1.0, 1.0, 1.0], [[(1, 0.5)], [], []], [0, 1, 0])
    >>> list_schedule(graph, lambda rank, time, ready: ready[0])
    ListSchedule(rows=[[0, 2], [1]], start=[0.0, 1.5, 1.0], stuck=[[], []])
    """
    ranks, rank_of, seconds, readers, _ = work
    needs = list(work.needs)
    starts, ready_times = [0.0] * len(needs), [0.0] * len(needs) if earliest is None else list(earliest)
    rank_free = [0.0] * ranks
    rows: list[list[int]] = [[] for _ in range(ranks)]
    ready: list[list[int]] = [[] for _ in range(ranks)]
    # Two ends of the same nominal time differ in their last bits. They are one moment, or a rank would pick before the
    # op that it should prefer is ready.
    rounding = 1e-6 * min([second for second in seconds if second], default=0.0)
    # A heap of (time, op that gets ready) and (time, ~rank that gets free).
    events: list[tuple[float, int]] = []
    for op, count in enumerate(needs):
        if not count:
            if ready_times[op] > 0:
                heappush(events, (ready_times[op], op))
            else:
                ready[rank_of[op]].append(op)
    awake_ranks, patient_ranks = set(range(ranks)), set[int]()
    clock = 0.0
    while True:
        # 1) Each rank that something happened to picks while it is free: an op without duration leaves it free.
        for rank in sorted(awake_ranks):
            while ready[rank] and rank_free[rank] <= clock + rounding:
                op = pick(rank, clock, ready[rank])
                if op < 0:
                    if op == LATER:
                        patient_ranks.add(rank)
                    break
                ready[rank].remove(op)
                rows[rank].append(op)
                starts[op] = clock
                rank_free[rank] = end = clock + seconds[op]
                # 2) Tell the readers. One that is ready now joins its rank's list at once, and wakes the rank if it is
                #    another one; one that is ready later is an event.
                for reader, delay in readers[op]:
                    if end + delay > ready_times[reader]:
                        ready_times[reader] = end + delay
                    needs[reader] -= 1
                    if not needs[reader]:
                        if ready_times[reader] <= clock:
                            ready[rank_of[reader]].append(reader)
                            if rank_of[reader] != rank:
                                heappush(events, (clock, ~rank_of[reader]))
                        else:
                            heappush(events, (ready_times[reader], reader))
                if end > clock:
                    heappush(events, (end, ~rank))
        # 3) Go on to the next moment, and wake the ranks of all its events, and those that asked for any change.
        if not events:
            return ListSchedule(rows, starts, ready)
        clock = events[0][0]
        awake_ranks = patient_ranks
        patient_ranks = set()
        while events and events[0][0] <= clock + rounding:
            event = heappop(events)[1]
            if event >= 0:
                ready[rank_of[event]].append(event)
                awake_ranks.add(rank_of[event])
            else:
                awake_ranks.add(~event)
