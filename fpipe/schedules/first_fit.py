"""A schedule as a building block: when one microbatch does what, repeated at an interval, and pulled tight.

Where the interval is as long as a rank's work on a microbatch and no two ops of the block meet in it, the middle of the
schedule has no idle tick (Qi et al. 2024, arXiv 2405.15362). Its two ends have some. So every op moves to the first gap
in which it fits and for which its rank has room, in the order of their starts: once with time and the roles of forward
and backward turned round, which tightens the end, and once as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fpipe.transforms.cells import Key

BlockTicks = Mapping[tuple[str, int], int]
"""The tick at which the first microbatch starts ("F", stage) and ("B", stage)."""


class _Starts(NamedTuple):
    """When every op starts: for F and B, stage by stage, microbatch by microbatch; and how long both take."""

    forward: list[list[int]]
    backward: list[list[int]]
    ticks: tuple[int, int]

    @property
    def end(self) -> int:
        """The last tick."""
        return max(row[-1] for row in self.backward) + self.ticks[1]

    def turned(self) -> _Starts:
        """Mirror the times: time runs backwards, and so forwards are backwards."""
        end, (forward, backward) = self.end, self.ticks
        return _Starts(
            [[end - backward - tick for tick in reversed(row)] for row in self.backward],
            [[end - forward - tick for tick in reversed(row)] for row in self.forward],
            (backward, forward),
        )


def in_blocks(
    block: BlockTicks,
    interval: int,
    ticks: tuple[int, int],
    placement: Sequence[int],
    microbatches: int,
    *,
    mirror: bool = True,
) -> list[list[Key]]:
    """The rows of a block that is repeated at an interval of ticks, for the ticks of a forward and of a backward. It
    is pulled tight at its start, and before that at its end, in the `mirror`."""

    def times(kind: str) -> list[list[int]]:
        return [
            [block[kind, stage] + index * interval for index in range(microbatches)] for stage in range(len(placement))
        ]

    starts = _Starts(times("F"), times("B"), ticks)
    room = most_held(block, interval, ticks, placement)
    if mirror:
        starts = _pulled(starts.turned(), placement, room).turned()
    starts = _pulled(starts, placement, room)
    rows: list[list[tuple[int, Key]]] = [[] for _ in range(1 + max(placement))]
    for kind, found in (("F", starts.forward), ("B", starts.backward)):
        for stage, row in enumerate(found):
            rows[placement[stage]] += [(tick, (kind, stage, index, None)) for index, tick in enumerate(row)]
    return [[key for _, key in sorted(row)] for row in rows]


def most_held(block: BlockTicks, interval: int, ticks: tuple[int, int], placement: Sequence[int]) -> int:
    """The most forwards that wait on a rank for the end of their backwards, once the block has come round often."""
    held = [[0] * interval for _ in range(1 + max(placement))]
    for stage, rank in enumerate(placement):
        for tick in range(block["F", stage], block["B", stage] + ticks[1]):
            held[rank][tick % interval] += 1
    return max(map(max, held))


def _pulled(starts: _Starts, placement: Sequence[int], room: int) -> _Starts:
    """Every op in the first gap of its rank after what it needs; forwards only where there is room for them."""
    forward, backward, ticks = starts
    count, end = len(forward[0]), starts.end
    busy = [bytearray(end) for _ in range(1 + max(placement))]
    held = [[0] * (end + 1) for _ in busy]
    for stage, rank in enumerate(placement):
        for index in range(count):
            first, last = forward[stage][index], backward[stage][index]
            busy[rank][first : first + ticks[0]] = b"\1" * ticks[0]
            busy[rank][last : last + ticks[1]] = b"\1" * ticks[1]
            for tick in range(first, last + ticks[1]):
                held[rank][tick] += 1
    todo = sorted(
        (row[index], kind, stage, index)
        for kind, rows in enumerate((forward, backward))
        for stage, row in enumerate(rows)
        for index in range(count)
    )
    for old, kind, stage, index in todo:
        rank, long, row = placement[stage], ticks[kind], (forward, backward)[kind][stage]
        own, load = busy[rank], held[rank]
        first = row[index - 1] + long if index else 0
        if kind == 0 and stage:
            first = max(first, forward[stage - 1][index] + ticks[0])
        if kind == 1:
            first = max(first, forward[stage][index] + ticks[0])
            if stage + 1 < len(placement):
                first = max(first, backward[stage + 1][index] + long)
        own[old : old + long] = bytes(long)
        if kind == 0:
            full = (tick for tick in range(old - 1, first - 1, -1) if load[tick] >= room)
            first = next(full, first - 1) + 1
        new = own.find(bytes(long), first)
        own[new : new + long] = b"\1" * long
        for tick in range(new, old) if kind == 0 else range(new + long, old + long):
            load[tick] += 1 if kind == 0 else -1
        row[index] = new
    return starts
