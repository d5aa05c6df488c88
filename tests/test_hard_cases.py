"""Programs that no law draws, each as small as can be: each runs as plain autograd does, and every reading reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, plain_autograd
from property_tests.test_gradients import same_bits


@dataclass(frozen=True)
class Case:
    """A program, and the net to run it with."""

    program: Program
    net: Net
    microbatches: int = 1
    rows: int = 10

    @property
    def sent(self) -> Program:
        return fpipe.communicate()(self.program)

    def is_plain_autograd(self, program: Program) -> bool:
        given = self.net.params(), self.net.batch(self.rows)
        return same_bits(
            fpipe.build(program, self.net.model)(*given), *plain_autograd(self.net, *given, self.microbatches)
        )


def of_chain(n: int, *transforms: Callable[[Program], Program]) -> Case:
    net = Net(("mlp",) * n, ("batch", *range(n - 1)))
    return Case(fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(net.model)), net, 4)


# Residuals that leave for the host between F and B


def offloaded_activation() -> Program:
    """The stage input waits on the host for its recomputation."""
    lines = str(fpipe.checkpoint()(fpipe.program(2))).splitlines()
    lines = [line.replace("y[0,0]", "y[0,0]@host@0") if "= R[1,0]" in line else line for line in lines]
    forward = next(number for number, line in enumerate(lines) if "= F[1,0]" in line)
    lines.insert(forward, "y[0,0]@host = OFFLOAD[0,0] y[0,0] @ 0")
    again = next(number for number, line in enumerate(lines) if "= R[1,0]" in line)
    lines.insert(again, "y[0,0]@host@0 = LOAD[0,0] y[0,0]@host @ 0")
    return Program.parse("\n".join(lines))


PAIRS = [
    ["0F0", "0F1", "(0F2;0B0)", "(0F3;0B1)", "0B2", "0B3"],
    ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
]
TWO = Net(("mlp",) * 2, ("batch", 0))
TRAVEL = fpipe.place("linear", homes=lambda stage: [2]), fpipe.merge(), fpipe.communicate(again=("params",))

CASES = {
    "weights that travel": of_chain(2, *TRAVEL),
    "pairs, recomputed, in halves": of_chain(
        2, fpipe.checkpoint(), fpipe.schedules.from_table(PAIRS), fpipe.split_backward(), fpipe.merge()
    ),
    "groups recomputed as one": of_chain(
        4, fpipe.checkpoint(groups=[(0, 1), (2, 3)]), fpipe.schedules.one_f_one_b(2), fpipe.merge()
    ),
    "activations on the host": Case(offloaded_activation(), TWO, rows=5),
}

every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_it_runs_as_plain_autograd_does_also_when_everything_is_sent_and_freed(name: str):
    case = CASES[name]
    assert case.is_plain_autograd(case.program)
    assert case.is_plain_autograd(fpipe.free()(case.sent))


@every_case
def test_it_checks_and_prints_also_with_its_transfers(name: str):
    case = CASES[name]
    fpipe.check(case.sent)
    for program in (case.program, case.sent):
        assert Program.parse(str(program)) == program


@every_case
def test_it_simulates_the_same_before_and_after_communicate(name: str):
    case = CASES[name]
    costs = fpipe.Costs(forward=3, backward_input=2, backward_weight=1, transfer=0.5)
    before, after = (fpipe.simulate(program, costs) for program in (case.program, case.sent))
    work = lambda timeline: {(op.cell, start, end) for op, start, end in timeline.events if end > start}  # noqa: E731
    assert (work(before), before.peak) == (work(after), after.peak)


@every_case
def test_it_is_drawn_with_every_scheduled_op(name: str):
    program = CASES[name].program
    drawn = [line.partition("|")[2].replace(" . ", " ").split() for line in fpipe.plot(program).splitlines()]
    assert [[cell for cell in row if cell != "."] for row in drawn] == program.table()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_replicas_added_as_computed_agree_to_rounding_and_cross_once_for_each_stage(ranks: int):
    case = of_chain(ranks, fpipe.place("bidirectional"), fpipe.merge(order="schedule"))
    given = case.net.params(), case.net.batch(case.rows)
    loss, grads = plain_autograd(case.net, *given, case.microbatches)
    found = fpipe.build(case.program, case.net.model)(*given)
    assert torch.equal(found.loss, loss)
    torch.testing.assert_close(found.grads, tuple(grads), rtol=1e-5, atol=1e-6)
    crossed = [op.reads[0].stage for op in case.sent.ops if op.kind == "SEND" and op.reads[0].name in ("g", "sum")]
    assert len(crossed) == len({*crossed}) == ranks - ranks % 2


def test_weights_travel_again_for_each_reader():
    program = CASES["weights that travel"].program
    trips = [
        str(op.writes[0]) for op in program.ops if op.kind == "RECV" and op.reads[0].name == "params" and op.rank == 0
    ]
    readers = [op for op in program.ops if op.kind in "FB" and op.rank == 0]
    assert len(trips) == len(set(trips)) == len(readers) == 8


def test_a_recomputed_pair_is_one_op_on_its_rank():
    program = of_chain(2, fpipe.checkpoint(), fpipe.schedules.from_table(PAIRS), fpipe.merge()).program
    assert [op.cell for op in program.ops if op.kind == "PAIR"] == ["(0F2;0B0)", "(0F3;0B1)"]
