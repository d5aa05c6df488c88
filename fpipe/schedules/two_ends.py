"""DualPipe and DualPipeV: both ends feed the pipeline; a forward of one runs with a backward of the opposite one.

DualPipe is its own mirror image: ranks r and p-1-r do the same with the two directions exchanged. So the turns of one
half describe it. The same turns on ranks that each have an early and a late stage are DualPipeV. For a rank,
direction 0 comes from its own end, direction 1 has been through the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from fpipe.program import Program, building
from fpipe.schedules.overlap import exchanges_of, overlapped_cells
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Cell, Key
from fpipe.transforms.place import bidirectional_ranks, stage_ranks, stages_by_rank
from fpipe.transforms.reorder import apply_table

Direction = tuple[Sequence[int], int]
"""The stages that a rank runs for one direction, and the first microbatch of that direction."""


def _refuse_few_microbatches(ranks: int, microbatches: int) -> str | None:
    if microbatches < 2 * ranks:
        return (
            f"the number of microbatches is at least twice that of ranks, {2 * ranks} for {ranks}, found "
            f"{microbatches}: with fewer the ends never meet. Put fpipe.split({2 * ranks}) or more before it."
        )
    return None


def _refuse_odd_sizes(ranks: int, stages: int, microbatches: int) -> str | None:
    for name, size in (("ranks", ranks), ("microbatches", microbatches)):
        if size % 2:
            return f"the number of {name} is even, found {size}: each direction has one half of them."
    return _refuse_few_microbatches(ranks, microbatches)


@published(
    "DualPipe",
    "DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, figure 5, table 2",
    idle="(p/2-1)(F+2B-W) for F=B, where a pair takes F+B+W",
    peak="p+1",
    accepts="p and m even, m >= 2p",
    refuses=_refuse_odd_sizes,
)
def dualpipe(ranks: int, *, overlap: bool = True) -> Transform:
    """Two directions: a forward of one runs together with a backward of the other (DeepSeek-V3).

    Stage s is on ranks s and p-1-s, and an ADD sums its gradients. The first half of the microbatches goes down the
    ranks, the second half up. Weight gradients that can wait fill the start and the end. If a pair takes F&B seconds
    and B is the full backward, the bubble is (p/2-1)(F&B+B-3W) for F=B.

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

    _check_overlap(overlap)

    @as_transform
    def transform(program: Program) -> Program:
        with building():
            rank_by_stage, homes = bidirectional_ranks(program.stages, ranks)
            shares = stages_by_rank(rank_by_stage, ranks)
            half, exchange_stages = program.microbatches // 2, exchanges_of(program)
            rows: list[list[Cell]] = []
            for rank in range(ranks):
                directions = ((shares[rank], 0), (shares[ranks - 1 - rank], half))
                # Ranks r and p-1-r do the same from their own ends, with the two directions exchanged.
                distance_from_end = min(rank, ranks - 1 - rank)
                turns = rank_turns(distance_from_end, ranks // 2, half, overlap)
                directions = directions if rank == distance_from_end else directions[::-1]
                rows.append([*cells_of_turns(turns, directions, exchange_stages)])
            return apply_table(program, rows, move=True, homes=homes)

    return transform


def _refuse_few_stages(ranks: int, stages: int, microbatches: int) -> str | None:
    if stages < 2 * ranks:
        return f"each rank has an early and a late stage, {2 * ranks} for {ranks} ranks; this program has {stages}."
    return _refuse_few_microbatches(ranks, microbatches)


@published(
    "DualPipeV",
    "Qi et al. 2025, DualPipe cut in half; torch.distributed.pipelining",
    idle="(p-1)(F+2B-W)/2 for F=B, where a pair takes F+B+W",
    peak="p+1/2 for two chunks of one size a rank",
    accepts="m >= 2p; at least 2 stages a rank",
    stages_per_rank=2,
    refuses=_refuse_few_stages,
)
def dualpipev(ranks: int, *, overlap: bool = True) -> Transform:
    """DualPipe cut in half: one copy of the parameters, placed in a V (0 1 .. p-1 p-1 .. 1 0).

    A rank pairs its early and its late stage as DualPipe pairs its two directions. The bubble is (p-1)(F&B+B-3W)/2 for
    F=B, where B is the full backward. The order is that of `torch.distributed.pipelining.ScheduleDualPipeV`, cell by
    cell. With more stages, neighbours form larger chunks. If 2p does not divide the stages, chunks differ in size, and
    the formulas do not hold.

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

    _check_overlap(overlap)

    @as_transform
    def transform(program: Program) -> Program:
        with building():
            chunks = stage_ranks("linear", program.stages, 2 * ranks)
            stages_by_chunk = stages_by_rank(chunks, 2 * ranks)
            exchange_stages, microbatches = exchanges_of(program), program.microbatches
            rows: list[list[Cell]] = []
            for rank in range(ranks):
                turns = rank_turns(rank, ranks, microbatches, overlap)
                directions = ((stages_by_chunk[rank], 0), (stages_by_chunk[~rank], 0))
                rows.append([*cells_of_turns(turns, directions, exchange_stages)])
            return apply_table(program, rows, move=True)

    return transform


def _check_overlap(overlap: bool) -> None:
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap is True or False, found {overlap!r}.")


def rank_turns(rank: int, ranks: int, microbatches: int, overlap: bool) -> Iterator[tuple[str, int]]:
    """Yield the turns of a rank as (kind, direction); ranks count from the outer end.

    "FB" is an F of the direction with a B of the opposite one; "W" the weight gradient of the oldest I without one.
    `microbatches` come from each direction. The phases are those of figure 5.
    """
    ranks_further_in = ranks - 1 - rank

    def forward_and_backward(direction: int) -> list[tuple[str, int]]:
        return [("FB", direction)] if overlap else [("F", direction), ("I", 1 - direction), ("W", 1 - direction)]

    # 1) Warm-up: forwards of direction 0, then of both, then split backwards of direction 1 with their W in the gaps.
    yield from [("F", 0)] * (2 * ranks_further_in)
    yield from [("F", 0), ("F", 1)] * (rank + 1)
    yield from [("I", 1), ("W", 1), ("F", 1)] * ranks_further_in
    # 2) Steady state: a forward of each direction with a backward of the opposite one.
    for index in range(microbatches - 2 * ranks + rank + 1):
        # In the middle the first backward is of the forward just before it, so they cannot run together.
        if index == 0 and not ranks_further_in:
            yield from [("F", 0), ("B", 1)]
        else:
            yield from forward_and_backward(0)
        yield from forward_and_backward(1)
    # 3) Drain: direction 0 has no forwards left.
    yield from [("B", 1), *forward_and_backward(1)] * ranks_further_in
    # 4) From the middle of the drain on, backwards are split, and the last W's fill what would be idle.
    for index in range(2 * (rank + 1)):
        yield ("B" if index <= rank else "I"), 1 - index % 2
    yield from [("W", 0), ("I", 0)] * ranks_further_in
    yield from [("W", 0)] * (rank + 1)


def cells_of_turns(
    turns: Iterator[tuple[str, int]], directions: tuple[Direction, ...], exchange_stages: Collection[int]
) -> Iterator[Cell]:
    """Yield the cells of a rank's turns, with the next microbatch of each direction and kind."""
    forwards, backwards = ([count(first_microbatch) for _, first_microbatch in directions] for _ in range(2))
    # I's whose W has not run yet, the oldest first.
    waiting_weights: deque[tuple[int, int]] = deque()

    def keys(kind: str, direction: int, microbatch: int) -> list[Key]:
        stages = directions[direction][0] if kind == "F" else directions[direction][0][::-1]
        return [(kind, stage, microbatch, None) for stage in stages]

    for kind, direction in turns:
        if kind == "W":
            yield from keys("W", *waiting_weights.popleft())
        elif kind == "FB":
            forward_microbatch, backward_microbatch = next(forwards[direction]), next(backwards[1 - direction])
            forward_stages, backward_stages = directions[direction][0], directions[1 - direction][0][::-1]
            yield from overlapped_cells(
                forward_stages, forward_microbatch, backward_stages, backward_microbatch, exchange_stages
            )
        else:
            microbatch = next((forwards if kind == "F" else backwards)[direction])
            if kind == "I":
                waiting_weights.append((direction, microbatch))
            yield from keys(kind, direction, microbatch)
