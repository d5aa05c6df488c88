"""Simulation: start times, waits, residuals held, transfers, and the costs of ops."""

import re
from collections.abc import Callable

import pytest

import fpipe
from fpipe import Costs
from fpipe.program import KINDS, Program
from fpipe.timing.amounts import EXTRA_COSTS
from tests.refusals import refusals

TWO_STAGES = fpipe.place("linear")(fpipe.program(2))
GPIPE = fpipe.chain(fpipe.split(3), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2))
BYTES = {"y": 4, "dx": 8}
ONE_F_ONE_B = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(3), fpipe.merge())(fpipe.program(3))


def size_of(value: fpipe.Value) -> float:
    return BYTES.get(value.name, 0)


def start_by_cell(program: Program, costs: Costs) -> dict[str, float]:
    return {op.cell: start for op, start, _ in fpipe.simulate(program, costs).events}


def transfers(program: Program, costs: Costs) -> list[tuple[str, int, int, float, float]]:
    return [(str(value), *fields) for value, *fields in fpipe.simulate(program, costs).transfers]


def test_an_op_starts_when_its_rank_is_free_and_its_reads_have_arrived():
    start = start_by_cell(TWO_STAGES, Costs(forward=[2, 3], backward_input=1, backward_weight=[4, 5], transfer=0.5))
    assert [start[cell] for cell in ("0F0", "1F0", "1B0", "0B0")] == [0, 2.5, 5.5, 12]


@pytest.mark.parametrize(("lengths", "makespan"), [([2, 2, 2], 24), ([1, 4, 1], 27), ([4, 1, 1], 30)])
def test_packing_and_order_of_microbatches_decide_the_time(lengths: list[int], makespan: float):
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(2))(fpipe.program(2))
    table = [lengths, lengths]
    timelines = [
        fpipe.simulate(program, Costs(seconds, seconds, seconds))
        for seconds in (table, lambda stage, microbatch: table[stage][microbatch])  # pyright: ignore[reportUnknownLambdaType]
    ]
    assert timelines[0].events == timelines[1].events
    assert timelines[0].makespan == makespan


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        (Costs([[1, 1, 1], [1]]), "forward lists 1 microbatches at stage 1; the program has a 1F1."),
        (Costs(lambda stage, microbatch: -1), "forward(0, 0) is a time in seconds, at least 0; found -1."),
    ],
)
def test_costs_of_microbatches_are_checked(costs: Costs, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        fpipe.simulate(GPIPE, costs)


def test_a_search_with_costs_of_microbatches_refuses_the_solver():
    costs = Costs(lambda stage, microbatch: 1 + microbatch)
    with pytest.raises(ValueError, match="takes microbatches as alike"):
        fpipe.search(2, costs, ranks=2, microbatches=2, solver="cp-sat")


def two_microbatches_in_order(row: str) -> fpipe.Program:
    return fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(row))(fpipe.program(1))


PEAKS_BY_CASE = {
    "from forward to the end of the backward": (ONE_F_ONE_B, (3, 2, 1), (3, 2, 1)),
    "recomputed only then": (fpipe.checkpoint()(GPIPE), (1, 1), (1, 1)),
    "all forwards first": (two_microbatches_in_order("0F0 0F1 0I0 0I1 0W0 0W1"), (2,), (2,)),
    "until a W that waits, or let go at the end of I": (
        two_microbatches_in_order("0F0 0I0 0F1 0I1 0W0 0W1"),
        (2,),
        (1,),
    ),
    "one for all stages of a rank": (fpipe.schedules.gpipe(2)(fpipe.split(3)(fpipe.program(6))), (3, 3), (3, 3)),
}


@pytest.mark.parametrize(("program", "peak", "released"), PEAKS_BY_CASE.values(), ids=PEAKS_BY_CASE.keys())
def test_residuals_are_held_at_their_peak(program: fpipe.Program, peak: tuple[int, ...], released: tuple[int, ...]):
    timeline = fpipe.simulate(program)
    assert (timeline.peak, timeline.peak_released) == (peak, released)


def test_a_recomputation_costs_a_forward_by_default():
    program = fpipe.checkpoint()(fpipe.program(1))
    assert [fpipe.simulate(program, Costs(recompute=seconds)).makespan for seconds in (None, 0.5, 0)] == [4, 3.5, 3]


def test_ops_that_take_no_time_count_towards_the_makespan():
    """Only ops that took time counted: with costs of 0 and a transfer of 1 the makespan was 0, under a bound of 2."""
    program = fpipe.chain(fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(2))
    timeline, bounds = (
        reading(program, fpipe.Costs(0, 0, 0, transfer=1)) for reading in (fpipe.simulate, fpipe.bounds)
    )
    path = [
        (step.activity.cell if isinstance(step.activity, fpipe.Op) else "way", step.end)
        for step in timeline.critical_path
    ]
    assert path == [("0F0", 0), ("way", 1), ("1F0", 1), ("1I0", 1), ("way", 2), ("0I0", 2)]
    assert [(wait.rank, wait.start, wait.end) for wait in timeline.waits] == [(0, 0, 2), (1, 0, 1), (1, 1, 2)]
    assert (timeline.makespan, timeline.span, timeline.iterations, bounds.makespan) == (2, 2, (2,), 2)


