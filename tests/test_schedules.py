"""Schedules by name and by table: their orders, sizes and published numbers."""

import itertools
import json
from pathlib import Path

import pytest

import fpipe
from fpipe.program import Program
from fpipe.transforms.cells import keys_of, read_table, sizes_of

# DualPipeV overlaps a forward with a backward: "(0F3;3B1)OVERLAP_F_B" in torch's tables is here the PAIR (0F3;3B1).
FILE = json.loads((Path(__file__).parent / "data" / "torch_orders.json").read_text())
TORCH = {name: read_table("\n".join(rows)) for name, rows in FILE["tables"].items()}
OURS = {
    "LoopedBFS": "looped_bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def torch_and_our_program(name: str) -> tuple[Program, Program]:
    """Return the program of a table of torch, and our schedule of that name at its sizes."""
    rows = TORCH[name]
    stages, microbatches, _ = sizes_of([key for row in rows for cell in row for key in keys_of(cell)])
    torchs = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.from_table(rows), fpipe.merge())
    ours = fpipe.schedules.about(OURS[name.partition("/")[0]])
    return torchs(fpipe.program(stages)), ours.program(len(rows), microbatches, stages)


@pytest.mark.parametrize("name", TORCH)
def test_schedules_equal_torchs_tables_or_beat_them(name: str):
    torchs, ours = torch_and_our_program(name)
    assert torchs.table() == TORCH[name]
    assert ours == torchs or name.startswith("ZBV")
    torch_timeline, our_timeline = fpipe.simulate(torchs), fpipe.simulate(ours)
    assert our_timeline.makespan <= torch_timeline.makespan
    assert max(our_timeline.peak) <= max(torch_timeline.peak)


@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product(range(1, 6), range(1, 8))))
def test_one_f_one_b_warms_up_with_the_ranks_below(ranks: int, microbatches: int):
    table = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))(fpipe.program(ranks)).table()
    first_backwards = [next(step for step, cell in enumerate(row) if "B" in cell) for row in table]
    assert first_backwards == [min(microbatches, ranks - rank) for rank in range(ranks)]


