"""Searches under a cap offload residuals and choose when sharded parameters are gathered."""

import dataclasses
from typing import Any

import pytest

import fpipe
from fpipe.timing.amounts import NamedBytes
from tests.test_cli import output_of
from tests.test_search import quick, step


def test_the_bound_under_a_cap_allows_offloaded_residuals():
    """Used to call pipe_offload optimal by a bound of orders that offload nothing."""
    options: dict[str, Any] = {"ranks": 2, "microbatches": 6, "memory_cap": 1, "placement": "looped"}
    costs = fpipe.Costs(5, 6, 4)
    result = quick(4, costs, **options, without=())
    assert any(op.kind == "OFFLOAD" for op in result.program.ops)
    assert result.bound < fpipe.bounds(fpipe.place("looped", ranks=2)(step(4, 6)), costs, memory_cap=1).makespan


SIZES = NamedBytes({"res": 2.0, "params": 3.0}, replicas=2)
SHARED = fpipe.Costs(forward=5, backward_input=6, backward_weight=4, gather=1, scatter=1, bytes=SIZES)
FOUR: Any = {"ranks": 2, "microbatches": 4, "seconds": 0.04, "solver": "local", "placement": "looped"}


def test_a_search_takes_the_fastest_gather_policy_that_fits():
    uncapped = fpipe.search(4, SHARED, shard=["step", "run", "use"], **FOUR)
    capped = fpipe.search(4, SHARED, shard=["run", "use"], memory_cap=max(uncapped.timeline.peak) - 3, **FOUR)
    assert uncapped.gather == "step"
    assert capped.gather in ("run", "use")
    assert max(capped.timeline.peak) <= max(uncapped.timeline.peak) - 3
    for result in (uncapped, capped):
        base = fpipe.chain(fpipe.split(4), result.schedule, fpipe.merge())(fpipe.program(4))
        program = fpipe.shard(gather=result.gather)(base)
        assert fpipe.simulate(program, SHARED) == result.timeline == fpipe.simulate(result.program, SHARED)
        assert f"fpipe.shard(gather={result.gather!r})" in str(result)


def test_a_result_says_what_its_costs_take_to_be_free():
    free_scatter = fpipe.search(4, dataclasses.replace(SHARED, scatter=0), shard=["step"], **FOUR)
    assert "the costs assume that these take no time: SCATTER, transfers" in str(free_scatter)
    assert not fpipe.search(4, fpipe.Costs(transfer=0.5), **FOUR).free


def test_a_cap_without_room_for_gathered_parameters_is_refused():
    smallest_peak = max(fpipe.search(4, SHARED, memory_cap=10, **FOUR).timeline.peak)
    with pytest.raises(fpipe.ProgramError, match=r"nothing fits memory_cap=.* with what is gathered: the least that"):
        fpipe.search(4, SHARED, memory_cap=smallest_peak, shard=["step"], **FOUR)


def test_the_search_command_takes_gather_policies():
    printed = output_of(
        "search", "-p", "2", "-m", "4", "-s", "4", "--seconds", "0.1", "--solver", "local", "--shard", "use"
    )
    assert "parameters are gathered by fpipe.shard(gather='use')" in printed
