"""Overlap a forward of one microbatch with a backward of another, so that exchanges hide behind computation.

Stages that compute alternate, and a stage that exchanges starts as soon as its data are ready. One block of experts a
chunk, as in DeepSeek-V3's figure 4 (attention a, dispatch, experts e, combine; its period begins in another place):

    main       aF      eI  eW      eF      aI  aW            published:  MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)
    exchange   comb B  disp F      disp B  comb F                        DISPATCH(F) DISPATCH(B) COMBINE(F) COMBINE(B)

If no stage exchanges, the two are PAIRs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from fpipe.limits import check_whole_number
from fpipe.program import Program, cell_of, is_exchange, parts_of
from fpipe.schedules.in_turn import RankContext, Unit, even_chunks
from fpipe.schedules.registry import published
from fpipe.schedules.rounds import in_groups
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Cell, Key
from fpipe.transforms.place import ascending_ranks, stage_ranks, stages_by_rank
from fpipe.transforms.reorder import apply_table


def exchanges_of(program: Program) -> frozenset[int]:
    """Return the stages that are exchanges."""
    return frozenset(op.stage for op in parts_of(program.ops) if op.stage is not None and is_exchange(op))


def overlapped_cells(
    forwards: Sequence[int],
    forward_microbatch: int,
    backwards: Sequence[int],
    backward_microbatch: int,
    exchange_stages: Collection[int],
) -> Iterator[Cell]:
    """Yield the cells of a forward of one microbatch, overlapped with a backward of another.

    `forwards` and `backwards` are the stages of each, in the order in which they run.

    >>> [cell if isinstance(cell, str) else cell_of(cell) for cell in overlapped_cells([0, 1], 3, [1, 0], 2, ())]
    ['(0F3;1B2)', '(1F3;0B2)']
    >>> print(*map(cell_of, overlapped_cells([0, 1, 2, 3], 1, [3, 2, 1, 0], 0, {1, 3})))
    3B0 0F1 1F1 2I0 1B0 2W0 2F1 3F1 0I0 0W0
    """
    if not any(stage in exchange_stages for stage in (*forwards, *backwards)):
        # Without exchanges: pair the stages as they come; what is left of the longer direction runs alone.
        pairs = zip_longest(
            (("F", stage, forward_microbatch, None) for stage in forwards),
            (("B", stage, backward_microbatch, None) for stage in backwards),
        )
        for forward, backward in pairs:
            yield f"({cell_of(forward)};{cell_of(backward)})" if forward and backward else forward or backward
        return
    # One compute stage of each direction in turn. Exchanges that have become ready follow at once, so that they are
    # under way while the opposite direction computes. W comes after the backward's exchange, which needs only the I.
    remaining_forwards, remaining_backwards = deque(forwards), deque(backwards)

    def started(stages: deque[int], kind: str, microbatch: int) -> Iterator[Key]:
        while stages and stages[0] in exchange_stages:
            yield kind, stages.popleft(), microbatch, None

    yield from started(remaining_backwards, "B", backward_microbatch)
    yield from started(remaining_forwards, "F", forward_microbatch)
    while remaining_forwards or remaining_backwards:
        if remaining_forwards:
            yield "F", remaining_forwards.popleft(), forward_microbatch, None
            yield from started(remaining_forwards, "F", forward_microbatch)
        if remaining_backwards:
            stage = remaining_backwards.popleft()
            yield "I", stage, backward_microbatch, None
            yield from started(remaining_backwards, "B", backward_microbatch)
            yield "W", stage, backward_microbatch, None


def _overlapping(ranks: int, chunks: int | None) -> Transform:
    """Return a schedule that warms up with one forward more than interleaved 1F1B, then overlaps F and B.

    Each rank has `chunks` chunks of neighbouring stages; with None each of its stages is a chunk.
    """

    @as_transform
    def transform(program: Program) -> Program:
        exchange_stages = exchanges_of(program)
        # One chunk: an ascending placement of the user is kept. Otherwise chunk c is on rank c mod p.
        if chunks == 1:
            placement = ascending_ranks(program, ranks)
            chunks_by_rank = [[stages] for stages in stages_by_rank(placement, ranks)]
        else:
            chunk_count = program.stages if chunks is None else ranks * chunks
            chunk_of = stage_ranks("linear", program.stages, chunk_count)
            stages_by_chunk = stages_by_rank(chunk_of, chunk_count)
            chunks_by_rank = [stages_by_chunk[rank::ranks] for rank in range(ranks)]
        microbatches = program.microbatches
        rows = [
            [*_row_of_rank(RankContext(rank, ranks, len(rank_chunks), microbatches), rank_chunks, exchange_stages)]
            for rank, rank_chunks in enumerate(chunks_by_rank)
        ]
        return apply_table(program, rows, move=True)

    return transform


def _row_of_rank(context: RankContext, chunks: list[list[int]], exchange_stages: Collection[int]) -> Iterator[Cell]:
    # The extra forward of the warm-up makes each pair one of two microbatches, on the last rank too.
    units: Sequence[Unit] = in_groups(context, context.ranks)
    warm_up = min(2 * context.later_ranks + (context.chunks - 1) * context.ranks + 1, len(units))
    for chunk, microbatch in units[:warm_up]:
        yield from (("F", stage, microbatch, None) for stage in chunks[chunk] if microbatch < context.microbatches)
    # A missing partner, in the drain or of a padded group, leaves its side of the pair empty.
    for turn, (chunk, backward_microbatch) in enumerate(units):
        forward_chunk, forward_microbatch = (
            units[warm_up + turn] if warm_up + turn < len(units) else (0, context.microbatches)
        )
        forwards = chunks[forward_chunk] if forward_microbatch < context.microbatches else []
        backwards = chunks[len(chunks) - 1 - chunk][::-1] if backward_microbatch < context.microbatches else []
        yield from overlapped_cells(forwards, forward_microbatch, backwards, backward_microbatch, exchange_stages)


@published(
    "1F1B with overlap",
    "torch.distributed.pipelining's and Megatron-LM's 1F1B with a pair of a forward and a backward, 2025",
    idle="(p-1)T where a pair takes T; the makespan is pT + (m-1)P where it takes P",
    peak="min(m, 2(p-1-r) + 2)",
)
def one_f_one_b_overlap(ranks: int) -> Transform:
    """1F1B in which a forward and a backward of two microbatches run at once, to hide exchanges.

    Rank r of p warms up with 2(p-r-1) + 1 forwards, one more than `eager_1f1b`, so a forward always meets a backward of
    another microbatch. The two form a PAIR. If some stages are exchanges (`fpipe.exchange`), stages alternate, and each
    exchange starts when its data are ready. An ascending placement from before, such as `fpipe.place([0, 0, 0, 1, 1])`,
    is kept.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b_overlap(2))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 |    0F0       0F1       0F2    (0F3;0B0)    0B1       0B2       0B3
    rank 1 |     .        1F0    (1F1;1B0) (1F2;1B1) (1F3;1B2)    1B3        .
    """
    return _overlapping(ranks, 1)


@published(
    "Interleaved 1F1B with overlap",
    "Megatron-LM, combined 1F1B, 2025; the warm-up is that of Kimi K2 (arXiv 2507.20534)",
    idle="(p-1)T/v, p divides m, where a pair takes T/v",
    peak="min(m, ((v-1)p + 2(p-1-r) + 2)/v), p divides m",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def interleaved_overlap(ranks: int, *, chunks: int | None = None) -> Transform:
    """Interleaved 1F1B in which a forward and a backward run at once, as in `one_f_one_b_overlap`.

    Rank r of p warms up with 2(p-r-1) + (v-1)p + 1 forwards of its v chunks.

    Args:
        ranks: the number of ranks.
        chunks: how many chunks of neighbouring stages each rank has; by default each stage is one.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.interleaved_overlap(2))(fpipe.program(4))
    >>> for rank, cells in enumerate(program.table()):
    ...     print(f"rank {rank} |", *cells)
    rank 0 | 0F0 0F1 2F0 2F1 0F2 (0F3;2B0) (2F2;2B1) (2F3;0B0) 0B1 2B2 2B3 0B2 0B3
    rank 1 | 1F0 1F1 3F0 (3F1;3B0) (1F2;3B1) (1F3;1B0) (3F2;1B1) (3F3;3B2) 3B3 1B2 1B3
    """
    if chunks is not None:
        check_whole_number("chunks", chunks)
    return _overlapping(ranks, chunks)
