"""Laws of time: simulated times do not depend on how transfers are written, and they add up."""

import itertools
from dataclasses import replace
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
from property_tests.strategies import DrawnProgram, max_examples, plans, tiny

SECONDS = st.sampled_from([0, 1, 2, 3, 0.25, 5])
OVERHEADS = st.sampled_from([0, 0, 0.5, 2])
NAMES = [
    *["y", "dx", "res", "wres", "g", "sum", "loss", "x", "t", "w"],
    *["inputs", "target", "params", "dy", "count", "outputs"],
]
NUMBERS = ["makespan", "span", "idle", "bubble", "bubble_span", "iterations", "steady", "delivered"]


@st.composite
def costs(draw: st.DrawFn, plain: bool = False) -> fpipe.Costs:
    """Draw costs of every kind: latencies and bandwidths for each link, free and busy senders, and their overheads."""
    per_stage = st.one_of(SECONDS, st.lists(SECONDS, min_size=5, max_size=5))
    if plain:
        return fpipe.Costs(*(draw(per_stage) for _ in range(3)), transfer=draw(SECONDS))
    by_microbatch = st.lists(SECONDS, min_size=7, max_size=7).map(
        lambda seconds: lambda stage, microbatch: seconds[(3 * stage + microbatch) % 7]
    )
    ops = [draw(st.one_of(per_stage, by_microbatch)) for _ in range(3)]
    table = draw(st.lists(SECONDS, min_size=25, max_size=25))
    latency: Any = draw(st.sampled_from([0, 0.5, lambda source, target: table[(5 * source + target) % 25]]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        rates = draw(st.lists(st.sampled_from([1, 2, 4, 0.5]), min_size=7, max_size=7))
        options["bandwidth"] = lambda source, target: rates[(3 * source + target) % 7]
        options["bytes"] = {name: draw(st.sampled_from([0, 1, 2, 4])) for name in NAMES}
    options |= {"sender": draw(st.sampled_from(["free", "busy"])), "send": draw(OVERHEADS), "receive": draw(OVERHEADS)}
    return fpipe.Costs(*ops, draw(st.sampled_from([None, 0, 2])), latency, **options)


def timeline_facts(timeline: Timeline) -> dict[str, Any]:
    """Return every field of a timeline, with cells for ops, because ops of a program with transfers read copies."""

    def named(subject: Any) -> Any:
        return subject if isinstance(subject, Transfer) else subject and subject.cell

    return {
        "events": {(op.cell, op.rank, s, e) for op, s, e in timeline.events if op.kind not in ("SEND", "RECV")},
        "numbers": [getattr(timeline, number) for number in NUMBERS],
        "transfers": timeline.transfers,
        "path": [(named(step.activity), step.start, step.end, step.reason) for step in timeline.critical_path],
        "waits": [(w.rank, w.start, w.end, named(w.op), named(w.writer), w.source) for w in timeline.waits],
    }


def memory_curves(timeline: Timeline) -> Any:
    return timeline.peak, timeline.peak_released, [timeline.memory_curve(rank) for rank in range(timeline.ranks)]


@given(plans(), costs(), st.integers(1, 3))
def test_a_timeline_is_the_same_before_and_after_communicate(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
    programs = plan.program, fpipe.communicate()(plan.program), frees(plan.program)
    bare, communicated, freed = (fpipe.simulate(program, costs, iterations=iterations) for program in programs)
    assert timeline_facts(bare) == timeline_facts(communicated)
    assert memory_curves(bare) == memory_curves(communicated)
    assert (bare.iterations, bare.transfers) == (freed.iterations, freed.transfers)


def is_one_at_a_time(timeline: fpipe.Timeline) -> bool:
    """Whether no rank runs two ops at once. An ADD inside its B used to count twice, and bubbles were negative."""
    events, ranks = timeline.events, range(timeline.ranks)
    rows = (sorted((start, end) for op, start, end in events if op.rank == rank) for rank in ranks)
    return all(end <= start for row in rows for (_, end), (start, _) in itertools.pairwise(row))


@max_examples(7)
@given(plans())
def test_predicted_bytes_are_those_held_before_and_after_communicate(plan: DrawnProgram):
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
        assert is_one_at_a_time(ran)
    assert (len(peaks), len(by_hand)) == (1, 1)


@given(plans(), costs(plain=True))
def test_the_fast_pass_gives_the_times_of_the_plain_one(plan: DrawnProgram, costs: fpipe.Costs):
    program = plan.program
    assert needs_only_main_lanes(group_ops(program.ops), costs)
    (exact,) = simulate_iterations(program, costs)
    fast_times = main_lane_times(program, costs, costs.transfer, group_ops(program.ops))
    assert fast_times == (exact.starts, exact.ends)


@given(plans(), costs(plain=True))
def test_equal_costs_of_microbatches_are_those_of_stages(plan: DrawnProgram, costs: fpipe.Costs):
    program = plan.program
    fields = {"forward": costs.forward, "backward_input": costs.backward_input}
    tables: dict[str, Any] = {
        name: [[seconds] * program.microbatches for seconds in (field if isinstance(field, list) else [field] * 5)]
        for name, field in fields.items()
    }
    by_microbatch = replace(costs, **tables)
    timelines = [fpipe.simulate(program, by_stage) for by_stage in (costs, by_microbatch)]
    assert timelines[0].events == timelines[1].events
    assert memory_curves(timelines[0]) == memory_curves(timelines[1])
    assert fpipe.bounds(program, costs) == fpipe.bounds(program, by_microbatch)


@given(plans(), costs(plain=True))
def test_peaks_in_the_order_of_ranks_are_those_in_time(plan: DrawnProgram, costs: fpipe.Costs):
    program = plan.program
    assert residuals_stay_on_rank(program, group_ops(program.ops))
    (exact,) = simulate_iterations(program, costs)
    in_time = [
        peaks_of(residual_changes(program, exact.starts, exact.ends, exact.transfers, released), program.ranks)
        for released in (0, 1)
    ]
    assert [*peaks_in_program_order(program, group_ops(program.ops))] == in_time


@given(plans(), costs(), st.integers(1, 3))
def test_the_critical_path_is_a_chain_from_start_to_end(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
    timeline = fpipe.simulate(plan.program, costs, iterations=iterations)
    path = timeline.critical_path
    assert (path[0].start, path[0].reason, path[-1].end) == (0, "start", timeline.makespan)
    assert all(earlier.end == later.start and later.reason != "start" for earlier, later in itertools.pairwise(path))


@given(plans(), costs(), st.integers(1, 2))
def test_work_and_waits_fill_each_rank(plan: DrawnProgram, costs: fpipe.Costs, iterations: int):
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
def test_a_memory_curve_reaches_the_peak_and_ends_at_zero(plan: DrawnProgram, costs: fpipe.Costs):
    timeline = fpipe.simulate(plan.program, costs)
    if costs.bytes is None:
        for rank, peak in enumerate(timeline.peak):
            rows = timeline.memory_curve(rank)
            assert max((amount for _, amount in rows), default=0) == pytest.approx(peak)
            assert rows[-1][1] == 0
            assert [moment for moment, _ in rows] == sorted(moment for moment, _ in rows)


@given(plans(), costs())
def test_a_link_carries_one_value_at_a_time(plan: DrawnProgram, costs: fpipe.Costs):
    if costs.bandwidth is None:
        return
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for value, source, target, start, _ in fpipe.simulate(plan.program, costs).transfers:
        rows.setdefault((source, target), []).append((start, start + costs.link_seconds(value, source, target)))
    assert all(earlier[1] <= later[0] for row in rows.values() for earlier, later in itertools.pairwise(sorted(row)))


@given(plans(), costs())
def test_iterations_in_a_row_take_no_longer_than_alone(plan: DrawnProgram, costs: fpipe.Costs):
    single, three = (fpipe.simulate(plan.program, costs, iterations=n) for n in (1, 3))
    assert three.iterations[0] == single.makespan
    duration = max(single.delivered, *(event.end for event in single.events))  # the last sum too, which takes no time
    assert all(b - a <= duration + 1e-9 for a, b in itertools.pairwise(three.iterations))


def frees(program: Program) -> Program:
    return fpipe.chain(fpipe.communicate(), fpipe.free())(program)


@given(plans(), costs())
def test_no_order_is_below_a_bound(plan: DrawnProgram, costs: fpipe.Costs):
    bound, timeline = fpipe.bounds(plan.program, costs), fpipe.simulate(plan.program, costs)
    assert timeline.makespan >= bound.makespan - 1e-9
    assert timeline.span >= bound.span - 1e-9
    assert not needs_only_main_lanes(group_ops(plan.program.ops), costs) or bound == fpipe.bounds(
        frees(plan.program), costs
    )


@given(plans(), st.sets(st.integers(0, 4)), SECONDS)
def test_an_exchange_on_its_lane_delays_no_op(plan: DrawnProgram, exchanges: set[int], seconds: float):
    """Each op ends no later than with the exchange inline, exchanges queue on their lane, and bounds hold."""
    program = plan.program
    exchanged = with_exchanges(program, exchanges)
    of_stage = [seconds if stage in exchanges else 1 for stage in range(program.stages)]
    work = [0 if stage in exchanges else 1 for stage in range(program.stages)]
    inline_costs = fpipe.Costs(of_stage, of_stage, work, backward=list(map(sum, zip(of_stage, work, strict=True))))
    costs = fpipe.Costs(exchange=seconds)
    timeline, inline = fpipe.simulate(exchanged, costs), fpipe.simulate(program, inline_costs)
    pairs = zip(timeline.events, inline.events, strict=True)
    assert all(event.end <= inline_event.end + 1e-9 for event, inline_event in pairs)
    lanes = [event for event in timeline.events if is_exchange(event.op) and event.end > event.start]
    for rank in range(timeline.ranks):
        row = sorted((start, end) for op, start, end in lanes if op.rank == rank)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(row))
    assert fpipe.bounds(exchanged, costs).makespan <= timeline.makespan + 1e-9


def with_exchanges(program: Program, stages: set[int]) -> Program:

    def exchanging(op: fpipe.Op) -> fpipe.Op:
        is_exchanged = op.kind in "FRBIW" and op.stage in stages
        return op._replace(options=(("exchange", "ring"), ("axis", "ep"))) if is_exchanged else op

    return Program.trusted(program.inputs, tuple(map_parts(exchanging, op) for op in program.ops), program.outputs)
