"""The language is a value: it prints, parses, compares, and cannot be changed."""

import csv
import dataclasses
import io
import pickle

import pytest

import fpipe
from fpipe.program import KINDS, Program, ProgramError
from fpipe.transforms.reorder import parse_cell

CHAIN = fpipe.program(2)
PIPELINE = fpipe.chain(
    fpipe.split(4),
    fpipe.checkpoint("except_last"),
    fpipe.split_backward(),
    fpipe.schedules.one_f_one_b(2),
    fpipe.merge(),
)

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
    "pairs": fpipe.chain(
        fpipe.split(2), fpipe.schedules.from_table([["0F0", "1F0", "(0F1;1B0)", "0B0", "1F1", "1B1", "0B1"]])
    )(CHAIN),
    "weights that travel": fpipe.chain(
        fpipe.place([0, 1], homes={0: [2], 1: [2]}), fpipe.communicate(again=("params",))
    )(CHAIN),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_text_round_trips_and_equal_programs_have_equal_hashes(program: Program):
    assert len({program, Program.parse(str(program)), Program(program.inputs, program.ops, program.outputs)}) == 1


@pytest.mark.parametrize("name", ["a chain", "a skip", "a pipeline", "two replicas", "pairs"])
def test_csv_and_grid_hold_the_same_cells_as_the_table(name: str):
    program = PROGRAMS[name]
    read = [list(row) for row in csv.reader(program.to_csv().splitlines())]
    drawn = [line.partition("|")[2].replace(".", " ").split() for line in fpipe.plot(program).splitlines()]
    assert read == drawn == program.table()


def test_a_table_is_read_from_a_file(tmp_path):
    program = PIPELINE(CHAIN)
    file = tmp_path / "table.csv"
    file.write_text(program.to_csv())
    assert fpipe.schedules.from_table(file)(program) == program


@pytest.mark.parametrize("name", ["inputs", "ops", "outputs"])
def test_a_program_cannot_be_changed(name: str):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(CHAIN, name, ())


def test_sizes_are_read_off_the_ops():
    program = PIPELINE(fpipe.program(4))
    assert (program.stages, program.microbatches, program.ranks, program.placement) == (4, 4, 2, (0, 0, 1, 1))


def test_the_repr_says_the_sizes():
    assert repr(CHAIN) == "<Program: 2 stages, 1 microbatches, 1 ranks, 4 ops>"


def test_a_stage_on_two_ranks_has_both_in_the_placement():
    assert PROGRAMS["two replicas"].placement == ((0, 1), (0, 1))


CELLS = {
    "2F0": (("F", 2, 0, None),),
    "12B345": (("B", 12, 345, None),),
    "2F0.1": (("F", 2, 0, 1),),
    " 1W7 ": (("W", 1, 7, None),),
    "(0F7;7B3)": (("F", 0, 7, None), ("B", 7, 3, None)),
}


@pytest.mark.parametrize(("text", "keys"), CELLS.items(), ids=CELLS.keys())
def test_a_cell_names_stage_kind_microbatch_and_slice(text: str, keys):
    assert parse_cell(text) == keys


NO_CELLS = {
    "0F1garbage": "'0F1garbage' is not a cell: after 0F1 comes 'garbage'. Cells read 2F0",
    "0B0W0": "'0B0W0' is not a cell: after 0B0 comes 'W0'.",
    "0F0.x": "'0F0.x' is not a cell: after 0F0 comes '.x'.",
    "0F0 1F0": "'0F0 1F0' is not a cell: after 0F0 comes ' 1F0'.",
    "0F-1": "'0F-1' is not a cell: it does not start with stage, kind, microbatch.",
    "-1F0": "'-1F0' is not a cell: it does not start with stage, kind, microbatch.",
    "0F": "'0F' is not a cell: it does not start with stage, kind, microbatch.",
    "F0": "'F0' is not a cell: it does not start with stage, kind, microbatch.",
    "0f0": "'0f0' is not a cell: it does not start with stage, kind, microbatch.",
    "(0F0;1B0": "'(0F0;1B0' is not a cell: it does not start with stage, kind, microbatch.",
    "": "'' is not a cell: it does not start with stage, kind, microbatch.",
    "0X1": "'X' is not a kind of op; known: F, B, I, W,",
}


