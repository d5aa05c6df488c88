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

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from fpipe.program import Program
from fpipe.schedules.in_turn import RankContext, Unit, in_turn
from fpipe.schedules.list_scheduler import NOTHING, TaskGraph, list_schedule
from fpipe.timing.costs import Costs, the_costs
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import by_table, in_rows


def in_rounds(
    ranks: int,
    group: int | None,
    warm_up: Callable[[RankContext, int], int],
    lag: Callable[[RankContext], int] | None = None,
    costs: Costs | None = None,
) -> Transform:
    """A looped schedule in the pattern of `in_turn` that takes its chunks in rounds of groups, by default of `ranks`.

    Where a group has to be short, the padded order, those of the frames and, if no group was asked for, that of even
    groups are simulated, by default for F = I = W, and the shortest is taken; of equal ones the first, which holds
    least.
    """
    seconds = the_costs(costs)

    def rows(program: Program, placed: list[int]) -> list[list[Key]]:
        count, chunks, size = program.microbatches, placed.count(0), group or ranks

        def padded(size: int) -> list[list[Key]]:
            ordered = in_turn(
                lambda context: warm_up(context, size), units=lambda context: in_groups(context, size), lag=lag
            )
            return ordered(program, placed)

        drawn = padded(size)
        if chunks == 1 or count % size == 0 or count % size >= ranks:  # no group, or none that is too short
            return drawn
        contexts = [RankContext(rank, ranks, chunks, count) for rank in range(ranks)]
        starts = [(warm_up(context, size), lag(context) if lag else 0) for context in contexts]
        tables = [drawn, *_framed(placed, count, "FIW" if lag else "FB", size, starts)]
        if group is None:
            tables.append(padded(even_group(ranks, count)))

        def worth(table: list[list[Key]]) -> tuple[float, float]:
            timeline = simulate(by_table(program, table, move=True), seconds)
            return _rounded(timeline.makespan), _rounded(timeline.span)

        return min(tables, key=worth)

    return in_rows("looped", ranks, rows)


def _rounded(seconds: float) -> float:
    """Seconds without the last digits of a sum, so that times which are equal are so in every unit of the costs."""
    return float(f"{seconds:.9g}")


def even_group(ranks: int, microbatches: int) -> int:
    """The least group that makes as many rounds as groups of `ranks` have, none of which is short: as torch takes it.

    >>> even_group(4, 10), even_group(4, 11), even_group(4, 3)
    (5, 6, 3)
    """
    return -(-microbatches // max(1, microbatches // ranks))


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


def _framed(
    placed: list[int], count: int, kinds: str, group: int, starts: Sequence[tuple[int, int]]
) -> Iterator[list[list[Key]]]:
    """The tables of those frames that come to an end; `starts` are the warm-up and the lag of each rank."""
    work, stages = _chain_graph(placed, count, kinds), len(placed)
    most = [ahead + 1 + lag for ahead, lag in starts]
    full, rest = divmod(count, group)
    early = [rest] + [group] * full
    cuts = [early]
    if full:
        cuts.insert(0, [group, rest] + [group] * (full - 1))
    if full == 1:  # there are few backwards to fill places with: two short groups may lack fewer at a time
        cuts += [[first, count - first] for first in range(rest + 1, group)]
    for cut in cuts:
        places = _places(placed, group, starts, _numbers(cut, group), _numbers(early, group))[: len(work.needs)]
        rows = _by_places(work, places, stages * count, most)
        if sum(map(len, rows)) == len(places):
            yield [[_key(op, count, stages, kinds) for op in row] for row in rows]


def _key(op: int, count: int, stages: int, kinds: str) -> Key:
    """The key of an op of `_chain_graph`."""
    track, index = divmod(op, count)
    return kinds[track // stages], track % stages, index, None


def _chain_graph(placed: list[int], count: int, kinds: str) -> TaskGraph:
    """The ops of a chain of stages, kind by kind, stage by stage, each with its microbatches, which enter in turn.

    Op `(kind * stages + stage) * count + microbatch` takes one second, or two if it is a B.
    """
    stages = len(placed)
    path = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    edges = [*pairwise(path), *((track, track + stages) for track in range(stages, (len(kinds) - 1) * stages))]
    needs: list[dict[int, float]] = [{} for _ in range(len(kinds) * stages * count)]
    for source, track in edges:
        for index in range(count):
            needs[track * count + index][source * count + index] = 0.0
    for index in range(1, count):
        needs[index][index - 1] = 0.0
    seconds = [2.0 if kind == "B" else 1.0 for kind in kinds for _ in range(stages * count)]
    ranks = [rank for _ in kinds for rank in placed for _ in range(count)]
    return TaskGraph.of(1 + max(placed), ranks, seconds, needs)


def _by_places(work: TaskGraph, places: Sequence[int], forwards: int, most: Sequence[int]) -> list[list[int]]:
    """Run the ready op with the first place, and let each rank hold at most so many forwards."""
    held, last = [0] * len(most), len(places) - forwards

    def pick(rank: int, time: float, ready: list[int]) -> int:
        full = held[rank] >= most[rank]
        best = min([op for op in ready if not (full and op < forwards)], key=places.__getitem__, default=NOTHING)
        if best != NOTHING:
            held[rank] += (best < forwards) - (best >= last)
        return best

    return list_schedule(work, pick).rows


def _places(
    placed: list[int], group: int, starts: Sequence[tuple[int, int]], out: Sequence[int], back: Sequence[int]
) -> list[int]:
    """Where each op stands in the row of its rank, which warms up and then takes F, I and W in turn.

    `out` and `back` are the numbers of microbatches in the frames of the forwards and of the backwards.
    """
    count, stages = len(out), len(placed)
    found = [0] * (3 * stages * count)
    for rank, (ahead, lag) in enumerate(starts):
        own = [stage for stage, home in enumerate(placed) if home == rank]
        for chunk, stage in enumerate(own):
            for index in range(count):
                turn = _turn(out[index], chunk, group, len(own))
                found[stage * count + index] = turn if turn <= ahead else ahead + 3 * (turn - ahead)
                turn = _turn(back[index], len(own) - 1 - chunk, group, len(own))
                found[(stages + stage) * count + index] = ahead + 1 + 3 * turn
                found[(2 * stages + stage) * count + index] = ahead + 2 + 3 * (turn + lag)
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
