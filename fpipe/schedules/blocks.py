"""Building blocks: a schedule as the timetable of one microbatch, repeated at an interval (arXiv 2405.15362).

A block gives the tick at which the first microbatch starts each of its ops; microbatch i starts it i intervals later.

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
    """Return the block of V-Half: two ticks a hop down and one up, forwards and backwards alike."""
    # Ops meet on a rank if their ticks agree modulo the interval of 6; the extra wait at an even number of ranks keeps
    # the backwards clear of the forwards.
    start = 3 * ranks - 1 + (0 if ranks % 2 else 3)  # of the backwards
    legs = (range(0, 2 * ranks, 2), range(2 * ranks - 1, 3 * ranks - 1))
    return block_of_legs(*legs, range(start, start + 2 * ranks, 2), range(start + 2 * ranks, start + 3 * ranks))


def v_min_block(ranks: int) -> BlockTicks:
    """Return the block of V-Min: every leg goes from rank to rank without a wait.

    A rank has six ticks for each microbatch: F, I and W of two chunks. Of all waits between the legs at which no two
    ops meet on a rank, take those that hold least.
    """
    blocks: list[BlockTicks] = []
    for waits in product(range(6), repeat=3):
        starts = [0]
        for wait in waits:
            starts.append(starts[-1] + ranks + wait)
        block = block_of_legs(*(range(start, start + ranks) for start in starts))
        stages_by_rank = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
        ticks_by_rank = [{block[kind, stage] % 6 for kind in "FB" for stage in stages} for stages in stages_by_rank]
        # Four ops, F and B of both chunks, need four different ticks of the interval; W takes the other two.
        if all(len(ticks) == 4 for ticks in ticks_by_rank):
            blocks.append(block)
    return min(blocks, key=lambda block: (longest_held(block), [*block.values()]))


def block_of_legs(
    forward_down: Sequence[int], forward_up: Sequence[int], backward_down: Sequence[int], backward_up: Sequence[int]
) -> BlockTicks:
    """Return a block on a V from its four legs, each with a tick for every rank: F down and up, B down and up."""
    ticks_by_kind = {"F": [*forward_down, *forward_up], "B": [*backward_down, *backward_up][::-1]}
    return {(kind, stage): tick for kind, ticks in ticks_by_kind.items() for stage, tick in enumerate(ticks)}


def longest_held(block: BlockTicks) -> int:
    """Return how many ticks the fullest rank holds one microbatch, over both its chunks."""
    last_stage = len(block) // 2 - 1
    lifetimes = [block["B", stage] - block["F", stage] for stage in range(last_stage + 1)]
    return max(lifetimes[stage] + lifetimes[last_stage - stage] for stage in range(last_stage + 1))


def fill_gaps_with_weights(
    rows: Sequence[Sequence[Key]], placement: Sequence[int], room: float, wres_share: float = 1.0
) -> list[list[Key]]:
    """Turn rows of F and B into rows of F, I and W, with a W at each tick where its rank would wait.

    A rank waits if its next op is not ready, or is a forward and the rank holds `room` chunks already. Until its W a
    chunk holds the share `wres_share`.
    """
    # A clock of ticks, at which every rank runs at most one op. Ops count as done from the next tick on, so a rank
    # cannot read what another runs in the same tick.
    freed = {"F": -1.0, "I": 1.0 - wres_share, "W": wres_share}
    remaining_rows = [deque(row) for row in rows]
    waiting_weights: list[deque[Key]] = [deque() for _ in rows]
    filled_rows: list[list[Key]] = [[] for _ in rows]
    held_by_rank = [0.0 for _ in rows]
    done_ops: set[Key] = set()
    while any(remaining_rows) or any(waiting_weights):
        ran: list[Key] = []
        for rank, row in enumerate(remaining_rows):
            fits = bool(row) and (row[0][0] != "F" or held_by_rank[rank] + 1 <= room + 1e-6)
            # The next op of the row if it is ready, else the oldest W, else the rank is idle for this tick.
            if fits and done_ops.issuperset(ops_awaited(row[0], len(placement))):
                kind, stage, microbatch, slice_index = row.popleft()
                key: Key = ("F" if kind == "F" else "I", stage, microbatch, slice_index)
            elif waiting_weights[rank]:
                key = waiting_weights[rank].popleft()
            else:
                continue
            filled_rows[rank].append(key)
            ran.append(key)
            held_by_rank[rank] -= freed[key[0]]
            if key[0] == "I":
                waiting_weights[rank].append(("W", *key[1:]))
        if not ran:
            raise ProgramError("these rows leave no room for what they run next.")
        done_ops.update(ran)
    return filled_rows


def ops_awaited(key: Key, stages: int) -> list[Key]:
    """Return the op of the same microbatch that a forward or a backward waits for."""
    kind, stage, microbatch, slice_index = key
    stage = stage or 0
    if kind == "F":
        return [("F", stage - 1, microbatch, slice_index)] if stage else []
    return [("I", stage + 1, microbatch, slice_index) if stage + 1 < stages else ("F", stage, microbatch, slice_index)]


class OpStarts(NamedTuple):
    """The start of every F and B, as [stage][microbatch], and the ticks that each takes."""

    forward: list[list[int]]
    backward: list[list[int]]
    ticks: tuple[int, int]

    @property
    def end(self) -> int:
        """The tick at which everything has ended."""
        return max(row[-1] for row in self.backward) + self.ticks[1]

    def mirrored(self) -> OpStarts:
        """Return the schedule with time reversed, in which forwards are backwards."""
        end, (forward, backward) = self.end, self.ticks
        return OpStarts(
            [[end - backward - tick for tick in reversed(row)] for row in self.backward],
            [[end - forward - tick for tick in reversed(row)] for row in self.forward],
            (backward, forward),
        )


def tightened_block_rows(
    block: BlockTicks,
    interval: int,
    ticks: tuple[int, int],
    placement: Sequence[int],
    microbatches: int,
    *,
    mirror: bool = False,
) -> list[list[Key]]:
    """Return the rows of a repeated block after pulling its ops together.

    If the interval is as long as a rank's work on a microbatch and no two ops meet in it, only the two ends of the
    schedule have idle ticks (Qi et al. 2024, arXiv 2405.15362). So every op moves to the first gap in which it fits and
    for which its rank has room, in the order of the starts. With `mirror` this is done first with time reversed, which
    tightens the end. `ticks` are those of a forward and a backward.
    """
    starts = OpStarts(*op_starts(block, interval, microbatches), ticks)
    room = forwards_in_flight(block, interval, ticks, placement)
    if mirror:
        starts = pull_tight(starts.mirrored(), placement, room).mirrored()
    starts = pull_tight(starts, placement, room)
    return rows_by_start(starts.forward, starts.backward, placement)


def repeated_rows(block: BlockTicks, interval: int, placement: Sequence[int], microbatches: int) -> list[list[Key]]:
    """Return the rows of a block that is repeated at an interval."""
    return rows_by_start(*op_starts(block, interval, microbatches), placement)


def op_starts(block: BlockTicks, interval: int, microbatches: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the starts of forwards and of backwards, as [stage][microbatch]."""
    stages, offsets = range(len(block) // 2), [index * interval for index in range(microbatches)]
    forward, backward = ([[block[kind, stage] + time for time in offsets] for stage in stages] for kind in "FB")
    return forward, backward


def rows_by_start(
    forward: Sequence[Sequence[int]], backward: Sequence[Sequence[int]], placement: Sequence[int]
) -> list[list[Key]]:
    """Return the rows of ops with these starts, which are [stage][microbatch]."""
    rows: list[list[tuple[int, Key]]] = [[] for _ in range(1 + max(placement))]
    for kind, starts in (("F", forward), ("B", backward)):
        for stage, row in enumerate(starts):
            rows[placement[stage]] += [(tick, (kind, stage, index, None)) for index, tick in enumerate(row)]
    return [[key for _, key in sorted(row)] for row in rows]


def forwards_in_flight(block: BlockTicks, interval: int, ticks: tuple[int, int], placement: Sequence[int]) -> int:
    """Return the most forwards that a rank holds in the steady state of a block.

    A chunk that lives longer than the interval overlaps with the next microbatch's: count modulo the interval.
    """
    held_by_tick = [[0] * interval for _ in range(1 + max(placement))]
    for stage, rank in enumerate(placement):
        for tick in range(block["F", stage], block["B", stage] + ticks[1]):
            held_by_tick[rank][tick % interval] += 1
    return max(map(max, held_by_tick))


def pull_tight(starts: OpStarts, placement: Sequence[int], room: int) -> OpStarts:
    """Move every op to the first gap of its rank after its needs, and a forward only to where there is room.

    The starts are changed in place.
    """
    # 1) For each rank, which ticks are busy, and how many chunks are held at each tick.
    forward, backward, ticks = starts
    count, end = len(forward[0]), starts.end
    busy = [bytearray(end) for _ in range(1 + max(placement))]
    held_by_rank = [[0] * (end + 1) for _ in busy]
    for stage, rank in enumerate(placement):
        for microbatch in range(count):
            earliest, last_tick = forward[stage][microbatch], backward[stage][microbatch]
            busy[rank][earliest : earliest + ticks[0]] = b"\1" * ticks[0]
            busy[rank][last_tick : last_tick + ticks[1]] = b"\1" * ticks[1]
            for tick in range(earliest, last_tick + ticks[1]):
                held_by_rank[rank][tick] += 1
    # 2) Ops by their start: whatever an op needs has moved before it.
    rows = [(kind, stage, row) for kind, rows in enumerate((forward, backward)) for stage, row in enumerate(rows)]
    ops_by_start = sorted((row[i], kind, stage, i) for kind, stage, row in rows for i in range(count))
    for old_start, kind, stage, microbatch in ops_by_start:
        rank, duration, row = placement[stage], ticks[kind], (forward, backward)[kind][stage]
        busy_ticks, held_ticks = busy[rank], held_by_rank[rank]
        # 3) The earliest start: after the same op of the microbatch before, and after what it reads.
        earliest = row[microbatch - 1] + duration if microbatch else 0
        if kind == 0 and stage:
            earliest = max(earliest, forward[stage - 1][microbatch] + ticks[0])
        if kind == 1:
            earliest = max(earliest, forward[stage][microbatch] + ticks[0])
            if stage + 1 < len(placement):
                earliest = max(earliest, backward[stage + 1][microbatch] + duration)
        busy_ticks[old_start : old_start + duration] = bytes(duration)
        # 4) A forward stays behind the last tick before it at which its rank is full.
        if kind == 0:
            full = (tick for tick in range(old_start - 1, earliest - 1, -1) if held_ticks[tick] >= room)
            earliest = next(full, earliest - 1) + 1
        # 5) The first gap that is long enough: a run of zero bytes. A forward that moves up is held longer, a backward
        #    frees its chunk earlier.
        new_start = busy_ticks.find(bytes(duration), earliest)
        busy_ticks[new_start : new_start + duration] = b"\1" * duration
        for tick in range(new_start, old_start) if kind == 0 else range(new_start + duration, old_start + duration):
            held_ticks[tick] += 1 if kind == 0 else -1
        row[microbatch] = new_start
    return starts
