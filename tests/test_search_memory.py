"""Searches that move residuals to the host, and that choose when shared out parameters are gathered."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.finding.climber import Climber
from fpipe.finding.list_orders import ListOrders, rules
from fpipe.finding.memory_limits import limits_of
from fpipe.finding.offloaded_tasks import OffloadedTasks
from fpipe.orders.tasks import tasks_of
from fpipe.timing.value_bytes import NamedBytes
from property_tests.strategies import few
from tests.test_cli import out
from tests.test_search import SLOW, quick, step

COSTS = fpipe.Costs(5, 6, 4, offload=5)
WORDS: dict[str, Any] = {"ranks": 2, "microbatches": 6, "memory_cap": 1, "placement": "looped"}


def test_what_leaves_beats_everything_without():
    """Also the schedule by name that moves residuals, all that wait for an op of their rank."""
    stays = quick(4, COSTS, offload="never", **WORDS)
    found = quick(4, COSTS, without=SLOW, **WORDS)
    assert found.beat is not None
    assert found.value < found.beat[1] < stays.value
    assert found.beat[0] == "pipe_offload"
    assert max(found.timeline.peak) <= 1
    assert not any(op.kind == "OFFLOAD" for op in stays.program.ops)
    assert all(row.name not in ("bpipe", "pipe_offload") for row in stays.named)


def test_residuals_stay_where_no_cap_asks_or_no_cost_is_said():
    """Free copies would make every cap free."""
    for costs, cap in ((COSTS, None), (fpipe.Costs(5, 6, 4), 1)):
        words = WORDS | {"memory_cap": cap}
        assert not any(op.kind == "OFFLOAD" for op in quick(4, costs, **words).program.ops)


def test_copies_that_take_long_move_little():
    """No first order found room for copies twice as long as ops; the best of those that stay were no starts."""
    costs, words = replace(COSTS, offload=9), {"ranks": 4, "microbatches": 5, "memory_cap": 1.5, "placement": "looped"}
    found = quick(8, costs, seconds=0.1, **words)
    assert found.value < quick(8, costs, seconds=0.1, offload="never", **words).value
    assert 0 < sum(op.kind == "OFFLOAD" for op in found.program.ops) < 20


def test_a_bound_under_a_cap_is_none_of_what_leaves():
    """pipe_offload was said to be the best there can be, by a bound of orders whose residuals stay."""
    found = quick(4, fpipe.Costs(5, 6, 4), **(WORDS | {"without": SLOW}))
    assert any(op.kind == "OFFLOAD" for op in found.program.ops)
    assert found.bound < fpipe.bounds(fpipe.place("looped", ranks=2)(step(4, 6)), COSTS, memory_cap=1).makespan


times = st.sampled_from([0, 1, 2, 3, 5])


@few(10)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 6)),
    seconds=st.lists(times, min_size=18, max_size=18),
    copies=st.tuples(times, st.sampled_from([None, 0, 2, 6]), st.sampled_from([0, 1])),
    cap=st.sampled_from([1, 1.5, 2]),
    split=st.booleans(),
    again=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_orders_with_copies_take_and_hold_what_simulate_says(
    sizes: tuple[int, int, int],
    seconds: list[int],
    copies: tuple[int, int | None, int],
    cap: float,
    split: bool,
    again: set[int],
    seed: int,
):
    ranks, chunks, count = sizes
    stages = ranks * chunks
    each = [seconds[at * 6 : at * 6 + stages] for at in range(3)]
    costs = fpipe.Costs(*each, offload=copies[0], load=copies[1], transfer=copies[2])
    policy = fpipe.checkpoint(lambda stage, _: stage in again)
    base = fpipe.chain(fpipe.split_backward() if split else fpipe.identity(), policy)(step(stages, count))
    tasks = tasks_of(fpipe.place("looped", ranks=ranks)(base), costs)
    assert tasks is not None
    limits = limits_of(tasks, cap, costs)
    said = {one.name: getattr(tasks, one.name) for one in fields(tasks)}
    moving = OffloadedTasks(**said, room=limits, costs=costs)
    for more, rule in zip((1, 1.5, 2, math.inf), islice(rules(seed), 4), strict=True):
        rows = ListOrders(tasks, [limit * more for limit in limits]).order(rule)
        if rows is None or not moving.play([moving.flat(row) for row in rows]).ends:
            continue
        climber = Climber(moving, rows, [math.inf] * ranks, "makespan", seed)
        climber.on(10, 0.0)
        timeline = fpipe.simulate(moving.ordered(climber.climb.best.rows), costs)
        assert (timeline.makespan, timeline.span) == pytest.approx(climber.climb.best.value)
        assert max(timeline.peak) <= cap


def test_bytes_of_the_host_take_their_time():
    costs = fpipe.Costs(5, 6, 4, host_bandwidth=2.0, bytes=NamedBytes({"res": 8.0, "wres": 4.0}))
    words = WORDS | {"memory_cap": 16.0}
    found, stays = (quick(4, costs, offload=word, **words) for word in ("auto", "never"))
    assert max(found.timeline.peak) <= 16
    assert any(op.kind == "OFFLOAD" for op in found.program.ops)
    assert found.value < stays.value


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
