"""Laws of the language: they hold for every program, so they are tried on random ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program, ProgramError
from property_tests.strategies import DrawnProgram, dags, few, legal_tables, plans, tiny

ANY_ROWS = 8


def harmless(program: Program, plan: DrawnProgram) -> bool:
    """Whether a program that was not refused still gives plain autograd's gradients, bit by bit."""
    net = tiny(plan.takes)
    return fpipe.verify(program, net.model, net.params(), net.batch(ANY_ROWS)).bitwise


@few(15)
@given(plans())
def test_schedule_merge_split_backward_and_checkpoint_commute(plan: DrawnProgram):
    roads = itertools.permutations(plan.transforms.values())
    assert {fpipe.chain(plan.split, *road)(plan.base) for road in roads} == {plan.program}


@given(plans())
def test_text_with_transfers_and_frees_round_trips(plan: DrawnProgram):
    for program in (plan.program, fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program)):
        copy = Program.parse(str(program))
        assert (copy == program, hash(copy) == hash(program), copy is program) == (True, True, False)


@given(plans())
def test_csv_and_the_drawn_grid_round_trip_on_a_base_program(plan: DrawnProgram):
    others = [plan.split, *(plan.transforms[name] for name in ("checkpoint", "split_backward", "merge"))]
    for text in (plan.program.to_csv(), fpipe.plot(plan.program)):
        assert fpipe.chain(*others, fpipe.schedules.from_table(text))(plan.base) == plan.program


@few(15)
@given(plans())
def test_csv_with_transfers_round_trips_on_a_base_program(plan: DrawnProgram):
    program = fpipe.communicate()(plan.program)
    assert fpipe.schedules.from_table(program.to_csv(comms=True))(program) == program


@given(plans())
def test_merging_backwards_undoes_splitting_them(plan: DrawnProgram):
    whole = fpipe.chain(plan.split, plan.transforms["checkpoint"], fpipe.merge())(plan.base)
    assert fpipe.chain(fpipe.split_backward(), fpipe.merge_backward())(whole) == whole


@given(plans())
def test_splitting_backwards_undoes_merging_them(plan: DrawnProgram):
    """Where I and W stand side by side, of which a program that merge_backward has been through has no others."""
    merged = fpipe.merge_backward()(plan.program)
    assert fpipe.merge_backward()(fpipe.split_backward()(merged)) == fpipe.merge_backward()(merged) == merged


@given(plans(), st.sampled_from(["checkpoint", "split_backward", "schedule", "merge"]))
def test_each_transform_does_nothing_the_second_time(plan: DrawnProgram, name: str):
    assert plan.transforms[name](plan.program) == plan.program


@given(plans())
def test_communicate_does_nothing_the_second_time(plan: DrawnProgram):
    once = fpipe.communicate()(plan.program)
    assert fpipe.communicate()(once) == once


@given(plans())
def test_every_transfer_is_of_one_value_to_one_rank_once(plan: DrawnProgram):
    received = [op for op in fpipe.communicate()(plan.program).ops if op.kind == "RECV"]
    moved = {(op.reads[0]._replace(at=""), op.rank) for op in received}
    assert len(moved) == len(received)


@given(plans())
def test_every_op_reads_only_what_is_on_its_rank_once_everything_is_sent(plan: DrawnProgram):
    program = fpipe.communicate()(plan.program)
    at = {value: {op.rank} for op in program.ops for value in op.writes if op.kind != "SEND"}
    at |= {end.value: set(end.homes) for end in program.inputs}
    assert all(op.rank in at[value] for op in program.ops if op.kind != "RECV" for value in op.reads)


