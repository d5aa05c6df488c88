"""Orders searched by cost, and priorities: legal, complete and under the cap, whatever the sizes and costs."""

import inspect
import itertools
import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe.finding.schedule_table import ScheduleTable
from fpipe.program import Op, ProgramError
from fpipe.schedules.priority import Now
from property_tests.strategies import few
from tests.test_search import never_worse, quick

seconds = st.one_of(st.integers(0, 4).map(float), st.floats(0.01, 10))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes, chunks a rank, costs of each stage, a cap and what stays for W."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    stages = ranks * chunks
    each = st.lists(seconds, min_size=stages, max_size=stages)
    return {
        "ranks": ranks,
        "chunks": chunks,
        "microbatches": draw(st.integers(1, 7)),
        "costs": fpipe.Costs(draw(each), draw(each), draw(each), transfer=draw(seconds)),
        "cap": draw(st.sampled_from([1, 1.5, 2, 2.5, 3, 5, 20])),
        "kept": draw(st.sampled_from([1.0, 0.5, 0.0])),
    }


@few(15)
@given(case=cases())
def test_a_searched_order_is_legal_complete_and_under_the_cap(case: dict[str, Any]):
    ranks, costs, cap = case["ranks"], case["costs"], case["cap"]
    schedule = fpipe.schedules.zb_auto if case["chunks"] == 1 else fpipe.schedules.zbv
    order = schedule(ranks, costs=costs, memory_cap=cap, kept=case["kept"])
    base = fpipe.program(ranks * case["chunks"])
    program = fpipe.chain(fpipe.split(case["microbatches"]), order, fpipe.merge())(base)
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    if case["kept"] == 1:
        assert max(fpipe.simulate(program, costs).peak) <= cap + 1e-6


@few(15)
@given(case=cases(), weights=st.lists(st.integers(-3, 3), min_size=4, max_size=4))
def test_a_priority_ends_in_a_program_under_the_cap_or_in_a_sentence(case: dict[str, Any], weights: list[int]):
    """Whatever the rule says, nothing hangs."""
    kind, stage, index, wait = weights

    def key(op: Op, now: Now) -> float:
        if op.kind == "F" and now.held > wait + 3:
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
TOLD = {name: takes for name, takes in PARAMETERS.items() if "costs" in takes}

scales = st.sampled_from([1e-6, 1e-3, 0.37, 3.0, 100.0])


def scaled(costs: fpipe.Costs, by: float) -> fpipe.Costs:
    """The same costs told in another unit."""
    parts: Any = (costs.forward, costs.backward_input, costs.backward_weight)
    return fpipe.Costs(*([one * by for one in each] for each in parts), transfer=costs.transfer * by)


def by_microbatch(op: Op, now: Now) -> tuple[int, int]:
    return op.microbatch or 0, "WIF".index(op.kind)


@few(8)
@given(case=cases(), by=scales, objective=st.sampled_from(["makespan", "span"]))
def test_the_unit_of_costs_says_nothing(case: dict[str, Any], by: float, objective: Any):
    """Ties of floats chose other orders when all costs were multiplied by one number: a bubble of 0.001 or 0.09."""
    ranks, stages, microbatches = case["ranks"], case["ranks"] * case["chunks"], case["microbatches"]
    base = fpipe.split(microbatches)(fpipe.program(stages))
    for name, takes in TOLD.items():
        if fpipe.schedules.about(name).refuses(ranks, stages, microbatches) is None:
            said = {"memory_cap": case["cap"], "objective": objective}
            how = {word: value for word, value in said.items() if word in takes}
            schedule = fpipe.schedules.get(name)
            one, other = (schedule(ranks, costs=scaled(case["costs"], unit), **how)(base) for unit in (1.0, by))
            assert one == other, name
    placement, halves = "linear" if case["chunks"] == 1 else "v", fpipe.split_backward()(base)
    ordered = partial(fpipe.schedules.from_priority, by_microbatch, ranks, placement=placement)
    one, other = (ordered(costs=scaled(case["costs"], unit))(halves) for unit in (1.0, by))
    assert one == other


