"""Small hard programs that no property test draws: each runs as plain autograd and passes every reading."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, plain_autograd
from property_tests.test_gradients import assert_same_bits


@dataclass(frozen=True)
class Case:
    """A program with the net that runs it."""

    program: Program
    net: Net
    microbatches: int = 1
    rows: int = 10

    @property
    def sent(self) -> Program:
        return fpipe.communicate()(self.program)

    def is_plain_autograd(self, program: Program) -> bool:
        arguments = self.net.params(), self.net.batch(self.rows)
        return assert_same_bits(
            fpipe.build(program, self.net.model)(*arguments), *plain_autograd(self.net, *arguments, self.microbatches)
        )


def chain_case(stages: int, *transforms: Callable[[Program], Program]) -> Case:
    net = Net(("mlp",) * stages, ("batch", *range(stages - 1)))
    return Case(fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(net.model)), net, 4)


# Residuals that are offloaded to the host between F and B


def program_with_offloaded_activation() -> Program:
    """Return a program whose stage input waits on the host for its recomputation."""
    lines = str(fpipe.checkpoint()(fpipe.program(2))).splitlines()
    lines = [line.replace("y[0,0]", "y[0,0]@host@0") if "= R[1,0]" in line else line for line in lines]
    forward = next(index for index, line in enumerate(lines) if "= F[1,0]" in line)
    lines.insert(forward, "y[0,0]@host = OFFLOAD[0,0] y[0,0] @ 0")
    recompute = next(index for index, line in enumerate(lines) if "= R[1,0]" in line)
    lines.insert(recompute, "y[0,0]@host@0 = LOAD[0,0] y[0,0]@host @ 0")
    return Program.parse("\n".join(lines))


PAIRS = [
    ["0F0", "0F1", "(0F2;0B0)", "(0F3;0B1)", "0B2", "0B3"],
    ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
]
TWO_STAGE_NET = Net(("mlp",) * 2, ("batch", 0))
TRAVELLING_WEIGHTS = fpipe.place("linear", homes=lambda stage: [2]), fpipe.merge(), fpipe.communicate(again=("params",))

CASES = {
    "weights that travel": chain_case(2, *TRAVELLING_WEIGHTS),
    "pairs, recomputed, in halves": chain_case(
        2, fpipe.checkpoint(), fpipe.schedules.from_table(PAIRS), fpipe.split_backward(), fpipe.merge()
    ),
    "groups recomputed as one": chain_case(
        4, fpipe.checkpoint(groups=[(0, 1), (2, 3)]), fpipe.schedules.one_f_one_b(2), fpipe.merge()
    ),
    "activations on the host": Case(program_with_offloaded_activation(), TWO_STAGE_NET, rows=5),
}

every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_a_case_gives_the_bits_of_plain_autograd_with_and_without_transfers(name: str):
    case = CASES[name]
    assert case.is_plain_autograd(case.program)
    assert case.is_plain_autograd(fpipe.free()(case.sent))


@every_case
def test_a_case_checks_and_parses_back_with_and_without_transfers(name: str):
    case = CASES[name]
    fpipe.check(case.sent)
    for program in (case.program, case.sent):
        assert Program.parse(str(program)) == program


@every_case
def test_communicate_leaves_the_simulation_of_a_case_unchanged(name: str):
    case = CASES[name]
    costs = fpipe.Costs(forward=3, backward_input=2, backward_weight=1, transfer=0.5)
    plain_timeline, sent_timeline = (fpipe.simulate(program, costs) for program in (case.program, case.sent))
    work_times = lambda timeline: {(op.cell, start, end) for op, start, end in timeline.events if end > start}  # noqa: E731
    assert (work_times(plain_timeline), plain_timeline.peak) == (work_times(sent_timeline), sent_timeline.peak)


@every_case
def test_a_plot_of_a_case_shows_every_scheduled_op(name: str):
    program = CASES[name].program
    drawn = [line.partition("|")[2].replace(" . ", " ").split() for line in fpipe.plot(program).splitlines()]
    assert [[cell for cell in row if cell != "."] for row in drawn] == program.table()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_replicas_added_in_schedule_order_send_one_gradient_a_stage(ranks: int):
    case = chain_case(ranks, fpipe.place("bidirectional"), fpipe.merge(order="schedule"))
    arguments = case.net.params(), case.net.batch(case.rows)
    loss, grads = plain_autograd(case.net, *arguments, case.microbatches)
    result = fpipe.build(case.program, case.net.model)(*arguments)
    assert torch.equal(result.loss, loss)
    torch.testing.assert_close(result.grads, tuple(grads), rtol=1e-5, atol=1e-6)
    sent_stages = [op.reads[0].stage for op in case.sent.ops if op.kind == "SEND" and op.reads[0].name in ("g", "sum")]
    assert len(sent_stages) == len({*sent_stages}) == ranks - ranks % 2


def test_weights_travel_again_for_each_reader():
    program = CASES["weights that travel"].program
    trips = [
        str(op.writes[0]) for op in program.ops if op.kind == "RECV" and op.reads[0].name == "params" and op.rank == 0
    ]
    readers = [op for op in program.ops if op.kind in "FB" and op.rank == 0]
    assert len(trips) == len(set(trips)) == len(readers) == 8


def test_a_recomputed_pair_is_one_op_on_its_rank():
    program = chain_case(2, fpipe.checkpoint(), fpipe.schedules.from_table(PAIRS), fpipe.merge()).program
    assert [op.cell for op in program.ops if op.kind == "PAIR"] == ["(0F2;0B0)", "(0F3;0B1)"]