@given(plans())
def test_a_rank_keeps_the_order_of_its_table(plan: DrawnProgram):
    kept = tuple(tuple(cell for cell in row if "R" not in cell) for row in plan.program.table())
    assert kept == plan.table


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from(["gpipe", "one_f_one_b"]))
def test_more_stages_than_ranks_share_a_rank_and_count_as_one(ranks: int, each: int, microbatches: int, name: str):
    schedule = getattr(fpipe.schedules, name)(ranks)
    placed = fpipe.chain(fpipe.split(microbatches), schedule)
    one, more = (fpipe.simulate(placed(fpipe.program(ranks * v)), fpipe.Costs(*[12 / v] * 3)) for v in (1, each))
    assert one.peak == more.peak
    assert one.makespan == pytest.approx(more.makespan)


@given(plans(), st.data())
def test_removing_an_op_is_refused_or_harmless(plan: DrawnProgram, data: st.DataObject):
    program = fpipe.communicate()(plan.program)
    place = data.draw(st.sampled_from(range(len(program.ops))))
    try:
        rest = Program(program.inputs, program.ops[:place] + program.ops[place + 1 :], program.outputs)
    except ProgramError:
        return
    assert harmless(rest, plan), program.ops[place]


@given(plans(), st.data())
def test_duplicating_an_op_is_refused(plan: DrawnProgram, data: st.DataObject):
    program = fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program)
    source = data.draw(st.sampled_from(range(len(program.ops))))
    target = data.draw(st.sampled_from(range(source, len(program.ops)))) + 1
    with pytest.raises(ProgramError):
        Program(program.inputs, (*program.ops[:target], program.ops[source], *program.ops[target:]), program.outputs)


@given(plans(), st.data())
def test_swapping_two_ops_in_a_ranks_order_is_refused_or_harmless(plan: DrawnProgram, data: st.DataObject):
    rows = [list(row) for row in plan.table]
    row = data.draw(st.sampled_from([row for row in rows if len(row) > 1]))
    one, other = data.draw(st.lists(st.sampled_from(range(len(row))), min_size=2, max_size=2, unique=True))
    row[one], row[other] = row[other], row[one]
    try:
        swapped = fpipe.reorder(rows)(plan.program)
    except ProgramError as error:
        if "comes later" not in str(error):
            raise
        return
    assert harmless(swapped, plan)


@given(plans(), st.data())
def test_moving_an_op_within_the_list_is_refused_or_harmless(plan: DrawnProgram, data: st.DataObject):
    ops = list(fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program).ops)
    places = st.sampled_from(range(len(ops)))
    ops.insert(data.draw(places), ops.pop(data.draw(places)))
    try:
        moved = Program(plan.program.inputs, tuple(ops), fpipe.communicate()(plan.program).outputs)
    except ProgramError:
        return
    assert harmless(moved, plan)


@given(plans())
def test_gradients_do_not_depend_on_the_order(plan: DrawnProgram):
    assert harmless(fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program), plan)


@given(plans())
def test_free_drops_every_value_once_and_no_result(plan: DrawnProgram):
    program = fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program)
    freed = [value for op in program.ops if op.kind == "FREE" for value in op.reads]
    written = {value for op in program.ops if op.kind != "SEND" for value in op.writes}
    assert sorted(freed) == sorted(written - {end.value for end in program.outputs})


@given(dags(), st.integers(1, 5))
def test_results_are_named_in_one_order(takes, microbatches: int):
    program = fpipe.chain(fpipe.split(microbatches), fpipe.merge())(fpipe.program(len(takes), inputs=takes))
    grads = [f"grads[{stage}]" for stage in range(len(takes))]
    assert [str(end.name) for end in program.outputs] == ["loss", "outputs", *grads]


@few(15)
@given(dags(), st.integers(1, 4), st.data())
def test_the_four_commute_with_replicas_too(takes, microbatches: int, data: st.DataObject):
    base = fpipe.split(microbatches)(fpipe.program(len(takes), inputs=takes))
    table = data.draw(legal_tables(fpipe.split_backward()(base), replicas=True), label="table")
    schedule = fpipe.schedules.from_table(table, replicated=True)
    four = fpipe.checkpoint("except_last"), fpipe.split_backward(), schedule, fpipe.merge()
    assert len({fpipe.chain(*road)(base) for road in itertools.permutations(four)}) == 1
