"""Transfers end, whatever the program, where each begins only when both sides have come to it."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.runtimes.processes.message_order import messages_of, queue_of_rank, with_results_last
from fpipe.transforms.communicate import with_adjacent_transfers, with_transfers
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
    program = with_results_last(with_transfers(run.program))
    every, asked = messages_of(program), with_adjacent_transfers(program)
    for rank in range(program.ranks):
        values = [value for op in parts_of(asked.ops) if op.rank == rank for value in _sent_or_received(op)]
        assert [one.value for one in queue_of_rank(every, rank)[0]] == values


def _sent_or_received(op: Op) -> tuple[Value, ...]:
    return {"SEND": op.writes, "RECV": op.reads}.get(op.kind, ())


@few(25)
@given(run=runs())
def test_results_come_last_and_nothing_waits_for_ever(run: Run):
    """What takes time keeps its order on each rank."""
    program = with_transfers(run.program)
    late = with_results_last(program)
    fpipe.check(late)
    timed = [[op for op in one.ops if kind_of(op.kind).time] for one in (program, late)]
    for rank in range(program.ranks):
        before, after = ([op for op in ops if op.rank == rank] for ops in timed)
        assert before == after