def test_groups_of_three_are_megatrons():
    """Megatron's PP2 VP2, five microbatches in groups of three."""
    schedule = fpipe.schedules.interleaved(2, group=3)
    table = fpipe.chain(fpipe.split(5), schedule)(fpipe.program(4)).table()
    forwards = [[cell.split("F") for cell in row if "F" in cell] for row in table]
    for rank, row in enumerate(forwards):
        assert "".join(index for _, index in row) == "0120123434"
        assert "".join(str((int(stage) - rank) // 2) for stage, _ in row) == "0001110011"
    assert [next(step for step, cell in enumerate(row) if "B" in cell) - 1 for row in table] == [5, 3]


RAGGED = [(p, m) for p in (2, 3, 4, 5) for m in range(p + 1, 3 * p + 2) if m % p]


@pytest.mark.crossed
@pytest.mark.parametrize(("ranks", "microbatches"), RAGGED)
@pytest.mark.parametrize("name", ["interleaved", "kimi_k2", "group_interleaved"])
def test_a_short_group_costs_no_idle_time(name: str, ranks: int, microbatches: int):
    """Used to leave idle the places of a short last group: 34 instead of 30 at p=3, m=4. At m < 2p a group of less than
    half the ranks has too few neighbours."""
    timeline = fpipe.simulate(fpipe.schedules.about(name).program(ranks, microbatches))
    floor = 6 * microbatches + (ranks - 1) * (2 if name == "group_interleaved" else 3)
    if microbatches > 2 * ranks or 2 * (microbatches % ranks) >= ranks or name == "group_interleaved":
        assert timeline.makespan == floor
    else:
        padded = fpipe.simulate(fpipe.schedules.about(name).program(ranks, 2 * ranks))
        assert floor <= timeline.makespan < padded.makespan


@pytest.mark.crossed
@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p in (2, 3, 4) for m in range(1, 3 * p + 1) if m % p])
@pytest.mark.parametrize("name", ["interleaved", "kimi_k2", "interleaved_zb", "group_interleaved"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_a_ragged_order_is_never_longer_than_its_padded_round(name: str, chunks: int, ranks: int, microbatches: int):
    about = fpipe.schedules.about(name)
    options = {} if name == "kimi_k2" else {"group": ranks}
    ragged = fpipe.simulate(about.program(ranks, microbatches, chunks * ranks, **options))
    padded = fpipe.simulate(about.program(ranks, -(-microbatches // ranks) * ranks, chunks * ranks))
    assert ragged.makespan < padded.makespan
    assert all(ragged_peak <= padded_peak for ragged_peak, padded_peak in zip(ragged.peak, padded.peak, strict=True))


@pytest.mark.parametrize(
    ("name", "microbatches", "ticks"),
    [("interleaved", 5, (39, 41)), ("interleaved_zb", 5, (33, 34)), ("interleaved_zb", 10, (63, 65))],
)
def test_groups_are_even_if_that_is_shorter(name: str, microbatches: int, ticks: tuple[int, int]):
    """On 4 ranks a short early group took two ticks longer than torch's rounds, though it holds less."""
    about = fpipe.schedules.about(name)
    even, short_last = (fpipe.simulate(about.program(4, microbatches, **options)) for options in ({}, {"group": 4}))
    assert (even.makespan, short_last.makespan) == ticks
    assert even == fpipe.simulate(about.program(4, microbatches, group=5))
    assert max(short_last.peak) + 0.5 == max(even.peak)


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p in (2, 3, 4, 6) for m in range(1, 2 * p - 1)])
def test_zb_h2_with_few_microbatches_is_no_slower_than_zb_h1(ranks: int, microbatches: int):
    for costs in (fpipe.Costs(), fpipe.Costs(10, 12, 8), fpipe.Costs(3, 4, 2)):
        h1, h2 = (
            fpipe.simulate(fpipe.schedules.about(name).program(ranks, microbatches), costs)
            for name in ("zb_h1", "zb_h2")
        )
        assert h2.makespan <= h1.makespan
        assert h2.span <= h1.span


def test_stages_of_a_rank_run_in_turn():
    table = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(4)).table()
    assert table[0] == ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]


# The paper's figure 5: 8 ranks, 20 microbatches; the first and a middle rank up to their first pairs, and their ends.
def test_dualpipe_is_the_figure_of_the_paper():
    table = fpipe.schedules.about("dualpipe").program(8, 20).table()
    assert " ".join(table[0][:16]) == "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F10 7I10 7W10 7F11 7I11 7W11 7F12 7I12 7W12"
    assert " ".join(table[3][:11]) == "3F0 4F10 3F1 4F11 3F2 4F12 3F3 4F13 3F4 4B10 (4F14;3B0)"
    assert " ".join(table[3][-12:]) == "4B16 3B6 4B17 3B7 4I18 3I8 4I19 3I9 4W18 3W8 4W19 3W9"


@pytest.mark.parametrize(("name", "ranks"), [("chimera", 4), ("dualpipe", 4)])
def test_the_gradients_of_two_replicas_meet_in_an_add(name: str, ranks: int):
    program = fpipe.schedules.about(name).program(ranks, 2 * ranks)
    params_input = program.inputs[0]
    assert (params_input.value.name, params_input.homes) == ("params", (0, ranks - 1))
    rank_by_value = {value: op.rank for op in program.ops for value in op.writes}
    meeting = [op for op in program.ops if op.kind == "ADD" and len({rank_by_value[value] for value in op.reads}) > 1]
    assert {op.stage for op in meeting} == set(range(ranks))
    assert all(op.rank in (op.stage, ranks - 1 - (op.stage or 0)) for op in meeting)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_takes_as_many_waves_as_the_stages_allow(waves: int):
    """Used to default to one wave of adjacent stages for any number of stages: w times the bubble."""
    program = fpipe.split(6)(fpipe.program(6 * waves + 1))
    assert fpipe.schedules.hanayo(3)(program) == fpipe.schedules.hanayo(3, waves=waves)(program)
