"""`fpipe.testing`: a schedule that breaks a law is told which."""

from collections.abc import Callable

import pytest

import fpipe
from fpipe.program import Program
from fpipe.testing import check_schedule
from tests.refusals import refusals

Transform = Callable[[Program], Program]


def test_a_registered_name_is_checked_at_the_sizes_it_serves(monkeypatch: pytest.MonkeyPatch):
    about = fpipe.schedules.about("gpipe")
    odd = fpipe.schedules.Schedule("odd", about.factory, 2, refuses=lambda p, s, m: "too few" if m < 2 * p else None)
    monkeypatch.setitem(fpipe.schedules.registry.SCHEDULE_BY_NAME, "odd", odd)
    found = check_schedule("odd", ranks=(1, 2), microbatches=(2, 3, 4), examples=2)
    assert [tuple(size) for size in found.sizes] == [(1, 2, 2), (1, 3, 2), (1, 4, 2), (2, 4, 4)]


def greedy(ranks: int) -> Transform:
    """Wrong from two microbatches on two ranks on: rank 1 wants all forwards first, rank 0 one backward in between."""

    def rows(program: Program) -> list[list[str]]:
        m = program.microbatches
        first = [f"0{kind}{index}" for index in range(m) for kind in "FB"]
        return [first, [f"1F{index}" for index in range(m)] + [f"1B{index}" for index in range(m)]][:ranks]

    return lambda program: fpipe.chain(fpipe.place("linear", ranks=ranks), fpipe.reorder(rows))(program)


def idle(ranks: int) -> Transform:
    """Leaves all ranks but the first without work."""
    return fpipe.schedules.gpipe(1)


def wrong(ranks: int) -> Transform:
    """Every microbatch takes the rows of the first."""

    def transform(program: Program) -> Program:
        program = fpipe.schedules.gpipe(ranks)(program)
        text = str(program).replace(f"index={program.microbatches - 1}", "index=0")
        return Program.parse(text)

    return transform


def lossy(ranks: int) -> Transform:
    """Forgets the outputs."""
    return fpipe.chain(fpipe.schedules.gpipe(ranks), fpipe.merge(outputs=False))


def raises(ranks: int) -> Transform:
    raise KeyError(ranks)


def checked(schedule: Callable[[int], Transform]) -> object:
    return check_schedule(schedule, ranks=(1, 2), microbatches=(1, 2, 3), examples=20)


test_a_schedule_that_breaks_a_law_is_told_which_at_the_smallest_size = refusals(
    globals(),
    """
checked(greedy)
    BrokenLaw: greedy at ranks=2, microbatches=2, stages=2: it makes a program of these sizes. 2 ops wait for each other
    in a circle
checked(idle)
    BrokenLaw: idle at ranks=2, microbatches=1, stages=2: it uses every rank. the program is on 1 ranks.
    rank 0 | 0F0 1F0 1B0 0B0
checked(wrong)
    BrokenLaw: stages=1: its gradients on DrawnModel(inputs=('batch',), tied=()), 3 rows, are those of plain autograd
checked(lossy)
    BrokenLaw: lossy at ranks=1, microbatches=1, stages=1: it is complete. the result outputs is lost.
checked(raises)
    BrokenLaw: raises at ranks=1, microbatches=1, stages=1: it makes a program of these sizes. KeyError: 1
""",
)
