"""Schedules that users write as a priority or a generator: their orders, and the refusals of invalid ones."""

import math
import re
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

import fpipe
from fpipe.program import Op, Program, ProgramError
from fpipe.schedules import from_generator, from_priority
from fpipe.schedules.priority import RankState


def one_f_one_b(op: Op, now: RankState) -> tuple[bool, int]:
    return op.kind == "F", op.microbatch or 0


def forwards_first(op: Op, now: RankState) -> tuple[bool, int]:
    return op.kind != "F", op.microbatch or 0


def split_program(stages: int, microbatches: int) -> Program:
    return fpipe.split(microbatches)(fpipe.program(stages))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (3, 4), (4, 9)])
def test_backward_first_under_a_cap_is_one_f_one_b(ranks: int, microbatches: int):
    caps = [ranks - rank for rank in range(ranks)]
    scheduled = from_priority(one_f_one_b, ranks, cap=caps)(split_program(ranks, microbatches))
    assert scheduled == fpipe.schedules.one_f_one_b(ranks)(split_program(ranks, microbatches))


def test_the_cap_counts_recomputed_residuals():
    program = fpipe.chain(fpipe.split(4), fpipe.checkpoint("always"))(fpipe.program(2))
    scheduled = from_priority(forwards_first, 2, cap=1)(program)
    assert fpipe.simulate(scheduled).peak == (1, 1)


def test_a_key_is_told_time_rank_held_microbatches_and_sizes():
    calls: list[RankState] = []

    def key(op: Op, now: RankState) -> float:
        calls.append(now)
        return op.kind == "F"

    from_priority(key, 2, costs=fpipe.Costs(transfer=0.5))(split_program(2, 2))
    assert calls[0] == RankState(time=0.0, rank=0, held_microbatches=0.0, microbatches=2, stages=2)
    assert min(now.time for now in calls if now.rank == 1) == 1.5
    assert max(now.held_microbatches for now in calls) == 2


@pytest.mark.parametrize(
    ("key", "options", "sentence"),
    [
        (lambda op, now: None, {}, "key gave None for 0F0, on rank 0 at time 0; a key is a number, a tuple"),
        (lambda op, now: math.nan, {}, "key gave nan for 0F0"),
        (lambda op, now: op.cell if op.microbatch else 1, {}, "the keys do not compare, on rank 0 at time 0 ('<' not"),
        (
            lambda op, now: math.inf,
            {},
            "a dead end: after 0 of 8 ops nothing can go on.\n  rank 0 may go on, but the k",
        ),
        (forwards_first, {"cap": [2, 0]}, "cap is 0 on rank 1, but one microbatch holds 1"),
        (forwards_first, {"cap": [2]}, "cap lists 1 numbers for 2 ranks"),
    ],
)
def test_an_invalid_priority_is_refused(key: Any, options: dict[str, Any], sentence: str):
    with pytest.raises((ProgramError, ValueError, TypeError), match=re.escape(sentence)):
        from_priority(key, 2, **options)(split_program(2, 2))


def gpipe_cells(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    yield from (f"{rank}F{index}" for index in range(microbatches))
    yield from (f"{rank}B{index}" for index in range(microbatches))


def test_a_generator_gives_the_schedule():
    assert from_generator(gpipe_cells, 3)(split_program(3, 4)) == fpipe.schedules.gpipe(3)(split_program(3, 4))


def test_a_generator_may_yield_keys_and_idle_cells_under_a_placement():
    def cells(rank: int, ranks: int, microbatches: int) -> Iterator[Any]:
        yield None
        for stage in (rank, 3 - rank):
            yield from (("F", stage, index) for index in range(microbatches))
        yield "."
        for stage in (3 - rank, rank):
            yield from (f"{stage}B{index}" for index in range(microbatches))

    scheduled = from_generator(cells, 2, "v")(split_program(4, 2))
    assert scheduled.placement == (0, 1, 1, 0)
    assert scheduled.table()[1][:4] == ["1F0", "1F1", "2F0", "2F1"]


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        (lambda r, p, m: ["0F0", "0F9"] if r == 0 else gpipe_cells(r, p, m), "rank 0, cell 1: 0F9 names microbatch 9"),
        (lambda r, p, m: [*gpipe_cells(r, p, m), f"{r}X0"], "rank 0, cell 4: 'X' is not a kind of op"),
        (
            lambda r, p, m: [*gpipe_cells(r, p, m), 7],
            "a cell is text such as '2F0', or (kind, stage, microbatch, slice)",
        ),
        (
            lambda r, p, m: [(r, "F", 0)],
            "rank 0: (0, 'F', 0, None) is not a cell, such as '2F0', '(0F7;7B3)' or ('F', ",
        ),
        (lambda r, p, m: gpipe_cells(1 - r, p, m), "rank 0, cell 0: 1F0 is on rank 1 in this program."),
        (lambda r, p, m: gpipe_cells(r, p, m) if r else [], "rank 0 has no ops in the table"),
        (lambda r, p, m: None, "rank 0: the generator gave None; it yields cells such as '0F0'"),
        (lambda r, p, m: repeat("0F0"), "rank 0: 48 cells and no end; a generator stops after its last op."),
        (lambda r, p, m: repeat(None), "rank 0: 48 cells and no end; a generator stops after its last op."),
    ],
)
def test_an_invalid_generator_is_refused(cells: Any, sentence: str):
    with pytest.raises((ProgramError, TypeError), match=re.escape(sentence)):
        from_generator(cells, 2)(split_program(2, 2))
