"""The building block: when one microbatch does what, repeated at an interval, is a whole schedule.

A block gives each track of a pipeline (see orders/linear_pipeline.py) an offset in seconds; microbatch i does what
microbatch 0 did, i intervals later. Sorted by these times the ops of a rank are its row. Times that overlap do no harm:
only the order counts, and each op then starts as early as it can.

    one block, p=2      f f . F . b . B w w        f F forwards of the first and second chunk, b B their backwards
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fpipe.orders.linear_pipeline import LinearPipeline, TrackRow
from fpipe.orders.list_scheduler import NOTHING, Scheduled, chain_graph, list_schedule
from fpipe.transforms.cells import Key


class BuildingBlock(NamedTuple):
    """Offsets of the F and I tracks of one microbatch, and the interval after which the next one follows."""

    offsets: tuple[float, ...]
    interval: float


def track_rows_of(pipeline: LinearPipeline, block: BuildingBlock) -> list[TrackRow]:
    """Each rank's F and I, in the order of a repeated block."""
    offsets, interval = block
    count = range(pipeline.microbatches)
    rows: list[TrackRow] = []
    for own in pipeline.tracks:
        tracks = [*own, *(pipeline.stages + stage for stage in own)]
        timed = [(offsets[track] + interval * index, track) for track in tracks for index in count]
        timed.sort()
        rows.append([track for _, track in timed])
    return rows


@lru_cache(maxsize=32)
def lattice(ranks: int, hops: int = 6) -> list[tuple[int, ...]]:
    """All blocks on a V whose legs have equal hops of 1 to `hops` cells and in which no two ops meet.

    A cell is the op of one chunk, and a rank has six for each microbatch: F, I and W of two chunks. A leg is one chunk
    going down or up the ranks: F down, F up, I down, I up. Gives the offsets of the F and I tracks in cells, the blocks
    that hold least first.
    """
    legs = [[*range(ranks)], [*reversed(range(ranks))]] * 2
    found: list[tuple[int, ...]] = []

    def go(leg: int, used: list[int], time: int, cells: list[int]) -> None:
        if leg == 4:
            down, up, back, home = (cells[at : at + ranks] for at in range(0, 4 * ranks, ranks))
            found.append((*down, *up, *reversed(home), *reversed(back)))
            return
        for hop in range(1, hops + 1):
            for start in range(time, time + (6 if leg else 1)):
                now, at = used[:], start
                for rank in legs[leg]:
                    if now[rank] >> at % 6 & 1:
                        break
                    now[rank] |= 1 << at % 6
                    at += hop
                else:
                    go(leg + 1, now, at - hop + 1, cells + [start + hop * step for step in range(ranks)])
            if ranks == 1:
                break

    go(0, [0] * ranks, 0, [])
    return sorted(found, key=lambda cells: (most_held(cells, ranks), cells))


def v_half_cells(ranks: int) -> tuple[int, ...]:
    """The block of V-Half: forwards go down two cells a hop and up one, and so do the backwards.

    >>> v_half_cells(3) in lattice(3)
    True
    """
    turn = 3 * ranks - 1 + (0 if ranks % 2 else 3)
    down, up = range(0, 2 * ranks, 2), range(2 * ranks - 1, 3 * ranks - 1)
    back, home = range(turn, turn + 2 * ranks, 2), range(turn + 2 * ranks, turn + 3 * ranks)
    return (*down, *up, *reversed(home), *reversed(back))


def most_held(cells: Sequence[int], ranks: int) -> float:
    """The activations that the fullest rank holds when a block of the lattice is repeated, W aside."""
    stages = 2 * ranks
    life = [cells[stages + stage] - cells[stage] for stage in range(stages)]
    return max(life[rank] + life[stages - 1 - rank] for rank in range(ranks)) / 6


def v_blocks(pipeline: LinearPipeline) -> Iterator[BuildingBlock]:
    """The blocks of the lattice that fit under the caps of a pipeline, those that hold most first."""
    room = min(pipeline.caps)
    for cells in reversed(lattice(pipeline.ranks)):
        if most_held(cells, pipeline.ranks) <= room:
            yield v_block(pipeline, cells)


