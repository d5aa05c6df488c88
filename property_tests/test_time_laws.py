"""Laws of time: what a simulation says does not depend on how transfers are written, and adds up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program, is_exchange
from fpipe.timing.lanes import Transfer, group_ops, simulate_iterations
from fpipe.timing.memory import peaks_in_program_order, peaks_of, residual_changes, residuals_stay_on_rank
from fpipe.timing.simulate import main_lane_times, needs_only_main_lanes
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import map_parts
from property_tests.strategies import DrawnProgram, few, plans, tiny

SECONDS = st.sampled_from([0, 1, 2, 3, 0.25, 5])
TAKEN = st.sampled_from([0, 0, 0.5, 2])
NAMES = [
    *["y", "dx", "res", "wres", "g", "sum", "loss", "x", "t", "w"],
    *["inputs", "target", "params", "dy", "count", "outputs"],
]
NUMBERS = ["makespan", "span", "idle", "bubble", "bubble_span", "iterations", "steady", "delivered"]


@st.composite
def costs(draw: st.DrawFn, plain: bool = False) -> fpipe.Costs:
    """Random costs of every kind: latencies and bandwidths for each link, senders free and busy, and what they take."""
    per_stage = st.one_of(SECONDS, st.lists(SECONDS, min_size=5, max_size=5))
    ops = [draw(per_stage) for _ in range(3)]
    if plain:
        return fpipe.Costs(*ops, transfer=draw(SECONDS))
    table = draw(st.lists(SECONDS, min_size=25, max_size=25))
    latency: Any = draw(st.sampled_from([0, 0.5, lambda source, target: table[(5 * source + target) % 25]]))
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        rates = draw(st.lists(st.sampled_from([1, 2, 4, 0.5]), min_size=7, max_size=7))
        more["bandwidth"] = lambda source, target: rates[(3 * source + target) % 7]
        more["bytes"] = {name: draw(st.sampled_from([0, 1, 2, 4])) for name in NAMES}
    more |= {"sender": draw(st.sampled_from(["free", "busy"])), "send": draw(TAKEN), "receive": draw(TAKEN)}
    return fpipe.Costs(*ops, draw(st.sampled_from([None, 0, 2])), latency, **more)


def facts(timeline: Timeline) -> dict[str, Any]:
    """Every field of a timeline, with cells for ops: those of a program with transfers read copies."""

    def named(what: Any) -> Any:
        return what if isinstance(what, Transfer) else what and what.cell

    return {
        "events": {(op.cell, op.rank, s, e) for op, s, e in timeline.events if op.kind not in ("SEND", "RECV")},
        "numbers": [getattr(timeline, number) for number in NUMBERS],
        "transfers": timeline.transfers,
        "path": [(named(step.what), step.start, step.end, step.why) for step in timeline.critical_path],
        "waits": [(w.rank, w.start, w.end, named(w.op), named(w.on), w.source) for w in timeline.waits],
    }


def held(timeline: Timeline) -> Any:
    return timeline.peak, timeline.peak_released, [timeline.held(rank) for rank in range(timeline.ranks)]


@given(plans(), costs(), st.integers(1, 3))
def test_a_timeline_is_the_same_before_and_after_communicate(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
    programs = plan.program, fpipe.communicate()(plan.program), frees(plan.program)
    bare, sent, freed = (fpipe.simulate(program, costs, iterations=iterations) for program in programs)
    assert facts(bare) == facts(sent)
    assert held(bare) == held(sent)
    assert (bare.iterations, bare.transfers) == (freed.iterations, freed.transfers)


def one_at_a_time(found: fpipe.Timeline) -> bool:
    """No rank is in two ops at once: an ADD that ran in its B counted twice, and bubbles were below zero."""
    rows = (sorted((start, end) for op, start, end in found.events if op.rank == rank) for rank in range(found.ranks))
    return all(end <= start for row in rows for (_, end), (start, _) in itertools.pairwise(row))


@few(10)
@given(plans())
def test_the_bytes_told_are_those_held_before_and_after_communicate(plan: DrawnProgram):
    net = tiny(plan.takes)
    model, params, batch = net.model, net.params(), net.batch(8)
    peaks: set[tuple[float, ...]] = set()
    by_hand: set[tuple[float, ...]] = set()
    for program in (plan.program, fpipe.communicate()(plan.program), frees(plan.program)):
        sizes = fpipe.sizes(program, model, params, batch)
        ran = fpipe.build(program, model, record=True)(params, batch).timeline
        peaks |= {sizes.peak, fpipe.simulate(program, fpipe.Costs(bytes=sizes)).peak, ran.peak}
        by_hand |= {fpipe.build(program, model, record=True, trace=False)(params, batch).timeline.peak}
        assert {event.op for event in ran.events} == {op for op in program.ops if op.kind != "FREE"}
        assert one_at_a_time(ran)
    assert (len(peaks), len(by_hand)) == (1, 1)


@given(plans(), costs(plain=True))
def test_the_fast_pass_is_the_plain_one(plan: DrawnProgram, costs: fpipe.Costs):
    program = plan.program
    assert needs_only_main_lanes(group_ops(program.ops), costs)
    (made,) = simulate_iterations(program, costs)
    assert main_lane_times(program, costs, costs.transfer, group_ops(program.ops)) == (made.starts, made.ends)


@given(plans(), costs(plain=True))
def test_peaks_in_the_order_of_ranks_are_those_in_time(plan: DrawnProgram, costs: fpipe.Costs):
    program = plan.program
    assert residuals_stay_on_rank(program, group_ops(program.ops))
    (made,) = simulate_iterations(program, costs)
    in_time = [
        peaks_of(residual_changes(program, made.starts, made.ends, made.transfers, released), program.ranks)
        for released in (0, 1)
    ]
    assert [*peaks_in_program_order(program, group_ops(program.ops))] == in_time


@given(plans(), costs(), st.integers(1, 3))
def test_the_critical_path_is_a_chain_from_start_to_end(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
    timeline = fpipe.simulate(plan.program, costs, iterations=iterations)
    path = timeline.critical_path
    assert (path[0].start, path[0].why, path[-1].end) == (0, "start", timeline.makespan)
    assert all(one.end == other.start and other.why != "start" for one, other in itertools.pairwise(path))


@given(plans(), costs(), st.integers(1, 2))
def test_what_a_rank_waits_is_what_it_does_not_work(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
    if costs.sender == "busy":
        return
    timeline = fpipe.simulate(fpipe.communicate()(plan.program), costs, iterations=iterations)
    work, sends = [0.0] * timeline.ranks, {"SEND": costs.send, "RECV": costs.receive}
    for op, start, end in timeline.events:
        took = sends[op.kind] if op.kind in sends else end - start if op.kind in "FBIWR" else 0
        work[op.rank] += min(took, max(0.0, timeline.makespan - start))
    for wait in timeline.waits:
        work[wait.rank] += wait.end - wait.start
    assert work == pytest.approx([timeline.makespan] * timeline.ranks)


@given(plans(), costs())
def test_a_curve_has_its_maximum_at_the_peak_and_ends_at_nothing(plan: DrawnProgram, costs: fpipe.Costs):
    timeline = fpipe.simulate(plan.program, costs)
    if costs.bytes is None:
        for rank, peak in enumerate(timeline.peak):
            rows = timeline.held(rank)
            assert max((amount for _, amount in rows), default=0) == pytest.approx(peak)
            assert rows[-1][1] == 0
            assert [when for when, _ in rows] == sorted(when for when, _ in rows)


@given(plans(), costs())
def test_a_link_carries_one_value_at_a_time(plan: DrawnProgram, costs: fpipe.Costs):
    if costs.bandwidth is None:
        return
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for value, source, target, start, _ in fpipe.simulate(plan.program, costs).transfers:
        rows.setdefault((source, target), []).append((start, start + costs.link_seconds(value, source, target)))
    assert all(one[1] <= other[0] for row in rows.values() for one, other in itertools.pairwise(sorted(row)))


@given(plans(), costs())
def test_iterations_in_a_row_take_no_longer_than_alone(plan: DrawnProgram, costs: fpipe.Costs):
    one, three = (fpipe.simulate(plan.program, costs, iterations=n) for n in (1, 3))
    assert three.iterations[0] == one.makespan
    whole = max(one.delivered, *(event.end for event in one.events))  # the last sum too, which takes no time
    assert all(b - a <= whole + 1e-9 for a, b in itertools.pairwise(three.iterations))


def frees(program: Program) -> Program:
    return fpipe.chain(fpipe.communicate(), fpipe.free())(program)


@given(plans(), costs())
def test_no_order_is_below_a_bound(plan: DrawnProgram, costs: fpipe.Costs):
    found, timeline = fpipe.bounds(plan.program, costs), fpipe.simulate(plan.program, costs)
    assert timeline.makespan >= found.makespan - 1e-9
    assert timeline.span >= found.span - 1e-9
    assert not needs_only_main_lanes(group_ops(plan.program.ops), costs) or found == fpipe.bounds(
        frees(plan.program), costs
    )


@given(plans(), st.sets(st.integers(0, 4)), SECONDS)
def test_an_exchange_beside_a_ranks_work_holds_up_no_more_than_within_it(
    plan: DrawnProgram, exchanges: set[int], seconds: float
):
    """Each op is over no later, each exchange queues on its lane, and no order is below a bound."""
    program = plan.program
    beside = with_exchanges(program, exchanges)
    of_stage = [seconds if stage in exchanges else 1 for stage in range(program.stages)]
    work = [0 if stage in exchanges else 1 for stage in range(program.stages)]
    within = fpipe.Costs(of_stage, of_stage, work, backward=list(map(sum, zip(of_stage, work, strict=True))))
    costs = fpipe.Costs(exchange=seconds)
    timeline, before = fpipe.simulate(beside, costs), fpipe.simulate(program, within)
    pairs = zip(timeline.events, before.events, strict=True)
    assert all(event.end <= other.end + 1e-9 for event, other in pairs)
    lanes = [event for event in timeline.events if is_exchange(event.op) and event.end > event.start]
    for rank in range(timeline.ranks):
        row = sorted((start, end) for op, start, end in lanes if op.rank == rank)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(row))
    assert fpipe.bounds(beside, costs).makespan <= timeline.makespan + 1e-9


def with_exchanges(program: Program, stages: set[int]) -> Program:
    """The program where these stages are exchanges."""

    def exchanging(op: fpipe.Op) -> fpipe.Op:
        is_exchanged = op.kind in "FRBIW" and op.stage in stages
        return op._replace(how=(("exchange", "ring"), ("axis", "ep"))) if is_exchanged else op

    return Program.trusted(program.inputs, tuple(map_parts(exchanging, op) for op in program.ops), program.outputs)
