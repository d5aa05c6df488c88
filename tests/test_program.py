"""A program is a value: it prints, parses, compares, and is immutable."""

import csv
import dataclasses
import io
import pickle

import pytest

import fpipe
from fpipe.program import Program
from tests.refusals import refusals

CHAIN = fpipe.program(2)
RECOMPUTED = fpipe.chain(fpipe.split(4), fpipe.checkpoint("except_last"), fpipe.split_backward())
PIPELINE = fpipe.chain(RECOMPUTED, fpipe.schedules.one_f_one_b(2), fpipe.merge())
PAIRS = fpipe.schedules.from_table([["0F0", "1F0", "(0F1;1B0)", "0B0", "1F1", "1B1", "0B1"]])
ON_HOST = fpipe.place([0, 1], homes={0: [2], 1: [2]})

PROGRAMS = {
    "a chain": CHAIN,
    "one stage": fpipe.program(1),
    "a skip": fpipe.program(4, inputs=("batch", 0, 1, (2, 0))),
    "a pipeline": PIPELINE(CHAIN),
    "with transfers": fpipe.communicate()(PIPELINE(CHAIN)),
    "with frees": fpipe.chain(fpipe.communicate(), fpipe.free())(PIPELINE(CHAIN)),
    "microbatches of a size": fpipe.split(size=3, rows=10)(CHAIN),
    "a spec": fpipe.split(2, fpipe.Chunk(1))(CHAIN),
    "a dict of specs": fpipe.split(2, {"ids": fpipe.Chunk(1), "scale": fpipe.Replicate()})(CHAIN),
    "two replicas": fpipe.chain(fpipe.split(4), fpipe.place("bidirectional"), fpipe.merge())(CHAIN),
    "pairs": fpipe.chain(fpipe.split(2), PAIRS)(CHAIN),
    "weights that travel": fpipe.chain(ON_HOST, fpipe.communicate(again=("params",)))(CHAIN),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_text_round_trips_and_equal_programs_have_equal_hashes(program: Program):
    assert len({program, Program.parse(str(program)), Program(program.inputs, program.ops, program.outputs)}) == 1


@pytest.mark.parametrize("name", ["a chain", "a skip", "a pipeline", "two replicas", "pairs"])
def test_csv_and_grid_hold_the_same_cells_as_the_table(name: str):
    program = PROGRAMS[name]
    csv_rows = [list(row) for row in csv.reader(program.to_csv().splitlines())]
    grid_rows = [line.partition("|")[2].replace(".", " ").split() for line in fpipe.plot(program).splitlines()]
    assert csv_rows == grid_rows == program.table()


def test_a_table_is_read_from_a_file(tmp_path):
    program = PIPELINE(CHAIN)
    file = tmp_path / "table.csv"
    file.write_text(program.to_csv())
    assert fpipe.schedules.from_table(file)(program) == program


@pytest.mark.parametrize("name", ["inputs", "ops", "outputs"])
def test_a_program_is_immutable(name: str):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(CHAIN, name, ())


def test_a_program_counts_stages_microbatches_and_ranks():
    program = PIPELINE(fpipe.program(4))
    assert (program.stages, program.microbatches, program.ranks, program.placement) == (4, 4, 2, (0, 0, 1, 1))
    assert repr(program) == f"<Program: 4 stages, 4 microbatches, 2 ranks, {len(program.ops)} ops>"
    assert PROGRAMS["two replicas"].placement == ((0, 1), (0, 1))


@pytest.mark.parametrize("idle", ["", ".", None])
def test_idle_cells_are_left_out(idle):
    rows = [["0F0", idle, " 0B0 "], [idle, "1F0", "1B0"]]
    assert fpipe.schedules.from_table(rows)(CHAIN).table() == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_a_pickle_names_five_stable_classes():
    """docs/stability.md promises that later releases read the pickles of any 0.x release."""
    global_names = set[str]()

    class Names(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /):
            global_names.add(f"{module_name}.{global_name}")
            return super().find_class(module_name, global_name)

    program = PROGRAMS["with frees"]
    assert Names(io.BytesIO(pickle.dumps(program))).load() == program
    assert global_names == {
        "fpipe.program.Program",
        *(f"fpipe.ops.{name}" for name in ("Input", "Op", "Output", "Value")),
    }


def table_of_one_cell(text: str) -> Program:
    return fpipe.schedules.from_table([[text]])(CHAIN)


test_refusals = refusals(
    globals(),
    r"""
table_of_one_cell("0F1garbage")
    ProgramError: '0F1garbage' is not a cell: after 0F1 comes 'garbage'. Cells read 2F0
table_of_one_cell("0B0W0")
    ProgramError: '0B0W0' is not a cell: after 0B0 comes 'W0'.
table_of_one_cell("0F0.x")
    ProgramError: '0F0.x' is not a cell: after 0F0 comes '.x'.
table_of_one_cell("0F-1")
    ProgramError: '0F-1' is not a cell: it does not start with stage, kind, microbatch.
table_of_one_cell("0F")
    ProgramError: '0F' is not a cell: it does not start with stage, kind, microbatch.
table_of_one_cell("(0F0;1B0")
    ProgramError: '(0F0;1B0' is not a cell: it does not start with stage, kind, microbatch.
table_of_one_cell("0X1")
    ProgramError: 'X' is not a kind of op; known: F, B, I, W,
Program.parse("params[0]")
    ProgramError: line 1: a line ends in ' @ ' and the ranks, as in 'params[0] @ 0' params[0]
Program.parse("params[0] @ 0,x")
    ProgramError: line 1: a line ends in ' @ ' and the ranks
Program.parse("\nF[0,0] @ 0")
    ProgramError: line 2: 'F[0,0]' is not a value; a value reads like y[2,0], params[1]:1, res[0,3.1] or y[2,0]@1
Program.parse("y[0,0] = F[0,0 inputs @ 0")
    ProgramError: line 1: 'F[0,0' is not an op; an op reads like y[2,0] = F[2,0] params[2] y[1,0]
Program.parse("y[0,0] = F[0,0] inputs[ @ 0")
    ProgramError: line 1: 'inputs[' is not a value
Program.parse("y[0,0] = F[0,-1] inputs @ 0")
    ProgramError: line 1: 'F[0,-1]' is not an op
Program.parse("y[0,0] = F[0,0] inputs {a=b} @ 0")
    ProgramError: line 1: {a=b} is not a list of name=literal
Program.parse("{ y[0,0] = F[0,0] inputs @ 0")
    ProgramError: line 1: a PAIR reads { op ; op } @ rank
Program.parse("{ nothing ; y[0,0] = F[0,0] inputs } @ 0")
    ProgramError: line 1: 'nothing' is not an op
# Numbers are read strictly: a leading zero, a foreign digit, one that is missing, and a long one.
Program.parse("y[0,0] = F[00,0] params[0] @ 0")
    ProgramError: line 1: 'F[00,0]' is not an op
Program.parse("y[0,0] = F[٠,0] params[0] @ 0")
    ProgramError: line 1: 'F[٠,0]' is not an op
Program.parse("y[0,] @ 0")
    ProgramError: line 1: 'y[0,]' is not a value
Program.parse("params[" + "1" * 5000 + "] @ 0")
    ProgramError: line 1:
fpipe.register_kind("F", fpipe.Kind("after"))
    ValueError: a kind's name is new and in capital letters, found 'F'; taken: F, B,
fpipe.register_kind("clip", fpipe.Kind("after"))
    ValueError: a kind's name is new and in capital letters, found 'clip'
fpipe.register_kind("", fpipe.Kind("after"))
    ValueError: a kind's name is new and in capital letters, found ''
""",
)
