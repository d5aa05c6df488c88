"""The two schedules that all others are measured against: GPipe and 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter

from fpipe.program import Program, ProgramError
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows

Turns = Iterator[tuple[str, int]]
"""The turns of one rank: ("F", microbatch) or ("B", microbatch), each for all stages of the rank."""


@published(
    "GPipe",
    "Huang et al. 2019, figure 2c",
    idle="(p-1)(T+2c)",
    peak="m",
)
def gpipe(ranks: int) -> Transform:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, figure 2c).

    Bubble (p-1)/(m+p-1) for p ranks and m microbatches; every microbatch is held at the peak.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
    rank 1 |  .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
    rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .
    """

    def turns(rank: int, ranks: int, microbatches: int) -> Turns:
        yield from (("F", index) for index in range(microbatches))
        yield from (("B", index) for index in range(microbatches))

    return in_rows("linear", ranks, _each_rank(turns))


@published(
    "1F1B (DAPPLE, PipeDream-flush)",
    "Narayanan et al. 2021 (Megatron-LM), figure 3",
    idle="(p-1)T + [2(p-1)m/p + 2(p-2)]c",
    peak="min(m, p-r)",
)
def one_f_one_b(ranks: int) -> Transform:
    """Warm up, then one forward and one backward in turn, then drain (PipeDream-flush; Megatron 2021, figure 3).

    Rank r of p warms up with p-r-1 forwards, so that it never holds more than p-r microbatches. The bubble is GPipe's,
    (p-1)/(m+p-1). Fewer microbatches than ranks are fine.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
    rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
    rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
    """

    def turns(rank: int, ranks: int, microbatches: int) -> Turns:
        warm_up = min(microbatches, ranks - rank - 1)
        yield from (("F", index) for index in range(warm_up))
        for index in range(microbatches - warm_up):
            yield "F", warm_up + index
            yield "B", index
        yield from (("B", index) for index in range(microbatches - warm_up, microbatches))

    return in_rows("linear", ranks, _each_rank(turns))


def _each_rank(turns: Callable[[int, int, int], Turns]) -> Callable[[Program, list[int]], list[list[Key]]]:
    """Rows from the turns of each rank: a forward goes through the rank's stages, a backward back through them."""

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        if set(map(itemgetter(3), program.ops)) != {None}:
            raise ProgramError(
                "this program has sequence slices, which this schedule does not order; use seq1f1b or from_table."
            )
        ranks, microbatches = 1 + max(placement), program.microbatches
        stages = [[stage for stage, rank in enumerate(placement) if rank == own] for own in range(ranks)]
        return [
            [
                (kind, stage, index, None)
                for kind, index in turns(rank, ranks, microbatches)
                for stage in (stages[rank] if kind == "F" else reversed(stages[rank]))
            ]
            for rank in range(ranks)
        ]

    return rows
