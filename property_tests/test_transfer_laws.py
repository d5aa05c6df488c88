"""Transfers end, whatever the program, where each begins only when both sides have come to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program, ProgramError
from fpipe.runtimes.processes.message_order import check_transfers, messages
from fpipe.transforms.communicate import with_transfers
from property_tests.strategies import few
from property_tests.test_gradients import Run, runs
from property_tests.test_schedule_laws import every_schedule, programs


@every_schedule
@few(2)
@given(data=st.data(), ahead=st.integers(0, 3))
def test_the_transfers_of_every_schedule_end(name: str, data: st.DataObject, ahead: int):
    check_transfers(fpipe.communicate()(data.draw(programs(name))), ahead)


@few(25)
@given(run=runs(), ahead=st.integers(0, 3), seed=st.integers())
def test_the_transfers_of_every_program_end(run: Run, ahead: int, seed: int):
    program = with_transfers(run.program)
    check_transfers(program, ahead)
    assert ends_by_chance(program, ahead, random.Random(seed))


def ends_by_chance(program: Program, ahead: int, random: random.Random) -> bool:
    """Whether ranks that each go on, by one op or one arrival, in a drawn order get to the end: a walk of its own."""
    every = {one.value: one for one in messages(program)}
    rows = [[op for op in program.ops for op in op.parts or (op,) if op.rank == rank] for rank in range(program.ranks)]
    sent, posted, arrived = dict[tuple[int, int], int](), dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    while True:
        moves = [row for row in rows if row and row[0].kind != "RECV"]
        for row in rows:
            for value in row[0].reads if row and row[0].kind == "RECV" else ():
                one = every[value]
                way = one.source, one.target
                posted[way] = max(posted.get(way, 0), one.place + 1 + ahead)
                moves += [row] if arrived.get(way, 0) > one.place else []
        ways = [way for way in sent if arrived.get(way, 0) < min(sent[way], posted.get(way, 0))]
        if not moves and not ways:
            return not any(rows)
        move = random.choice([*moves, *ways])
        if isinstance(move, tuple):
            arrived[move] = arrived.get(move, 0) + 1
            continue
        op = move.pop(0)
        for value in op.writes if op.kind == "SEND" else ():
            way = every[value].source, every[value].target
            sent[way] = sent.get(way, 0) + 1


@pytest.mark.parametrize("of", [lambda a, b: frozenset((a, b)), lambda a, b: "all"], ids=["a pair's", "one for all"])
def test_a_communicator_for_both_ways_would_not_do(of: object):
    """What two ranks send each other at the same time: the first transfer of each waits for the other's second."""
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate())
    sentence = r"ranks wait for one another: rank 0 in RECV\(dx\[1,0\]@0\), rank 1 in RECV\(y\[0,2\]@1\)\."
    with pytest.raises(ProgramError, match=sentence):
        check_transfers(program(fpipe.program(2)), 2, communicator=of)
