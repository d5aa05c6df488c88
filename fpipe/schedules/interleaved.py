"""Interleaved schedules: several chunks a rank, which a microbatch visits in a loop, for a smaller bubble."""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.program import Program, ProgramError
from fpipe.schedules.in_turn import RankContext, Unit, even_chunks, in_turn
from fpipe.schedules.registry import published
from fpipe.schedules.rounds import in_rounds
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import from_rows
from fpipe.transforms.slice_sequence import slice_sequence


@published(
    "Interleaved 1F1B (VPP)",
    "Narayanan et al. 2021 (Megatron-LM), figure 4",
    idle="(p-1)T/v, p divides m",
    peak="min(m, ((v-1)p + 2(p-1-r) + 1)/v), p divides m",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def interleaved(ranks: int, group: int | None = None, *, costs: Costs | None = None) -> Transform:
    """1F1B over v chunks a rank, with stage s on rank s mod p: the bubble of 1F1B divided by v.

    Groups of p microbatches run through chunk 0, then through chunk 1, and so on. Rank r of p warms up with 2(p-r-1) +
    (v-1)group forwards.

    Megatron requires that p divides m. Here a short group runs early, in slots that are free (see rounds.py), and the
    peak stays. If it is shorter, the groups have g = ceil(m / (m // p)) microbatches instead, as in torch: the idle
    time is then (p-1)T/v for any m >= p, and the peak ((v-1)g + 2(p-1-r) + 1)/v. `group=p` keeps the smaller peak.

    Args:
        ranks: the number of ranks.
        group: microbatches that go through a chunk before the next chunk has its turn, at least `ranks`; by default
            `ranks`, or even groups.
        costs: seconds by which to choose between the two; without, for F = I = W and no transfer.

    Raises:
        ValueError: a group of fewer microbatches than ranks: its first would wait for itself to come round.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.interleaved(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2  .   .  3B0  .  3B1  .  3B2 0B0 0B1 0B2
    rank 1 |  .  1F0 1F1 1F2 4F0 4F1 4F2 4B0  .  4B1  .  4B2 1B0 1B1 1B2  .
    rank 2 |  .   .  2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2  .   .
    """
    return in_rounds(
        ranks,
        checked_group(ranks, group, ranks, None),
        # A group through each chunk but the last. Then the first microbatch goes down to the last rank and comes back,
        # a forward of this rank for each hop.
        warm_up=lambda context, size: 2 * context.later_ranks + (context.chunks - 1) * size,
        costs=costs,
    )


@published(
    "Interleaved 1F1B, one more warm-up",
    "Kimi K2 technical report, 2025 (arXiv 2507.20534)",
    idle="(p-1)T/v, p divides m",
    peak="min(m, ((v-1)p + 2(p-1-r) + 2)/v)",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def kimi_k2(ranks: int) -> Transform:
    """Interleaved 1F1B with one more forward of warm-up.

    On the last rank too, each forward is then next to a backward of another microbatch, so the exchange of experts of
    one overlaps with the work of the other. A rank holds one chunk more than under `interleaved`.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.kimi_k2(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2  .   .   .  3B0  .  3B1 3B2 0B0 0B1 0B2
    rank 1 |  .  1F0 1F1 1F2 4F0 4F1 4F2  .  4B0  .  4B1 4B2 1B0 1B1 1B2  .
    rank 2 |  .   .  2F0 2F1 2F2 5F0 5F1 5B0 5F2 5B1 5B2 2B0 2B1 2B2  .   .
    """
    # One forward more than `interleaved`, so that each backward meets a forward of another microbatch.
    return in_rounds(ranks, ranks, lambda context, size: 2 * context.later_ranks + (context.chunks - 1) * size + 1)


@published(
    "Looped BFS",
    "Lamy-Poirier 2022 (breadth-first pipeline parallelism, arXiv 2211.05953)",
    idle="(p-1)T/v, m >= p",
    peak="m",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def looped_bfs(ranks: int) -> Transform:
    """Breadth first: all microbatches through chunk 0, then all through chunk 1; backwards in reverse.

    The bubble is that of `interleaved`, but all microbatches are held. A chunk's weights are gathered once a pass,
    which suits sharded data parallelism.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.looped_bfs(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2  .   .   .   .  3B2 3B1 3B0 0B2 0B1 0B0
    rank 1 |  .  1F0 1F1 1F2 4F0 4F1 4F2  .   .  4B2 4B1 4B0 1B2 1B1 1B0  .
    rank 2 |  .   .  2F0 2F1 2F2 5F0 5F1 5F2 5B2 5B1 5B0 2B2 2B1 2B0  .   .
    """

    def by_chunk(context: RankContext) -> list[Unit]:
        return [(chunk, index) for chunk in range(context.chunks) for index in range(context.microbatches)]

    # All forwards are warm-up; the backwards are the forwards in reverse, so the last chunk turns round at once.
    return from_rows("looped", ranks, in_turn(lambda context: context.forwards, units=by_chunk, reverse_backwards=True))


@published(
    "Interleaved zero bubble",
    "torch.distributed.pipelining, ScheduleInterleavedZeroBubble; after Qi et al. 2024",
    idle="(p-1)(F+B-W)/v, p divides m",
    peak="min(m, p), p divides m",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def interleaved_zb(ranks: int, group: int | None = None, *, costs: Costs | None = None) -> Transform:
    """ZB-H1 over v chunks a rank: the weight gradients of interleaved 1F1B wait and fill the drain.

    Rank r of p warms up with (p-r-1) + (v-1)p forwards. Its Ws lag r Is behind, so every rank holds p microbatches.

    Args:
        ranks: the number of ranks.
        group: of `interleaved`. One of g > p instead of p holds (v-1)(g-p)/v microbatches more.
        costs: of `interleaved`.

    Raises:
        ValueError: a group of fewer microbatches than ranks.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.interleaved_zb(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2  .   .  3I0 3W0 3I1 3W1 3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1 |  .  1F0 1F1 1F2 4F0 4F1  .  4I0 4F2 4I1 4W0 4I2 4W1 1I0 4W2 1I1 1W0 1I2 1W1 1W2
    rank 2 |  .   .  2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2I0 5W1 2I1 5W2 2I2 2W0 2W1 2W2
    """
    return in_rounds(
        ranks,
        checked_group(ranks, group, ranks, None),
        warm_up=lambda context, size: context.later_ranks + (context.chunks - 1) * size,
        # Rank r warms up with r forwards fewer than the first, and holds the `wres` of r more W's: all hold p.
        lag=lambda context: context.rank,
        costs=costs,
    )


@published(
    "Group-interleaved 1F1B",
    "Wan et al. 2025 (PipeOffload, arXiv 2503.01328)",
    idle="(p-1)(F+B)/v, p divides m",
    peak="min(m, ((v-1)g + p - r)/v), g=p",
    accepts="stages a multiple of p; any m; p/2 <= group <= p",
    stages_per_rank=2,
    refuses=even_chunks,
)
def group_interleaved(ranks: int, group: int | None = None) -> Transform:
    """Interleaved 1F1B in groups of g microbatches with half the warm-up.

    A rank sends its input gradient before it computes the weight gradient, so rank r of p warms up with only (p-r-1) +
    (v-1)g forwards. A smaller group holds less. Each microbatch that it has less than p costs up to (v-1)(F+B-W)/v
    seconds.

    Args:
        ranks: the number of ranks.
        group: microbatches of a group, from ranks/2 to ranks; by default `ranks`.

    Raises:
        ValueError: another group. Fewer than half the ranks wait for each other; more than ranks hold more for nothing.

    >>> import fpipe
    >>> schedule = fpipe.schedules.group_interleaved(3, group=2)
    >>> print(fpipe.plot(fpipe.chain(fpipe.split(3), schedule)(fpipe.program(6))))
    rank 0 | 0F0 0F1  .  3F0 3F1 0F2  .   .  3I0 3W0  .  3I1 3W1 3F2 0I0 0W0  .  0I1 0W1 3I2 3W2  .  0I2 0W2
    rank 1 |  .  1F0 1F1  .  4F0 4F1  .  4I0 4W0 1F2 4I1 4W1  .  1I0 1W0 4F2 1I1 1W1 4I2 4W2  .  1I2 1W2  .
    rank 2 |  .   .  2F0 2F1  .  5F0 5I0 5W0 5F1 5I1 5W1 2F2 2I0 2W0 2I1 2W1 5F2 5I2 5W2  .  2I2 2W2  .   .
    """
    return in_rounds(
        ranks,
        checked_group(ranks, group, -(-ranks // 2), ranks) or ranks,
        warm_up=lambda context, size: context.later_ranks + (context.chunks - 1) * size,
        # Each W right after its I, whose gradient is on its way by then.
        lag=lambda context: 0,
    )


def checked_group(ranks: int, group: int | None, minimum: int, maximum: int | None) -> int | None:
    """Return the group if it is within the limits or None, else raise ValueError."""
    if group is None:
        return None
    if type(group) is int and minimum <= group and (maximum is None or group <= maximum):
        return group
    limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    reason = "with fewer, the ranks wait for each other for ever" + ("; more hold more for nothing" if maximum else "")
    raise ValueError(f"group is {limits} for {ranks} ranks ({reason}); found {group!r}.")


# 1F1B over slices of sequences, so that a rank warms up and drains by slices instead of whole microbatches.


@published(
    "Seq1F1B",
    "Sun et al. 2024, arXiv 2406.03488, figure 3",
    idle="(p-1)T/Q",
    peak="min(m, (p-r-1+Q)/Q)",
    accepts="any; models that are causal along the sequence",
    slices=True,
)
def seq1f1b(ranks: int, *, slices: int | None = None) -> Transform:
    """1F1B over slices of sequences: forwards from the first slice up, backwards from the last slice down.

    The backward starts at the last slice, so rank r of p warms up with p-r-2+Q forwards for Q slices. The bubble is
    that of 1F1B divided by Q. A rank holds p-r-1 slices and one whole microbatch. A later slice of causal attention
    takes longer, so a real step takes a little more than the formula; `slice_sequence(sizes=)` before it evens them.

    Args:
        ranks: the number of ranks.
        slices: how many slices a sequence has; by default as the program is sliced already, or else 4.

    Raises:
        ProgramError: the program has another number of slices.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.seq1f1b(2, slices=2))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0.0 0F0.1 0F1.0   .   0B0.1 0F1.1 0B0.0   .   0B1.1 0B1.0
    rank 1 |   .   1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0   .
    """
    ordered = from_rows("linear", ranks, _rows)

    @as_transform
    def transform(program: Program) -> Program:
        if program.slices == 1:
            program = slice_sequence(4 if slices is None else slices)(program)
        elif slices not in (None, program.slices):
            raise ProgramError(f"seq1f1b(slices={slices}): this program has {program.slices} slices already.")
        return ordered(program)

    return transform


def _rows(program: Program, placement: list[int]) -> list[list[Key]]:
    # The last slice of a microbatch turns round first: forwards run up the slices, backwards run down. The unit of the
    # warm-up is a slice, and `slices` forwards pass before the first one can turn round.
    ranks, slices, microbatches = 1 + max(placement), program.slices, program.microbatches
    slice_indices = [None] if slices == 1 else list(range(slices))
    forwards = [(index, piece) for index in range(microbatches) for piece in slice_indices]
    backwards = [(index, piece) for index in range(microbatches) for piece in reversed(slice_indices)]

    def row(rank: int) -> Iterator[Key]:
        stages = [stage for stage, stage_rank in enumerate(placement) if stage_rank == rank]
        warm_up = min(len(forwards), ranks - rank - 2 + slices)
        for turn in range(len(forwards) + warm_up):
            if turn < len(forwards):
                yield from (("F", stage, *forwards[turn]) for stage in stages)
            if turn >= warm_up:
                yield from (("B", stage, *backwards[turn - warm_up]) for stage in reversed(stages))

    return [list(row(rank)) for rank in range(ranks)]
