"""`evaluating`: what a net computes in eval mode, of the model that trains it, and without touching the net."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from tests.processes import Processes
from tests.test_distributed import own

MANY = 2


class Tied(nn.Module):
    """Norms, dropout, a weight in two stages, and a buffer that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.c = nn.Linear(8, 4, bias=False)
        self.c.weight = nn.Parameter(self.a[0].weight.detach().T.clone())
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) @ self.a[0].weight.T * self.scale


def cut(door: str) -> tuple[nn.Module, fpipe.Model, Any, Any]:
    torch.manual_seed(0)
    if door == "from_module":
        net: Any = Tied()
        return net, *fpipe.from_module(net, 3, loss=F.mse_loss, example=rows(8))
    net = nn.Sequential(*(child for name, child in Tied().named_children() if name != "c"), nn.Linear(8, 8))
    return net, *fpipe.from_sequential(net, 3, loss=F.mse_loss)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=made), torch.randn(count, 8, generator=made)


def trained(model: fpipe.Model, params: Any, state: Any, ranks: int = 3) -> fpipe.Result:
    program = fpipe.chain(fpipe.split(MANY), fpipe.schedules.gpipe(ranks), fpipe.merge())(fpipe.program(model))
    return fpipe.build(program, model)(params, rows(8), state=state, key=1)


def evaluation(model: fpipe.Model, schedule: str = "one_f_one_b", ranks: int = 3) -> fpipe.Program:
    parts = fpipe.split(MANY), fpipe.schedules.get(schedule)(ranks), fpipe.merge(), fpipe.forward_only()
    return fpipe.chain(*parts)(fpipe.program(model))


def plain(net: nn.Module, state: Any, x: Tensor) -> Tensor:
    """What a copy of the net computes in eval mode with these running statistics, a microbatch at a time."""
    twin = copy.deepcopy(net).eval()
    twin.load_state_dict({name: leaf for one in state for name, leaf in one.items()}, strict=False)
    return torch.cat([twin(part) for part in x.tensor_split(MANY)]).detach()


@pytest.mark.crossed
@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
@pytest.mark.parametrize("how", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_outputs_are_those_of_the_net_in_eval_mode(door: str, how: dict[str, Any]):
    net, model, params, state = cut(door)
    now = trained(model, params, state).state
    seen = fpipe.evaluating(model)
    step = fpipe.build(evaluation(seen), seen, **how)
    for count in (8, 2, 5):
        x, target = rows(count, count)
        result = step(params, (x, target), state=now)
        assert torch.equal(result.outputs, plain(net, now, x))
        assert result.state is None
    assert all(module.training for module in net.modules())
    again = trained(model, params, state)
    assert all(map(torch.equal, fpipe.tree.leaves(again.state), fpipe.tree.leaves(now)))
    assert all(torch.equal(net.state_dict()[name], leaf) for own in state for name, leaf in own.items())


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_parameters_that_are_trained_in_place_are_evaluated(door: str):
    net, model, params, state = cut(door)
    seen = fpipe.evaluating(model)
    step, x = fpipe.build(evaluation(seen), seen), rows(4)[0]
    before = step(params, (x, rows(4)[1]), state=state).outputs
    for leaf in fpipe.tree.leaves(params):
        leaf.mul_(1.5)
    after = step(params, (x, rows(4)[1]), state=state).outputs
    assert not torch.equal(before, after)
    assert torch.equal(after, plain(net, state, x))


def test_a_net_without_state_shares_its_program():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    x, target = rows(4)
    loss = fpipe.build(evaluation(model, "zb_h1", 2), fpipe.evaluating(model))(params, (x, target)).loss
    assert torch.allclose(loss, F.mse_loss(copy.deepcopy(net).eval()(x), target))


def on_two(rank: int, door: str) -> bool:
    net, model, params, state = cut(door)
    now = trained(model, params, state, ranks=1).state
    seen = fpipe.evaluating(model)
    program = fpipe.chain(fpipe.split(MANY), fpipe.place([0, 0, 1]), fpipe.merge(), fpipe.forward_only())
    program = program(fpipe.program(seen))
    mine, kept = own(program, rank, params), own(program, rank, now)
    step = fpipe.build(program, seen, runtime="distributed", example=(params, rows(8), now))
    result = step(mine, rows(5), state=kept)
    return result.outputs is None or torch.equal(result.outputs, plain(net, now, rows(5)[0]))


@pytest.mark.parametrize("door", ["from_module", "from_sequential"])
def test_two_processes_evaluate(pair: Processes, door: str):
    assert pair.each(on_two, door) == [True, True]
