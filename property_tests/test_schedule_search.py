"""Laws of searches and priorities: their orders are legal, complete and under the cap, whatever sizes and costs."""

import inspect
import itertools
import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe.finding import by_cost
from fpipe.finding.search_result import ScheduleTable
from fpipe.program import Op, ProgramError
from fpipe.schedules.priority import RankState
from property_tests.strategies import max_examples
from tests.test_search import never_worse, quick

short_searches = mock.patch.object(by_cost, "SECONDS", 0.05)
"""A fraction of the effort, for laws of any order that a search may end in."""
seconds = st.one_of(st.integers(0, 4).map(float), st.floats(0.01, 10))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes, chunks a rank, costs of each stage, a cap, and the share of residuals that W needs."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    stages = ranks * chunks
    stage_costs = st.lists(seconds, min_size=stages, max_size=stages)
    return {
        "ranks": ranks,
        "chunks": chunks,
        "microbatches": draw(st.integers(1, 7)),
        "costs": fpipe.Costs(draw(stage_costs), draw(stage_costs), draw(stage_costs), transfer=draw(seconds)),
        "cap": draw(st.sampled_from([1, 1.5, 2, 2.5, 3, 5, 20])),
        "wres_share": draw(st.sampled_from([1.0, 0.5, 0.0])),
    }


@max_examples(6)
@given(case=cases())
@short_searches
def test_a_searched_order_is_legal_complete_and_under_the_cap(case: dict[str, Any]):
    ranks, costs, cap = case["ranks"], case["costs"], case["cap"]
    schedule = fpipe.schedules.zb_auto if case["chunks"] == 1 else fpipe.schedules.zbv
    order = schedule(ranks, costs=costs, memory_cap=cap, wres_share=case["wres_share"])
    base = fpipe.program(ranks * case["chunks"])
    program = fpipe.chain(fpipe.split(case["microbatches"]), order, fpipe.merge())(base)
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    if case["wres_share"] == 1:
        assert max(fpipe.simulate(program, costs).peak) <= cap + 1e-6


@max_examples(15)
@given(case=cases(), weights=st.lists(st.integers(-3, 3), min_size=4, max_size=4))
def test_a_priority_ends_in_a_program_under_the_cap_or_in_a_sentence(case: dict[str, Any], weights: list[int]):
    """Whatever the priority, nothing hangs."""
    kind, stage, index, wait = weights

    def key(op: Op, state: RankState) -> float:
        if op.kind == "F" and state.held_microbatches > wait + 3:
            return math.inf
        return kind * "FIW".index(op.kind) + stage * (op.stage or 0) + index * (op.microbatch or 0)

    placement = "linear" if case["chunks"] == 1 else "v"
    order = fpipe.schedules.from_priority(key, case["ranks"], placement=placement, cap=case["cap"], costs=case["costs"])
    base = fpipe.program(case["ranks"] * case["chunks"])
    sentence = "a dead end: after "
    try:
        program = fpipe.chain(fpipe.split(case["microbatches"]), fpipe.split_backward(), order)(base)
    except ProgramError as error:
        sentence = str(error)
    else:
        assert max(fpipe.simulate(program, case["costs"]).peak) <= case["cap"]
    assert sentence.startswith("a dead end: after ")


PARAMETERS = {name: inspect.signature(fpipe.schedules.get(name)).parameters for name in fpipe.schedules.names()}
WITH_COSTS = {name: takes for name, takes in PARAMETERS.items() if "costs" in takes}

scales = st.sampled_from([1e-6, 1e-3, 0.37, 3.0, 100.0])


def scale_costs(costs: fpipe.Costs, factor: float) -> fpipe.Costs:
    parts: Any = (costs.forward, costs.backward_input, costs.backward_weight)
    scaled = ([cost * factor for cost in stage_costs] for stage_costs in parts)
    return fpipe.Costs(*scaled, transfer=costs.transfer * factor)


def by_microbatch(op: Op, state: RankState) -> tuple[int, int]:
    return op.microbatch or 0, "WIF".index(op.kind)


