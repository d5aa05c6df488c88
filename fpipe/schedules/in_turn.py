"""Warm up with forwards, then do one forward and one backward in turn: the pattern of all schedules of fixed order.

    warm-up 2             F0 F1 | F2 B0 | F3 B1 | B2 B3
    the same, W lag 1     F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 I3 W2 W3

A schedule gives the number of forwards of the warm-up, the order of chunks and microbatches, and, if backwards are
split, how many I's a W lags behind. GPipe, 1F1B, their interleaved variants and the handcrafted zero-bubble schedules
differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fpipe.program import Program
from fpipe.transforms.cells import Key

Unit = tuple[int, int]
"""A chunk of a rank's stages, and a microbatch."""


class RankContext(NamedTuple):
    """The sizes that a rank's row depends on."""

    rank: int
    ranks: int
    chunks: int
    microbatches: int

    @property
    def later_ranks(self) -> int:
        """The number of ranks behind this one: so many forwards run before the first backward can arrive."""
        return self.ranks - 1 - self.rank

    @property
    def forwards(self) -> int:
        """The number of forwards of the rank."""
        return self.chunks * self.microbatches


def in_turn(
    warm_up: Callable[[RankContext], int],
    *,
    units: Callable[[RankContext], Sequence[Unit]] | None = None,
    lag: Callable[[RankContext], int] | None = None,
    reverse_backwards: bool = False,
) -> Callable[[Program, list[int]], list[list[Key]]]:
    """Return a function that orders a placed program in this pattern.

    Args:
        warm_up: the number of forwards that a rank runs before its first backward.
        units: the order of a rank's forwards, if each of its stages is a chunk; by default all its stages are one
            chunk, and run microbatch by microbatch. Backwards keep that order, with the last chunk first. A unit of a
            microbatch that the program does not have takes a place, but runs nothing.
        lag: splits the backwards; the number of I's that a W runs behind its own I.
        reverse_backwards: whether backwards run in the reverse order of the forwards, the last microbatch first.
    """

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        microbatches, ranks = program.microbatches, 1 + max(placement)
        table: list[list[Key]] = []
        for rank in range(ranks):
            rank_stages = [stage for stage, stage_rank in enumerate(placement) if stage_rank == rank]
            chunks = [rank_stages] if units is None else [[stage] for stage in rank_stages]
            context = RankContext(rank, ranks, len(chunks), microbatches)
            forwards = [(0, microbatch) for microbatch in range(microbatches)] if units is None else units(context)
            # The gradient reaches the last chunk first.
            mirrored = [(len(chunks) - 1 - chunk, microbatch) for chunk, microbatch in forwards]
            backwards = forwards[::-1] if reverse_backwards else mirrored
            row = _row(chunks, forwards, backwards, warm_up(context), lag and lag(context))
            # Padded units have microbatches beyond the last; they keep the turn but run nothing.
            table.append([cell for cell in row if cell[2] < microbatches])
        return table

    return rows


def _row(
    chunks: list[list[int]], forwards: Sequence[Unit], backwards: Sequence[Unit], warm_up: int, lag: int | None
) -> list[tuple[str, int, int, None]]:
    """Return the cells of a rank; a forward goes up through the stages of a chunk, a backward comes back down."""

    def cells(kind: str, unit: Unit) -> list[tuple[str, int, int, None]]:
        stages = chunks[unit[0]]
        return [(kind, stage, unit[1], None) for stage in (stages if kind == "F" else stages[::-1])]

    # After the warm-up the next forward stands before each backward, until the forwards run out: the drain.
    row = [cell for unit in forwards[:warm_up] for cell in cells("F", unit)]
    paired_forwards = len(forwards) - warm_up
    for turn, unit in enumerate(backwards):
        if turn < paired_forwards:
            row += cells("F", forwards[warm_up + turn])
        row += cells("B" if lag is None else "I", unit)
        # The W of `lag` backwards ago: so many `wres` are held at most.
        if lag is not None and turn >= lag:
            row += cells("W", backwards[turn - lag])
    # The W's that still lag when the last backward has run.
    if lag:
        row += [cell for unit in backwards[max(0, len(backwards) - lag) :] for cell in cells("W", unit)]
    return row


def even_chunks(ranks: int, stages: int, microbatches: int) -> str | None:
    """Return why a schedule refuses sizes with unequal numbers of chunks, or None."""
    if stages % ranks == 0:
        return None
    return (
        f"{stages} stages on {ranks} ranks leave some ranks more chunks than others; cut the model into a multiple of "
        f"{ranks} stages, such as {-(-stages // ranks) * ranks}."
    )


def two_stages(ranks: int, stages: int, microbatches: int) -> str | None:
    """Return why a schedule on a V refuses these sizes, or None."""
    if stages == 2 * ranks:
        return None
    return (
        f"a V over {ranks} ranks has {2 * ranks} stages, down and up; this program has {stages}. Cut the model into "
        f"{2 * ranks}."
    )
