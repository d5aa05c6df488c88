"""Laws of the language, which hold for every program, on random programs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program, ProgramError
from property_tests.strategies import DrawnProgram, dags, legal_tables, max_examples, plans, tiny

ANY_ROWS = 8


def is_harmless(program: Program, plan: DrawnProgram) -> bool:
    """Whether a changed program still computes plain autograd's gradients, bit by bit."""
    net = tiny(plan.takes)
    return fpipe.verify(program, net.model, net.params(), net.batch(ANY_ROWS)).bitwise


@max_examples(15)
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
    transforms = [plan.split, *(plan.transforms[name] for name in ("checkpoint", "split_backward", "merge"))]
    for text in (plan.program.to_csv(), fpipe.plot(plan.program)):
        assert fpipe.chain(*transforms, fpipe.schedules.from_table(text))(plan.base) == plan.program


@max_examples(15)
@given(plans())
def test_csv_with_transfers_round_trips_on_a_base_program(plan: DrawnProgram):
    program = fpipe.communicate()(plan.program)
    assert fpipe.schedules.from_table(program.to_csv(comms=True))(program) == program


@given(plans())
def test_merging_backwards_undoes_splitting_them(plan: DrawnProgram):
    merged = fpipe.chain(plan.split, plan.transforms["checkpoint"], fpipe.merge())(plan.base)
    assert fpipe.chain(fpipe.split_backward(), fpipe.merge_backward())(merged) == merged


@given(plans())
def test_splitting_backwards_undoes_merging_them(plan: DrawnProgram):
    """After merge_backward, each I and W left apart have ops between them, so splitting adds only adjacent pairs."""
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
    moved = {(op.reads[0]._replace(location=""), op.rank) for op in received}
    assert len(moved) == len(received)


@given(plans())
def test_communicate_puts_every_read_on_the_rank_of_its_op(plan: DrawnProgram):
    program = fpipe.communicate()(plan.program)
    ranks_by_value = {value: {op.rank} for op in program.ops for value in op.writes if op.kind != "SEND"}
    ranks_by_value |= {end.value: set(end.homes) for end in program.inputs}
    assert all(op.rank in ranks_by_value[value] for op in program.ops if op.kind != "RECV" for value in op.reads)


@given(plans())
def test_a_rank_keeps_the_order_of_its_table(plan: DrawnProgram):
    rows = tuple(tuple(cell for cell in row if "R" not in cell) for row in plan.program.table())
    assert rows == plan.table


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from(["gpipe", "one_f_one_b"]))
def test_stages_of_one_rank_count_as_one(ranks: int, stages_per_rank: int, microbatches: int, name: str):
    schedule = getattr(fpipe.schedules, name)(ranks)
    placed = fpipe.chain(fpipe.split(microbatches), schedule)
    programs = ((v, placed(fpipe.program(ranks * v))) for v in (1, stages_per_rank))
    single, several = (fpipe.simulate(program, fpipe.Costs(*[12 / v] * 3)) for v, program in programs)
    assert single.peak == several.peak
    assert single.makespan == pytest.approx(several.makespan)


@given(plans(), st.data())
def test_removing_an_op_is_refused_or_harmless(plan: DrawnProgram, data: st.DataObject):
    program = fpipe.communicate()(plan.program)
    position = data.draw(st.sampled_from(range(len(program.ops))))
    try:
        shortened = Program(program.inputs, program.ops[:position] + program.ops[position + 1 :], program.outputs)
    except ProgramError:
        return
    assert is_harmless(shortened, plan), program.ops[position]


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
    i, k = data.draw(st.lists(st.sampled_from(range(len(row))), min_size=2, max_size=2, unique=True))
    row[i], row[k] = row[k], row[i]
    try:
        swapped = fpipe.reorder(rows)(plan.program)
    except ProgramError as error:
        if "comes later" not in str(error):
            raise
        return
    assert is_harmless(swapped, plan)


@given(plans(), st.data())
def test_moving_an_op_within_the_list_is_refused_or_harmless(plan: DrawnProgram, data: st.DataObject):
    ops = list(fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program).ops)
    positions = st.sampled_from(range(len(ops)))
    ops.insert(data.draw(positions), ops.pop(data.draw(positions)))
    try:
        moved = Program(plan.program.inputs, tuple(ops), fpipe.communicate()(plan.program).outputs)
    except ProgramError:
        return
    assert is_harmless(moved, plan)


@given(plans())
def test_gradients_do_not_depend_on_the_order(plan: DrawnProgram):
    assert is_harmless(fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program), plan)


@given(plans())
def test_free_drops_every_value_once_and_no_result(plan: DrawnProgram):
    program = fpipe.chain(fpipe.communicate(), fpipe.free())(plan.program)
    freed = [value for op in program.ops if op.kind == "FREE" for value in op.reads]
    written_values = {value for op in program.ops if op.kind != "SEND" for value in op.writes}
    assert sorted(freed) == sorted(written_values - {end.value for end in program.outputs})


@given(dags(), st.integers(1, 5))
def test_results_are_named_in_one_order(takes, microbatches: int):
    program = fpipe.chain(fpipe.split(microbatches), fpipe.merge())(fpipe.program(len(takes), inputs=takes))
    grads = [f"grads[{stage}]" for stage in range(len(takes))]
    assert [str(end.name) for end in program.outputs] == ["loss", "outputs", *grads]


@max_examples(15)
@given(dags(), st.integers(1, 4), st.data())
def test_the_four_transforms_commute_with_replicas(takes, microbatches: int, data: st.DataObject):
    base = fpipe.split(microbatches)(fpipe.program(len(takes), inputs=takes))
    table = data.draw(legal_tables(fpipe.split_backward()(base), replicas=True), label="table")
    schedule = fpipe.schedules.from_table(table, replicated=True)
    four = fpipe.checkpoint("except_last"), fpipe.split_backward(), schedule, fpipe.merge()
    assert len({fpipe.chain(*road)(base) for road in itertools.permutations(four)}) == 1
