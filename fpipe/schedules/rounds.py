"""Rounds of a loop: a group of microbatches goes through chunk after chunk, and one group may have to be short.

A group fills the ranks, so that its first microbatch has come round when its last has left. Where groups do not divide
the microbatches, Megatron and torch refuse: a short group would come round too early. It can run in the places of a
full one, but if it is the last group both ways, the ranks all wait in the places that stay free:

    p=3, v=2, m=4       F | 0 1 2 0'1'2'3 . . 3'. .        B | 0'1'2'0 1 2 3'. . 3 . .

So the short group of the backwards is their first one, and that of the forwards their first or second (of only two
both may be short): where one of the two leaves places free, the other has something to do:

                        F | 0 1 2 0'1'2'3 . . 3'. .        B | 0'. . 0 . . 1'2'3'1 2 3

Torch makes fewer rounds of even groups instead, where none is short: no time is lost, but more is held.

These frames say who goes first. A rank takes of the ops that are ready the one with the first place, as long as it does
not hold more than in the padded order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from fpipe.orders.linear_pipeline import linear_pipeline_of, shortest, unit_pipeline
from fpipe.orders.list_scheduler import NOTHING, Scheduled, TaskGraph, list_schedule
from fpipe.program import Program
from fpipe.schedules.in_turn import RankContext, Unit, rows_in_turn
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows

PerRank = Callable[[RankContext], int]


def in_rounds(
    ranks: int,
    group: int | None,
    warm_up: Callable[[RankContext, int], int],
    lag: PerRank | None = None,
    costs: Costs | None = None,
) -> Transform:
    """A looped schedule in the pattern of `in_turn` that takes its chunks in rounds of groups.

    Where a group has to be short, the padded order, those of the frames and, if no group was asked for, that of even
    groups are played, and the shortest is taken; of equal ones the first, which holds least.

    Args:
        ranks: how many.
        group: microbatches that go through a chunk before the next chunk has its turn; by default as many as ranks.
        warm_up: as `in_turn` has it, for a size of groups.
        lag: as `in_turn` has it.
        costs: seconds by which to choose; by default F = I = W and no transfer.
    """

    def rows(program: Program, placed: list[int]) -> list[list[Key]]:
        count, chunks, size = program.microbatches, placed.count(0), group or ranks

        def padded(size: int) -> list[list[Key]]:
            ahead = partial(_ahead, warm_up, size)
            return rows_in_turn(
                program, "looped", placed, ahead, units=lambda context: in_groups(context, size), lag=lag
            )

        drawn = padded(size)
        if chunks == 1 or count % size == 0 or count % size >= ranks:  # no group, or none that is too short
            return drawn
        contexts = [RankContext(rank, ranks, chunks, count) for rank in range(ranks)]
        tables = [drawn, *_Loop(contexts, size, partial(_ahead, warm_up, size), lag).tables()]
        if group is None:
            tables.append(padded(even_group(ranks, count)))
        fused = lag is None
        if costs is None:
            return shortest(unit_pipeline(placed, count, fused=fused), tables)
        return shortest(linear_pipeline_of(program, placed, costs, math.inf, 1.0, "", fused=fused), tables)

    return in_rows("looped", ranks, rows)


def even_group(ranks: int, microbatches: int) -> int:
    """The least group that makes as many rounds as groups of `ranks` have, none of which is short: as torch takes it.

    >>> even_group(4, 10), even_group(4, 11), even_group(4, 3)
    (5, 6, 3)
    """
    return -(-microbatches // max(1, microbatches // ranks))


def _ahead(warm_up: Callable[[RankContext, int], int], size: int, context: RankContext) -> int:
    return warm_up(context, size)


def in_groups(context: RankContext, group: int) -> list[Unit]:
    """Megatron's order: a group of microbatches through chunk 0, the same through chunk 1, and so on; the next group.

    A last group of fewer microbatches than ranks is padded up to the ranks with microbatches that are not there.

    >>> [index for _, index in in_groups(RankContext(0, 2, 2, 5), 3)]
    [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    """
    count = context.microbatches
    rest = count % group
    if rest and count > group:
        count += max(0, min(group, context.ranks) - rest)
    starts = range(0, count, group)
    return [
        (chunk, index)
        for start in starts
        for chunk in range(context.chunks)
        for index in range(start, min(count, start + group))
    ]


class _Loop:
    """The ops of a looped schedule as numbers, kind by kind, stage by stage, microbatch by microbatch."""

    def __init__(self, contexts: list[RankContext], group: int, warm_up: PerRank, lag: PerRank | None) -> None:
        self.contexts, self.group = contexts, group
        self.ahead = [warm_up(context) for context in contexts]
        self.lag = [lag(context) if lag else 0 for context in contexts]
        self.kinds = "FIW" if lag else "FB"
        self.count, self.stages = contexts[0].microbatches, contexts[0].chunks * len(contexts)
        self.work = self._work()

    def tables(self) -> list[list[list[Key]]]:
        """The rows of those frames that come to an end."""
        kinds, stages, count = self.kinds, self.stages, self.count
        runs = [self._by_frame(*frames) for frames in self._frames()]
        return [
            [[(kinds[op // count // stages], op // count % stages, op % count, None) for op in row] for row in one.rows]
            for one in runs
            if sum(map(len, one.rows)) == len(self.work.needs)
        ]

    def _work(self) -> TaskGraph:
        stages, count, kinds = self.stages, self.count, self.kinds
        total = len(kinds) * stages * count
        readers: list[list[tuple[int, float]]] = [[] for _ in range(total)]
        needs = [0] * total
        tracks = [(stage, stage + 1) for stage in range(stages - 1)]
        tracks += [(stage, stages + stage) for stage in range(stages)]
        tracks += [(stages + stage + 1, stages + stage) for stage in range(stages - 1)]
        tracks += [(stages + stage, 2 * stages + stage) for stage in range(stages if kinds == "FIW" else 0)]
        edges = [(track * count + index, after * count + index) for track, after in tracks for index in range(count)]
        edges += [(index, index + 1) for index in range(count - 1)]  # microbatches enter in turn
        for op, after in edges:
            readers[op].append((after, 0.0))
            needs[after] += 1
        ranks = [op // count % stages % len(self.contexts) for op in range(total)]
        seconds = [2.0 if kinds[op // count // stages] == "B" else 1.0 for op in range(total)]
        return TaskGraph(len(self.contexts), ranks, seconds, readers, needs)

    def _frames(self) -> list[tuple[list[int], list[int]]]:
        """How many forwards, and how many backwards, each group of the frames has that are tried."""
        count, group = self.count, self.group
        full, rest = divmod(count, group)
        early = [rest] + [group] * full
        cuts = [early]
        if full:
            cuts.insert(0, [group, rest] + [group] * (full - 1))
        if full == 1:  # there are few backwards to fill places with: two short groups may lack fewer at a time
            cuts += [[first, count - first] for first in range(rest + 1, group)]
        return [(cut, early) for cut in cuts]

    def _by_frame(self, forward: Sequence[int], backward: Sequence[int]) -> Scheduled:
        """The ready op with the first place of a frame in which groups have so many microbatches."""
        places, count, stages = self._places(forward, backward), self.count, self.stages
        forwards, last = stages * count, (len(self.kinds) - 1) * stages * count
        held, most = (
            [0] * len(self.contexts),
            [ahead + 1 + lag for ahead, lag in zip(self.ahead, self.lag, strict=True)],
        )

        def pick(rank: int, time: float, ready: list[int]) -> int:
            full = held[rank] >= most[rank]
            best = min([op for op in ready if not (full and op < forwards)], key=places.__getitem__, default=NOTHING)
            if best != NOTHING:
                held[rank] += (best < forwards) - (best >= last)
            return best

        return list_schedule(self.work, pick)

    def _places(self, forward: Sequence[int], backward: Sequence[int]) -> list[int]:
        """Where each op stands in the row of its rank, which warms up and then takes F, I and W in turn."""
        chunks, group, per_kind = self.contexts[0].chunks, self.group, self.stages * self.count
        out, back = (_numbers(sizes, group) for sizes in (forward, backward))
        found = [0] * len(self.work.needs)
        for context, ahead, lag in zip(self.contexts, self.ahead, self.lag, strict=True):
            for chunk in range(chunks):
                first = (chunk * context.ranks + context.rank) * self.count
                for index in range(self.count):
                    turn = _turn(out[index], chunk, group, chunks)
                    found[first + index] = turn if turn <= ahead else ahead + 3 * (turn - ahead)
                    turn = _turn(back[index], chunks - 1 - chunk, group, chunks)
                    found[per_kind + first + index] = ahead + 1 + 3 * turn
                    if len(self.kinds) == 3:
                        found[2 * per_kind + first + index] = ahead + 2 + 3 * (turn + lag)
        return found


def _numbers(sizes: Sequence[int], group: int) -> list[int]:
    """The number that each microbatch has among those that are there and those that short groups lack.

    >>> _numbers([1, 3], 3), _numbers([3, 1], 3)
    ([0, 3, 4, 5], [0, 1, 2, 3])
    """
    return [at * group + index for at, size in enumerate(sizes) for index in range(size)]


def _turn(number: int, chunk: int, group: int, chunks: int) -> int:
    """How many units of a rank come before one, in groups that are full."""
    return number // group * group * chunks + chunk * group + number % group
