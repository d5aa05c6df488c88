"""Costs by operations, of models that cannot run here: those of torch's own counter on the net."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpipe
from tests.toys import Toy


def attention(own: Any, x: Tensor) -> Tensor:
    q, k, v = (one.view(*one.shape[:2], 2, 4).transpose(1, 2) for one in own.into(x).chunk(3, -1))
    return own.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), (4, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3)), (4, 3, 9, 9)),
    "attention": (
        lambda: nn.Sequential(nn.Linear(8, 8), Toy(attention, into=nn.Linear(8, 24), out=nn.Linear(8, 8))),
        (4, 6, 8),
    ),
}


def by_torch(net: nn.Module, x: Tensor) -> tuple[int, int]:
    """Operations of a forward and of a backward of a net on meta, where attention has no kernel of its own."""
    with FlopCounterMode(display=False) as forward:
        y = net(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", NETS)
def test_operations_are_those_that_torch_counts(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fpipe.graphs.compiling.add._same_bits", None)  # tried sums of 4096 x 4096 on real memory
    made, shape = NETS[name]
    x, one = torch.empty(shape, device="meta"), torch.empty(1, *shape[1:], device="meta")
    net = made().to("meta")
    model, params, state = fpipe.from_module(net, 2, loss=lambda y, t: y.sum(), example=(x, x))
    program = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    costs = fpipe.estimate(program, model, params, (x, x), flops=1, state=state or None)
    stages: Any = costs
    forward, backward = by_torch(net, one)
    assert sum(stages.forward) == forward
    scores = 2 * 2 * 6 * 6 * 4 if name == "attention" else 0  # the kernel of a CPU computes them once more
    assert sum(stages.backward) == backward + scores
    assert [i + w for i, w in zip(stages.backward_input, stages.backward_weight, strict=True)] == stages.backward
    assert all(again <= once for again, once in zip(stages.recompute, stages.forward, strict=True))
    twice = fpipe.estimate(program, model, params, (x, x), flops=2, state=state or None)
    assert twice.forward == [seconds / 2 for seconds in stages.forward]


@pytest.mark.parametrize("flops", [0, float("nan"), "1e12"])
def test_a_rate_that_is_none_is_refused(flops: Any):
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Linear(2, 2)), 1, loss=nn.functional.mse_loss)
    batch = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="flops is how many operations a rank does a second, such as 400e12; found"):
        fpipe.estimate(fpipe.program(model), model, params, batch, flops=flops)
