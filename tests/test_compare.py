"""Schedules side by side: the numbers are those of simulate and bounds, whatever a schedule is given as."""

import json
import math

import pytest

import fpipe
from fpipe.program import ProgramError


def test_numbers_are_those_of_simulate_and_bounds():
    costs = fpipe.Costs.per_rank(F=10, B=12, W=8, c=1)
    found = fpipe.compare(["gpipe", "zbv"], 2, 4, costs)
    shared = fpipe.Costs.per_rank(F=10, B=12, W=8, c=1, stages=2)
    program = fpipe.schedules.about("zbv").program(2, 4, costs=shared)
    timeline, least = fpipe.simulate(program, shared), fpipe.bounds(program, shared)
    row = found["zbv"]
    assert (row.makespan, row.span, row.bubble, row.bubble_span, row.idle) == (
        timeline.makespan,
        timeline.span,
        timeline.bubble,
        timeline.bubble_span,
        timeline.idle,
    )
    assert (row.peak, row.bound, row.above) == (max(timeline.peak), least.makespan, least.gap(timeline))
    assert row.timeline == timeline
    assert found[0].name == "gpipe"
    assert len(found) == 2


def test_a_rank_does_the_same_work_under_every_schedule():
    """With costs of a stage, a schedule of two chunks a rank worked twice as long as one of one chunk."""
    found = fpipe.compare(["gpipe", "interleaved", "interleaved:stages=12", "hanayo:waves=2", "seq1f1b:slices=4"], 4, 8)
    assert {round(row.makespan - row.idle, 9) for row in found} == {24.0}


def test_what_is_compared_may_be_a_name_a_transform_or_a_program():
    order = fpipe.schedules.gpipe(2)
    program = fpipe.schedules.about("gpipe").program(2, 4)
    entries = ["gpipe", order, ("mine", order), program, ("its program", program)]
    found = fpipe.compare(entries, 2, 4)
    assert [row.name for row in found] == ["gpipe", "2", "mine", "4", "its program"]
    assert len({(row.makespan, row.peak, row.bound) for row in found}) == 1
    assert fpipe.compare([("v", fpipe.schedules.zbv(2))], 2, 4, stages=4)["v"].refused == ""


def test_what_does_not_serve_the_size_is_a_row_that_says_why():
    found = fpipe.compare(["gpipe", "chimera"], 3, 4)
    refused = found["chimera"]
    assert refused.refused.startswith("the number of ranks is even, found 3")
    assert math.isnan(refused.makespan)
    assert refused.timeline is None
    assert str(found).splitlines()[2].startswith("chimera: the number of ranks is even, found 3")
    assert repr(found) == "<Comparison: 1 schedules, 1 refused, shortest gpipe (18)>"
    with pytest.raises(ProgramError, match="chimera: the number of ranks is even, found 3"):
        fpipe.compare("chimera", 3, 4)


def test_costs_of_each_stage_say_how_they_are_cut():
    found = fpipe.compare(["gpipe", "zbv"], 2, 4, fpipe.Costs(forward=[1, 2]))
    assert found["gpipe"].makespan == 19
    assert "forward lists a cost for each stage, but a rank cuts its share into 2 ops here" in found["zbv"].refused
    each = fpipe.compare(["gpipe", "zbv"], 2, 4, lambda parts: fpipe.Costs(forward=[1 / parts] * int(2 * parts)))
    assert not any(row.refused for row in each)


def test_ranks_and_microbatches_are_said_where_they_differ():
    small = fpipe.schedules.about("gpipe").program(2, 2)
    cells = fpipe.compare(["gpipe", ("small", small)], 4, 8).cells
    assert [row[:3] for row in cells] == [
        ["schedule", "ranks", "microbatches"],
        ["gpipe", "4", "8"],
        ["small", "2", "2"],
    ]
    assert "ranks" not in fpipe.compare(["gpipe", small], 2, 2).cells[0]


def test_rows_are_data_and_print_as_a_moderate_table():
    found = fpipe.compare(fpipe.schedules.names(), 4, 8)
    records = json.loads(json.dumps(found.records()))
    assert [record["name"] for record in records] == [*fpipe.schedules.names()]
    assert max(map(len, str(found).splitlines())) <= 130
    assert len(repr(found)) < 100
