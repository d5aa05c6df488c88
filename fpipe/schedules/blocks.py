"""The building block: when one microbatch does what, repeated at an interval, is a whole schedule.

A block says at which tick the first microbatch starts each of its ops; microbatch i starts it i intervals later.

    one block, p=2      f f . F . b . B w w        f F forwards of the first and second chunk, b B their backwards
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from fpipe.program import ProgramError
from fpipe.transforms.cells import Key

BlockTicks = Mapping[tuple[str, int], int]
"""The tick at which the first microbatch starts ("F", stage) and ("B", stage)."""


def v_half_block(ranks: int) -> BlockTicks:
    """The block of V-Half: forwards go down two ticks a hop and up one, and so do the backwards."""
    turn = 3 * ranks - 1 + (0 if ranks % 2 else 3)
    legs = (range(0, 2 * ranks, 2), range(2 * ranks - 1, 3 * ranks - 1))
    return _of_legs(*legs, range(turn, turn + 2 * ranks, 2), range(turn + 2 * ranks, turn + 3 * ranks))


def v_min_block(ranks: int) -> BlockTicks:
    """The block of V-Min: every leg goes from rank to rank without a wait.

    A rank has six ticks for each microbatch: F, I and W of two chunks. Of all waits between the legs at which no two
    ops meet on a rank, those are taken that hold least.
    """
    blocks: list[BlockTicks] = []
    for waits in product(range(6), repeat=3):
        starts = [0]
        for wait in waits:
            starts.append(starts[-1] + ranks + wait)
        block = _of_legs(*(range(start, start + ranks) for start in starts))
        places = [{(block[kind, stage]) % 6 for kind in "FB" for stage in (r, 2 * ranks - 1 - r)} for r in range(ranks)]
        if all(len(ticks) == 4 for ticks in places):
            blocks.append(block)
    return min(blocks, key=lambda block: (_most_held(block), [*block.values()]))


def _of_legs(down: Sequence[int], up: Sequence[int], back: Sequence[int], home: Sequence[int]) -> BlockTicks:
    """A block on a V by its legs, each a tick for each rank that it passes: F down and up, I down and up again."""
    rows = {"F": [*down, *up], "B": [*back, *home][::-1]}
    return {(kind, stage): tick for kind, ticks in rows.items() for stage, tick in enumerate(ticks)}


def _most_held(block: BlockTicks) -> int:
    """The ticks for which the fullest rank holds the chunks of one microbatch."""
    last = len(block) // 2 - 1
    life = [block["B", stage] - block["F", stage] for stage in range(last + 1)]
    return max(life[stage] + life[last - stage] for stage in range(last + 1))


def with_weights(
    rows: Sequence[Sequence[Key]], placement: Sequence[int], room: float, kept: float = 1.0
) -> list[list[Key]]:
    """Rows of F and B as rows of F, I and W: a W runs at each tick at which its rank would wait.

    That is where the next op of the row is not there yet, or is a forward for which `room` chunks leave no place. A W
    still needs the share `kept` of a chunk.
    """
    freed = {"F": -1.0, "I": 1.0 - kept, "W": kept}
    left = [deque(row) for row in rows]
    waiting: list[deque[Key]] = [deque() for _ in rows]
    full: list[list[Key]] = [[] for _ in rows]
    held = [0.0 for _ in rows]
    done: set[Key] = set()
    while any(left) or any(waiting):
        ran: list[Key] = []
        for rank, row in enumerate(left):
            fits = bool(row) and (row[0][0] != "F" or held[rank] + 1 <= room + 1e-6)
            if fits and done.issuperset(_needs(row[0], len(placement))):
                kind, stage, index, piece = row.popleft()
                key: Key = ("F" if kind == "F" else "I", stage, index, piece)
            elif waiting[rank]:
                key = waiting[rank].popleft()
            else:
                continue
            full[rank].append(key)
            ran.append(key)
            held[rank] -= freed[key[0]]
            if key[0] == "I":
                waiting[rank].append(("W", *key[1:]))
        if not ran:
            raise ProgramError("these rows leave no room for what they run next.")
        done.update(ran)
    return full


def _needs(key: Key, stages: int) -> list[Key]:
    """The op of the same microbatch that a forward or a backward waits for."""
    kind, stage, index, piece = key
    at = stage or 0
    if kind == "F":
        return [("F", at - 1, index, piece)] if at else []
    return [("I", at + 1, index, piece)] if at + 1 < stages else [("F", at, index, piece)]


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
    mirror: bool = False,
) -> list[list[Key]]:
    """The rows of a block of ticks that is repeated at an interval, and pulled tight; a forward and a backward take so
    many.

    Where the interval is as long as a rank's work on a microbatch and no two ops meet in it, only the two ends of
    the schedule have idle ticks (Qi et al. 2024, arXiv 2405.15362). So every op moves to the first gap in which it
    fits and for which its rank has room, in the order of their starts: if asked in the `mirror` of time and of forward
    and backward, which tightens the end, and then as they are.
    """

    starts = _Starts(*_times(block, interval, microbatches), ticks)
    room = _room(block, interval, ticks, placement)
    if mirror:
        starts = _pulled(starts.turned(), placement, room).turned()
    starts = _pulled(starts, placement, room)
    return _by_starts(starts.forward, starts.backward, placement)


def repeated(block: BlockTicks, interval: int, placement: Sequence[int], microbatches: int) -> list[list[Key]]:
    """The rows of a block of ticks that is repeated at an interval, as it is."""
    return _by_starts(*_times(block, interval, microbatches), placement)


def _times(block: BlockTicks, interval: int, microbatches: int) -> tuple[list[list[int]], list[list[int]]]:
    """When forwards and backwards start, stage by stage, microbatch by microbatch."""
    stages, times = range(len(block) // 2), [index * interval for index in range(microbatches)]
    return (
        [[block["F", stage] + time for time in times] for stage in stages],
        [[block["B", stage] + time for time in times] for stage in stages],
    )


def _by_starts(
    forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]], placement: Sequence[int]
) -> list[list[Key]]:
    """The rows of ops that start at these ticks, stage by stage, microbatch by microbatch."""
    rows: list[list[tuple[int, Key]]] = [[] for _ in range(1 + max(placement))]
    for kind, starts in (("F", forward), ("B", backward)):
        for stage, row in enumerate(starts):
            rows[placement[stage]] += [(tick, (kind, stage, index, None)) for index, tick in enumerate(row)]
    return [[key for _, key in sorted(row)] for row in rows]


def _room(block: BlockTicks, interval: int, ticks: tuple[int, int], placement: Sequence[int]) -> int:
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
