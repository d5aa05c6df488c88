"""Stretch an order to more microbatches: find its steady state, and repeat it.

    0F0 0F1 [0B0 0F2] 0B1 0B2      --> two microbatches more -->      0F0 0F1 [0B0 0F2] [0B1 0F3] [0B2 0F4] 0B3 0B4

Between two moments at which every track has gone on by the same number of microbatches nothing but these numbers has
changed. What ran between them can run once more, as often as one likes: nothing waits for ever, and no rank holds more.
Where a steady state has three microbatches and there are to be four more, it runs twice, and the last two are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

Rows = list[list[int]]
"""For each rank the tracks of its ops, in order: a track takes its microbatches in turn."""


class Steady(NamedTuple):
    """A steady state: seconds for each microbatch, how many there are, and where each row begins and ends to repeat."""

    pace: float
    microbatches: int
    begins: list[int]
    ends: list[int]


def steady_states(rows: Rows, starts: Sequence[Sequence[float]]) -> list[Steady]:
    """The steady states of an order whose ops start at these times, the fastest first.

    >>> steady_states([[0, 0, 1, 0, 1, 1]], [[0, 1, 2, 3, 4, 5]])[0]
    Steady(pace=2.0, microbatches=1, begins=[1], ends=[3])
    """
    pairs = enumerate(zip(rows, starts, strict=True))
    ops = sorted((start, rank, at, row[at]) for rank, (row, own) in pairs for at, start in enumerate(own))
    counts = dict.fromkeys((track for row in rows for track in row), 0)
    lead, reached = next(iter(counts)), [0 for _ in rows]
    seen: defaultdict[tuple[int, ...], list[tuple[float, int, list[int]]]] = defaultdict(list)
    found: list[Steady] = []
    before = ops[0][0]
    for start, rank, _, track in ops:
        if start > before:
            now, before = counts[lead], start
            ahead = tuple([count - now for count in counts.values()])
            for began, count, cut in seen[ahead][-8:]:
                found.append(Steady((start - began) / (now - count), now - count, cut, reached[:]))
            seen[ahead].append((start, now, reached[:]))
        counts[track] += 1
        reached[rank] += 1
    return sorted(found, key=lambda state: state[:2])


def stretch(rows: Rows, steady: Steady, more: int) -> Rows:
    """An order of `more` microbatches more.

    >>> stretch([[0, 0, 1, 0, 1, 1]], Steady(2.0, 1, [1], [3]), 2)
    [[0, 0, 1, 0, 1, 0, 1, 0, 1, 1]]
    """
    times = -(-more // steady.microbatches)
    repeated = (
        [*row[:end], *(row[begin:end] * times), *row[end:]]
        for row, begin, end in zip(rows, steady.begins, steady.ends, strict=True)
    )
    return [_without_last(row, times * steady.microbatches - more) for row in repeated]


def _without_last(row: list[int], count: int) -> list[int]:
    """A row without the last microbatches: nobody waits for them, and nothing else is later without them."""
    left, kept = Counter[int](), list[int]()
    for track in reversed(row):
        left[track] += 1
        if left[track] > count:
            kept.append(track)
    return kept[::-1]


def later(first: float, second: float, steps: float) -> float:
    """Extrapolate from `first` and `second`, so many steps on: in a steady state each step adds the same."""
    return second + steps * (second - first)
