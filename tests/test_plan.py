"""plan: groups of layers for RoundPipe, as few turns of the largest as can be."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.planning.plan import Plan
from property_tests.strategies import few
from tests.refusals import refusals

SECONDS = st.integers(0, 4)


def cuts(start: int, end: int) -> list[list[range]]:
    """All ways to group the layers from `start` to `end`."""
    if start == end:
        return [[]]
    inner = range(start + 1, end)
    ways = (way for count in range(len(inner) + 1) for way in combinations(inner, count))
    return [[*map(range, (start, *way), (*way, end))] for way in ways]


def every_plan(layers: int, run: str) -> list[Plan]:
    if run == "infer":
        return [Plan(tuple(ahead), ()) for ahead in cuts(0, layers)]
    starts = range(layers) if run == "fused" else [layers]
    return [
        Plan(tuple(ahead), (*([range(cut, layers)] if run == "fused" else []), *back[::-1]))
        for cut in starts
        for ahead, back in product(cuts(0, cut), cuts(0, cut))
    ]


def group_costs(found: Plan, costs: Any, run: str) -> list[float]:
    made = [sum(costs.forward[layer] for layer in group) for group in found.forward]
    for number, group in enumerate(found.backward):
        first = costs.forward if run == "fused" and number == 0 else costs.recompute
        made.append(sum(first[i] + costs.backward_input[i] + costs.backward_weight[i] for i in group))
    return made


@st.composite
def layers(draw: st.DrawFn, most: int = 5) -> fpipe.Costs:
    count = draw(st.integers(1, most))
    rows = [draw(st.lists(SECONDS, min_size=count, max_size=count)) for _ in range(4)]
    return fpipe.Costs(*rows)


def size(found: Plan) -> int:
    return len(found.forward) + len(found.backward)


@few(50)
@given(costs=layers(), ranks=st.integers(1, 4), run=st.sampled_from(["fused", "train", "infer"]), data=st.data())
def test_no_plan_takes_fewer_turns_of_its_largest_group(costs: Any, ranks: int, run: Any, data: st.DataObject):
    count = len(costs.forward)
    memory = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    limit = data.draw(st.integers(max(memory), 3 * count))
    threshold = data.draw(st.sampled_from([1, 1.1, 1.5, 3, None]))
    plans = [
        each
        for each in every_plan(count, run)
        if all(sum(memory[i] for i in group) <= limit for group in (*each.forward, *each.backward))
    ]
    alone = [max(group_costs(each, costs, run)) for each in plans if size(each) == max(map(size, plans))]
    largest = min(alone)
    if run != "infer":  # what the last layer would take if it were recomputed counts as a layer too
        largest = max(largest, costs.recompute[-1] + costs.backward_input[-1] + costs.backward_weight[-1])
    bound = float("inf") if threshold is None else threshold * largest
    allowed = [each for each in plans if max(group_costs(each, costs, run)) <= bound]
    best = min(max(ranks, size(each)) * max(group_costs(each, costs, run)) for each in allowed)
    if max(map(size, plans)) < ranks:
        with pytest.raises(ValueError, match=f"these layers make {max(map(size, plans))} groups at most"):
            fpipe.plan(costs, ranks, run=run, threshold=threshold, memory=memory, limit=limit)
        return
    found = fpipe.plan(costs, ranks, run=run, threshold=threshold, memory=memory, limit=limit)
    assert found in plans
    assert size(found) >= ranks
    assert max(ranks, size(found)) * max(group_costs(found, costs, run)) == best


@given(
    models=st.lists(layers(most=3), min_size=2, max_size=2),
    ranks=st.integers(1, 4),
    run=st.sampled_from(["fused", "train", "infer"]),
)
def test_no_plans_of_several_models_take_fewer_turns(models: list[Any], ranks: int, run: Any):
    """All plans of both, and of all pairs the one with the fewest turns of the largest group of either."""
    runs = ["train", "fused"] if run == "fused" else [run, run]
    together: list[list[float]] = [
        [cost for each, costs, how in zip(pair, models, runs, strict=True) for cost in group_costs(each, costs, how)]
        for pair in product(*(every_plan(len(costs.forward), how) for costs, how in zip(models, runs, strict=True)))
    ]
    if max(map(len, together)) < ranks:
        with pytest.raises(ValueError, match=f"these layers make {max(map(len, together))} groups at most"):
            fpipe.plan(models, ranks, run=run, threshold=None)
        return
    found = fpipe.plan(models, ranks, run=run, threshold=None)
    own = zip(found, models, runs, strict=True)
    largest = max(cost for each, costs, how in own for cost in group_costs(each, costs, how))
    groups = sum(map(size, found))
    assert groups >= ranks
    assert groups * largest == min(max(ranks, len(costs)) * max(costs) for costs in together)


def test_an_evaluation_goes_round_without_a_plan():
    program = fpipe.chain(fpipe.split(2), fpipe.forward_only(), fpipe.schedules.roundpipe(2))(fpipe.program(4))
    assert program.table()[:2] == [["0F0", "1F0", "0F1", "1F1"], ["2F0", "3F0", "2F1", "3F1"]]


test_refusals = refusals(
    globals(),
    """
fpipe.plan(fpipe.Costs(), 0)
    ValueError: ranks is a number, at least 1; found 0.
fpipe.plan(fpipe.Costs(), 1, run="both")
    ValueError: run is "fused", "train" or "infer", found 'both'.
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
    ValueError: stages and memory have an entry for each of 2 models.
""",
)
