"""Both ends feed the pipeline, and each rank runs a forward of one end together with a backward of the other.

DualPipe is its own mirror image: ranks r and p-1-r do the same with the two directions exchanged. So the turns of one
half describe it, and those turns on ranks of which each has an early and a late stage are DualPipeV. For a rank, way 0
is the one that comes from its own end, way 1 the one that has been through the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from fpipe.program import Program, building
from fpipe.schedules.overlap import exchanges_of, together
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Cell, Key
from fpipe.transforms.place import stage_ranks, two_ways
from fpipe.transforms.reorder import by_table

Way = tuple[Sequence[int], int]
"""The stages that a rank runs of one way, and the first microbatch that comes that way."""


def _enough(ranks: int, microbatches: int) -> str | None:
    if microbatches < 2 * ranks:
        return (
            f"the number of microbatches is at least twice that of ranks, {2 * ranks} for {ranks}, found "
            f"{microbatches}: with fewer the ends never meet. Put fpipe.split({2 * ranks}) or more before it."
        )
    return None


def _both_even(ranks: int, stages: int, microbatches: int) -> str | None:
    for word, found in (("ranks", ranks), ("microbatches", microbatches)):
        if found % 2:
            return f"the number of {word} is even, found {found}: each direction has one half of them."
    return _enough(ranks, microbatches)


@published(
    "DualPipe",
    "DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, figure 5, table 2",
    idle="(p/2-1)(F+2B-W) for F=B, where a pair takes F+B+W",
    peak="p+1",
    accepts="p and m even, m >= 2p",
    refuses=_both_even,
)
def dualpipe(ranks: int, *, overlap: bool = True) -> Transform:
    """Two directions, and a forward of one runs together with a backward of the other (DualPipe, DeepSeek-V3).

    Stage s is on ranks s and p-1-s; its gradients meet in an ADD. The first half of the microbatches goes down, the
    second up. Weight gradients that can wait fill the start and the end. With F&B for the time of a pair the bubble is
    (p/2-1)(F&B+B-3W) for F=B, in which B is the full backward; p+1 microbatches are held.

    Args:
        ranks: even.
        overlap: whether a forward and a backward that can run at once are one PAIR; else they are F, I, W in turn.
            Of stages some of which are exchanges, their stages go in turn (see `schedules/overlap.py`).

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.dualpipe(2))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 |    0F0       1F2       0F1       1B2    (1F3;0B0)    1B3       0I1       0W1
    rank 1 |    0F2       1F0       0F3       1B0    (1F1;0B2)    1B1       0I3       0W3
    """

    _said(overlap)

    @transforming
    def transform(program: Program) -> Program:
        with building():
            down, homes = two_ways(program.stages, ranks)
            shares = [[stage for stage, rank in enumerate(down) if rank == own] for own in range(ranks)]
            half, over = program.microbatches // 2, exchanges_of(program)
            rows: list[list[Cell]] = []
            for rank in range(ranks):
                ways = ((shares[rank], 0), (shares[ranks - 1 - rank], half))
                outer = min(rank, ranks - 1 - rank)
                turns = _turns(outer, ranks // 2, half, overlap)
                rows.append([*_cells(turns, ways if rank == outer else ways[::-1], over)])
            return by_table(program, rows, move=True, homes=homes)

    return transform


def _two_stages(ranks: int, stages: int, microbatches: int) -> str | None:
    if stages < 2 * ranks:
        return f"each rank has an early and a late stage, {2 * ranks} for {ranks} ranks; this program has {stages}."
    return _enough(ranks, microbatches)


@published(
    "DualPipeV",
    "Qi et al. 2025, DualPipe cut in half; torch.distributed.pipelining",
    idle="(p-1)(F+2B-W)/2 for F=B, where a pair takes F+B+W",
    peak="p+1/2 for two chunks of one size a rank",
    accepts="m >= 2p; at least 2 stages a rank",
    stages_per_rank=2,
    refuses=_two_stages,
)
def dualpipev(ranks: int, *, overlap: bool = True) -> Transform:
    """DualPipe cut in half: one copy of the parameters, placed in a V (0 1 .. p-1 p-1 .. 1 0).

    A rank does with its early and its late stage what DualPipe does with its two directions. The bubble is
    (p-1)(F&B+B-3W)/2 for F=B (B the full backward), and p+1/2 microbatches are held. The order is that of
    `torch.distributed.pipelining.ScheduleDualPipeV`, cell by cell. More stages make larger chunks of neighbours; where
    they are no multiple of 2p some are larger than others, and the formulas of one size do not hold.

    Args:
        ranks: any number.
        overlap: whether a forward and a backward that can run at once are one PAIR; else they are F, I, W in turn.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.dualpipev(2))(fpipe.program(4))
    >>> for rank, cells in enumerate(program.table()):
    ...     print(f"rank {rank} |", *cells)
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3
    """

    _said(overlap)

    @transforming
    def transform(program: Program) -> Program:
        with building():
            chunks = stage_ranks("linear", program.stages, 2 * ranks)
            shares = [[stage for stage, chunk in enumerate(chunks) if chunk == own] for own in range(2 * ranks)]
            over, count = exchanges_of(program), program.microbatches
            rows = [
                [*_cells(_turns(rank, ranks, count, overlap), ((shares[rank], 0), (shares[~rank], 0)), over)]
                for rank in range(ranks)
            ]
            return by_table(program, rows, move=True)

    return transform


def _said(overlap: bool) -> None:
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap is True or False, whether a forward and a backward are one PAIR; found {overlap!r}.")


def _turns(rank: int, ranks: int, microbatches: int, overlap: bool) -> Iterator[tuple[str, int]]:
    """Turns of a rank: F, B, I of a way, "FB" (F of the way, B of the other), W of the oldest I without one.

    Ranks count from the outer end; `microbatches` come each way. The phases are those of figure 5.
    """
    further = ranks - 1 - rank

    def both(way: int) -> list[tuple[str, int]]:
        return [("FB", way)] if overlap else [("F", way), ("I", 1 - way), ("W", 1 - way)]

    yield from [("F", 0)] * (2 * further)
    yield from [("F", 0), ("F", 1)] * (rank + 1)
    yield from [("I", 1), ("W", 1), ("F", 1)] * further
    for index in range(microbatches - 2 * ranks + rank + 1):
        if index == 0 and not further:  # in the middle the backward is of the forward just before: not at once
            yield from [("F", 0), ("B", 1)]
        else:
            yield from both(0)
        yield from both(1)
    yield from [("B", 1), *both(1)] * further
    for index in range(2 * (rank + 1)):  # from the middle of the drain on, weight gradients wait
        yield ("B" if index <= rank else "I"), 1 - index % 2
    yield from [("W", 0), ("I", 0)] * further
    yield from [("W", 0)] * (rank + 1)


def _cells(turns: Iterator[tuple[str, int]], ways: tuple[Way, ...], over: Collection[int]) -> Iterator[Cell]:
    """The cells of a rank's turns: each way counts its forwards and its backwards; stages `over` are exchanges."""
    forwards, backwards = ([count(first) for _, first in ways] for _ in range(2))
    owed: deque[tuple[int, int]] = deque()

    def keys(kind: str, way: int, microbatch: int) -> list[Key]:
        stages = ways[way][0] if kind == "F" else ways[way][0][::-1]
        return [(kind, stage, microbatch, None) for stage in stages]

    for kind, way in turns:
        if kind == "W":
            yield from keys("W", *owed.popleft())
        elif kind == "FB":
            one, other = next(forwards[way]), next(backwards[1 - way])
            yield from together(ways[way][0], one, ways[1 - way][0][::-1], other, over)
        else:
            microbatch = next((forwards if kind == "F" else backwards)[way])
            if kind == "I":
                owed.append((way, microbatch))
            yield from keys(kind, way, microbatch)
