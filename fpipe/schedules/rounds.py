"""Rounds of a looped schedule: a group of microbatches goes through chunk after chunk; one group may be short.

A group fills the ranks: its first microbatch has come round when its last has left. If groups do not divide the
microbatches, Megatron and torch refuse, since a short group would come round too early. It can run in the places of a
full one. But if it is the last group both ways, all ranks wait in the places that stay free:

    p=3, v=2, m=4       F | 0 1 2 0'1'2'3 . . 3'. .        B | 0'1'2'0 1 2 3'. . 3 . .

So the first group of the backwards is short, and the first or second group of the forwards (of only two both may be
short). Where one direction leaves places free, the other has something to do:

                        F | 0 1 2 0'1'2'3 . . 3'. .        B | 0'. . 0 . . 1'2'3'1 2 3

Torch makes fewer rounds of even groups instead, none of them short: no time is lost, but more is held.

Such a frame only ranks the ops. A rank runs the ready op with the lowest rank in the frame, unless it would hold more
than in the padded order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from fpipe.program import Program
from fpipe.schedules.in_turn import RankContext, Unit, in_turn
from fpipe.schedules.list_scheduler import NOTHING, TaskGraph, list_schedule
from fpipe.timing.costs import Costs, checked_costs
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import apply_table, from_rows


def in_rounds(
    ranks: int,
    group: int | None,
    warm_up: Callable[[RankContext, int], int],
    lag: Callable[[RankContext], int] | None = None,
    costs: Costs | None = None,
) -> Transform:
    """Return a looped schedule in the pattern of `in_turn` that takes its chunks in rounds of groups.

    A group has `ranks` microbatches by default. If one has to be short, the padded order, the framed orders and,
    without a `group`, the order of even groups are simulated, by default for F = I = W. The shortest is taken; of equal
    ones the first, which holds least.
    """
    seconds = checked_costs(costs)

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        microbatches, chunks, size = program.microbatches, placement.count(0), group or ranks

        def padded(size: int) -> list[list[Key]]:
            row_maker = in_turn(
                lambda context: warm_up(context, size), units=lambda context: in_groups(context, size), lag=lag
            )
            return row_maker(program, placement)

        padded_table = padded(size)
        # No groups, or none that is too short to fill the ranks.
        if chunks == 1 or microbatches % size == 0 or microbatches % size >= ranks:
            return padded_table
        contexts = [RankContext(rank, ranks, chunks, microbatches) for rank in range(ranks)]
        starts = [(warm_up(context, size), lag(context) if lag else 0) for context in contexts]
        tables = [padded_table, *framed_tables(placement, microbatches, "FIW" if lag else "FB", size, starts)]
        if group is None:
            tables.append(padded(even_group(ranks, microbatches)))

        def times_of(table: list[list[Key]]) -> tuple[float, float]:
            timeline = simulate(apply_table(program, table, move=True), seconds)
            return round_seconds(timeline.makespan), round_seconds(timeline.span)

        return min(tables, key=times_of)

    return from_rows("looped", ranks, rows)


def round_seconds(seconds: float) -> float:
    """Round off the last digits of a sum, so that equal times are equal in every unit of the costs."""
    return float(f"{seconds:.9g}")


def even_group(ranks: int, microbatches: int) -> int:
    """Return torch's group: the smallest one for which the rounds of groups of `ranks` leave no group short.

    >>> even_group(4, 10), even_group(4, 11), even_group(4, 3)
    (5, 6, 3)
    """
    return -(-microbatches // max(1, microbatches // ranks))


def in_groups(context: RankContext, group: int) -> list[Unit]:
    """Return Megatron's order: a group of microbatches through chunk 0, then through chunk 1, ..; then the next group.

    A last group with fewer microbatches than ranks is padded up to the ranks with microbatches that do not exist.

    >>> [index for _, index in in_groups(RankContext(0, 2, 2, 5), 3)]
    [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    """
    count = context.microbatches
    remainder = count % group
    if remainder and count > group:
        count += max(0, min(group, context.ranks) - remainder)
    starts = range(0, count, group)
    return [
        (chunk, microbatch)
        for start in starts
        for chunk in range(context.chunks)
        for microbatch in range(start, min(count, start + group))
    ]


def framed_tables(
    placement: list[int], microbatches: int, kinds: str, group: int, starts: Sequence[tuple[int, int]]
) -> Iterator[list[list[Key]]]:
    """Yield the table of each frame that does not deadlock; `starts` has the warm-up and the lag of each rank."""
    # The cap of a rank is what its padded order holds: the warm-up, one more, and the chunks whose W lags.
    graph, stages = _chain_graph(placement, microbatches, kinds), len(placement)
    caps = [warm_up + 1 + lag for warm_up, lag in starts]
    full_groups, remainder = divmod(microbatches, group)
    short_group_first = [remainder] + [group] * full_groups
    group_sizes = [short_group_first]
    if full_groups:
        group_sizes.insert(0, [group, remainder] + [group] * (full_groups - 1))
    # With one full group there are few backwards to fill places with: two short groups may lack fewer at a time.
    if full_groups == 1:
        group_sizes += [[first_size, microbatches - first_size] for first_size in range(remainder + 1, group)]
    for forward_sizes in group_sizes:
        numbers = [numbers_in_full_groups(sizes, group) for sizes in (forward_sizes, short_group_first)]
        ranking = places_in_rows(placement, group, starts, *numbers)[: len(graph.needs)]
        rows = rows_by_place(graph, ranking, stages * microbatches, caps)
        if sum(map(len, rows)) == len(ranking):
            yield [[key_of_op(op, microbatches, stages, kinds) for op in row] for row in rows]


def key_of_op(op: int, count: int, stages: int, kinds: str) -> Key:
    """Return the key of op number `op` of `_chain_graph`."""
    track, index = divmod(op, count)
    return kinds[track // stages], track % stages, index, None


def _chain_graph(placement: list[int], microbatches: int, kinds: str) -> TaskGraph:
    """Return the task graph of a chain of stages, whose microbatches enter in order.

    Op `(kind * stages + stage) * microbatches + microbatch` takes one second, or two if it is a B.
    """
    stages = len(placement)
    path = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
    # A track is a kind of one stage. Edges: F up the stages and B or I back down; with split backwards, each W
    # after its I. Then the first stage's forwards, one microbatch after the other.
    edges = [*pairwise(path), *((track, track + stages) for track in range(stages, (len(kinds) - 1) * stages))]
    needs: list[dict[int, float]] = [{} for _ in range(len(kinds) * stages * microbatches)]
    for source, track in edges:
        for microbatch in range(microbatches):
            needs[track * microbatches + microbatch][source * microbatches + microbatch] = 0.0
    for microbatch in range(1, microbatches):
        needs[microbatch][microbatch - 1] = 0.0
    seconds = [2.0 if kind == "B" else 1.0 for kind in kinds for _ in range(stages * microbatches)]
    ranks = [rank for _ in kinds for rank in placement for _ in range(microbatches)]
    return TaskGraph.of(1 + max(placement), ranks, seconds, needs)


def rows_by_place(graph: TaskGraph, ranking: Sequence[int], forwards: int, caps: Sequence[int]) -> list[list[int]]:
    """Return the rows if each rank runs its ready op of lowest ranking, and holds at most `caps` forwards."""
    held_forwards, first_final_op = [0] * len(caps), len(ranking) - forwards

    def pick(rank: int, time: float, ready: list[int]) -> int:
        is_full = held_forwards[rank] >= caps[rank]
        best = min([op for op in ready if not (is_full and op < forwards)], key=ranking.__getitem__, default=NOTHING)
        if best != NOTHING:
            held_forwards[rank] += (best < forwards) - (best >= first_final_op)
        return best

    return list_schedule(graph, pick).rows


def places_in_rows(
    placement: list[int],
    group: int,
    starts: Sequence[tuple[int, int]],
    forwards: Sequence[int],
    backwards: Sequence[int],
) -> list[int]:
    """Return the place of each op in the row of its rank, which warms up and then runs F, I and W in turn.

    `forwards` and `backwards` number the microbatches in the frames of the two directions.
    """
    microbatches, stages = len(forwards), len(placement)
    ranking = [0] * (3 * stages * microbatches)
    for rank, (warm_up, lag) in enumerate(starts):
        rank_stages = [stage for stage, stage_rank in enumerate(placement) if stage_rank == rank]
        for chunk, stage in enumerate(rank_stages):
            for microbatch in range(microbatches):
                units = units_before(forwards[microbatch], chunk, group, len(rank_stages))
                # After the warm-up a rank repeats F, I, W: places ahead + 3n, + 1 and + 2, and W later by its lag.
                beyond = max(0, units - warm_up)
                ranking[stage * microbatches + microbatch] = units + 2 * beyond
                mirrored_chunk = len(rank_stages) - 1 - chunk
                units = units_before(backwards[microbatch], mirrored_chunk, group, len(rank_stages))
                ranking[(stages + stage) * microbatches + microbatch] = warm_up + 1 + 3 * units
                ranking[(2 * stages + stage) * microbatches + microbatch] = warm_up + 2 + 3 * (units + lag)
    return ranking


def numbers_in_full_groups(sizes: Sequence[int], group: int) -> list[int]:
    """Return the number of each microbatch if every group were full, so that short groups leave gaps.

    >>> numbers_in_full_groups([1, 3], 3), numbers_in_full_groups([3, 1], 3)
    ([0, 3, 4, 5], [0, 1, 2, 3])
    """
    return [group_index * group + index for group_index, size in enumerate(sizes) for index in range(size)]


def units_before(number: int, chunk: int, group: int, chunks: int) -> int:
    """Return how many units run on a rank before this one, if groups are full."""
    return number // group * group * chunks + chunk * group + number % group
