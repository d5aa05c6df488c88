"""Searches under a cap: of schedules that move residuals, and of when shared out parameters are gathered."""

from __future__ import annotations

from typing import Any

import pytest

import fpipe
from fpipe.timing.amounts import NamedBytes
from tests.test_cli import out
from tests.test_search import quick, step


def test_a_bound_under_a_cap_is_none_of_what_leaves():
    """pipe_offload was said to be the best there can be, by a bound of orders whose residuals stay."""
    words: dict[str, Any] = {"ranks": 2, "microbatches": 6, "memory_cap": 1, "placement": "looped"}
    costs = fpipe.Costs(5, 6, 4)
    found = quick(4, costs, **words, without=())
    assert any(op.kind == "OFFLOAD" for op in found.program.ops)
    assert found.bound < fpipe.bounds(fpipe.place("looped", ranks=2)(step(4, 6)), costs, memory_cap=1).makespan


SIZES = NamedBytes({"res": 2.0, "params": 3.0}, replicas=2)
SHARED = fpipe.Costs(forward=5, backward_input=6, backward_weight=4, gather=1, scatter=1, bytes=SIZES)
FOUR: Any = {"ranks": 2, "microbatches": 4, "seconds": 0.04, "solver": "local", "placement": "looped"}


def test_the_policy_is_the_fastest_that_fits_and_the_result_has_it():
    found = fpipe.search(4, SHARED, shard=["step", "run", "use"], **FOUR)
    less = fpipe.search(4, SHARED, shard=["run", "use"], memory_cap=max(found.timeline.peak) - 3, **FOUR)
    assert found.gather == "step"
    assert less.gather in ("run", "use")
    assert max(less.timeline.peak) <= max(found.timeline.peak) - 3
    for one in (found, less):
        base = fpipe.chain(fpipe.split(4), one.schedule, fpipe.merge())(fpipe.program(4))
        program = fpipe.shard(gather=one.gather)(base)
        assert fpipe.simulate(program, SHARED) == one.timeline == fpipe.simulate(one.program, SHARED)
        assert f"fpipe.shard(gather={one.gather!r})" in str(one)


def test_a_cap_that_leaves_no_room_for_what_is_gathered_is_refused():
    least = max(fpipe.search(4, SHARED, memory_cap=10, **FOUR).timeline.peak)
    with pytest.raises(fpipe.ProgramError, match=r"nothing fits memory_cap=.* with what is gathered: the least that"):
        fpipe.search(4, SHARED, memory_cap=least, shard=["step"], **FOUR)


def test_the_command_takes_policies():
    said = out("search", "-p", "2", "-m", "4", "-s", "4", "--seconds", "0.1", "--solver", "local", "--shard", "use")
    assert "parameters are gathered by fpipe.shard(gather='use')" in said