def v_block(pipeline: LinearPipeline, cells: Sequence[int]) -> BuildingBlock:
    """A block of the lattice in seconds."""
    return BuildingBlock(tuple(cell * pipeline.work / 6 for cell in cells), pipeline.work)


class Follower:
    """Schedules a pipeline by a block as by a priority list: the ready op that the block has first goes first, and
    nothing waits for its turn; but microbatches enter at the block's interval, and a forward leaves room.

    Args:
        eager: whether a forward leaves room for those alone that its microbatch still has on the rank; else for all of
            the oldest one that is not all there.
    """

    def __init__(self, pipeline: LinearPipeline, eager: bool = False) -> None:
        self.pipeline, self.eager = pipeline, eager
        self.work = chain_graph(pipeline, 3)

    def order(self, block: BuildingBlock, late: float, ahead: float) -> tuple[tuple[float, float], list[TrackRow]]:
        """Worth of the block, and the row of each rank: its W run so many intervals after their I, and microbatches
        enter so many ahead of their turn."""
        pipeline, count, stages = self.pipeline, self.pipeline.microbatches, self.pipeline.stages
        offsets, interval = block
        weights = [offsets[stages + one] + pipeline.seconds[stages + one] + late * interval for one in range(stages)]
        turn = [offset + interval * index for offset in (*offsets, *weights) for index in range(count)]
        enters = [max(0.0, interval * (index - ahead)) for index in range(count)]
        found = self._run(turn, [*enters, *([0.0] * (len(turn) - count))])
        first = [found.start[row[0]] for row in found.rows]
        last = [found.start[row[-1]] + self.work.seconds[row[-1]] for row in found.rows]
        span = max(end - begin for begin, end in zip(first, last, strict=True))
        return pipeline.worth((max(last), span)), [[op // count for op in row] for row in found.rows]

    def _run(self, turn: list[float], enters: list[float]) -> Scheduled:
        pipeline, count = self.pipeline, self.pipeline.microbatches
        caps, kept, own = pipeline.caps, pipeline.kept, pipeline.tracks
        forwards, inputs = pipeline.stages * count, 2 * pipeline.stages * count
        after = {stage: len(each) - 1 - chunk for each in own for chunk, stage in enumerate(each)}
        held, begun = [0.0] * pipeline.ranks, [0] * pipeline.stages

        def fits(rank: int, op: int) -> bool:
            if self.eager:
                return held[rank] + 1 + after[op // count] <= caps[rank]
            oldest = min([begun[stage] for stage in own[rank]])  # not all of it is here, and it keeps its room
            younger = sum([max(0, begun[stage] - oldest - 1) for stage in own[rank]])
            more = held[rank] + 1 if op % count <= oldest else max(held[rank] + 1, younger + 1 + len(own[rank]))
            return more <= caps[rank]

        def pick(rank: int, time: float, ready: list[int]) -> int:
            best, first = NOTHING, float("inf")
            for op in ready:
                if turn[op] < first and (op >= forwards or fits(rank, op)):
                    best, first = op, turn[op]
            if best >= inputs:
                held[rank] -= kept
            elif best >= forwards:
                held[rank] -= 1 - kept
            elif best >= 0:
                held[rank] += 1
                begun[best // count] += 1
            return best

        return list_schedule(self.work, pick, enters)


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
    """The rows of a block of ticks that is repeated at an interval, and pulled tight; a forward and a backward take so
    many.

    Where the interval is as long as a rank's work on a microbatch and no two ops meet in it, only the two ends of
    the schedule have idle ticks (Qi et al. 2024, arXiv 2405.15362). So every op moves to the first gap in which it
    fits and for which its rank has room, in the order of their starts: in the `mirror` of time and of forward and
    backward, which tightens the end, and as they are.
    """

    def times(kind: str) -> list[list[int]]:
        return [
            [block[kind, stage] + index * interval for index in range(microbatches)] for stage in range(len(placement))
        ]

    starts = _Starts(times("F"), times("B"), ticks)
    room = _room(block, interval, ticks, placement)
    if mirror:
        starts = _pulled(starts.turned(), placement, room).turned()
    starts = _pulled(starts, placement, room)
    rows: list[list[tuple[int, Key]]] = [[] for _ in range(1 + max(placement))]
    for kind, found in (("F", starts.forward), ("B", starts.backward)):
        for stage, row in enumerate(found):
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
