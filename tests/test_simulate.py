"""A program as time: what starts when, who waits, what is held."""

import pytest

import fpipe
from fpipe.program import KINDS

GPIPE = fpipe.chain(fpipe.split(3), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2))
ONE_F_ONE_B = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(3), fpipe.merge())(fpipe.program(3))


def starts(program: fpipe.Program, costs: fpipe.Costs) -> dict[str, float]:
    return {op.cell: start for op, start, _ in fpipe.simulate(program, costs).events}


def test_an_op_starts_when_its_rank_is_free_and_what_it_reads_is_there():
    found = starts(
        fpipe.place("linear")(fpipe.program(2)),
        fpipe.Costs(forward=[2, 3], backward_input=1, backward_weight=[4, 5], transfer=0.5),
    )
    assert {cell: found[cell] for cell in ("0F0", "1F0", "1B0", "0B0")} == {"0F0": 0, "1F0": 2.5, "1B0": 5.5, "0B0": 12}


def test_the_input_gradient_leaves_before_the_weight_gradient():
    program = fpipe.chain(fpipe.place("linear"), fpipe.split_backward())(fpipe.program(2))
    found = starts(program, fpipe.Costs())
    assert (found["0I0"], found["1W0"]) == (3, 3)


def test_the_span_of_one_rank_alone_is_what_it_works():
    program = fpipe.chain(fpipe.split(2), fpipe.place([0, 1]))(fpipe.program(2))
    busy = [(start, end) for op, start, end in fpipe.simulate(program).events if op.rank == 1 and end > start]
    assert busy[-1][1] - busy[0][0] < fpipe.simulate(program).span


def of_halves(row: str) -> fpipe.Program:
    return fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(row))(fpipe.program(1))


HELD = {
    "from forward to the end of the backward": (ONE_F_ONE_B, (3, 2, 1), (3, 2, 1)),
    "recomputed only then": (fpipe.checkpoint()(GPIPE), (1, 1), (1, 1)),
    "all forwards first": (of_halves("0F0 0F1 0I0 0I1 0W0 0W1"), (2,), (2,)),
    "until a W that waits, or let go at the end of I": (of_halves("0F0 0I0 0F1 0I1 0W0 0W1"), (2,), (1,)),
    "one for all stages of a rank": (fpipe.schedules.gpipe(2)(fpipe.split(3)(fpipe.program(6))), (3, 3), (3, 3)),
}


@pytest.mark.parametrize(("program", "peak", "released"), HELD.values(), ids=HELD.keys())
def test_residuals_are_held(program: fpipe.Program, peak: tuple[int, ...], released: tuple[int, ...]):
    timeline = fpipe.simulate(program)
    assert (timeline.peak, timeline.peak_released) == (peak, released)


def test_a_recomputation_costs_a_forward_unless_said():
    program = fpipe.checkpoint()(fpipe.program(1))
    assert [
        fpipe.simulate(program, costs).makespan
        for costs in (fpipe.Costs(), fpipe.Costs(recompute=0.5), fpipe.Costs(recompute=0))
    ] == [4, 3.5, 3]


def test_an_empty_time_has_no_bubble():
    timeline = fpipe.simulate(GPIPE, fpipe.Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble, timeline.bubble_span) == (0, 0, 0)


def test_the_end_of_an_op_that_takes_no_time_is_an_end_of_work():
    """Only ops that took time counted: with costs of 0 and a transfer of 1 the makespan was 0, under a bound of 2."""
    program = fpipe.chain(fpipe.schedules.zb_h1(2), fpipe.merge())(fpipe.program(2))
    timeline, bounds = (read(program, fpipe.Costs(0, 0, 0, transfer=1)) for read in (fpipe.simulate, fpipe.bounds))
    path = [(step.what.cell if isinstance(step.what, fpipe.Op) else "way", step.end) for step in timeline.critical_path]
    assert path == [("0F0", 0), ("way", 1), ("1F0", 1), ("1I0", 1), ("way", 2), ("0I0", 2)]
    assert [(wait.rank, wait.start, wait.end) for wait in timeline.waits] == [(0, 0, 2), (1, 0, 1), (1, 1, 2)]
    assert (timeline.makespan, timeline.span, timeline.iterations, bounds.makespan) == (2, 2, (2,), 2)


def test_a_kind_of_ones_own_costs_what_was_said():
    if "TOLL" not in KINDS:
        fpipe.register_kind("TOLL", fpipe.Kind("after"))
    fpipe.register_cost("TOLL", 5.0)
    lines = [line.replace("= g[0,0] @", "= paid[0] @") for line in str(fpipe.program(1)).splitlines()]
    lines.insert(-3, "paid[0] = TOLL[0] g[0,0] @ 0")
    assert fpipe.simulate(fpipe.Program.parse("\n".join(lines))).makespan == 8


def test_ranks_of_two_digits_line_up():
    rows = fpipe.plot(fpipe.place("linear")(fpipe.program(11))).splitlines()
    assert len({row.index("|") for row in rows}) == 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (32, 128)])
def test_the_repl_shows_what_fits_on_a_few_lines(ranks: int, microbatches: int):
    """18,000 characters of ops."""
    program = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))(fpipe.program(ranks))
    costs = fpipe.Costs(bytes={name: [1.0] * ranks for name in ("y", "dx", "res", "g", "x", "t", "w", "loss")})
    for shown in (program, fpipe.simulate(program), fpipe.bounds(program), costs):
        assert len(repr(shown)) <= 600
    assert repr(fpipe.simulate(program)).startswith("<Timeline: makespan ")