@pytest.mark.parametrize(("text", "sentence"), NO_CELLS.items(), ids=NO_CELLS.keys())
def test_a_cell_is_read_strictly(text: str, sentence: str):
    with pytest.raises(ProgramError) as error:
        parse_cell(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize("idle", ["", ".", None])
def test_idle_cells_are_left_out(idle):
    rows = [["0F0", idle, "0B0"], [idle, "1F0", "1B0"]]
    assert fpipe.schedules.from_table(rows)(CHAIN).table() == [["0F0", "0B0"], ["1F0", "1B0"]]


NO_LINES = {
    "params[0]": "line 1: a line ends in ' @ ' and the ranks, as in 'params[0] @ 0'\n    params[0]",
    "params[0] @ 0,x": "line 1: a line ends in ' @ ' and the ranks",
    "params[0] @ 0 rest": "line 1: a line ends in ' @ ' and the ranks",
    "\nF[0,0] @ 0": "line 2: 'F[0,0]' is not a value; a value reads like y[2,0], params[1]:1, res[0,3.1] or y[2,0]@1",
    "y[0,0] = F[0,0 inputs @ 0": "line 1: 'F[0,0' is not an op; an op reads like y[2,0] = F[2,0] params[2] y[1,0]",
    "y[0,0] = F[0,0] inputs[ @ 0": "line 1: 'inputs[' is not a value",
    "y[0,0] = F[0,-1] inputs @ 0": "line 1: 'F[0,-1]' is not an op",
    "y[0,0] = Q[0,0] inputs @ 0": "line 1: 'Q' is not a kind of op; known: F, B,",
    "y[0,0] = F[0,0] inputs {a=b} @ 0": "line 1: {a=b} is not a list of name=literal",
    "{ y[0,0] = F[0,0] inputs @ 0": "line 1: a PAIR reads { op ; op } @ rank",
    "{ nothing ; y[0,0] = F[0,0] inputs } @ 0": "line 1: ",
}


@pytest.mark.parametrize(("text", "sentence"), NO_LINES.items(), ids=NO_LINES.keys())
def test_text_is_read_strictly(text: str, sentence: str):
    with pytest.raises(ProgramError) as error:
        Program.parse(text)
    assert sentence in str(error.value)


def test_a_pickle_rests_on_five_names_that_stay():
    """docs/stability.md: what one release of 0.x has pickled is read by all later ones."""
    found = set[str]()

    class Names(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /):
            found.add(f"{module_name}.{global_name}")
            return super().find_class(module_name, global_name)

    program = PROGRAMS["with frees"]
    assert Names(io.BytesIO(pickle.dumps(program))).load() == program
    assert found == {"fpipe.program.Program", *(f"fpipe.ops.{name}" for name in ("Input", "Op", "Output", "Value"))}


def test_a_program_can_be_written_by_hand():
    text = """
        params[0] @ 0
        inputs @ 0
        target @ 0

        y[0,0] loss[0,0] res[0,0] = F[0,0] params[0] inputs target @ 0
        g[0,0] = B[0,0] params[0] res[0,0] @ 0
        loss = loss[0,0] @ 0
        outputs = y[0,0] @ 0
        grads[0] = g[0,0] @ 0
    """
    assert Program.parse(text) == fpipe.program(1)


def test_a_kind_of_ones_own_prints_and_parses():
    if "CLIP" not in KINDS:
        fpipe.register_kind("CLIP", fpipe.Kind("after"))
    lines = [line.replace("= g[0,0] @", "= clipped[0] @") for line in str(fpipe.program(1)).splitlines()]
    lines.insert(-3, "clipped[0] = CLIP[0] g[0,0] {norm=1.0} @ 0")
    assert str(Program.parse("\n".join(lines))).splitlines() == lines


@pytest.mark.parametrize("name", ["F", "clip", "C1", ""])
def test_a_kind_has_a_new_name_in_capital_letters(name: str):
    with pytest.raises(ValueError, match="a kind's name is new and in capital letters, found "):
        fpipe.register_kind(name, fpipe.Kind("after"))
