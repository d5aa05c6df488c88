"""Transforms: each rewrites the ops of its purpose, leaves the rest, and refuses programs that it cannot take."""

from itertools import permutations

import pytest

import fpipe
from fpipe.program import Op, Program
from tests.refusals import refusals

CHAIN = fpipe.program(3)
SPLIT = fpipe.split(4)(CHAIN)
DAG = fpipe.program(4, inputs=("batch", 0, (0, 1), (2, 0)))


def kinds(program: Program, *names: str) -> list[str]:
    return [op.cell for op in program.ops if op.kind in names]


def test_chain_of_chains_is_one_chain():
    a, b, c = fpipe.split(2), fpipe.checkpoint(), fpipe.merge()
    nested, flat = fpipe.chain(fpipe.chain(a, b), c), fpipe.chain(a, b, c)
    assert nested(CHAIN) == flat(CHAIN) == fpipe.chain(a, fpipe.chain(b, c))(CHAIN)


@pytest.mark.parametrize(
    "transform",
    [fpipe.chain(), fpipe.identity(), fpipe.checkpoint("never"), fpipe.merge_backward(), fpipe.communicate()],
)
def test_transforms_without_work_change_nothing(transform):
    assert transform(SPLIT) == SPLIT


@pytest.mark.parametrize(
    ("split", "microbatches"),
    [(fpipe.split(1), 1), (fpipe.split(size=3, rows=10), 4), (fpipe.split(8, rows=5, allow_fewer=True), 5)],
)
def test_split_makes_a_number_of_microbatches_by_count_size_or_rows(split, microbatches: int):
    assert split(CHAIN).microbatches == microbatches


def test_each_stage_that_reads_the_batch_gets_its_own_slice():
    program = fpipe.split(2)(fpipe.program(3, inputs=("batch", 0, (1, "batch"))))
    assert kinds(program, "SPLIT") == ["SPLIT(x[0,0])", "SPLIT(x[2,0])", "SPLIT(x[0,1])", "SPLIT(x[2,1])"]


def test_merge_without_outputs_writes_no_logits():
    program = fpipe.merge(outputs=False)(SPLIT)
    assert not any(value.name == "y" and value.stage == 2 for op in program.ops for value in op.writes)


def test_merge_with_losses_keeps_each_loss():
    names = [str(output.name) for output in fpipe.merge(losses=True)(SPLIT).outputs]
    assert names[1:5] == [f"losses[,{index}]" for index in range(4)]


