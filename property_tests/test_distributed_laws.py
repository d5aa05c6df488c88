"""Two processes compute what one does, bit by bit, whatever the program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

import fpipe
from property_tests.strategies import few
from property_tests.test_gradients import Run, runs
from tests.processes import Processes
from tests.test_distributed import both


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    made.close()


def differs(rank: int, run: Run) -> list[str]:
    return both(rank, run.program, run.net.model, run.net.params(run.seed), run.net.batch(run.rows, run.seed))


@few(12)
@given(run=runs().filter(lambda run: run.program.ranks == 2 and "free()" not in run.chain.steps))
def test_two_processes_give_the_bits_of_one(pair: Processes, run: Run):
    fpipe.check(run.program)
    assert pair.each(differs, run) == [[], []]
