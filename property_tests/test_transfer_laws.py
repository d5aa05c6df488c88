"""Laws of transfers: they end, whatever the program, even if each starts only when both sides have reached it."""

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.runtimes.processes.message_order import messages_of, queue_of_rank, with_results_last
from fpipe.transforms.communicate import with_adjacent_transfers, with_transfers
from property_tests.chains import Run, runs
from property_tests.strategies import max_examples
from property_tests.test_schedule_laws import every_schedule, programs
from property_tests.test_time_laws import SECONDS

RULES = ["eager", "nccl_directions", "nccl_pairs", "nccl", "rendezvous"]


@every_schedule
@max_examples(2)
@given(data=st.data())
def test_every_schedule_ends_under_every_rule_of_messages(name: str, data: st.DataObject):
    assert_stricter_rules_wait_no_less(data.draw(programs(name)), fpipe.Costs(transfer=0.5))


@max_examples(25)
@given(run=runs(), transfer=SECONDS)
def test_every_program_ends_under_every_rule_of_messages(run: Run, transfer: float):
    assert_stricter_rules_wait_no_less(run.program, fpipe.Costs(transfer=transfer, update=0.5))


def assert_stricter_rules_wait_no_less(program: Program, costs: fpipe.Costs) -> None:
    assume(all(op.kind != "SEND" for op in program.ops))
    timelines = [fpipe.simulate(program, costs, messages=rule) for rule in RULES]
    for looser, stricter in itertools.pairwise(timelines):
        assert all(early <= late + 1e-9 for early, late in zip(looser.ends, stricter.ends, strict=True))


@max_examples(25)
@given(run=runs())
def test_nccl_transfers_are_posted_in_the_order_of_all_sends(run: Run):
    """Each rank has one queue for all peers. By the law above, this order ends under the strictest rule."""
    program = with_results_last(with_transfers(run.program))
    messages, adjacent = messages_of(program), with_adjacent_transfers(program)
    for rank in range(program.ranks):
        values = [value for op in parts_of(adjacent.ops) if op.rank == rank for value in _sent_or_received(op)]
        assert [message.value for message in queue_of_rank(messages, rank)[0]] == values


def _sent_or_received(op: Op) -> tuple[Value, ...]:
    return {"SEND": op.writes, "RECV": op.reads}.get(op.kind, ())


@max_examples(25)
@given(run=runs())
def test_results_come_last_and_nothing_waits_for_ever(run: Run):
    """Ops that take time keep their order on each rank."""
    program = with_transfers(run.program)
    reordered = with_results_last(program)
    fpipe.check(reordered)
    timed = [[op for op in variant.ops if kind_of(op.kind).time] for variant in (program, reordered)]
    for rank in range(program.ranks):
        original_ops, reordered_ops = ([op for op in ops if op.rank == rank] for ops in timed)
        assert original_ops == reordered_ops
