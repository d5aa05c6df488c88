"""Each kind of invalid program has its own error message."""

import pytest

import fpipe
from fpipe.program import Program, ProgramError
from tests.refusals import refusals

BASE = fpipe.program(2)
TWO = fpipe.split(2)(BASE)
HALVES = fpipe.split_backward()(BASE)
TRANSFERS = fpipe.chain(fpipe.place("linear"), fpipe.communicate())(BASE)
FREED = fpipe.free()(BASE)
from_table = fpipe.schedules.from_table


def lines(program: Program) -> list[str]:
    return str(program).splitlines()


def index_of(program: Program, text: str) -> int:
    return next(number for number, line in enumerate(lines(program)) if text in line)


def drop_lines(program: Program, *texts: str) -> str:
    return "\n".join(line for line in lines(program) if not any(text in line for text in texts))


def swap_lines(program: Program, upper_text: str, lower_text: str) -> str:
    program_lines = lines(program)
    i, j = index_of(program, upper_text), index_of(program, lower_text)
    program_lines[i], program_lines[j] = program_lines[j], program_lines[i]
    return "\n".join(program_lines)


def insert_line(program: Program, anchor: str, line: str) -> str:
    program_lines = lines(program)
    program_lines.insert(index_of(program, anchor) + 1, line)
    return "\n".join(program_lines)


def change_line(program: Program, line: str, old: str, new: str) -> str:
    return "\n".join(text.replace(old, new) if line in text else text for text in lines(program))


def test_tables_may_have_replicas_if_replicated_is_true():
    rows = [["0F0", "0F1", "0B0", "1B1"], ["1F0", "1B0", "1F1", "0B1"]]
    assert from_table(rows, replicated=True)(TWO).placement == ((0, 1), (0, 1))


def test_deadlocks_through_unnamed_ops_are_found():
    """Rank 0 waits for a sum of two cotangents, which waits for rank 1, which waits for rank 0."""
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(3, inputs=("batch", 0, (1, 0))))
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "2F0", "2B0", "1B0", "2F1", "2B1", "1B1"]]
    with pytest.raises(ProgramError, match=r"waits, through unnamed ops, for|reads dy\[0,0\]"):
        from_table(rows)(program)


@pytest.mark.parametrize(
    ("old", "new"),
    [("{index=0, count=2}", "{index=0, count=3}"), ("count=2", "count=3"), ("index=1", "index=2"), (", count=2", "")],
)
def test_parse_refuses_splits_that_disagree(old: str, new: str):
    """Used to end in an error about sizes in the step."""
    text = str(fpipe.split(2)(fpipe.program(1))).replace(old, new)
    with pytest.raises(ProgramError, match=r"all of them say count=2 and index=0\.\.1, and cut alike"):
        fpipe.Program.parse(text)


