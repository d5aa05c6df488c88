"""Transfers end, whatever the program, where each begins only when both sides have come to it."""

from __future__ import annotations

import itertools
import random

from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.runtimes.processes.message_order import messages, queue_of, results_last
from fpipe.transforms.communicate import received_as_sent, with_transfers
from property_tests.chains import Run, runs
from property_tests.strategies import few
from property_tests.test_schedule_laws import every_schedule, programs
from property_tests.test_time_laws import SECONDS

RULES = ["eager", "nccl_directions", "nccl_pairs", "nccl", "rendezvous"]


@every_schedule
@few(2)
@given(data=st.data())
def test_every_schedule_ends_under_every_rule_of_messages(name: str, data: st.DataObject):
    waits_no_less_under_a_stricter_rule(data.draw(programs(name)), fpipe.Costs(transfer=0.5))


@few(25)
@given(run=runs(), transfer=SECONDS)
def test_every_program_ends_under_every_rule_of_messages(run: Run, transfer: float):
    waits_no_less_under_a_stricter_rule(run.program, fpipe.Costs(transfer=transfer, update=0.5))


def waits_no_less_under_a_stricter_rule(program: Program, costs: fpipe.Costs) -> None:
    assume(all(op.kind != "SEND" for op in program.ops))
    found = [fpipe.simulate(program, costs, messages=rule) for rule in RULES]
    for less, more in itertools.pairwise(found):
        assert all(one <= other + 1e-9 for one, other in zip(less.ends, more.ends, strict=True))


@few(25)
@given(run=runs())
def test_what_build_posts_on_nccl_is_in_the_order_of_all_sends(run: Run):
    """Which ends under the strictest rule, as the law above says of it: on each rank, one queue for all others."""
    program = results_last(with_transfers(run.program))
    every, asked = messages(program), received_as_sent(program)
    for rank in range(program.ranks):
        values = [value for op in parts_of(asked.ops) if op.rank == rank for value in _sent_or_received(op)]
        assert [one.value for one in queue_of(every, rank)[0]] == values


def _sent_or_received(op: Op) -> tuple[Value, ...]:
    return {"SEND": op.writes, "RECV": op.reads}.get(op.kind, ())


@few(25)
@given(run=runs(), ahead=st.integers(0, 3), seed=st.integers())
def test_the_transfers_of_every_program_end(run: Run, ahead: int, seed: int):
    program = with_transfers(run.program)
    assert ends_by_chance(program, ahead, random.Random(seed))
    waited_for = results_last(program)
    assert ends_by_chance(waited_for, ahead, random.Random(seed))
    assert [timed(waited_for, rank) for rank in range(program.ranks)] == [
        timed(program, rank) for rank in range(program.ranks)
    ]


def timed(program: Program, rank: int) -> list[Op]:
    return [op for op in program.ops if op.rank == rank and kind_of(op.kind).time]


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
