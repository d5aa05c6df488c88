"""Programs that no law draws, each as small as can be: each runs as plain autograd does, and every reading reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, Takes, plain_autograd

Expected = tuple[Tensor, list[dict[str, Tensor]]]


@dataclass(frozen=True)
class Case:
    """A program, the model and values to run it with, and what plain autograd says."""

    program: Program
    model: fpipe.Model
    params: tuple[dict[str, Tensor], ...]
    batch: tuple[Tensor, Tensor]
    expected: Callable[[], Expected]

    def run(self, program: Program | None = None) -> Any:
        return fpipe.build(self.program if program is None else program, self.model)(self.params, self.batch)

    @cached_property
    def sent(self) -> Program:
        return fpipe.communicate()(self.program)


def of_net(net: Net, *transforms: Callable[[Program], Program], microbatches: int = 4, rows: int = 10) -> Case:
    program = fpipe.chain(fpipe.split(microbatches), *transforms)(fpipe.program(net.model))
    return Case(
        program,
        net.model,
        net.params(),
        net.batch(rows),
        lambda: plain_autograd(net, net.params(), net.batch(rows), microbatches),
    )


def chain_of(n: int, body: str = "mlp") -> Net:
    takes: Takes = ("batch", *range(n - 1))
    return Net((body,) * n, takes)  # type: ignore[arg-type]


# Weights on a host, forward and backward cut differently: rank 0 runs 0F 1F 2F, rank 1 3F 3B, ranks 2 and 3 the rest.


def roundpipe_rank(kind: str, stage: int, microbatch: int) -> int:
    return {3: 1}.get(stage, 0) if kind == "F" else {3: 1, 2: 2, 1: 3, 0: 2}[stage]


ROUNDPIPE = [
    fpipe.checkpoint(lambda stage, microbatch: stage < 3),
    fpipe.place(roundpipe_rank, homes=lambda stage: [4]),
    fpipe.merge(),
]


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


# Module state


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum(1).mean()


TIED = Net(("tied", "mlp", "tied"), ("batch", 0, 1))
PAIRS = [
    ["0F0", "0F1", "(0F2;0B0)", "(0F3;0B1)", "0B2", "0B3"],
    ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
]

CASES: dict[str, Callable[[], Case]] = {
    "forward and backward cut differently, weights on a host": lambda: of_net(chain_of(4), *ROUNDPIPE),
    "weights that travel": lambda: of_net(
        chain_of(2), fpipe.place("linear", homes=lambda stage: [2]), fpipe.merge(), fpipe.communicate(again=("params",))
    ),
    "two replicas, tied": lambda: of_net(TIED, fpipe.place("bidirectional"), fpipe.merge()),
    "pairs, recomputed, in halves": lambda: of_net(
        chain_of(2), fpipe.checkpoint(), fpipe.schedules.from_table(PAIRS), fpipe.split_backward(), fpipe.merge()
    ),
    "activations on the host": lambda: Case(
        offloaded_activation(),
        (net := chain_of(2)).model,
        net.params(),
        net.batch(5),
        lambda: plain_autograd(net, net.params(), net.batch(5)),
    ),
    "groups recomputed as one": lambda: of_net(
        chain_of(4), fpipe.checkpoint(groups=[(0, 1), (2, 3)]), fpipe.schedules.one_f_one_b(2), fpipe.merge()
    ),
}

every_case = pytest.mark.parametrize("name", CASES)


def assert_same(found: Any, expected: Expected) -> None:
    loss, grads = expected
    pairs = [("loss", found.loss, loss)] + [
        (f"grads[{number}][{name}]", found.grads[number][name], grad)
        for number, stage in enumerate(grads)
        for name, grad in stage.items()
    ]
    assert [name for name, one, other in pairs if not torch.equal(one, other)] == []


@every_case
def test_it_runs_as_plain_autograd_does_also_when_everything_is_sent_and_freed(name: str):
    case = CASES[name]()
    assert_same(case.run(), case.expected())
    assert_same(case.run(fpipe.free()(case.sent)), case.expected())


@every_case
def test_it_checks_and_prints_also_with_its_transfers(name: str):
    case = CASES[name]()
    fpipe.check(case.sent)
    for program in (case.program, case.sent):
        assert Program.parse(str(program)) == program


@every_case
def test_it_simulates_the_same_before_and_after_communicate(name: str):
    case = CASES[name]()
    costs = fpipe.Costs(forward=3, backward_input=2, backward_weight=1, transfer=0.5)
    before, after = (fpipe.simulate(program, costs) for program in (case.program, case.sent))
    work = lambda timeline: {(op.cell, start, end) for op, start, end in timeline.events if end > start}  # noqa: E731
    assert (work(before), before.peak) == (work(after), after.peak)


@every_case
def test_it_is_drawn_with_every_scheduled_op(name: str):
    program = CASES[name]().program
    drawn = [line.partition("|")[2].replace(" . ", " ").split() for line in fpipe.plot(program).splitlines()]
    assert [[cell for cell in row if cell != "."] for row in drawn] == program.table()


def test_replicas_added_as_computed_agree_to_rounding():
    case = of_net(chain_of(3), fpipe.place("bidirectional"), fpipe.merge(order="schedule"))
    loss, grads = case.expected()
    found = case.run()
    assert torch.equal(found.loss, loss)
    torch.testing.assert_close(found.grads, tuple(grads), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_added_as_computed_cross_once_for_each_stage(ranks: int):
    program = of_net(
        chain_of(ranks), fpipe.place("bidirectional"), fpipe.merge(order="schedule"), fpipe.communicate()
    ).program
    sent = {op.reads[0].stage for op in program.ops if op.kind == "SEND" and op.reads[0].name in ("g", "sum")}
    count = sum(op.kind == "SEND" and op.reads[0].name in ("g", "sum") for op in program.ops)
    assert count == len(sent) == ranks - ranks % 2


def test_weights_travel_again_for_each_reader():
    program = CASES["weights that travel"]().program
    trips = [
        str(op.writes[0]) for op in program.ops if op.kind == "RECV" and op.reads[0].name == "params" and op.rank == 0
    ]
    readers = [op for op in program.ops if op.kind in "FB" and op.rank == 0]
    assert len(trips) == len(set(trips)) == len(readers) == 8


def test_a_forward_group_holds_no_residuals():
    program = CASES["forward and backward cut differently, weights on a host"]().program
    assert fpipe.simulate(program).peak[0] == 0


def test_a_forward_may_wait_for_an_update_whose_own_forward_comes_later():
    """An update needs its stage's input and no more, so the SPLIT that makes it cannot stand behind a later forward."""
    stage = fpipe.Stage(lambda p, x: x, update=lambda state, x: state)
    base = fpipe.split(2)(
        fpipe.program(fpipe.Model((stage, fpipe.Stage(lambda p, x: x), stage), squares, ("batch", 0, 1)))
    )
    text = str(base).replace("F[0,1] params[0] x[0,1]", "F[0,1] params[0] x[0,1] state[0,0]")
    rows = [["0F1", "0F0", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"], ["2F1", "2F0", "2B0", "2B1"]]
    program = fpipe.schedules.from_table(rows)(Program.parse(text))
    fpipe.check(program)
    assert program.table() == rows


def test_a_recomputed_pair_is_one_op_on_its_rank():
    program = of_net(chain_of(2), fpipe.schedules.from_table(PAIRS), fpipe.merge()).program
    assert [op.cell for op in program.ops if op.kind == "PAIR"] == ["(0F2;0B0)", "(0F3;0B1)"]
