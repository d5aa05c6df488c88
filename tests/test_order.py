"""The global order follows from the ops and the order of each rank: one clock, data first, then the rank."""

import random

import pytest

import fpipe
from fpipe.order import arrange, ops_by_rank
from fpipe.program import Program, ProgramError

PIPELINE = fpipe.chain(fpipe.split(4), fpipe.split_backward(), fpipe.schedules.one_f_one_b(3), fpipe.merge())


def shuffle_ops(program: Program, seed: int) -> list:
    """Interleave the orders of the ranks at random, and put unscheduled ops anywhere."""
    rows = {rank: [op for op in ops if op.kind in "FBIW"] for rank, ops in ops_by_rank(program.ops).items()}
    loose = [op for op in program.ops if op.kind not in "FBIW"]
    chance = random.Random(seed)
    mixed = []
    while any(rows.values()):
        mixed.append(rows[chance.choice([rank for rank, row in rows.items() if row])].pop(0))
    for op in loose:
        mixed.insert(chance.randrange(len(mixed) + 1), op)
    return mixed


@pytest.mark.parametrize("seed", range(10))
def test_the_order_does_not_depend_on_how_ranks_interleave(seed: int):
    for program in (PIPELINE(fpipe.program(3)), fpipe.communicate()(PIPELINE(fpipe.program(3)))):
        assert arrange(program.inputs, shuffle_ops(program, seed), program.outputs) == program


def test_merge_keeps_recomputes_where_a_table_placed_them():
    base = fpipe.chain(fpipe.split(2), fpipe.checkpoint())(fpipe.program(1))
    scheduled = fpipe.schedules.from_table([["0F0", "0F1", "0R0", "0R1", "0B0", "0B1"]])(base)
    assert fpipe.merge()(scheduled).table() == [["0F0", "0F1", "0R0", "0R1", "0B0", "0B1"]]


def test_an_op_of_an_unscheduled_stage_keeps_its_place():
    text = str(fpipe.program(1)).replace("grads[0] = g[0,0]", "sum[1] = ADD[1] g[0,0] @ 0\ngrads[1] = sum[1]")
    lines = text.splitlines()
    ops_first = sorted(lines, key=lambda line: (" = " in line) + (line.split(" = ")[-1][:1].islower()))
    program = fpipe.Program.parse("\n".join(ops_first))
    assert fpipe.place([0] * program.stages)(program).placement[0] == 0


def cross_reads(program: Program) -> list:
    """Let the first ADD of a stage's sums read the last one."""
    adds = [op for op in program.ops if op.kind == "ADD"]
    return [op._replace(reads=(adds[-1].writes[0], *op.reads[1:])) if op is adds[0] else op for op in program.ops]


def test_a_cycle_of_unscheduled_ops_is_an_error():
    # A rewrite that crossed the reads of two ADDs met Python's recursion limit instead of a sentence.
    program = fpipe.chain(fpipe.split(3), fpipe.merge())(fpipe.program(1))
    with pytest.raises(ProgramError) as error:
        arrange(program.inputs, cross_reads(program), program.outputs)
    assert str(error.value) == (
        "ops that no schedule places wait for each other in a circle, and can stand in no order.\n"
        "  ADD(sum[0,1]) on rank 0 reads sum[0,2], which ADD(sum[0,2]) writes.\n"
        "  ADD(sum[0,2]) on rank 0 reads sum[0,1], which ADD(sum[0,1]) writes.\n"
        "Let one of them read a value that is written before."
    )


def test_sums_of_many_microbatches_may_come_in_reverse_order():
    program = fpipe.chain(fpipe.split(1500), fpipe.merge(outputs=False))(fpipe.program(1))
    backwards = sorted(program.ops, key=lambda op: (op.kind == "ADD", -(op.microbatch or 0) * (op.kind == "ADD")))
    assert arrange(program.inputs, backwards, program.outputs) == program
