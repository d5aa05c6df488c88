"""Run a forward of one microbatch together with a backward of another, whose exchanges hide behind each other's work.

Stages that compute go in turn, and a stage that exchanges starts as soon as its data are there. One block of experts a
chunk, as in DeepSeek-V3's figure 4 (attention a, dispatch, experts e, combine; its period begins in another place):

    main       aF      eI  eW      eF      aI  aW            published:  MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)
    exchange   comb B  disp F      disp B  comb F                        DISPATCH(F) DISPATCH(B) COMBINE(F) COMBINE(B)

Where no stage exchanges, the two are PAIRs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from fpipe.limits import whole
from fpipe.program import Program, cell_of, is_exchange, parts_of
from fpipe.schedules.in_turn import RankContext, Unit, even_chunks
from fpipe.schedules.registry import published
from fpipe.schedules.rounds import in_groups
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Cell, Key
from fpipe.transforms.place import in_order, stage_ranks
from fpipe.transforms.reorder import by_table


def exchanges_of(program: Program) -> frozenset[int]:
    """The stages that are collectives."""
    return frozenset(op.stage for op in parts_of(program.ops) if op.stage is not None and is_exchange(op))


def together(
    forwards: Sequence[int], number: int, backwards: Sequence[int], other: int, over: Collection[int]
) -> Iterator[Cell]:
    """The cells of a forward through some stages and a backward of another microbatch through others, in its order, of
    which some stages are exchanges (`over`).

    >>> [cell if isinstance(cell, str) else cell_of(cell) for cell in together([0, 1], 3, [1, 0], 2, ())]
    ['(0F3;1B2)', '(1F3;0B2)']
    >>> print(*map(cell_of, together([0, 1, 2, 3], 1, [3, 2, 1, 0], 0, {1, 3})))
    3B0 0F1 1F1 2I0 1B0 2W0 2F1 3F1 0I0 0W0
    """
    if not any(stage in over for stage in (*forwards, *backwards)):
        pairs = zip_longest((("F", at, number, None) for at in forwards), (("B", at, other, None) for at in backwards))
        for one, two in pairs:
            yield f"({cell_of(one)};{cell_of(two)})" if one and two else one or two
        return
    ahead, back = deque(forwards), deque(backwards)

    def started(queue: deque[int], kind: str, microbatch: int) -> Iterator[Key]:
        while queue and queue[0] in over:
            yield kind, queue.popleft(), microbatch, None

    yield from started(back, "B", other)
    yield from started(ahead, "F", number)
    while ahead or back:
        if ahead:
            yield "F", ahead.popleft(), number, None
            yield from started(ahead, "F", number)
        if back:
            stage = back.popleft()
            yield "I", stage, other, None
            yield from started(back, "B", other)
            yield "W", stage, other, None


def _overlapping(ranks: int, chunks: int | None) -> Transform:
    """Warm up with a forward more than interleaved 1F1B, then each backward together with a forward.

    A rank has so many chunks of neighbouring stages, or (None) each of its stages is one.
    """

    @transforming
    def transform(program: Program) -> Program:
        stages, over = program.stages, exchanges_of(program)
        if chunks == 1:
            placed = in_order(program, ranks)
            parts = [[[stage for stage, at in enumerate(placed) if at == rank]] for rank in range(ranks)]
        else:
            many = stages if chunks is None else ranks * chunks
            chunk_of = stage_ranks("linear", stages, many)
            shares = [[stage for stage, chunk in enumerate(chunk_of) if chunk == own] for own in range(many)]
            parts = [shares[rank::ranks] for rank in range(ranks)]
        count = program.microbatches
        rows = [[*_row(RankContext(rank, ranks, len(own), count), own, over)] for rank, own in enumerate(parts)]
        return by_table(program, rows, move=True)

    return transform


def _row(context: RankContext, own: list[list[int]], over: Collection[int]) -> Iterator[Cell]:
    """The cells of a rank that has these chunks."""
    units: Sequence[Unit] = in_groups(context, context.ranks)
    ahead = min(2 * context.later_ranks + (context.chunks - 1) * context.ranks + 1, len(units))
    for chunk, index in units[:ahead]:
        yield from (("F", stage, index, None) for stage in own[chunk] if index < context.microbatches)
    for turn, (chunk, other) in enumerate(units):
        following, number = units[ahead + turn] if ahead + turn < len(units) else (0, context.microbatches)
        forwards = own[following] if number < context.microbatches else []
        backwards = own[len(own) - 1 - chunk][::-1] if other < context.microbatches else []
        yield from together(forwards, number, backwards, other, over)


@published(
    "1F1B with overlap",
    "torch.distributed.pipelining's and Megatron-LM's 1F1B with a pair of a forward and a backward, 2025",
    idle="(p-1)T where a pair takes T; the makespan is pT + (m-1)P where it takes P",
    peak="min(m, 2(p-1-r) + 2)",
)
def one_f_one_b_overlap(ranks: int) -> Transform:
    """1F1B in which a forward and a backward of two microbatches run at once, so that exchanges hide behind work.

    Rank r of p warms up with 2(p-r-1) + 1 forwards, one more than `eager_1f1b`: then the backward beside a forward is
    always of another microbatch. Both are a PAIR, or, of stages some of which are exchanges (`fpipe.exchange`), their
    stages in turn, each exchange started as soon as its data are there. Places that go up, as in
    `fpipe.place([0, 0, 0, 1, 1])` before it, are kept.

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
    """Interleaved 1F1B in which a forward and a backward of two microbatches run at once (`one_f_one_b_overlap`).

    Rank r of p warms up with 2(p-r-1) + (v-1)p + 1 forwards of its v chunks.

    Args:
        ranks: how many.
        chunks: how many chunks of neighbouring stages each rank has; by default each stage is one.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.interleaved_overlap(2))(fpipe.program(4))
    >>> for rank, cells in enumerate(program.table()):
    ...     print(f"rank {rank} |", *cells)
    rank 0 | 0F0 0F1 2F0 2F1 0F2 (0F3;2B0) (2F2;2B1) (2F3;0B0) 0B1 2B2 2B3 0B2 0B3
    rank 1 | 1F0 1F1 3F0 (3F1;3B0) (1F2;3B1) (1F3;1B0) (3F2;1B1) (3F3;3B2) 3B3 1B2 1B3
    """
    if chunks is not None:
        whole("chunks", chunks)
    return _overlapping(ranks, chunks)