def test_ranks_of_two_digits_line_up():
    rows = fpipe.plot(fpipe.place("linear")(fpipe.program(11))).splitlines()
    assert len({row.index("|") for row in rows}) == 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (32, 128)])
def test_reprs_fit_on_a_few_lines(ranks: int, microbatches: int):
    """The repr used to print all ops, in 18,000 characters."""
    program = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))(fpipe.program(ranks))
    costs = fpipe.Costs(bytes={name: [1.0] * ranks for name in ("y", "dx", "res", "g", "x", "t", "w", "loss")})
    for value in (program, fpipe.simulate(program), fpipe.bounds(program), costs):
        assert len(repr(value)) <= 600
    assert repr(fpipe.simulate(program)).startswith("<Timeline: makespan ")


def test_a_value_takes_its_bytes_over_the_bandwidth_and_then_the_latency():
    latency = {(0, 1): 1, (1, 0): 2}
    for transfer_cost in (latency, lambda source, target: latency[source, target]):
        costs = Costs(transfer=transfer_cost, bandwidth={(0, 1): 2, (1, 0): 4}, bytes=size_of)
        assert transfers(TWO_STAGES, costs) == [("y[0,0]", 0, 1, 1, 4), ("dx[1,0]", 1, 0, 7, 11)]


def test_transfers_on_one_link_follow_each_other():
    costs = Costs(transfer=1, bandwidth=1, bytes=size_of)
    outputs = [transfer for transfer in transfers(GPIPE, costs) if transfer[0].startswith("y")]
    assert outputs == [("y[0,0]", 0, 1, 1, 6), ("y[0,1]", 0, 1, 5, 10), ("y[0,2]", 0, 1, 9, 14)]


def test_a_free_sender_goes_on_and_a_busy_sender_waits_for_the_arrival():
    free, busy = (start_by_cell(GPIPE, Costs(transfer=10, sender=sender)) for sender in ("free", "busy"))
    assert [start["0F1"] for start in (free, busy)] == [1, 11]
    assert [start["1F0"] for start in (free, busy)] == [11, 11]


def test_a_rank_runs_no_op_while_it_sends_or_receives():
    """Rank 1 takes y[0,1] at 6.5 although it arrived at 5, since 1F0 comes first; its transfer may be an op or not."""
    costs = Costs(forward=[1, 3], transfer=0.5, send=1, receive=0.5)
    for program in (GPIPE, fpipe.communicate()(GPIPE)):
        start = start_by_cell(program, costs)
        assert [start[cell] for cell in ("0F0", "0F1", "0F2", "1F0", "1F1")] == [0, 2, 4, 3, 6.5]
        timeline = fpipe.simulate(program, costs)
        assert timeline.transfers[1][3:] == (4, 4.5)
        assert "RECV(y[0,1]@1)" in [getattr(step.activity, "cell", "") for step in timeline.critical_path]


@pytest.mark.parametrize(("pair", "seconds"), [("sum", 6), ("max", 4), (lambda op: 5 if op.kind == "PAIR" else 0, 5)])
def test_a_pair_costs_the_sum_the_maximum_or_a_given_number(pair, seconds: float):
    base = fpipe.split(2)(fpipe.program(1))
    program = fpipe.schedules.from_table([["0F0", "(0F1;0B0)", "0B1"]])(base)
    events = fpipe.simulate(program, Costs(2, 3, 1, pair=pair)).events
    assert [end - start for op, start, end in events if op.kind == "PAIR"] == [seconds]


def offloaded(microbatches: int) -> Program:
    """All forwards, then all backwards; every microbatch's residuals are on the host in between."""
    return fpipe.chain(fpipe.split(microbatches), fpipe.schedules.gpipe(1), fpipe.offload())(fpipe.program(1))


def test_the_copy_lane_runs_one_op_at_a_time_next_to_the_main_lane():
    events = fpipe.simulate(offloaded(2), Costs(offload=3, load=1)).events
    times = {op.cell: (start, end) for op, start, end in events if op.kind != "SPLIT"}
    main = {"0F0": (0, 1), "0F1": (1, 2), "0B0": (5, 7), "0B1": (9, 11)}
    offloads = {"OFFLOAD(res[0,0]@host)": (1, 4), "OFFLOAD(res[0,1]@host)": (5, 8)}
    assert times == main | offloads | {"LOAD(res[0,0]@host@0)": (4, 5), "LOAD(res[0,1]@host@0)": (8, 9)}


