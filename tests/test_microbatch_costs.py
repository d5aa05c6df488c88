"""Costs may differ between microbatches, and follow from their lengths."""

from collections.abc import Callable
from typing import Any

import pytest

import fpipe


def pipeline(name: str, ranks: int, microbatches: int) -> fpipe.Program:
    return fpipe.schedules.about(name).program(ranks, microbatches)


def test_a_table_and_a_function_time_each_microbatch():
    program = pipeline("gpipe", 2, 3)
    table = [[1, 5, 1], [2, 2, 2]]
    timeline = fpipe.simulate(program, fpipe.Costs(forward=table))
    seconds = {event.op.cell: event.end - event.start for event in timeline.events if event.op.kind == "F"}
    assert seconds == {"0F0": 1, "0F1": 5, "0F2": 1, "1F0": 2, "1F1": 2, "1F2": 2}
    by_function = fpipe.simulate(program, fpipe.Costs(forward=lambda stage, microbatch: table[stage][microbatch]))
    assert by_function.ends == timeline.ends


def test_the_order_of_microbatches_counts():
    """On a pipeline the longest microbatch belongs where other ranks have work meanwhile."""
    program = pipeline("one_f_one_b", 2, 4)
    orders = (1, 1, 1, 5), (1, 5, 1, 1)
    costs = [fpipe.Costs(*[lambda _, k, order=order: order[k]] * 3) for order in orders]
    makespans = [fpipe.simulate(program, order_costs).makespan for order_costs in costs]
    assert makespans[0] != makespans[1]


def test_a_search_takes_the_seconds_of_each_microbatch():
    base = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(2))
    costs = fpipe.Costs([[1, 4, 2], [3, 1, 1]], [[2, 2, 5], [1, 3, 1]], [[1, 1, 1], [2, 6, 1]])
    result = fpipe.search(base, costs, ranks=2, solver="local")
    assert result.timeline.makespan == fpipe.simulate(result.program, costs).makespan
    assert result.bound <= result.timeline.makespan <= fpipe.compare(["gpipe"], 2, 3, costs).rows[0].makespan


def test_a_fit_gives_back_what_grows_with_the_length_and_its_square():
    def seconds(length: float) -> float:
        return 0.5 + 0.25 * length + 0.125 * length**2

    measured = {n: fpipe.Costs(forward=[seconds(n), 2 * seconds(n)], bytes={"y": 8}) for n in (2, 4, 8, 16)}
    costs = fpipe.fit_lengths(measured).at([3, 32])
    assert costs.forward[1] == pytest.approx([2 * seconds(3), 2 * seconds(32)])
    assert costs.bytes == {"y": 8}
    assert fpipe.fit_lengths({4: fpipe.Costs([8], 8, 8)}).at([1]).forward == [pytest.approx([2])]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "short table": (
        lambda: fpipe.simulate(pipeline("gpipe", 1, 3), fpipe.Costs(forward=[[1, 2]])),
        "forward lists 2 microbatches at stage 0; the program has a 0F2",
    ),
    "negative": (lambda: fpipe.Costs(forward=[[1, -2]]), "forward is a time in seconds, at least 0; found -2"),
    "wrong function": (
        lambda: fpipe.simulate(pipeline("gpipe", 1, 3), fpipe.Costs(forward=lambda *_: "long")),
        r"forward\(0, 0\) is a time in seconds, at least 0; found 'long'",
    ),
    "lengths": (
        lambda: fpipe.simulate(pipeline("gpipe", 1, 3), fpipe.fit_lengths({2: fpipe.Costs()}), lengths=[1]),
        "the program has 3 microbatches, and lengths= 1",
    ),
    "no fit": (
        lambda: fpipe.simulate(pipeline("gpipe", 1, 3), fpipe.Costs(), lengths=[1, 2, 3]),
        "lengths= needs costs by fpipe.fit_lengths, found Costs",
    ),
    "zero length": (lambda: fpipe.fit_lengths({0: fpipe.Costs()}), r"a positive number; found \[0\]"),
    "no length": (lambda: fpipe.fit_lengths({2: fpipe.Costs()}).at([]), r"one for each microbatch; found \[\]"),
    "stages": (
        lambda: fpipe.fit_lengths({2: fpipe.Costs([1, 2]), 4: fpipe.Costs([1, 2, 3])}),
        "profile the same stages at all lengths",
    ),
    "plan": (
        lambda: fpipe.plan(fpipe.Costs(forward=lambda stage, microbatch: 1.0), 2, stages=4),
        "forward is a function: list its seconds",
    ),
}


def test_a_plan_groups_stages_by_their_means_over_microbatches():
    forward = [[1, 3, 8], [2, 2, 2], [5, 1, 0], [1, 1, 1]]
    means = fpipe.Costs(forward=[4, 2, 2, 1], backward=[8, 4, 4, 2])
    listed = fpipe.Costs(forward=forward, backward=[[2 * seconds for seconds in row] for row in forward])
    assert fpipe.plan(listed, 2) == fpipe.plan(means, 2)


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_costs_are_refused(mistake: str):
    call, message = WRONG[mistake]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
