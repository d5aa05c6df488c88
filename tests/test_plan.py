"""Plans of RoundPipe group layers such that the largest group takes as few turns as possible."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.planning.plan import Plan
from property_tests.strategies import max_examples
from tests.refusals import refusals

SECONDS = st.integers(0, 4)


def partitions(start: int, end: int) -> list[list[range]]:
    """Return all ways to group the layers from `start` to `end`."""
    if start == end:
        return [[]]
    inner_cuts = range(start + 1, end)
    cut_sets = (partitions for count in range(len(inner_cuts) + 1) for partitions in combinations(inner_cuts, count))
    return [[*map(range, (start, *partitions), (*partitions, end))] for partitions in cut_sets]


def every_plan(layers: int, run: str) -> list[Plan]:
    if run == "infer":
        return [Plan(tuple(forward_groups), ()) for forward_groups in partitions(0, layers)]
    starts = range(layers) if run == "fused" else [layers]
    return [
        Plan(tuple(forward_groups), (*([range(cut, layers)] if run == "fused" else []), *backward_groups[::-1]))
        for cut in starts
        for forward_groups, backward_groups in product(partitions(0, cut), partitions(0, cut))
    ]


def group_costs(plan: Plan, costs: Any, run: str) -> list[float]:
    seconds = [sum(costs.forward[layer] for layer in group) for group in plan.forward]
    for index, group in enumerate(plan.backward):
        forward_costs = costs.forward if run == "fused" and index == 0 else costs.recompute
        seconds.append(sum(forward_costs[i] + costs.backward_input[i] + costs.backward_weight[i] for i in group))
    return seconds


@st.composite
def layer_costs(draw: st.DrawFn, max_layers: int = 5) -> fpipe.Costs:
    count = draw(st.integers(1, max_layers))
    rows = [draw(st.lists(SECONDS, min_size=count, max_size=count)) for _ in range(4)]
    return fpipe.Costs(*rows)


def group_count(plan: Plan) -> int:
    return len(plan.forward) + len(plan.backward)


@max_examples(50)
@given(costs=layer_costs(), ranks=st.integers(1, 4), run=st.sampled_from(["fused", "train", "infer"]), draws=st.data())
def test_a_plan_takes_the_fewest_turns_of_its_largest_group(costs: Any, ranks: int, run: Any, draws: st.DataObject):
    count = len(costs.forward)
    memory = draws.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    limit = draws.draw(st.integers(max(memory), 3 * count))
    threshold = draws.draw(st.sampled_from([1, 1.1, 1.5, 3, None]))
    plans = [
        plan
        for plan in every_plan(count, run)
        if all(sum(memory[i] for i in group) <= limit for group in (*plan.forward, *plan.backward))
    ]
    finest_costs = [
        max(group_costs(plan, costs, run)) for plan in plans if group_count(plan) == max(map(group_count, plans))
    ]
    largest = min(finest_costs)
    if run != "infer":  # what the last layer would take if it were recomputed counts as a layer too
        largest = max(largest, costs.recompute[-1] + costs.backward_input[-1] + costs.backward_weight[-1])
    bound = float("inf") if threshold is None else threshold * largest
    allowed = [plan for plan in plans if max(group_costs(plan, costs, run)) <= bound]
    fewest_seconds = min(max(ranks, group_count(plan)) * max(group_costs(plan, costs, run)) for plan in allowed)
    if max(map(group_count, plans)) < ranks:
        with pytest.raises(ValueError, match=f"these layers make {max(map(group_count, plans))} groups at most"):
            fpipe.plan(costs, ranks, run=run, threshold=threshold, memory=memory, limit=limit)
        return
    best_plan = fpipe.plan(costs, ranks, run=run, threshold=threshold, memory=memory, limit=limit)
    assert best_plan in plans
    assert group_count(best_plan) >= ranks
    assert max(ranks, group_count(best_plan)) * max(group_costs(best_plan, costs, run)) == fewest_seconds


@given(
    models=st.lists(layer_costs(max_layers=3), min_size=2, max_size=2),
    ranks=st.integers(1, 4),
    run=st.sampled_from(["fused", "train", "infer"]),
)
def test_plans_of_several_models_take_the_fewest_turns(models: list[Any], ranks: int, run: Any):
    """The brute force tries all pairs of plans and counts turns of the largest group of either."""
    runs = ["train", "fused"] if run == "fused" else [run, run]
    costs_by_choice: list[list[float]] = [
        [
            cost
            for plan, costs, run_kind in zip(pair, models, runs, strict=True)
            for cost in group_costs(plan, costs, run_kind)
        ]
        for pair in product(
            *(every_plan(len(costs.forward), run_kind) for costs, run_kind in zip(models, runs, strict=True))
        )
    ]
    if max(map(len, costs_by_choice)) < ranks:
        with pytest.raises(ValueError, match=f"these layers make {max(map(len, costs_by_choice))} groups at most"):
            fpipe.plan(models, ranks, run=run, threshold=None)
        return
    best_plans = fpipe.plan(models, ranks, run=run, threshold=None)
    priced = zip(best_plans, models, runs, strict=True)
    largest = max(cost for plan, costs, run_kind in priced for cost in group_costs(plan, costs, run_kind))
    groups = sum(map(group_count, best_plans))
    assert groups >= ranks
    assert groups * largest == min(max(ranks, len(costs)) * max(costs) for costs in costs_by_choice)


def test_roundpipe_evaluates_without_a_plan():
    program = fpipe.chain(fpipe.split(2), fpipe.forward_only(), fpipe.schedules.roundpipe(2))(fpipe.program(4))
    assert program.table()[:2] == [["0F0", "1F0", "0F1", "1F1"], ["2F0", "3F0", "2F1", "3F1"]]


test_refusals = refusals(
    globals(),
    """
fpipe.plan(fpipe.Costs(), 1, threshold=0.9)
    ValueError: threshold is a multiple of the largest layer, from 1; found 0.9.
fpipe.plan(fpipe.Costs(), 1)
    ValueError: these costs have one number for all stages: say how many there are by stages=, at least 1.
fpipe.plan(fpipe.Costs([1, 2], [1, 2, 3]), 1)
    ValueError: how many stages are there? The costs list [2, 3]. Give one cost a stage, or say stages=
fpipe.plan(fpipe.Costs(), 1, stages=2, memory=[1, 2])
    ValueError: memory= and limit= go together: say both, or neither.
fpipe.plan(fpipe.Costs(), 1, stages=2, memory=[1], limit=3)
    ValueError: memory lists 1 stages, there are 2.
fpipe.plan(fpipe.Costs(), 1, stages=2, memory=[1, -1], limit=3)
    ValueError: the memory of stage 1 is in bytes, at least 0; found -1.
fpipe.plan(fpipe.Costs(), 1, stages=2, memory=[1, 4], limit=3)
    ValueError: stage 1 takes 4 bytes, and the limit is 3: cut it.
fpipe.plan(fpipe.Costs(), 4, stages=2)
    ValueError: these layers make 3 groups at most, for 4 ranks; use fewer ranks.
fpipe.plan([fpipe.Costs()] * 2, 1, stages=[2])
    ValueError: stages and memory have 2 entries, one a model.
""",
)
