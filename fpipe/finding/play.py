"""Play an order: compute when each op ends if every rank runs its ops in the given order, each as early as possible.

These are the times of `timing/lanes.py`, which defines them, computed on numbers alone. A search plays thousands of
orders, and building and simulating a program takes twenty times as long. A property test compares the two.

    op 0: 1 s on rank 0                              rank 0 | 0 .
    op 1: 2 s on rank 1, reads op 0       -->        rank 1 | . 1 1              ends [1, 3]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fpipe.timing.timeline import Timeline

Needs = Sequence[tuple[int, float]]
"""The ops that an op reads, each with the delay of its transfer in seconds; -1 is the caller, ready at time 0."""


class PlayedTimes(NamedTuple):
    """Makespan, span and the end of each op."""

    makespan: float
    span: float
    ends: list[float]


NEVER = PlayedTimes(math.inf, math.inf, [])
"""The times of an order that deadlocks, or that takes longer than the limit."""


class NumberedOps(NamedTuple):
    """Ops as numbers: an op is its index in these lists.

    Args:
        seconds: duration of each op.
        needs: what each op reads. An exchange needs itself here, and its real needs are in `exchange_needs`.
        reader_ranks: for each op the other ranks that may wait for it.
        tails: for each op a lower bound of the seconds from its end to the end of all its transitive readers.
        exchange_needs: what each op on the exchange lane reads. The lane runs next to the main lane of the rank; no
            exchange starts before the main-lane op above it does.
    """

    seconds: Sequence[float]
    needs: Sequence[Needs]
    reader_ranks: Sequence[Sequence[int]]
    tails: Sequence[float]
    exchange_needs: Mapping[int, Needs] = MappingProxyType({})


def play(
    numbered_ops: NumberedOps,
    rows: Sequence[Sequence[int]],
    limit: float = math.inf,
    known_ends: Sequence[float] = (),
    known_counts: Sequence[int] = (),
) -> PlayedTimes:
    """Return when each op ends if each rank runs its row in order, or `NEVER` above a makespan of `limit`.

    A caller that changed a row only behind some place passes the ends that it knows: the first `known_counts[rank]` ops
    of each row keep their `known_ends`.

    >>> numbers = NumberedOps([1.0, 2.0], [[(-1, 0.5)], [(0, 0.0)]], [[1], []], [2.0, 0.0])
    >>> play(numbers, [[0], [1]])
    PlayedTimes(makespan=3.5, span=2.0, ends=[1.5, 3.5, 0.0])
    """
    # The idea: no clock and no queue of events. Each rank advances through its row until an op reads one that has not
    # ended, and notes which (`awaited`). Whoever ends that op puts the rank back on the worklist. Times do not depend
    # on the order of the worklist, since each is a maximum over ends that are final once they are written.
    seconds, needs, reader_ranks, tails, exchange_needs = numbered_ops
    ranks = range(len(rows))

    # 1) Where each rank begins, and when its main lane is free. An end below 0 is unknown. The last slot of `ends` is
    #    the caller: `ends[-1]` is 0, so the hot loop need not ask whether a source is -1.
    if known_counts:
        ends, next_slot = list(known_ends), list(known_counts)
        lane_free = [ends[last_op_before(numbered_ops, row, slot)] for row, slot in zip(rows, next_slot, strict=True)]
        for row, slot in zip(rows, next_slot, strict=True):
            for op in row[slot:]:
                ends[op] = -1.0
    else:
        ends, next_slot, lane_free = [-1.0] * len(seconds) + [0.0], [0 for _ in ranks], [0.0 for _ in ranks]
    awaited, worklist = [-1 for _ in ranks], [*ranks]

    while worklist:
        rank = worklist.pop()
        row, clock = rows[rank], lane_free[rank]
        stop_slot = len(row)
        for slot in range(next_slot[rank], stop_slot):
            op = row[slot]

            # 2) The main lane: start when the op before has ended and everything that is read has arrived.
            for source, delay in needs[op]:
                source_end = ends[source]
                if source_end < 0:
                    break
                if source_end + delay > clock:
                    clock = source_end + delay
            else:
                ends[op] = clock = clock + seconds[op]
                if clock + tails[op] > limit:
                    return NEVER
                for reader_rank in reader_ranks[op]:
                    if awaited[reader_rank] == op:
                        awaited[reader_rank] = -1
                        worklist.append(reader_rank)
                continue

            # 3) The exchange lane. An exchange needs itself, so step 2 always breaks on it: ops of the main lane pay
            #    nothing for the second lane. The main lane's `clock` goes on unchanged.
            if op in exchange_needs:
                op_above = last_op_before(numbered_ops, row, slot)
                start = ends[op_above] - seconds[op_above] if op_above >= 0 else 0.0
                if seconds[op]:
                    start = max(start, ends[last_op_before(numbered_ops, row, slot, on_exchange_lane=True)])
                for source, delay in exchange_needs[op]:
                    source_end = ends[source]
                    if source_end < 0:
                        break
                    start = max(start, source_end + delay)
                else:
                    ends[op] = end = start + seconds[op]
                    if end + tails[op] > limit:
                        return NEVER
                    for reader_rank in reader_ranks[op]:
                        if awaited[reader_rank] == op:
                            awaited[reader_rank] = -1
                            worklist.append(reader_rank)
                    continue

            # 4) Blocked: both loops left `source` at the op that has not ended.
            awaited[rank], stop_slot = source, slot
            break
        next_slot[rank], lane_free[rank] = stop_slot, clock

    # 5) A rank that did not reach the end of its row waits for ever.
    if any(map(int.__lt__, next_slot, map(len, rows))):
        return NEVER
    first_ops = (next((op for op in row if op not in exchange_needs), -1) for row in rows)
    starts = (ends[op] - seconds[op] if op >= 0 else 0.0 for op in first_ops)
    span = max((end - start for end, start in zip(lane_free, starts, strict=True)), default=0.0)
    return PlayedTimes(max(lane_free, default=0.0), span, ends)


def last_op_before(numbered_ops: NumberedOps, row: Sequence[int], slot: int, on_exchange_lane: bool = False) -> int:
    """Return the last op of a lane above this place of a row, or -1: an exchange counts only if it takes time."""
    for op in reversed(row[:slot]):
        is_exchange = op in numbered_ops.exchange_needs
        if is_exchange == on_exchange_lane and (numbered_ops.seconds[op] or not on_exchange_lane):
            return op
    return -1


OrderValue = tuple[float, float]
"""The value of an order, less is better: (makespan, span) or (span, makespan), the objective first."""


def order_value(times: PlayedTimes | Timeline, objective: str) -> OrderValue:
    """Return the makespan and the span, the objective first."""
    return (times.makespan, times.span) if objective == "makespan" else (times.span, times.makespan)
