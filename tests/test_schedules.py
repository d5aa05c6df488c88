"""Schedules by name and by table: their orders, their sizes, their published numbers."""

import itertools
import json
from pathlib import Path

import pytest

import fpipe
from fpipe.program import Program, ProgramError, parts_of

DATA = Path(__file__).parent / "data"
TORCH: dict[str, list[str]] = json.loads((DATA / "torch_orders.json").read_text())["tables"]

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


@pytest.mark.parametrize("name", [name for name in TORCH if "local=2" in name and "ranks=2" in name])
def test_the_four_transforms_commute_on_torchs_tables(name: str):
    program, schedule = base(name)
    halves = {(op.stage, op.microbatch) for op in parts_of(schedule(program).ops) if op.kind == "I"}
    own = fpipe.split_backward(lambda stage, index: (stage, index) in halves)
    for split, policy in ((own, "except_last"), (fpipe.split_backward(), "always")):
        four = schedule, split, fpipe.checkpoint(policy), fpipe.merge()
        assert len({fpipe.chain(*road)(program) for road in itertools.permutations(four)}) == 1


OURS = {
    "LoopedBFS": "looped_bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
FIXED = ("looped_bfs", "interleaved", "interleaved_zb", "dualpipev")


def ours(name: str) -> str:
    """What we call the schedule of a table of torch's."""
    return OURS[name.partition("/")[0]]


def by_name(name: str) -> Program:
    stages, microbatches = sizes(TORCH[name])
    return fpipe.schedules.about(ours(name)).program(len(TORCH[name]), microbatches, stages)


@pytest.mark.parametrize("name", [name for name in TORCH if ours(name) in FIXED])
def test_schedules_of_fixed_order_are_torchs_cell_by_cell(name: str):
    assert by_name(name).table() == [[cell for cell in row.split() if cell != "."] for row in TORCH[name]]


@pytest.mark.parametrize("name", [name for name in TORCH if ours(name) in fpipe.schedules.names()])
def test_no_schedule_is_slower_or_holds_more_than_torchs(name: str):
    program, schedule = base(name)
    torchs, found = fpipe.simulate(schedule(program)), fpipe.simulate(by_name(name))
    assert found.makespan <= torchs.makespan
    assert max(found.peak) <= max(torchs.peak)


@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product(range(1, 6), range(1, 8))))
def test_one_f_one_b_warms_up_with_the_ranks_below(ranks: int, microbatches: int):
    table = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))(fpipe.program(ranks)).table()
    first = [next(step for step, cell in enumerate(row) if "B" in cell) for row in table]
    assert first == [min(microbatches, ranks - rank) for rank in range(ranks)]


