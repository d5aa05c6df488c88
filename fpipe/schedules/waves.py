"""Waves: microbatches go down the ranks and back, two slots apart, so that no two ever meet on a rank.

Number the ops of a microbatch from 0: its forwards in order, then its backwards. Op q of the i-th microbatch gets slot
q + 2i. On one rank, ops of the same parity are 2p apart, so p microbatches (p/2 in each of two directions) fill every
other slot, and those of the other parity the slots between:

    slot      0   1   2   3   4   5   6   7   8   9
    rank 0 | 0F0  .  0F1  .   .   .   .  0B0  .  0B1        down: number q is on rank q, then back
           |  .   .   .  3F2 3B2 3F3 3B3  .   .   .         up: the other way round

These are the orders of Chimera and of Hanayo, which turns Chimera's two directions into one wave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fpipe.limits import check_whole_number
from fpipe.program import Program, ProgramError, building
from fpipe.schedules.blocks import BlockTicks, tightened_block_rows
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.schedules.search_request import search_order
from fpipe.timing.costs import Costs, checked_costs
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Key
from fpipe.transforms.place import bidirectional_ranks, stage_ranks, stages_by_rank
from fpipe.transforms.reorder import apply_table, from_rows

Route = tuple[Iterable[int], Sequence[tuple[int, Sequence[int]]]]
"""Microbatches, and the ranks that they visit, each with the stages to run there."""


def _refuse_odd_sizes(ranks: int, stages: int, microbatches: int) -> str | None:
    if ranks % 2:
        return (
            f"the number of ranks is even, found {ranks}: on an odd number the two directions meet in the same slot of "
            "a rank. Use one rank more or less, or fpipe.schedules.one_f_one_b."
        )
    if microbatches % 2:
        return f"the number of microbatches is even, found {microbatches}: one half goes down, the other half up."
    return None


@published(
    "Chimera",
    "Li, Hoefler, SC 2021, figure 3, table 2",
    idle="(p-2)(m/p+1)F for B+W=2F and p | m; at m=p bubble (p-2)/(3p/2+p-2)",
    peak="min(p/2, p-r, m/2) + min(p/2, r+1, m/2)",
    accepts="p and m even",
    refuses=_refuse_odd_sizes,
)
def chimera(ranks: int) -> Transform:
    """Two pipelines in opposite directions that fill each other's bubbles.

    Each stage is on ranks r and p-1-r, and an ADD sums its gradients. The first half of the microbatches goes down, the
    second half up, in units of p/2 of each. With m > p, units follow each other; with m < p, slots stay empty (paper,
    section 3.5).

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.chimera(4))(fpipe.program(4))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1  .  3F2 3B2 3F3 3B3 0B0  .  0B1
    rank 1 |  .  1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1  .
    rank 2 |  .  1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3  .
    rank 3 | 0F2 0F3  .  3F0 3B0 3F1 3B1 0B2  .  0B3
    """

    @as_transform
    def transform(program: Program) -> Program:
        with building():
            rank_by_stage, homes = bidirectional_ranks(program.stages, ranks)
            shares = stages_by_rank(rank_by_stage, ranks)
            # The second half visits the ranks in the opposite order, with the stages of the mirrored rank.
            half = program.microbatches // 2
            routes = [
                (range(half), [*enumerate(shares)]),
                (range(half, 2 * half), [(ranks - 1 - rank, share) for rank, share in enumerate(shares)]),
            ]
            return apply_table(program, rows_by_slot(routes, ranks, unit=ranks // 2), move=True, homes=homes)

    return transform


def _refuse_without_turn(ranks: int, stages: int, microbatches: int) -> str | None:
    if ranks < 2:
        return "a wave turns at the first and the last of at least 2 ranks, found 1. Use fpipe.schedules.one_f_one_b."
    if stages < 2 * ranks:
        return (
            f"a wave goes down the ranks and back up, through {2 * ranks} stages on {ranks} ranks; this program has "
            f"{stages}. Cut the model finer, or use fewer ranks."
        )
    return None


@published(
    "Hanayo",
    "Liu et al. 2023, arXiv 2308.15762",
    idle="(p-1)(m/p+1)F/w for w waves, B+W=2F and p | m; at m=p (2p-2)/w",
    peak="min(m, p - (p-1-r)/v) for v=2w",
    accepts="p >= 2; at least 2 stages a rank, 2w for w waves",
    stages_per_rank=2,
    refuses=_refuse_without_turn,
    stages_per={"waves": 2},
)
def hanayo(ranks: int, waves: int | None = None) -> Transform:
    """Chimera's order without replicas: stages go down the ranks and back up, in one or more waves.

    Each wave takes two stages on every rank, or two groups of neighbours, so a turn needs no transfer. More waves mean
    a smaller bubble and more transfers. With m > p, microbatches run in units of p; each unit starts in the drain of
    the one before.

    Args:
        ranks: at least 2.
        waves: how often a microbatch goes down and back up; by default as often as the stages allow.

    Raises:
        ProgramError: fewer stages than the waves pass.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.hanayo(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  5F0 5B0 5F1 5B1 5F2 5B2 0B0  .  0B1  .  0B2
    rank 1 |  .  1F0 1F1  .  4F0 1F2 4F1 4B0 4F2 4B1 1B0 4B2 1B1  .  1B2  .
    rank 2 |  .   .  2F0 3F0 2F1 3F1 2F2 3F2 3B0 2B0 3B1 2B1 3B2 2B2  .   .
    """
    if waves is not None:
        check_whole_number("waves", waves)

    @as_transform
    def transform(program: Program) -> Program:
        max_waves = program.stages // (2 * ranks)
        if waves is not None and waves > max_waves:
            raise ProgramError(
                f"hanayo: waves={waves} on {ranks} ranks passes {2 * ranks * waves} stages, found {program.stages}. "
                "Use more stages or fewer waves."
            )
        # A chunk for each visit: down the ranks and back up, once for each wave.
        rank_by_chunk = [*range(ranks), *reversed(range(ranks))] * (waves or max_waves)
        chunks = stage_ranks("linear", program.stages, len(rank_by_chunk))
        visits = [*zip(rank_by_chunk, stages_by_rank(chunks, len(rank_by_chunk)), strict=True)]
        rows = rows_by_slot([(range(program.microbatches), visits)], ranks, unit=ranks)
        return from_rows([rank_by_chunk[chunk] for chunk in chunks], None, lambda program, placement: rows)(program)

    return transform


def rows_by_slot(routes: Iterable[Route], ranks: int, *, unit: int) -> list[list[Key]]:
    """Return the cells of each rank in the order of their slots.

    `unit` microbatches are two slots apart; the next unit starts when the first microbatch of this one has come back.
    """
    slots: list[list[tuple[int, str, int, Sequence[int]]]] = [[] for _ in range(ranks)]
    for microbatches, visits in routes:
        slots_per_microbatch = 2 * len(visits)
        for index, microbatch in enumerate(microbatches):
            first_slot = index // unit * slots_per_microbatch + 2 * (index % unit)
            for position_on_route, (rank, stages) in enumerate(visits):
                slots[rank].append((first_slot + position_on_route, "F", microbatch, stages))
                backward_slot = first_slot + slots_per_microbatch - 1 - position_on_route
                slots[rank].append((backward_slot, "B", microbatch, stages[::-1]))
    in_order = map(sorted, slots)
    return [[(kind, stage, i, None) for _, kind, i, stages in row for stage in stages] for row in in_order]


# A V: down the ranks and back up. The first and the last stage share a rank, and so do the chunks that are held longest
# and shortest: all ranks hold about the same.

FORWARD_TICKS, BACKWARD_TICKS = 1, 2
INTERVAL = 2 * (FORWARD_TICKS + BACKWARD_TICKS)


@published(
    "1F1B-V",
    "Qi et al. 2024 (controllable memory, arXiv 2405.15362), appendix",
    idle="p=2, 4, 8 at F=B=W=1: 2, 7.5, 16.5; at most (p-1)T",
    peak="min(m, floor(4(p+1)/3)/2)",
    accepts="2p stages; any m",
    stages_per_rank=2,
    refuses=two_stages,
    searches=True,
)
def one_f_one_b_v(ranks: int, *, costs: Costs | None = None) -> Transform:
    """1F1B over a V of stages: two thirds of its memory, with no split backward.

    Stage s is on rank s on the way down and on rank 2p-1-s on the way up. A microbatch runs as early as free ticks
    allow; the next follows one rank's work later. A rank holds at most floor(4(p+1)/3) chunks and idles about five
    sixths as long as under 1F1B. The order assumes free transfers and a backward of two forwards. It is the order of
    the authors' code, except where p is a multiple of three: there the authors' order holds one chunk more and takes
    less time (13 instead of 13.5 at p=m=3, F=B=W=1).

    With costs, an order is searched that holds no more, or one chunk more if p is a multiple of three.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search an order.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b_v(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  5F0 5B0 5F1 5B1  .   .  5F2 5B2 0B0  .  0B1  .  0B2
    rank 1 |  .  1F0 1F1 1F2 4F0  .  4F1 4B0  .  4B1 4F2 1B0  .  4B2 1B1  .  1B2  .
    rank 2 |  .   .  2F0 3F0 2F1 3F1 2F2  .  3B0 3F2 2B0 3B1 2B1  .  3B2 2B2  .   .
    """

    def published_order(wait: int) -> Transform:
        def rows(program: Program, placement: list[int]) -> list[list[Key]]:
            # Without a wait a tighter end gains no tick, and loses some with transfers.
            mirror = wait > 0
            ticks = (FORWARD_TICKS, BACKWARD_TICKS)
            return tightened_block_rows(
                v_block(ranks, wait), INTERVAL, ticks, placement, program.microbatches, mirror=mirror
            )

        return from_rows("v", ranks, rows)

    if costs is None:
        # Places in the interval repeat with every third rank: for a multiple of three, two ticks of wait are the least.
        return published_order(0 if ranks % 3 else 2)
    # The published order holds floor(4(p+1)/3) chunks, half as many microbatches; multiples of three one chunk more.
    cap = (4 * (ranks + 1) // 3 + (ranks % 3 == 0)) / 2
    starts = published_order(0), published_order(2)
    return search_order("one_f_one_b_v", "v", ranks, checked_costs(costs), cap, split_backward=False, starts=starts)


def v_block(ranks: int, wait: int) -> BlockTicks:
    """Return the block of a V: each op at the first tick that is free modulo the interval.

    The microbatch waits `wait` ticks, an even number, where it turns. Rank r has its forwards at the places r and
    2p-1-r (or two later) of the interval: an odd distance apart, so that the two backwards fit into the rest.
    """
    last_stage = 2 * ranks - 1
    block = {("F", stage): stage + (wait if stage >= ranks else 0) for stage in range(2 * ranks)}
    tick_now = block["F", last_stage] + FORWARD_TICKS
    for stage in reversed(range(2 * ranks)):
        rank = min(stage, last_stage - stage)
        down_offset, up_offset = block["F", rank] % INTERVAL, block["F", last_stage - rank] % INTERVAL
        # The two places that are left for the backwards of this rank: walk on from the down forward, one backward
        # behind the other, and step over the up forward.
        free_places: list[int] = []
        tick = down_offset
        while len(free_places) < 2:
            tick += FORWARD_TICKS
            if tick % INTERVAL == up_offset:
                tick += FORWARD_TICKS
            free_places.append(tick % INTERVAL)
            tick += BACKWARD_TICKS - FORWARD_TICKS
        if stage < ranks:
            free_places.remove(block["B", last_stage - rank] % INTERVAL)
        tick_now += min((tick - tick_now) % INTERVAL for tick in free_places)
        block["B", stage] = tick_now
        tick_now += BACKWARD_TICKS
    return block
