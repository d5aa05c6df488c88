"""Schedules that both ends feed, and those on a wave: published tables, replicas that meet, sizes that are refused."""

import pytest

import fpipe


# The paper's figure 5: 8 ranks, 20 microbatches; the first and a middle rank up to their first pairs, and their ends.
def test_dualpipe_is_the_figure_of_the_paper():
    table = fpipe.schedules.about("dualpipe").program(8, 20).table()
    assert " ".join(table[0][:16]) == "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F10 7I10 7W10 7F11 7I11 7W11 7F12 7I12 7W12"
    assert " ".join(table[3][:11]) == "3F0 4F10 3F1 4F11 3F2 4F12 3F3 4F13 3F4 4B10 (4F14;3B0)"
    assert " ".join(table[3][-12:]) == "4B16 3B6 4B17 3B7 4I18 3I8 4I19 3I9 4W18 3W8 4W19 3W9"


@pytest.mark.parametrize(("name", "ranks"), [("chimera", 4), ("dualpipe", 4)])
def test_the_gradients_of_two_replicas_meet_in_an_add(name: str, ranks: int):
    program = fpipe.schedules.about(name).program(ranks, 2 * ranks)
    first = program.inputs[0]
    assert (first.value.name, first.homes) == ("params", (0, ranks - 1))
    made = {value: op.rank for op in program.ops for value in op.writes}
    meeting = [op for op in program.ops if op.kind == "ADD" and len({made[value] for value in op.reads}) > 1]
    assert {op.stage for op in meeting} == set(range(ranks))
    assert all(op.rank in (op.stage, ranks - 1 - (op.stage or 0)) for op in meeting)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_there_are_as_many_waves_as_the_stages_allow(waves: int):
    """One wave of groups of neighbours was the default, whatever the stages: w times the bubble."""
    program = fpipe.split(6)(fpipe.program(6 * waves + 1))
    assert fpipe.schedules.hanayo(3)(program) == fpipe.schedules.hanayo(3, waves=waves)(program)