@max_examples(4)
@given(case=cases(), factor=scales, objective=st.sampled_from(["makespan", "span"]))
@short_searches
def test_the_unit_of_costs_changes_no_schedule(case: dict[str, Any], factor: float, objective: Any):
    """Used to depend on it: ties of floats chose other orders in another unit, with a bubble of 0.001 or 0.09."""
    ranks, stages, microbatches = case["ranks"], case["ranks"] * case["chunks"], case["microbatches"]
    base = fpipe.split(microbatches)(fpipe.program(stages))
    for name, takes in WITH_COSTS.items():
        if fpipe.schedules.about(name).refuses(ranks, stages, microbatches) is None:
            possible = {"memory_cap": case["cap"], "objective": objective}
            options = {option: value for option, value in possible.items() if option in takes}
            schedule = fpipe.schedules.get(name)
            costs = [scale_costs(case["costs"], unit) for unit in (1.0, factor)]
            plain, rescaled = (schedule(ranks, costs=unit_costs, **options)(base) for unit_costs in costs)
            assert plain == rescaled, name
    placement, halves = "linear" if case["chunks"] == 1 else "v", fpipe.split_backward()(base)
    ordered = partial(fpipe.schedules.from_priority, by_microbatch, ranks, placement=placement)
    plain, rescaled = (ordered(costs=scale_costs(case["costs"], unit))(halves) for unit in (1.0, factor))
    assert plain == rescaled


whole_seconds = st.integers(1, 5).map(float)
DEEP = settings.get_current_profile_name() == "deep"


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw sizes up to 12 microbatches a rank, whole costs of each stage, a cap, and the cost of copies to the host."""
    ranks, chunks = draw(st.integers(2, 3)), draw(st.sampled_from([1, 1, 2]))
    stages = ranks * chunks
    stage_seconds = st.lists(whole_seconds, min_size=stages, max_size=stages)
    op_costs = [draw(st.one_of(whole_seconds, stage_seconds)) for _ in range(3)]
    copies = draw(st.sampled_from([0.0, 0.0, 2.0]))
    return {
        "ranks": ranks,
        "stages": stages,
        "microbatches": draw(st.integers(1, 12 * ranks)),
        "costs": fpipe.Costs(*op_costs, transfer=draw(st.sampled_from([0.0, 1.0])), offload=copies),
        "cap": draw(st.sampled_from([None, 1, 1.5, 2, 2.25, ranks])),
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=200 if DEEP else 1)
@given(case=searches())
def test_a_search_beats_named_schedules_keeps_its_cap_and_round_trips(case: dict[str, Any]):
    """Beyond four microbatches a rank, it searches and repeats a shorter step. One seed gives one result."""
    search = never_worse(**case)
    schedule, program = search.schedule, search.program
    assert (
        ScheduleTable.from_json(schedule.to_json())
        == ScheduleTable.from_csv(schedule.to_csv(), replicated=schedule.replicated)
        == schedule
    )
    base = fpipe.chain(fpipe.split(case["microbatches"]), fpipe.merge())(fpipe.program(case["stages"]))
    assert schedule(base) == program
    assert fpipe.simulate(program, case["costs"]).makespan == search.timeline.makespan
    options = {"ranks": case["ranks"], "memory_cap": case["cap"], "without": (), "seed": case["seed"]}
    assert quick(base, case["costs"], **options) == search


NEAR = 1.015
"""A search of 0.6 seconds may end so far above an order that a rule happens to hit."""


def greedy_h2(ranks: int, microbatches: int, seconds: tuple[int, ...], transfer: int, fits: float) -> float:
    """Return the makespan of ZB-H2's forwards and input gradients, if a W runs where a share of it fits in a gap."""
    forward, inputs, weight = seconds
    ahead = [min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks)]
    rows = ["F" * warm_up + "IF" * (microbatches - warm_up) + "I" * warm_up for warm_up in ahead]
    ends: dict[tuple[str, int, int], float] = {}
    free, turns, waiting = [0.0] * ranks, [0] * ranks, [0] * ranks
    while any(turn < len(row) for turn, row in zip(turns, rows, strict=True)):
        for rank, row in enumerate(rows):
            while turns[rank] < len(row):
                kind = row[turns[rank]]
                index = row[: turns[rank]].count(kind)
                source = kind, rank + (-1 if kind == "F" else 1), index
                if 0 <= source[1] < ranks and source not in ends:
                    break
                ready = ends[source] + transfer if source in ends else 0.0
                while waiting[rank] and free[rank] < ready and free[rank] + weight * fits <= ready:
                    free[rank] += weight
                    waiting[rank] -= 1
                free[rank] = max(free[rank], ready) + (forward if kind == "F" else inputs)
                ends[kind, rank, index] = free[rank]
                waiting[rank] += kind == "I"
                turns[rank] += 1
    return max(end + weight * weights_left for end, weights_left in zip(free, waiting, strict=True))