whole = st.integers(1, 5).map(float)
DEEP = settings.get_current_profile_name() == "deep"


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes up to 12 microbatches a rank, whole costs of each stage, a cap, and what copies to the host take."""
    ranks, chunks = draw(st.integers(2, 3)), draw(st.sampled_from([1, 1, 2]))
    stages = ranks * chunks
    each = [draw(st.one_of(whole, st.lists(whole, min_size=stages, max_size=stages))) for _ in range(3)]
    copies = draw(st.sampled_from([0.0, 0.0, 2.0]))
    return {
        "ranks": ranks,
        "stages": stages,
        "microbatches": draw(st.integers(1, 12 * ranks)),
        "costs": fpipe.Costs(*each, transfer=draw(st.sampled_from([0.0, 1.0])), offload=copies),
        "cap": draw(st.sampled_from([None, 1, 1.5, 2, 2.25, ranks])),
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=200 if DEEP else 3)
@given(case=searches())
def test_a_search_is_never_above_a_schedule_by_name_keeps_its_cap_and_is_kept_as_text(case: dict[str, Any]):
    """Whatever the number of microbatches: beyond four a rank a shorter step is searched and repeated. Twice the same
    seed finds the same."""
    found = never_worse(**case)
    kept, program = found.schedule, found.program
    assert (
        ScheduleTable.from_json(kept.to_json())
        == ScheduleTable.from_csv(kept.to_csv(), replicated=kept.replicated)
        == kept
    )
    base = fpipe.chain(fpipe.split(case["microbatches"]), fpipe.merge())(fpipe.program(case["stages"]))
    assert kept(base) == program
    assert fpipe.simulate(program, case["costs"]).makespan == found.timeline.makespan
    words = {"ranks": case["ranks"], "memory_cap": case["cap"], "without": (), "seed": case["seed"]}
    assert quick(base, case["costs"], **words) == found


NEAR = 1.015
"""A search of 0.6 seconds may end so far above an order that a rule happens to hit."""


def greedy_h2(ranks: int, microbatches: int, seconds: tuple[int, ...], transfer: int, fits: float) -> float:
    """Makespan of ZB-H2's forwards and input gradients; a W runs if a share of it fits before the next."""
    forward, inputs, weight = seconds
    ahead = [min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks)]
    rows = ["F" * one + "IF" * (microbatches - one) + "I" * one for one in ahead]
    ends: dict[tuple[str, int, int], float] = {}
    free, at, waiting = [0.0] * ranks, [0] * ranks, [0] * ranks
    while any(turn < len(row) for turn, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind = row[at[rank]]
                index = row[: at[rank]].count(kind)
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
                at[rank] += 1
    return max(end + weight * more for end, more in zip(free, waiting, strict=True))


@few(60)
@given(data=st.data(), ranks=st.integers(2, 6), transfer=st.integers(0, 9), fits=st.sampled_from([0.0, 0.5, 1.0]))
def test_zb_h2_is_not_longer_than_its_greedy_rule(data: st.DataObject, ranks: int, transfer: int, fits: float):
    """With fewer than 2p-1 microbatches, unequal costs and a transfer a W in a gap made it up to 7 % shorter than where
    the paper draws it."""
    microbatches = data.draw(st.integers(1, 2 * ranks - 2), label="microbatches")
    seconds = data.draw(st.tuples(*[st.integers(1, 9)] * 3), label="seconds")
    costs = fpipe.Costs(*map(float, seconds), transfer=float(transfer))
    order = fpipe.schedules.zb_h2(ranks, costs=costs)
    found = fpipe.simulate(fpipe.chain(fpipe.split(microbatches), order)(fpipe.program(ranks)), costs)
    assert found.makespan <= NEAR * greedy_h2(ranks, microbatches, seconds, transfer, fits)
    assert max(found.peak) <= 2 * ranks - 1


def greedy_v(ranks: int, microbatches: int, seconds: tuple[int, int], transfer: int, turns: tuple[int, ...]) -> float:
    """Makespan of full backwards on a V: of what can start first, the leg whose turn it is; room as 1F1B-V has it."""
    last, cap = 2 * ranks - 1, 4 * (ranks + 1) // 3
    home = [min(stage, last - stage) for stage in range(2 * ranks)]
    ends: dict[tuple[int, int, int], float] = {}
    done, held, free = [[0] * (last + 1), [0] * (last + 1)], [0] * ranks, [0.0] * ranks
    while min(done[1]) < microbatches:
        found: list[tuple[float, int, int, int]] = []
        for back, stage in itertools.product((0, 1), range(last + 1)):
            rank, index, up = home[stage], done[back][stage], stage >= ranks
            source = (0, stage - 1) if not back else (0, stage) if stage == last else (1, stage + 1)
            if index == microbatches or (stage + back and (*source, index) not in ends):
                continue
            if (*source, index) in ends:
                way = transfer if home[source[1]] != rank else 0
                ready = ends[*source, index] + way
            else:
                ready = 0.0
            if back or held[rank] + 2 - up <= cap:
                found.append((max(free[rank], ready), turns[2 * back + up], back, stage))
        start, _, back, stage = min(found)
        rank, index = home[stage], done[back][stage]
        free[rank] = ends[back, stage, index] = start + seconds[back]
        done[back][stage] += 1
        held[rank] += 1 - 2 * back
    return max(free)


@few(10)
@given(
    ranks=st.integers(2, 6),
    more=st.integers(0, 6),
    seconds=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    transfer=st.integers(0, 9),
    turns=st.permutations(range(4)).map(tuple),
)
def test_1f1b_v_is_not_longer_than_a_greedy_rule(
    ranks: int, more: int, seconds: tuple[int, int], transfer: int, turns: tuple[int, ...]
):
    """Its block knows no transfer: where a hop took as long as four forwards, it was up to 15 % longer."""
    costs = fpipe.Costs(float(seconds[0]), float(seconds[1]), 0.0, transfer=float(transfer))
    base = fpipe.split(ranks + more)(fpipe.program(2 * ranks))
    found = fpipe.simulate(fpipe.schedules.one_f_one_b_v(ranks, costs=costs)(base), costs)
    assert found.makespan <= NEAR * greedy_v(ranks, ranks + more, seconds, transfer, turns)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "seconds", "cap", "greedy"),
    [(6, 13, (10, 7, 12), 2.5, 561.5), (5, 10, (7, 3, 4), 4, 160.0), (8, 24, (8, 10, 3), 7.5, 578.0)],
)
def test_v_half_is_not_longer_than_a_greedy_rule(
    ranks: int, microbatches: int, seconds: tuple[int, int, int], cap: float, greedy: float
):
    """Under an odd or fractional cap a rank that takes what is ready, I before F, was up to 8 % shorter."""
    costs = fpipe.Costs.per_rank(*seconds, stages=2)
    base = fpipe.chain(fpipe.split(microbatches), fpipe.split_backward())(fpipe.program(2 * ranks))
    found = fpipe.simulate(fpipe.schedules.v_half(ranks, costs=costs, memory_cap=cap)(base), costs)
    assert found.makespan <= NEAR * greedy
    assert max(found.peak) <= cap
