"""1F1B over slices of sequences, so that a rank warms up and drains by slices instead of whole microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.program import Program, ProgramError
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows
from fpipe.transforms.slice_sequence import slice_sequence


@published(
    "Seq1F1B",
    "Sun et al. 2024, arXiv 2406.03488, figure 3",
    idle="(p-1)T/Q",
    peak="min(m, (p-r-1+Q)/Q)",
    accepts="any; models that are causal along the sequence",
    slices=True,
)
def seq1f1b(ranks: int, *, slices: int | None = None) -> Transform:
    """1F1B whose turns are slices: forwards up the slices of a microbatch, backwards down (Seq1F1B, 2406.03488).

    The last slice of a microbatch is the first that can turn round, so rank r of p warms up with p-r-2+Q forwards for Q
    slices. With equal slices the bubble is that of 1F1B divided by Q, and a rank holds p-r-1 slices beside one whole
    microbatch. Slices are cut at equal lengths; since a later slice of causal attention looks back further, its ops
    take longer, and the formula is a little better than the run.

    Args:
        ranks: how many.
        slices: how many slices a sequence has; by default as the program is sliced already, or else 4.

    Raises:
        ProgramError: the program has another number of slices.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.seq1f1b(2, slices=2))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0.0 0F0.1 0F1.0   .   0B0.1 0F1.1 0B0.0   .   0B1.1 0B1.0
    rank 1 |   .   1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0   .
    """
    ordered = in_rows("linear", ranks, _rows)

    @transforming
    def transform(program: Program) -> Program:
        if program.slices == 1:
            program = slice_sequence(4 if slices is None else slices)(program)
        elif slices not in (None, program.slices):
            raise ProgramError(f"seq1f1b(slices={slices}): this program has {program.slices} slices already.")
        return ordered(program)

    return transform


def _rows(program: Program, placement: list[int]) -> list[list[Key]]:
    ranks, slices, microbatches = 1 + max(placement), program.slices, program.microbatches
    each = [None] if slices == 1 else list(range(slices))
    forwards = [(index, piece) for index in range(microbatches) for piece in each]
    backwards = [(index, piece) for index in range(microbatches) for piece in reversed(each)]

    def row(rank: int) -> Iterator[Key]:
        stages = [stage for stage, own in enumerate(placement) if own == rank]
        warm_up = min(len(forwards), ranks - rank - 2 + slices)
        for turn in range(len(forwards) + warm_up):
            if turn < len(forwards):
                yield from (("F", stage, *forwards[turn]) for stage in stages)
            if turn >= warm_up:
                yield from (("B", stage, *backwards[turn - warm_up]) for stage in reversed(stages))

    return [list(row(rank)) for rank in range(ranks)]