def test_a_copy_starts_no_earlier_than_the_main_op_before_it():
    """The second LOAD waits for the first backward, although its residuals are on the host long before."""
    start = start_by_cell(offloaded(2), Costs(5, 5, 0))
    assert (start["LOAD(res[0,1]@host@0)"], start["0B0"]) == (10, 10)


def test_copies_to_the_host_have_a_bandwidth():
    costs = Costs(offload=1, host_bandwidth=2, bytes=lambda value: 8 if value.name == "res" else 0)
    ends = {op.cell: end - start for op, start, end in fpipe.simulate(offloaded(1), costs).events}
    assert ends["OFFLOAD(res[0,0]@host)"] == ends["LOAD(res[0,0]@host@0)"] == 5


def test_the_steady_period_of_zb_h2_is_its_span():
    program = fpipe.chain(fpipe.split(8), fpipe.schedules.zb_h2(4), fpipe.merge())(fpipe.program(4))
    timeline = fpipe.simulate(program, iterations=4)
    assert (timeline.iterations, timeline.steady) == ((27, 51, 75, 99), 24)
    assert str(timeline).startswith("4 iterations, each 24, makespan 99")


def test_a_forward_waits_for_the_update_of_its_parameters():
    """Rank 1 is free at 3 and its parameters are new by then; the parameters of stage 0 are new at 4."""
    program = fpipe.chain(fpipe.place("linear"), fpipe.merge())(fpipe.program(2))
    timeline = fpipe.simulate(program, iterations=2)
    start_in_second_iteration = {event.op.cell: event.start for event in timeline.events[len(program.ops) :]}
    assert (timeline.iterations[0], start_in_second_iteration["0F0"], start_in_second_iteration["1F0"]) == (6, 6, 7)


def test_waits_name_the_rank_the_op_and_its_source():
    waits = fpipe.simulate(GPIPE, Costs(transfer=1)).waits
    fields = [
        (wait.rank, wait.start, wait.end, wait.op and wait.op.cell, wait.writer and wait.writer.cell, wait.source)
        for wait in waits
    ]
    assert fields == [(0, 3, 8, "0B0", "1B0", 1), (1, 0, 2, "1F0", "0F0", 0), (1, 11, 14, None, None, None)]


def test_the_critical_path_says_why_each_step_could_not_start_before():
    path = fpipe.simulate(GPIPE, Costs(transfer=1)).critical_path
    cells = [step.activity.cell if isinstance(step.activity, fpipe.Op) else str(step.activity.value) for step in path]
    assert cells == ["0F0", "y[0,0]", "1F0", "1F1", "1F2", "1B0", "dx[1,0]", "0B0", "0B1", "0B2"]
    reasons = ["start", "data", "data", "rank", "rank", "rank", "data", "data", "rank", "rank"]
    assert [step.reason for step in path] == reasons