test_refusals = refusals(
    globals(),
    r"""
fpipe.place([0, 2])(BASE)
    ProgramError: rank 1 is missing
Program.parse(drop_lines(BASE, "= B[1,0]"))
    ProgramError: rank 0, step 2: 0B0 reads dx[1,0] (the input gradient of stage 1 for microbatch 0), which nothing
    writes. rank 0 | 0F0 1F0 [0B0] Add the backward of stage 1: 1B0, or 1I0 and 1W0.
Program.parse(drop_lines(BASE, "= B[0,0]", "grads[0]"))
    ProgramError: rank 0, step 0: 0F0 writes res[0,0] (the residuals of 0F0), which nobody reads and which is no output:
    its backward, 0B0 (or 0I0 and 0W0), is missing
Program.parse(drop_lines(BASE, "= B[0,0]"))
    ProgramError: the output grads[0] is g[0,0] (the weight gradient of stage 0 for microbatch 0), which nothing writes.
    Add 0B0, or 0W0 after 0I0.
Program.parse(swap_lines(BASE, "= F[1,0]", "= B[1,0]"))
    ProgramError: rank 0, step 1: 1B0 reads res[1,0] (the residuals of 1F0), which 1F0 writes later on the same rank.
    rank 0 | 0F0 [1B0] 1F0 0B0 Put 1F0 before 1B0, or start from fpipe.schedules.one_f_one_b(ranks=1).
Program.parse(swap_lines(HALVES, "= I[1,0]", "= W[1,0]"))
    ProgramError: 1W0 reads wres[1,0] (what 1I0 leaves for the weight gradient), which 1I0 writes later on the same
    rank.
Program.parse(drop_lines(HALVES, "= W[1,0]", "grads[1]"))
    ProgramError: 1I0 writes wres[1,0] (what 1I0 leaves for the weight gradient), which nobody reads and which is no
    output: 1W0 is missing: an I without its W leaves the weight gradient undone
Program.parse(drop_lines(HALVES, "= I[1,0]"))
    ProgramError: which nothing writes. rank 0 | 0F0 1F0 [1W0] 0I0 0W0 Add 1I0 before 1W0.
Program.parse(insert_line(BASE, "= F[1,0]", "dx[1,0] wres[1,0] = I[1,0] params[1] res[1,0] @ 0"))
    ProgramError: 1B0 writes dx[1,0] (the input gradient of stage 1 for microbatch 0), which 1I0 writes already; a value
    is written once.
Program.parse(insert_line(BASE, "= F[0,0]", lines(BASE)[index_of(BASE, "= F[0,0]")]))
    ProgramError: 0F0 writes y[0,0] (the output of 0F0), which 0F0 writes already; a value is written once. The same op
Program.parse(insert_line(BASE, "params[0] @ 0", "params[0] @ 0"))
    ProgramError: params[0] is handed in twice; list each input once.
Program.parse(change_line(BASE, "= F[0,0]", "y[0,0] res", "y[0,0] params[1] res"))
    ProgramError: 0F0 writes params[1], which is an input; a value is written once.
Program.parse(change_line(BASE, "= F[0,0]", "params[0] inputs", "params[0] inputs y[0,0]"))
    ProgramError: 0F0 reads y[0,0] (the output of 0F0), which it writes itself. rank 0 | [0F0] 1F0 1B0 0B0 An op reads
    only what others wrote before.
Program.parse(change_line(BASE, "= F[0,0]", "y[0,0] res", "y[0,0] spare[0,0] res"))
    ProgramError: 0F0 writes spare[0,0], which nobody reads and which is no output: drop it, or name it as an output.
Program.parse(insert_line(BASE, "outputs =", "other = nothing @ 0"))
    ProgramError: the output other is nothing, which nothing writes. Add the op that writes it, or leave the output out.
Program.parse(change_line(BASE, "params[1] @", "@ 0", "@ 2"))
    ProgramError: rank 1 is missing: ranks are 0..2, and each has an op or is the home of a value.
Program.parse(change_line(TRANSFERS, "= F[1,0]", "y[0,0]@1",
"y[0,0]").replace("y[0,0]@1 = RECV[0,0] y[0,0]>1 @ 1\n", ""))
    ProgramError: SEND(y[0,0]>1) has no RECV: nobody reads y[0,0]>1. rank 0 | 0F0 [SEND(y[0,0]>1)] 0B0 Add the RECV,
    or use fpipe.communicate().
Program.parse(drop_lines(TRANSFERS, "= RECV[0,0]"))
    ProgramError: rank 1, step 0: 1F0 reads y[0,0]@1 (the output of 0F0), which nothing writes. rank 1 | [1F0] 1B0 Add
    the RECV
Program.parse(drop_lines(TRANSFERS, "= SEND[0,0]"))
    ProgramError: RECV(y[0,0]@1) reads y[0,0]>1 (the output of 0F0), which nothing writes. rank 1 | [RECV(y[0,0]@1)]
    1F0 1B0 Add the SEND
Program.parse(insert_line(TRANSFERS, "= RECV[0,0]",
"y[0,0]@1.1 = RECV[0,0] y[0,0]>1 @ 1").replace("params[1] y[0,0]@1 ", "params[1] y[0,0]@1 y[0,0]@1.1 "))
    ProgramError: RECV(y[0,0]@1.1) receives y[0,0]>1, which RECV(y[0,0]@1) received already.
Program.parse(change_line(TRANSFERS, "= RECV[0,0]", "@ 1", "@ 0").replace(">1 @ 1", ">1 @ 0"))
    ProgramError: RECV(y[0,0]@1) receives y[0,0]>1, which is on its way to rank 1.
Program.parse(change_line(TRANSFERS, "= F[1,0]", "y[0,0]@1", "y[0,0]@1 y[0,0]>1"))
    ProgramError: 1F0 reads y[0,0]>1, which is in flight; only a RECV may.
Program.parse(swap_lines(FREED, "_ = FREE[1,0] y[0,0]", "= F[1,0]"))
    ProgramError: 1F0 reads y[0,0] (the output of 0F0) after it was freed on rank 0. rank 0 | 0F0 [1F0] 1B0 0B0 Apply
    fpipe.free() last.
Program.parse(change_line(BASE, "= B[1,0]", "B[1,0]", "Q[1,0]"))
    ProgramError: 'Q' is not a kind of op; known: F, B, I, W,
from_table([["(0F0;1F0)", "1B0", "0B0"]])(BASE)
    ProgramError: inside the PAIR (0F0;1F0), 1F0 reads y[0,0]
from_table({0: ["0F0", "0F1", "0B0", "0B1"], 2: ["1F0", "1B0", "1F1", "1B1"]})(TWO)
    ProgramError: rank 1 is missing: the table names ranks [0, 2]; ranks are 0..n-1.
from_table([["0F0", "0F1", "0B0", "0B1"], []])(TWO)
    ProgramError: rank 1 has no ops in the table: each rank 0..n-1 has a row.
from_table([])(TWO)
    ProgramError: the table is empty; give a row for each rank.
from_table([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1"]])(TWO)
    ProgramError: the table has 1F0 without its backward: add 1B0, or 1I0 and 1W0.
from_table([["0F0", "0F1", "0B0", "0B1"], ["1B0", "1F1", "1B1"]])(TWO)
    ProgramError: the table does not name 1F0; every F and every backward is named once.
from_table([["0F0", "0F1", "0B0", "0B1"], ["1B0", "1F0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 1, step 0: 1B0 reads res[1,0] (the residuals of 1F0), which comes later on the same rank. rank
    1 | [1B0] 1F0 1F1 1B1 Put 1F0 before 1B0, or start from fpipe.schedules.one_f_one_b(ranks=2).
from_table([["0F0", "0F1", "0W0", "0I0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 0, step 2: 0W0 reads wres[0,0] (what 0I0 leaves for the weight gradient), which comes later on
    the same rank.
from_table([["0F0", "0F1", "0I0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: the table has 0I0 without 0W0: the weight gradient is never computed. Add it.
from_table([["0F0", "0F1", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: the table has 0W0 without 0I0, which makes what it reads. Add it before.
from_table([["0F0", "0F1", "0B0", "0I0", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 0, cell 3: 0I0 stands twice, or as B and as I and W; an op is named once.
from_table([["0F0", "0F1", "0F2", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 0, cell 2: 0F2 names microbatch 2, out of range: this program has 2 (0..1). Put fpipe.split(3)
    before the table.
from_table([["0F0", "0F1", "2F0", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 0, cell 2: 2F0 names stage 2, out of range: this program has 2 stages, 0..1.
from_table([["0F0", "0F1", "0B0", "1B1"], ["1F0", "1B0", "1F1", "0B1"]])(TWO)
    ProgramError: stage 0 is on several ranks: 0F0 on rank 0 and 0B1 on rank 1. Move one; or, with replicas of
    its parameters or without any, say homes={0: [0, 1]} (from_table: replicated=True).
from_table([["0F0", "0F1", "0R0", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(TWO)
    ProgramError: rank 0, cell 2: 0R0: nothing is recomputed there. Put fpipe.checkpoint() before the table.
from_table([["0F0", "0F1", "0R0", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])(fpipe.checkpoint("always")(TWO))
    ProgramError: the table names some R but not 1R0: name all of them, or none.
from_table([["0F0", "SEND(y[0,0]>1)", "0B0"], ["1F0", "1B0"]])(TRANSFERS)
    ProgramError: the table names some SEND but not SEND(dx[1,0]>0): name all of them, or none.
""",
)
