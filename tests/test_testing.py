"""`fpipe.testing`: checking a schedule names the law that it breaks."""

from collections.abc import Callable
from typing import Any

import pytest

import fpipe
from fpipe.program import Program
from fpipe.testing import check_schedule
from tests.refusals import refusals

Transform = Callable[[Program], Program]


def test_a_registered_name_is_checked_at_the_sizes_it_serves(monkeypatch: pytest.MonkeyPatch):
    about = fpipe.schedules.about("gpipe")
    schedule = fpipe.schedules.Schedule(
        "odd", about.factory, 2, refuses=lambda p, s, m: "too few" if m < 2 * p else None
    )
    monkeypatch.setitem(fpipe.schedules.registry.SCHEDULE_BY_NAME, "odd", schedule)
    report = check_schedule("odd", ranks=(1, 2), microbatches=(2, 3, 4), examples=2)
    assert [tuple(size) for size in report.sizes] == [(1, 2, 2), (1, 3, 2), (1, 4, 2), (2, 4, 4)]


def deadlocked(ranks: int) -> Transform:
    """Deadlock from two microbatches on two ranks on: rank 1 runs all forwards first, rank 0 a backward in between."""

    def rows(program: Program) -> list[list[str]]:
        m = program.microbatches
        rank_0 = [f"0{kind}{index}" for index in range(m) for kind in "FB"]
        return [rank_0, [f"1F{index}" for index in range(m)] + [f"1B{index}" for index in range(m)]][:ranks]

    return lambda program: fpipe.chain(fpipe.place("linear", ranks=ranks), fpipe.reorder(rows))(program)


def on_one_rank(ranks: int) -> Transform:
    """Leave every rank but the first without work."""
    return fpipe.schedules.gpipe(1)


def with_wrong_rows(ranks: int) -> Transform:
    """Feed the rows of microbatch 0 to the last microbatch too."""

    def transform(program: Program) -> Program:
        program = fpipe.schedules.gpipe(ranks)(program)
        text = str(program).replace(f"index={program.microbatches - 1}", "index=0")
        return Program.parse(text)

    return transform


def without_outputs(ranks: int) -> Transform:

    return fpipe.chain(fpipe.schedules.gpipe(ranks), fpipe.merge(outputs=False))


def raising(ranks: int) -> Transform:
    raise KeyError(ranks)


def check_small(schedule: Callable[[int], Transform]) -> object:
    return check_schedule(schedule, ranks=(1, 2), microbatches=(1, 2, 3), examples=20)


test_a_broken_law_is_named_at_the_smallest_size = refusals(
    globals(),
    """
check_schedule(fpipe.schedules.gpipe(2))
    TypeError: a schedule is a function of ranks; found a transform. Hand in lambda ranks: ...
check_small(deadlocked)
    BrokenLaw: deadlocked at ranks=2, microbatches=2, stages=2: it makes a program of these sizes. 2 ops wait for each
    other in a circle
check_small(on_one_rank)
    BrokenLaw: on_one_rank at ranks=2, microbatches=1, stages=2: it uses every rank. the program is on 1 ranks.
    rank 0 | 0F0 1F0 1B0 0B0
check_small(with_wrong_rows)
    BrokenLaw: stages=1: its gradients on DrawnModel(inputs=('batch',), tied=()), 3 rows, are those of plain autograd
check_small(without_outputs)
    BrokenLaw: without_outputs at ranks=1, microbatches=1, stages=1: it is complete. the result outputs is lost.
check_small(raising)
    BrokenLaw: raising at ranks=1, microbatches=1, stages=1: it makes a program of these sizes. KeyError: 1
""",
)


def head_by_itself(ranks: int) -> Any:
    """Order blocks as 1F1B does, and put one stage more, the head, on the last rank."""
    return fpipe.chain(
        fpipe.place([*range(ranks), ranks - 1]), fpipe.schedules.from_priority(backwards_first, ranks=ranks)
    )


def backwards_first(op: Any, state: Any) -> Any:
    return op.kind == "F", op.microbatch, op.stage


def test_a_schedule_may_have_a_stage_more_than_ranks(monkeypatch: pytest.MonkeyPatch):
    """Heads are stages of their own in many nets; the registry took a whole number of stages a rank."""
    registry = fpipe.schedules.registry
    monkeypatch.setattr(registry, "SCHEDULE_BY_NAME", dict(registry.SCHEDULE_BY_NAME))
    fpipe.schedules.register("head_by_itself", head_by_itself, stages_per_rank=lambda ranks: ranks + 1)
    assert fpipe.schedules.about("head_by_itself").program(3, 4).placement == (0, 1, 2, 2)
    assert fpipe.compare(["head_by_itself", "gpipe"], 3, 4).rows[0].name == "head_by_itself"
    checked = check_schedule("head_by_itself", ranks=(1, 3), microbatches=(2,), examples=3)
    assert [size.stages for size in checked.sizes] == [2, 4]
    unregistered = check_schedule(
        head_by_itself, ranks=(2,), microbatches=(2,), stages_per_rank=lambda ranks: ranks + 1, examples=1
    )
    assert [size.stages for size in unregistered.sizes] == [3]
