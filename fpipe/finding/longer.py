"""Stretch an order to more microbatches: find its steady state, and repeat it.

    0F0 0F1 [0B0 0F2] 0B1 0B2      --> two microbatches more -->      0F0 0F1 [0B0 0F2] [0B1 0F3] [0B2 0F4] 0B3 0B4

Between two moments at which every lane has gone on by the same number of microbatches nothing but these numbers has
changed. What ran between them can run once more, as often as one likes: nothing waits for ever, and no rank holds more.
Where a steady state has three microbatches and there are to be four more, it runs twice, and the last two are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from fpipe.orders.tasks import Rows, Tasks

T = TypeVar("T", bound=Tasks)


def longer(tasks: Tasks, rows: Rows, more: int) -> Iterator[Rows]:
    """Orders of `more` microbatches more, by the steady states of an order, the fastest first.

    Args:
        tasks: the ops of the shorter step, in whose lanes every microbatch is alike.
        rows: their order.
        more: microbatches to add.
    """
    for _, step, first, last in _steady(tasks, rows):
        times = -(-more // step)
        made = (
            [*row[:end], *(row[begin:end] * times), *row[end:]]
            for row, begin, end in zip(rows, first, last, strict=True)
        )
        yield [_without_last(row, times * step - more) for row in made]


def _without_last(row: list[int], count: int) -> list[int]:
    """A row without the last microbatches: what nobody waits for may go, and nothing else is later for it."""
    left, kept = Counter[int](), list[int]()
    for lane in reversed(row):
        left[lane] += 1
        if left[lane] > count:
            kept.append(lane)
    return kept[::-1]


def lengthened(tasks: T, more: int) -> T | None:
    """The tasks of `more` microbatches more, each like the first; None where they are not all alike."""
    count = tasks.program.microbatches
    if any(len(steps) != count or len({*map(len, steps)}) > 1 for steps in tasks.lanes):
        return None
    if any(op.parts for op in tasks.ops):
        return None
    lanes = sorted((op, lane, at) for lane, steps in enumerate(tasks.lanes) for at, op in enumerate(steps[0]))
    each = [[tasks.lanes[lane][turn][at] for _, lane, at in lanes] for turn in range(count)]
    many, total = len(lanes), count + more
    place = {op: at for row in each for at, op in enumerate(row)} | {-1: -1}

    def needs(row: list[int]) -> list[list[tuple[int, float]]]:
        return [[(place[source], way) for source, way in tasks.needs[op]] for op in row]

    def shown(row: list[int]) -> list[tuple[object, ...]]:
        ops = [tasks.ops[op] for op in row]
        return [(op.kind, op.stage, op.rank, tasks.seconds[at]) for op, at in zip(ops, row, strict=True)]

    first = each[0]
    if any(shown(row) != shown(first) or needs(row) != needs(first) for row in each[1:]):
        return None
    ways = needs(first)
    steps = [[place[op] for op in steps[0]] for steps in tasks.lanes]
    return replace(
        tasks,
        ops=[tasks.ops[op]._replace(microbatch=turn) for turn in range(total) for op in first],
        seconds=[tasks.seconds[op] for op in first] * total,
        needs=[
            tuple((turn * many + one if one >= 0 else -1, way) for one, way in own)
            for turn in range(total)
            for own in ways
        ],
        takes=[tasks.takes[op] for op in first] * total,
        drops=[tasks.drops[op] for op in first] * total,
        lanes=[[tuple(turn * many + at for at in lane) for turn in range(total)] for lane in steps],
        rows=[[] for _ in tasks.rows],
    )


def pace(tasks: Tasks, rows: Rows) -> float:
    """Seconds for each microbatch more: of the fastest steady state, or of the busiest rank where there is none."""
    found = _steady(tasks, rows)
    return found[0][0] if found else max(tasks.work) / max(1, tasks.program.microbatches)


def _steady(tasks: Tasks, rows: Rows) -> list[tuple[float, int, list[int], list[int]]]:
    """The steady states, the fastest first: seconds for each microbatch, how many there are, and where each rank's row
    begins and ends to repeat."""
    flats = [tasks.flat(row) for row in rows]
    ends = tasks.play(flats).ends
    starts: list[tuple[float, int, int, int]] = []  # when a step starts, its rank, its place in the row and its lane
    for rank, row in enumerate(rows):
        turn: defaultdict[int, int] = defaultdict(int)
        for place, lane in enumerate(row):
            first = tasks.lanes[lane][turn[lane]][0]
            turn[lane] += 1
            starts.append((ends[first] - tasks.seconds[first], rank, place, lane))
    starts.sort()
    counts, reached = [0 for _ in tasks.lanes], [0 for _ in rows]
    seen: defaultdict[tuple[int, ...], list[tuple[float, int, list[int]]]] = defaultdict(list)
    windows: list[tuple[float, int, list[int], list[int]]] = []
    for at, (start, rank, _, lane) in enumerate(starts):
        if not at or start > starts[at - 1][0]:
            ahead = tuple(count - counts[0] for count in counts)
            for began, count, cut in seen[ahead][-8:]:
                windows.append(((start - began) / (counts[0] - count), counts[0] - count, cut, reached[:]))
            seen[ahead].append((start, counts[0], reached[:]))
        counts[lane] += 1
        reached[rank] += 1
    return sorted(windows, key=lambda window: window[:2])