def test_merge_adds_in_microbatch_order_or_as_computed():
    table = fpipe.schedules.from_table([["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]])
    program = fpipe.chain(fpipe.split(3), table, fpipe.merge())(fpipe.program(1))
    reads = [list(map(str, op.reads)) for op in program.ops if op.kind == "ADD"]
    assert reads == [["g[0,0]", "g[0,1]"], ["sum[0,1]", "g[0,2]"]]
    program = fpipe.chain(fpipe.split(3), table, fpipe.merge(order="schedule"))(fpipe.program(1))
    assert [str(op.reads[-1]) for op in program.ops if op.kind == "ADD"] == ["g[0,1]", "g[0,0]"]


@pytest.mark.parametrize("policy", ["always", "except_last"])
def test_a_recomputed_forward_keeps_no_residuals(policy: str):
    program = fpipe.chain(fpipe.checkpoint(policy), fpipe.split_backward())(SPLIT)
    writers = [op.kind for op in program.ops for value in op.writes if value.name == "res" and value.microbatch == 0]
    assert writers == ["R", "R", "R"]


def test_a_checkpoint_group_keeps_only_its_inputs():
    program = fpipe.chain(fpipe.split(2), fpipe.checkpoint(groups=[(0, 1), (2,)]), fpipe.merge())(CHAIN)
    reads_by_cell = {op.cell: [str(value) for value in op.reads] for op in program.ops if op.kind == "R"}
    assert (reads_by_cell["1R0"], reads_by_cell["2R0"]) == (
        ["params[1]", "again[0,0]"],
        ["params[2]", "y[1,0]", "t[2,0]"],
    )


def test_checkpoint_groups_commute_with_other_transforms():
    group = fpipe.checkpoint(groups=[(0, 1), (2, 3)])
    steps = [fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge()]
    base = fpipe.split(3)(DAG)
    assert fpipe.chain(group, *steps)(base) == fpipe.chain(*steps, group)(base)


def test_merging_backwards_leaves_separated_halves():
    table = [["0F0", "0F1", "0I0", "0W0", "0I1", "0F2", "0W1", "0B2"]]
    program = fpipe.chain(fpipe.split(3), fpipe.schedules.from_table(table), fpipe.merge_backward())(fpipe.program(1))
    assert program.table() == [["0F0", "0F1", "0B0", "0I1", "0F2", "0W1", "0B2"]]


@pytest.mark.parametrize(("name", "placed"), [("linear", "001122"), ("looped", "012012"), ("v", "012210012")])
def test_placements_by_name(name: str, placed: str):
    assert fpipe.place(name, ranks=3)(fpipe.program(len(placed))).placement == (*map(int, placed),)


def test_schedules_of_one_chunk_a_rank_keep_ascending_placements():
    """`place([0, 0, 0, 1])` before 1F1B used to be replaced silently by equal shares."""
    schedules = [fpipe.schedules.get(name)(2) for name in ("gpipe", "one_f_one_b", "zb_h1", "one_f_one_b_overlap")]
    schedules.append(fpipe.schedules.from_priority(lambda op, now: op.microbatch, 2))
    for schedule in schedules:
        placed = fpipe.chain(fpipe.split(3), fpipe.place([0, 0, 0, 1]), schedule)(fpipe.program(4))
        assert placed.placement == (0, 0, 0, 1)
        assert schedule(placed) == placed
        assert fpipe.chain(fpipe.place("looped", ranks=2), schedule)(fpipe.program(4)).placement == (0, 0, 1, 1)


def test_parameters_live_at_their_homes():
    program = fpipe.place([0, 1, 0], homes={0: [2], 1: [2], 2: [2]})(CHAIN)
    assert {port.homes for port in program.inputs if port.value.name == "params"} == {(2,)}
    assert {port.homes for port in program.outputs if port.name.name == "grads"} == {(2,)}


PAIRED = [["0F0", "1F0", "2F0", "2B0", "(0F1;1B0)", "0B0", "1F1", "2F1", "2B1", "1B1", "0B1"]]


def test_reorder_takes_a_function_of_the_program():
    forwards_first = fpipe.reorder(
        lambda program: [sorted(row, key=lambda cell: "B" in cell) for row in program.table()]
    )
    assert forwards_first(fpipe.split(2)(fpipe.program(1))).table() == [["0F0", "0F1", "0B0", "0B1"]]


def test_a_cell_b_names_i_and_w_of_a_split_backward():
    program = fpipe.chain(fpipe.split_backward(), fpipe.reorder([["0F0", "0B0"]]))(fpipe.program(1))
    assert program.table() == [["0F0", "0I0", "0W0"]]


def test_every_value_is_freed_right_after_its_last_read():
    program = fpipe.free()(SPLIT)
    last_reader: dict[object, Op] = {}
    for previous, op in zip(program.ops, program.ops[1:], strict=False):
        last_reader.update({value: previous for value in previous.reads if previous.kind != "FREE"})
        if op.kind == "FREE" and previous.kind != "FREE":
            assert all(last_reader[value] is previous for value in op.reads)


def test_parameters_may_be_sent_to_each_reader():
    placed = fpipe.chain(fpipe.split(2), fpipe.place("linear", homes=lambda stage: [3]))
    program = fpipe.communicate(again=("params",))(placed(CHAIN))
    sends = [op for op in program.ops if op.kind == "SEND" and op.reads[0].name == "params"]
    assert len(sends) == len(kinds(program, "F", "B"))


def test_a_recompute_that_another_stage_reads_takes_a_tick():
    """Its start was taken for its end, and the program read a value before it was written."""
    recomputed = fpipe.chain(fpipe.split(3), fpipe.checkpoint(groups=[range(2)]))
    program = fpipe.chain(recomputed, fpipe.place([0, 0]), fpipe.communicate())(fpipe.program(2))
    assert fpipe.Program.parse(str(program)) == program


def test_merged_outputs_can_be_dropped():
    dropped_at_once = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))
    dropped_later = fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.merge(outputs=False))
    assert dropped_later(fpipe.program(2)) == dropped_at_once(fpipe.program(2))


