"""`compare` tabulates schedules with the numbers of `simulate` and `bounds`."""

import json
import math

import pytest

import fpipe
from fpipe.program import ProgramError
from tests.test_cli import output_of


def test_rows_have_the_numbers_of_simulate_and_bounds():
    costs = fpipe.Costs.per_rank(F=10, B=12, W=8, c=1)
    comparison = fpipe.compare(["gpipe", "zbv"], 2, 4, costs)
    shared = fpipe.Costs.per_rank(F=10, B=12, W=8, c=1, stages=2)
    program = fpipe.schedules.about("zbv").program(2, 4, costs=shared)
    timeline, bounds = fpipe.simulate(program, shared), fpipe.bounds(program, shared)
    row = comparison["zbv"]
    assert (row.makespan, row.span, row.bubble, row.bubble_span, row.idle) == (
        timeline.makespan,
        timeline.span,
        timeline.bubble,
        timeline.bubble_span,
        timeline.idle,
    )
    assert (row.peak, row.bound, row.above) == (max(timeline.peak), bounds.makespan, bounds.gap(timeline))
    assert row.timeline == timeline
    assert comparison[0].name == "gpipe"
    assert len(comparison) == 2


def test_ranks_do_equal_work_under_every_schedule():
    """Used to count costs per stage, so that two chunks a rank worked twice as long."""
    comparison = fpipe.compare(
        ["gpipe", "interleaved", "interleaved:stages=12", "hanayo:waves=2", "seq1f1b:slices=4"], 4, 8
    )
    assert {round(row.makespan - row.idle, 9) for row in comparison} == {24.0}


def test_compare_takes_names_transforms_and_programs():
    order = fpipe.schedules.gpipe(2)
    program = fpipe.schedules.about("gpipe").program(2, 4)
    schedules = ["gpipe", order, ("mine", order), program, ("its program", program)]
    comparison = fpipe.compare(schedules, 2, 4)
    assert [row.name for row in comparison] == ["gpipe", "2", "mine", "4", "its program"]
    assert len({(row.makespan, row.peak, row.bound) for row in comparison}) == 1
    assert fpipe.compare([("v", fpipe.schedules.zbv(2))], 2, 4, stages=4)["v"].refused == ""


def test_stages_are_those_of_names_that_say_none():
    """Three stages on two ranks, two for a name with its own."""
    rows = fpipe.compare(["one_f_one_b", "one_f_one_b:stages=2", "zbv"], 2, 4, stages=3)
    assert [row.timeline.program.stages for row in rows if row.timeline] == [3, 2]
    assert "this program has 3" in rows["zbv"].refused
    typed = "compare one_f_one_b one_f_one_b:stages=2 zbv -p 2 -m 4 -s 3"
    assert output_of(*typed.split()) == f"{rows}\n"


def test_schedules_that_refuse_the_size_have_a_row_with_the_reason():
    comparison = fpipe.compare(["gpipe", "chimera"], 3, 4)
    refused_row = comparison["chimera"]
    assert refused_row.refused.startswith("the number of ranks is even, found 3")
    assert math.isnan(refused_row.makespan)
    assert refused_row.timeline is None
    assert str(comparison).splitlines()[2].startswith("chimera: the number of ranks is even, found 3")
    assert repr(comparison) == "<Comparison: 1 schedules, 1 refused, shortest gpipe (18)>"
    with pytest.raises(ProgramError, match="chimera: the number of ranks is even, found 3"):
        fpipe.compare("chimera", 3, 4)


def test_costs_per_stage_must_match_the_chunks():
    comparison = fpipe.compare(["gpipe", "zbv"], 2, 4, fpipe.Costs(forward=[1, 2]))
    assert comparison["gpipe"].makespan == 19
    assert "forward lists a cost for each stage, but a rank cuts its share into 2 ops here" in comparison["zbv"].refused
    comparison_by_parts = fpipe.compare(
        ["gpipe", "zbv"], 2, 4, lambda parts: fpipe.Costs(forward=[1 / parts] * int(2 * parts))
    )
    assert not any(row.refused for row in comparison_by_parts)


def test_cells_have_ranks_and_microbatches_only_where_they_differ():
    small = fpipe.schedules.about("gpipe").program(2, 2)
    cells = fpipe.compare(["gpipe", ("small", small)], 4, 8).cells
    assert [row[:3] for row in cells] == [
        ["schedule", "ranks", "microbatches"],
        ["gpipe", "4", "8"],
        ["small", "2", "2"],
    ]
    assert "ranks" not in fpipe.compare(["gpipe", small], 2, 2).cells[0]


def test_rows_become_json_and_a_narrow_table():
    comparison = fpipe.compare(fpipe.schedules.names(), 4, 8)
    records = json.loads(json.dumps(comparison.records()))
    assert [record["name"] for record in records] == [*fpipe.schedules.names()]
    assert max(map(len, str(comparison).splitlines())) <= 130
    assert len(repr(comparison)) < 100