def test_megatrons_groups_of_three():
    """PP2 VP2, five microbatches in groups of three."""
    schedule = fpipe.schedules.interleaved(2, group=3)
    table = fpipe.chain(fpipe.split(5), schedule)(fpipe.program(4)).table()
    forwards = [[cell.split("F") for cell in row if "F" in cell] for row in table]
    for rank, row in enumerate(forwards):
        assert "".join(index for _, index in row) == "0120123434"
        assert "".join(str((int(stage) - rank) // 2) for stage, _ in row) == "0001110011"
    assert [next(step for step, cell in enumerate(row) if "B" in cell) - 1 for row in table] == [5, 3]


RAGGED = [(p, m) for p in (2, 3, 4, 5) for m in range(p + 1, 3 * p + 2) if m % p]


@pytest.mark.parametrize(("ranks", "microbatches"), RAGGED)
@pytest.mark.parametrize("name", ["interleaved", "kimi_k2", "group_interleaved"])
def test_a_short_group_costs_no_idle_time(name: str, ranks: int, microbatches: int):
    """A last group that is short both ways left its places free: 34 for 30 at p=3, m=4. At m < 2p one of less than half
    the ranks has too few others around it."""
    found = fpipe.simulate(fpipe.schedules.about(name).program(ranks, microbatches))
    floor = 6 * microbatches + (ranks - 1) * (2 if name == "group_interleaved" else 3)
    if microbatches > 2 * ranks or 2 * (microbatches % ranks) >= ranks or name == "group_interleaved":
        assert found.makespan == floor
    else:
        padded = fpipe.simulate(fpipe.schedules.about(name).program(ranks, 2 * ranks))
        assert floor <= found.makespan < padded.makespan


@pytest.mark.crossed
@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p in (2, 3, 4) for m in range(1, 3 * p + 1) if m % p])
@pytest.mark.parametrize("name", ["interleaved", "kimi_k2", "interleaved_zb", "group_interleaved"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_a_ragged_order_is_never_longer_than_its_padded_round(name: str, chunks: int, ranks: int, microbatches: int):
    about = fpipe.schedules.about(name)
    options = {} if name == "kimi_k2" else {"group": ranks}
    found = fpipe.simulate(about.program(ranks, microbatches, chunks * ranks, **options))
    padded = fpipe.simulate(about.program(ranks, -(-microbatches // ranks) * ranks, chunks * ranks))
    assert found.makespan < padded.makespan
    assert all(own <= most for own, most in zip(found.peak, padded.peak, strict=True))


@pytest.mark.parametrize(
    ("name", "microbatches", "ticks"),
    [("interleaved", 5, (39, 41)), ("interleaved_zb", 5, (33, 34)), ("interleaved_zb", 10, (63, 65))],
)
def test_groups_are_even_where_that_is_shorter(name: str, microbatches: int, ticks: tuple[int, int]):
    """On 4 ranks a short group that runs early took two ticks longer than torch's rounds, though it holds less."""
    about = fpipe.schedules.about(name)
    found, early = (fpipe.simulate(about.program(4, microbatches, **options)) for options in ({}, {"group": 4}))
    assert (found.makespan, early.makespan) == ticks
    assert found == fpipe.simulate(about.program(4, microbatches, group=5))
    assert max(early.peak) + 0.5 == max(found.peak)


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb"])
def test_torchs_order_of_six_microbatches_on_four_ranks(name: str):
    """torch 2.13 takes one group of six; `group` says it."""
    table = fpipe.schedules.about(name).program(4, 6, group=6).table()
    first = "7B0" if name == "interleaved" else "7I0"
    assert table[3][:9] == [*(f"3F{index}" for index in range(6)), "7F0", first, "7F1"]
    halves = 2 if name == "interleaved" else 3
    assert [len(row) for row in table] == [12 * halves] * 4


@pytest.mark.parametrize("name", ["interleaved", "kimi_k2", "looped_bfs", "interleaved_zb", "group_interleaved"])
def test_uneven_chunks_are_refused_with_the_next_size_that_fits(name: str):
    with pytest.raises(ProgramError, match=r"5 stages on 2 ranks leave some ranks more chunks .* such as 6\."):
        fpipe.schedules.about(name).program(2, 4, 5)


@pytest.mark.parametrize(("ranks", "microbatches"), [(p, m) for p in (2, 3, 4, 6) for m in range(1, 2 * p - 1)])
def test_zb_h2_with_few_microbatches_is_no_slower_than_zb_h1(ranks: int, microbatches: int):
    for costs in (fpipe.Costs(), fpipe.Costs(10, 12, 8), fpipe.Costs(3, 4, 2)):
        first, second = (
            fpipe.simulate(fpipe.schedules.about(name).program(ranks, microbatches), costs)
            for name in ("zb_h1", "zb_h2")
        )
        assert second.makespan <= first.makespan
        assert second.span <= first.span


def test_stages_of_a_rank_run_in_turn():
    table = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(4)).table()
    assert table[0] == ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]


@pytest.mark.parametrize("name", fpipe.schedules.__all__)
def test_help_on_a_published_schedule_shows_its_source_and_formulas(name: str):
    if name not in fpipe.schedules.names():
        pytest.skip("not a schedule of the literature")
    about = fpipe.schedules.about(name)
    text = getattr(fpipe.schedules, name).__doc__
    for line in (f"Source: {about.source}", f"Idle: {about.idle}", f"Peak: {about.peak}", f"Accepts: {about.accepts}"):
        assert line in text
