"""Warm up with forwards, then do one forward and one backward in turn: the pattern of all schedules of fixed order.

    warm-up 2             F0 F1 | F2 B0 | F3 B1 | B2 B3
    the same, W lag 1     F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 I3 W2 W3

A schedule says how many forwards a rank warms up with, in which order it takes its chunks and microbatches, and, if its
backwards are split, how many I's a W stays behind. Nothing else tells GPipe, 1F1B, their interleaved kin and the
handcrafted zero-bubble schedules apart.
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
        """Ranks between this one and the last: how many forwards come before the first backward can be there."""
        return self.ranks - 1 - self.rank

    @property
    def forwards(self) -> int:
        """How many forwards the rank has."""
        return self.chunks * self.microbatches


def in_turn(
    warm_up: Callable[[RankContext], int],
    *,
    units: Callable[[RankContext], Sequence[Unit]] | None = None,
    lag: Callable[[RankContext], int] | None = None,
    last_first: bool = False,
) -> Callable[[Program, list[int]], list[list[Key]]]:
    """The rows of this pattern for a program whose stages are placed.

    Args:
        warm_up: how many forwards a rank does before it takes turns.
        units: the order of the forwards of a rank that has each stage as a chunk; by default all its stages are one,
            and go microbatch by microbatch. Its backwards keep that order, with the last chunk first. A unit of a
            microbatch that the program does not have holds a place and is left out.
        lag: splits the backwards: how many I's a W stays behind its own.
        last_first: backwards take the forwards in reverse instead, the last microbatch first.
    """

    def rows(program: Program, placed: list[int]) -> list[list[Key]]:
        count, ranks = program.microbatches, 1 + max(placed)
        made: list[list[Key]] = []
        for rank in range(ranks):
            own = [stage for stage, at in enumerate(placed) if at == rank]
            chunks = [own] if units is None else [[stage] for stage in own]
            context = RankContext(rank, ranks, len(chunks), count)
            forwards = [(0, index) for index in range(count)] if units is None else units(context)
            mirrored = [(len(chunks) - 1 - chunk, index) for chunk, index in forwards]
            backwards = forwards[::-1] if last_first else mirrored
            row = _row(chunks, forwards, backwards, warm_up(context), lag and lag(context))
            made.append([cell for cell in row if cell[2] < count])
        return made

    return rows


def _row(
    chunks: list[list[int]], forwards: Sequence[Unit], backwards: Sequence[Unit], warm_up: int, lag: int | None
) -> list[tuple[str, int, int, None]]:
    """The cells of a rank: a forward goes up through the stages of a chunk, a backward comes back down."""

    def cells(kind: str, unit: Unit) -> list[tuple[str, int, int, None]]:
        stages = chunks[unit[0]]
        return [(kind, stage, unit[1], None) for stage in (stages if kind == "F" else stages[::-1])]

    row = [cell for unit in forwards[:warm_up] for cell in cells("F", unit)]
    ahead = len(forwards) - warm_up
    for turn, unit in enumerate(backwards):
        if turn < ahead:
            row += cells("F", forwards[warm_up + turn])
        row += cells("B" if lag is None else "I", unit)
        if lag is not None and turn >= lag:
            row += cells("W", backwards[turn - lag])
    if lag:
        row += [cell for unit in backwards[max(0, len(backwards) - lag) :] for cell in cells("W", unit)]
    return row


def even_chunks(ranks: int, stages: int, microbatches: int) -> str | None:
    """Why sizes are refused by the schedules that need as many chunks on every rank, or None."""
    if stages % ranks == 0:
        return None
    return (
        f"{stages} stages on {ranks} ranks leave some ranks more chunks than others; cut the model into a multiple of "
        f"{ranks} stages, such as {-(-stages // ranks) * ranks}."
    )


def two_stages(ranks: int, stages: int, microbatches: int) -> str | None:
    """Why sizes are refused by schedules that need two stages on every rank, or None."""
    if stages == 2 * ranks:
        return None
    return (
        f"a V over {ranks} ranks has {2 * ranks} stages, down and up; this program has {stages}. Cut the model into "
        f"{2 * ranks}."
    )