test_invalid_costs_are_refused = refusals(
    globals(),
    r"""
Costs(recompute=-1)
    ValueError: recompute is a time in seconds, at least 0; found -1.
Costs(backward_input=None)
    ValueError: backward_input is a time in seconds, at least 0; found None, which is no number.
Costs(offload=float('inf'))
    ValueError: offload is a time in seconds, at least 0; found inf.
Costs(bandwidth={(0, 1): 0}, bytes=size_of)
    ValueError: bandwidth is bytes a second, above 0; found 0.
Costs(bandwidth=-1, bytes=size_of)
    ValueError: bandwidth is bytes a second, above 0; found -1.
Costs(forward=True)
    ValueError: forward is a time in seconds, at least 0; found True, which is no number.
Costs(backward_weight=[1, '1'])
    ValueError: backward_weight is a time in seconds, at least 0; found '1', which is no number.
Costs(transfer={(0, 1): float('nan')})
    ValueError: transfer is a time in seconds, at least 0; found nan.
Costs(transfer={0: 1})
    ValueError: transfer is a number, or a table {(from, to): seconds} with the numbers of two ranks; found the
    key 0.
Costs(transfer={(0, True): 1})
    ValueError: the numbers of two ranks; found the key (0, True).
Costs(transfer={(0, -1): 1})
    ValueError: transfer has a link (0, -1); ranks are numbers from 0.
Costs(bandwidth={1: 1}, bytes=size_of)
    ValueError: bandwidth is a number, or a table {(from, to): bytes a second} with the numbers of two ranks;
    found the key 1.
Costs(host_bandwidth={(0, 1): 1}, bytes=size_of)
    ValueError: host_bandwidth is bytes a second, above 0; found {(0, 1): 1}, which is no number.
Costs(bandwidth=1)
    ValueError: a bandwidth needs bytes of values: say bytes=fpipe.sizes(...).
Costs(sender='blocking')
    ValueError: a sender is "free" or "busy", found 'blocking'.
Costs(send=-1)
    ValueError: send is a time in seconds, at least 0; found -1.
Costs(pair='mean')
    ValueError: a pair costs "sum", "max" or f(op); found 'mean'.
Costs(bytes={'y': -4})
    ValueError: the bytes of 'y' are a number, at least 0; found -4.
Costs(bytes=4)
    TypeError: bytes are {name: bytes}, f(value) or fpipe.sizes(...), found int.
fpipe.simulate(TWO_STAGES, Costs(forward=[1]))
    ValueError: forward lists 1 costs, but the program has a stage 1; give one for each of its 2 stages.
fpipe.simulate(TWO_STAGES, Costs(transfer={(0, 1): 1}))
    ValueError: transfer says nothing of the link from rank 1 to rank 0, over which a value travels; add (1, 0).
fpipe.simulate(TWO_STAGES, Costs(bandwidth={}, bytes=size_of))
    ValueError: bandwidth says nothing of the link from rank 0 to rank 1, over which a value travels; add (0, 1).
fpipe.simulate(TWO_STAGES, Costs(bytes={'res': 3}))
    ValueError: the bytes of y[0,0] are not known: bytes= has res; add 'y', 0 if it does not count.
fpipe.simulate(TWO_STAGES, Costs(bytes={}))
    ValueError: the bytes of y[0,0] are not known: bytes= has no names; add 'y', 0 if it does not count.
fpipe.simulate(TWO_STAGES, Costs(bytes=lambda value: float('nan')))
    ValueError: the bytes of y[0,0] are a number, at least 0; found nan.
fpipe.simulate(TWO_STAGES, Costs(transfer=lambda source, target: -1))
    ValueError: transfer is a time in seconds, at least 0; found -1.
fpipe.simulate(TWO_STAGES, Costs(transfer=lambda *link: True))
    ValueError: transfer is a time in seconds, at least 0; found True, which is no number.
fpipe.simulate(TWO_STAGES, Costs(bandwidth=lambda *link: float('nan'), bytes=size_of))
    ValueError: bandwidth is bytes a second, above 0; found nan.
fpipe.simulate(TWO_STAGES, Costs(bytes=lambda value: None))
    ValueError: the bytes of y[0,0] are a number, at least 0; found None, which is no number.
fpipe.bounds(TWO_STAGES, Costs(backward_weight=[1]))
    ValueError: backward_weight lists 1 costs, but the program has a stage 1; give one for
fpipe.register_cost('ADD', -1)
    ValueError: the cost of ADD is a time in seconds, at least 0; found
fpipe.register_cost('SEND', 1)
    ValueError: the cost of SEND is a field of fpipe.Costs.
fpipe.simulate(TWO_STAGES, iterations=0)
    ValueError: iterations is a whole number, at least 1; found
fpipe.simulate(TWO_STAGES).memory_curve(2)
    ValueError: ranks are 0..1, found 2.
fpipe.bounds(TWO_STAGES).gap(fpipe.simulate(TWO_STAGES), 'bubble')
    ValueError: found 'bubble'
""",
)


@pytest.mark.parametrize("reading", [fpipe.simulate, fpipe.bounds])
def test_lists_have_a_cost_for_each_stage_or_more(reading: Callable[..., object]):
    assert reading(TWO_STAGES, Costs([1, 1, 9])) == reading(TWO_STAGES, Costs())


def test_a_custom_kind_has_a_cost_for_each_op():
    """The fast pass used to ask for a cost once per stage and to take it for all microbatches."""
    if "FEE" not in KINDS:
        fpipe.register_kind("FEE", fpipe.Kind("after"))
    # A FEE for each microbatch stands behind the last backward, and the results are what the FEEs write.
    lines = str(fpipe.split(3)(fpipe.program(1))).splitlines()
    lines = [re.sub(r"= (g\[0,(\d)\]) @", r"= paid[0,\2] @", line) for line in lines]
    last_backward = max(index for index, line in enumerate(lines) if " = B[" in line)
    lines[last_backward + 1 : last_backward + 1] = [f"paid[0,{m}] = FEE[0,{m}] g[0,{m}] @ 0" for m in range(3)]
    program = Program.parse("\n".join(lines))
    if "FEE" not in EXTRA_COSTS:
        with pytest.raises(ValueError, match=re.escape("FEE has no cost; say fpipe.register_cost('FEE', seconds)")):
            fpipe.simulate(program)
    fpipe.register_cost("FEE", 5.0)
    assert fpipe.simulate(program).makespan == 9 + 3 * 5
    fpipe.register_cost("FEE", lambda op: 1.0 + (op.microbatch or 0))
    events = fpipe.simulate(program).events
    assert [end - start for op, start, end in events if op.kind == "FEE"] == [1, 2, 3]