def test_existing_transfers_are_reused():
    program = fpipe.chain(fpipe.split(2), fpipe.place("bidirectional"), fpipe.communicate())(fpipe.program(2))
    halved = fpipe.chain(fpipe.split_backward(), fpipe.communicate())(program)
    assert len(kinds(halved, "SEND")) == len(kinds(program, "SEND"))


def test_results_with_several_homes_cost_the_same_before_and_after_communicate():
    program = fpipe.chain(fpipe.split(2), fpipe.place("bidirectional"), fpipe.merge())(fpipe.program(2))
    costs = fpipe.Costs(transfer=1)
    assert fpipe.simulate(fpipe.communicate()(program), costs).makespan == fpipe.simulate(program, costs).makespan


def test_a_cell_of_four_letters_is_read_as_text():
    """Rows of keys are looked up at once; 0F10 has four letters as a key has four parts, and would name nothing."""
    base = fpipe.split(11)(fpipe.program(1))
    cells = [f"0{kind}{index}" for kind in "FB" for index in range(11)]
    keys = [(kind, 0, index, None) for kind in "FB" for index in range(11)]
    assert fpipe.reorder([cells])(base) == fpipe.reorder([keys])(base) == fpipe.reorder([cells[:5] + keys[5:]])(base)


def test_forward_only_may_stand_anywhere_after_split():
    steps = [fpipe.forward_only(), fpipe.schedules.one_f_one_b(3), fpipe.merge(), fpipe.checkpoint()]
    assert len({fpipe.chain(*order)(SPLIT) for order in permutations(steps)}) == 1


def test_a_pair_keeps_its_forward():
    table = [["0F0", "(0F1;0B0)", "0B1"]]
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table), fpipe.forward_only())(fpipe.program(1))
    assert program.table() == [["0F0", "0F1"]]


MODEL = fpipe.from_functions([lambda p, x: x])
test_refusals = refusals(
    globals(),
    """
# It was a serial order, in silence: each microbatch waited for the one before.
fpipe.chain(fpipe.schedules.gpipe(3), fpipe.split(4), fpipe.merge())(CHAIN)
    ProgramError: this program has an order of its own already, on 3 ranks. Put fpipe.split() before
fpipe.split(2)(SPLIT)
    ProgramError: this program is split into 4 microbatches already; split it once.
fpipe.checkpoint(groups=[(0, 2)])
    ValueError: a group lists adjacent stages, such as (1, 2, 3); found (0, 2).
fpipe.checkpoint(groups=[()])
    ValueError: a group lists adjacent stages, such as (1, 2, 3); found ().
fpipe.checkpoint(groups=[(0, 1), (1, 2)])
    ValueError: a stage is in one group at most; found [(0, 1), (1, 2)].
fpipe.place([0, 1])(CHAIN)
    ProgramError: the placement lists 2 ranks for 3 stages; give one rank a stage.
fpipe.place("linear", ranks=4)(CHAIN)
    ProgramError: 4 ranks for 3 stages: each rank needs a stage.
fpipe.place([0, 1, 0])(fpipe.chain(fpipe.split(2), fpipe.reorder(PAIRED))(CHAIN))
    ProgramError: the parts of (0F1;1B0) would be on ranks [0, 1]; a PAIR is on one rank.
fpipe.chain(fpipe.place([0, 1, 1]), fpipe.communicate(), fpipe.place([1, 0, 0]))(CHAIN)
    ProgramError: this program has its transfers already; place it before fpipe.communicate().
fpipe.reorder([["0F0", "1F0", "0B0"], ["1B0"]])(fpipe.place("linear")(fpipe.program(2)))
    ProgramError: rank 0, cell 1: 1F0 is on rank 1 in this program. reorder() keeps ops on their rank;
fpipe.merge()(fpipe.free()(SPLIT))
    ProgramError: this program already frees its values; apply fpipe.free() last, after every other transform.
fpipe.chain(fpipe.split(2), fpipe.checkpoint(groups=[range(3)]), fpipe.place("looped", ranks=2))(fpipe.program(3))
    ProgramError: the stages of a checkpoint group are on one rank.
fpipe.chain(fpipe.place("linear"), fpipe.communicate(), fpipe.split(2))(fpipe.program(2))
    ProgramError: put fpipe.split() before fpipe.communicate().
""",
)