@max_examples(15)
@given(data=st.data(), ranks=st.integers(2, 6), transfer=st.integers(0, 9), fits=st.sampled_from([0.0, 0.5, 1.0]))
def test_zb_h2_is_not_longer_than_its_greedy_rule(data: st.DataObject, ranks: int, transfer: int, fits: float):
    """Used to fail: with fewer than 2p-1 microbatches, unequal costs and a transfer, a W in a gap made the order up to
    7 % shorter than the paper's position."""
    microbatches = data.draw(st.integers(1, 2 * ranks - 2), label="microbatches")
    seconds = data.draw(st.tuples(*[st.integers(1, 9)] * 3), label="seconds")
    costs = fpipe.Costs(*map(float, seconds), transfer=float(transfer))
    order = fpipe.schedules.zb_h2(ranks, costs=costs)
    timeline = fpipe.simulate(fpipe.chain(fpipe.split(microbatches), order)(fpipe.program(ranks)), costs)
    assert timeline.makespan <= NEAR * greedy_h2(ranks, microbatches, seconds, transfer, fits)
    assert max(timeline.peak) <= 2 * ranks - 1


def greedy_v(ranks: int, microbatches: int, seconds: tuple[int, int], transfer: int, turns: tuple[int, ...]) -> float:
    """Return the makespan of full backwards on a V that runs the earliest op, ties by `turns`, under 1F1B-V's cap."""
    last_stage, cap = 2 * ranks - 1, 4 * (ranks + 1) // 3
    home = [min(stage, last_stage - stage) for stage in range(2 * ranks)]
    ends: dict[tuple[int, int, int], float] = {}
    done, in_flight, free = [[0] * (last_stage + 1), [0] * (last_stage + 1)], [0] * ranks, [0.0] * ranks
    while min(done[1]) < microbatches:
        candidates: list[tuple[float, int, int, int]] = []
        for back, stage in itertools.product((0, 1), range(last_stage + 1)):
            rank, index, is_upper = home[stage], done[back][stage], stage >= ranks
            source = (0, stage - 1) if not back else (0, stage) if stage == last_stage else (1, stage + 1)
            if index == microbatches or (stage + back and (*source, index) not in ends):
                continue
            if (*source, index) in ends:
                hop = transfer if home[source[1]] != rank else 0
                ready = ends[*source, index] + hop
            else:
                ready = 0.0
            if back or in_flight[rank] + 2 - is_upper <= cap:
                candidates.append((max(free[rank], ready), turns[2 * back + is_upper], back, stage))
        start, _, back, stage = min(candidates)
        rank, index = home[stage], done[back][stage]
        free[rank] = ends[back, stage, index] = start + seconds[back]
        done[back][stage] += 1
        in_flight[rank] += 1 - 2 * back
    return max(free)


@max_examples(3)
@given(
    ranks=st.integers(2, 6),
    extra=st.integers(0, 6),
    seconds=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    transfer=st.integers(0, 9),
    turns=st.permutations(range(4)).map(tuple),
)
def test_1f1b_v_is_not_longer_than_a_greedy_rule(
    ranks: int, extra: int, seconds: tuple[int, int], transfer: int, turns: tuple[int, ...]
):
    """Used to fail: its block ignores transfers, and was up to 15 % longer where one took as long as four forwards."""
    costs = fpipe.Costs(float(seconds[0]), float(seconds[1]), 0.0, transfer=float(transfer))
    base = fpipe.split(ranks + extra)(fpipe.program(2 * ranks))
    timeline = fpipe.simulate(fpipe.schedules.one_f_one_b_v(ranks, costs=costs)(base), costs)
    assert timeline.makespan <= NEAR * greedy_v(ranks, ranks + extra, seconds, transfer, turns)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "seconds", "cap", "greedy"),
    [(6, 13, (10, 7, 12), 2.5, 561.5), (5, 10, (7, 3, 4), 4, 160.0), (8, 24, (8, 10, 3), 7.5, 578.0)],
)
def test_v_half_is_not_longer_than_a_greedy_rule(
    ranks: int, microbatches: int, seconds: tuple[int, int, int], cap: float, greedy: float
):
    """Used to fail under an odd or fractional cap: a rank that runs any ready op, I before F, was up to 8 % shorter."""
    costs = fpipe.Costs.per_rank(*seconds, stages=2)
    base = fpipe.chain(fpipe.split(microbatches), fpipe.split_backward())(fpipe.program(2 * ranks))
    timeline = fpipe.simulate(fpipe.schedules.v_half(ranks, costs=costs, memory_cap=cap)(base), costs)
    assert timeline.makespan <= NEAR * greedy
    assert max(timeline.peak) <= cap
