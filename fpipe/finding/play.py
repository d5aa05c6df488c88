"""Play rows of ops: each row does its ops in order, each as soon as what it needs is there.

This gives the times of `timing/lanes.py`, which defines them, on numbers alone: a search asks for a thousand orders,
and to build and simulate a program takes twenty times as long. A law compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fpipe.timing.timeline import Timeline

Needs = Sequence[tuple[int, float]]
"""Ops that an op waits for, each with the seconds on the way; -1 is the caller, who has all from the start."""


class Played(NamedTuple):
    """Makespan and span, and when each op ends."""

    makespan: float
    span: float
    ends: list[float]


NEVER = Played(math.inf, math.inf, [])
"""Ops that wait for each other for ever, or take longer than the limit."""


class Numbers(NamedTuple):
    """Ops as numbers, the places in these lists.

    Args:
        wakes: the other rows that may wait for an op.
        tails: seconds from its end to the end of all that needs it, at the least.
        beside: what the ops on the exchange lane of their row wait for. In `needs` each waits for itself: there the
            main lane, which goes on meanwhile, looks here. None starts before the main op before it in the row does.
    """

    seconds: Sequence[float]
    needs: Sequence[Needs]
    wakes: Sequence[Sequence[int]]
    tails: Sequence[float]
    beside: Mapping[int, Needs] = MappingProxyType({})


def play(
    numbers: Numbers,
    rows: Sequence[Sequence[int]],
    limit: float = math.inf,
    known: Sequence[float] = (),
    done: Sequence[int] = (),
) -> Played:
    """Play rows of ops; what takes longer than `limit` is `NEVER`. The ends of the first ops of each row, as many as
    `done` says, may be `known`.

    >>> numbers = Numbers([1.0, 2.0], [[(-1, 0.5)], [(0, 0.0)]], [[1], []], [2.0, 0.0])
    >>> play(numbers, [[0], [1]])
    Played(makespan=3.5, span=2.0, ends=[1.5, 3.5, 0.0])
    """
    seconds, needs, wakes, tails, beside = numbers
    count = range(len(rows))
    if done:
        ends, place = list(known), list(done)
        free = [ends[_before(numbers, row, at)] for row, at in zip(rows, place, strict=True)]
        for row, at in zip(rows, place, strict=True):
            for op in row[at:]:
                ends[op] = -1.0
    else:
        ends, place, free = [-1.0] * len(seconds) + [0.0], [0 for _ in count], [0.0 for _ in count]
    waits, todo = [-1 for _ in count], [*count]
    while todo:
        own = todo.pop()
        row, now = rows[own], free[own]
        reached = len(row)
        for at in range(place[own], reached):
            op = row[at]
            for source, way in needs[op]:
                there = ends[source]
                if there < 0:
                    break
                if there + way > now:
                    now = there + way
            else:
                ends[op] = now = now + seconds[op]
                if now + tails[op] > limit:
                    return NEVER
                for other in wakes[op]:
                    if waits[other] == op:
                        waits[other] = -1
                        todo.append(other)
                continue
            if op in beside:
                last = _before(numbers, row, at)
                start = ends[last] - seconds[last] if last >= 0 else 0.0
                if seconds[op]:
                    start = max(start, ends[_before(numbers, row, at, beside=True)])
                for source, way in beside[op]:
                    there = ends[source]
                    if there < 0:
                        break
                    start = max(start, there + way)
                else:
                    ends[op] = end = start + seconds[op]
                    if end + tails[op] > limit:
                        return NEVER
                    for other in wakes[op]:
                        if waits[other] == op:
                            waits[other] = -1
                            todo.append(other)
                    continue
            waits[own], reached = source, at
            break
        place[own], free[own] = reached, now
    if any(map(int.__lt__, place, map(len, rows))):
        return NEVER
    firsts = (next((op for op in row if op not in beside), -1) for row in rows)
    starts = (ends[op] - seconds[op] if op >= 0 else 0.0 for op in firsts)
    span = max((end - start for end, start in zip(free, starts, strict=True)), default=0.0)
    return Played(max(free, default=0.0), span, ends)


def _before(numbers: Numbers, row: Sequence[int], at: int, beside: bool = False) -> int:
    """The last op before a place of a row that is work, or `beside` it an exchange that takes time; -1 if none is."""
    for op in reversed(row[:at]):
        if (op in numbers.beside) == beside and (numbers.seconds[op] or not beside):
            return op
    return -1


Value = tuple[float, float]
"""The makespan and span of an order, or the other way round: first the one that is to be short."""


def worth(found: Played | Timeline, objective: str) -> Value:
    """The makespan and then the span, or the other way round."""
    return (found.makespan, found.span) if objective == "makespan" else (found.span, found.makespan)
