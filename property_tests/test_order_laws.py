"""Laws of orders: every other player of an order gives the times that `timing/lanes.py` defines."""

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
    """Return start and end of each op, by the definition."""
    timeline = next(simulate_iterations(program, costs))
    return dict(zip(program.ops, zip(timeline.starts, timeline.ends, strict=True), strict=True))


def tasks(program: Program, costs: fpipe.Costs) -> Tasks:
    task_graph = tasks_of(program, costs)
    assume(task_graph is not None)
    assert task_graph is not None
    return task_graph


@given(plans(), costs(plain=True), st.sets(st.integers(0, 4)), SECONDS, st.data())
def test_tasks_are_played_as_lanes_define(
    plan: DrawnProgram, costs: fpipe.Costs, exchanges: set[int], seconds: float, data: st.DataObject
):
    """With asynchronous exchanges too, and continued from any position of each row."""
    program, costs = with_exchanges(plan.program, exchanges), replace(costs, exchange=seconds)
    task_graph, defined, timeline = tasks(program, costs), lanes(program, costs), fpipe.simulate(program, costs)
    flats = [task_graph.ops_of_row(row) for row in task_graph.rows]
    played = task_graph.play(flats)
    assert played.ends[:-1] == [defined[op][1] for op in task_graph.ops]
    assert (played.makespan, played.span) == pytest.approx((timeline.makespan, timeline.span))
    assert [
        task_graph.peak_of(flat) / share for flat, share in zip(flats, task_graph.residuals_per_microbatch, strict=True)
    ] == [*timeline.peak]
    counts = [data.draw(st.integers(0, len(flat))) for flat in flats]
    assert task_graph.play(flats, known_ends=played.ends, known_counts=counts).ends == played.ends


@given(plans(), costs(plain=True))
def test_a_list_schedule_of_given_rows_is_as_lanes_define(plan: DrawnProgram, costs: fpipe.Costs):
    task_graph, defined = tasks(plan.program, costs), lanes(plan.program, costs)
    flats = [task_graph.ops_of_row(row)[::-1] for row in task_graph.rows]
    ranks = [op.rank for op in task_graph.ops]
    graph = TaskGraph.of(task_graph.ranks, ranks, task_graph.seconds, [*map(dict, task_graph.needs)])

    def pick(rank: int, time: float, ready: list[int]) -> int:
        return flats[rank].pop() if flats[rank] and flats[rank][-1] in ready else NOTHING

    releases = [max([delay for source, delay in needs if source < 0], default=0.0) for needs in task_graph.needs]
    schedule = list_schedule(graph, pick, releases)
    assert schedule.start == [defined[op][0] for op in task_graph.ops]


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
