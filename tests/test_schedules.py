"""Schedules by name and by table: their orders, their sizes, their published numbers."""

import itertools
import json
from pathlib import Path

import pytest

import fpipe
from fpipe.program import Program, ProgramError, parts_of

DATA = Path(__file__).parent / "data"
TORCH: dict[str, list[str]] = json.loads((DATA / "torch_orders.json").read_text())["tables"]
NAMED = {"GPipe": fpipe.schedules.gpipe, "1F1B": fpipe.schedules.one_f_one_b}

# DualPipeV overlaps a forward with a backward: "(0F3;3B1)OVERLAP_F_B" in torch's tables is here the PAIR (0F3;3B1).
every_table = pytest.mark.parametrize("name", TORCH)


def sizes(rows: list[str]) -> tuple[int, int]:
    """Stages and microbatches of a table."""
    cells = [
        cell
        for row in rows
        for cell in row.replace("(", " ").replace(")", " ").replace(";", " ").split()
        if cell != "."
    ]
    forwards = [cell.split("F") for cell in cells if "F" in cell]
    return 1 + max(int(stage) for stage, _ in forwards), 1 + max(int(index) for _, index in forwards)


def base(name: str) -> tuple[Program, fpipe.transforms._rewrite.Transform]:
    stages, microbatches = sizes(TORCH[name])
    return fpipe.split(microbatches)(fpipe.program(stages)), fpipe.schedules.from_table("\n".join(TORCH[name]))


@every_table
def test_torchs_tables_are_programs(name: str):
    program, schedule = base(name)
    assert fpipe.chain(schedule, fpipe.merge())(program).table() == [
        [cell for cell in row.split() if cell != "."] for row in TORCH[name]
    ]


@every_table
def test_the_four_transforms_commute_on_torchs_tables(name: str):
    program, schedule = base(name)
    halves = {(op.stage, op.microbatch) for op in parts_of(schedule(program).ops) if op.kind == "I"}
    four = (
        schedule,
        fpipe.split_backward(lambda stage, index: (stage, index) in halves),
        fpipe.checkpoint("except_last"),
        fpipe.merge(),
    )
    assert len({fpipe.chain(*road)(program) for road in itertools.permutations(four)}) == 1


@every_table
def test_the_four_transforms_commute_on_torchs_tables_with_every_backward_split(name: str):
    program, schedule = base(name)
    four = (schedule, fpipe.split_backward(), fpipe.checkpoint("always"), fpipe.merge())
    assert len({fpipe.chain(*road)(program) for road in itertools.permutations(four)}) == 1


@every_table
def test_torchs_tables_check_as_programs_with_transfers(name: str):
    program, schedule = base(name)
    fpipe.check(fpipe.chain(schedule, fpipe.merge(), fpipe.communicate(), fpipe.free())(program))


@every_table
def test_torchs_tables_hold_everything_once(name: str):
    program, schedule = base(name)
    stages, microbatches = sizes(TORCH[name])
    made = [op.cell for op in parts_of(schedule(program).ops) if op.kind in "FBIW"]
    every = list(itertools.product(range(stages), range(microbatches)))
    assert len(made) == len(set(made))
    assert {cell.replace("I", "B") for cell in made if "W" not in cell} == {
        f"{stage}{kind}{index}" for stage, index in every for kind in "FB"
    }


GPIPE = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1F1", "1F2", "1B0", "1B1", "1B2"]]
ONE_F_ONE_B = [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]


@pytest.mark.parametrize(("name", "table"), [("gpipe", GPIPE), ("one_f_one_b", ONE_F_ONE_B)])
def test_a_schedule_is_its_table(name: str, table):
    program = fpipe.split(3)(fpipe.program(2))
    assert getattr(fpipe.schedules, name)(2)(program) == fpipe.schedules.from_table(table)(program)


@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product(range(1, 6), range(1, 8))))
def test_one_f_one_b_warms_up_with_the_ranks_below(ranks: int, microbatches: int):
    table = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))(fpipe.program(ranks)).table()
    first = [next(step for step, cell in enumerate(row) if "B" in cell) for row in table]
    assert first == [min(microbatches, ranks - rank) for rank in range(ranks)]


def test_stages_of_a_rank_run_in_turn():
    table = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(4)).table()
    assert table[0] == ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]


@pytest.mark.parametrize("schedule", NAMED.values(), ids=NAMED)
def test_more_ranks_than_stages_are_refused(schedule):
    with pytest.raises(ProgramError, match=r"4 ranks for 3 stages: each rank needs a stage."):
        schedule(4)(fpipe.program(3))


@pytest.mark.parametrize("schedule", NAMED.values(), ids=NAMED)
def test_a_schedule_can_be_applied_again_over_another(schedule):
    program = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(3))
    other = fpipe.chain(fpipe.schedules.gpipe(2), schedule(3))(program)
    assert other == schedule(3)(program)
