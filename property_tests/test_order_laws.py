"""One clock: `timing/lanes.py` defines when ops run, and whatever else plays an order says the same: here, and
`columns` in test_time_laws.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.finding.tasks import Tasks, tasks_of
from fpipe.program import Op, Program
from fpipe.schedules.list_scheduler import NOTHING, TaskGraph, list_schedule
from fpipe.timing.costs import Ticks
from fpipe.timing.lanes import simulate_iterations
from fpipe.timing.waiting import data_waits, earliest_starts
from property_tests.strategies import DrawnProgram, plans
from property_tests.test_time_laws import SECONDS, costs, with_exchanges


def lanes(program: Program, costs: fpipe.Costs) -> dict[Op, tuple[float, float]]:
    """Start and end of each op, by the definition."""
    made = next(simulate_iterations(program, costs))
    return dict(zip(program.ops, zip(made.starts, made.ends, strict=True), strict=True))


def tasks(program: Program, costs: fpipe.Costs) -> Tasks:
    found = tasks_of(program, costs)
    assume(found is not None)
    assert found is not None
    return found


@given(plans(), costs(plain=True), st.sets(st.integers(0, 4)), SECONDS, st.data())
def test_tasks_are_played_as_lanes_define(
    plan: DrawnProgram, costs: fpipe.Costs, exchanges: set[int], seconds: float, data: st.DataObject
):
    """With exchanges beside the work of a rank too, and from any place of each row on."""
    program, costs = with_exchanges(plan.program, exchanges), replace(costs, exchange=seconds)
    known, defined, timeline = tasks(program, costs), lanes(program, costs), fpipe.simulate(program, costs)
    flats = [known.ops_of_row(row) for row in known.rows]
    played = known.play(flats)
    assert played.ends[:-1] == [defined[op][1] for op in known.ops]
    assert (played.makespan, played.span) == pytest.approx((timeline.makespan, timeline.span))
    assert [known.peak_of(flat) / share for flat, share in zip(flats, known.residuals_per_microbatch, strict=True)] == [
        *timeline.peak
    ]
    done = [data.draw(st.integers(0, len(flat))) for flat in flats]
    assert known.play(flats, known_ends=played.ends, known_counts=done).ends == played.ends


@given(plans(), costs(plain=True))
def test_a_list_schedule_of_given_rows_is_as_lanes_define(plan: DrawnProgram, costs: fpipe.Costs):
    known, defined = tasks(plan.program, costs), lanes(plan.program, costs)
    flats = [known.ops_of_row(row)[::-1] for row in known.rows]
    graph = TaskGraph.of(known.ranks, [op.rank for op in known.ops], known.seconds, [*map(dict, known.needs)])

    def pick(rank: int, time: float, ready: list[int]) -> int:
        return flats[rank].pop() if flats[rank] and flats[rank][-1] in ready else NOTHING

    found = list_schedule(graph, pick, [max([way for one, way in own if one < 0], default=0.0) for own in known.needs])
    assert found.start == [defined[op][0] for op in known.ops]


@given(plans())
def test_the_global_order_is_that_of_the_lanes_in_ticks(plan: DrawnProgram):
    starts = [start for start, end in lanes(plan.program, Ticks()).values() if end > start]
    assert starts == sorted(starts)


@given(plans(), costs())
def test_no_op_starts_before_the_longest_path_to_it(plan: DrawnProgram, costs: fpipe.Costs):
    seconds = [0.0 if op.kind in ("SEND", "RECV", "FREE") else costs.seconds(op) for op in plan.program.ops]
    heads = earliest_starts(data_waits(plan.program, costs), seconds)
    defined = lanes(plan.program, costs)
    assert all(head <= defined[op][0] for op, head in zip(plan.program.ops, heads, strict=True))
