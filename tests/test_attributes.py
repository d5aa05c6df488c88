"""Tensors in plain attributes: what a module remembers there is state that no step hands on."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe

torch.manual_seed(0)
ROWS = torch.randn(10, 8), torch.randn(10, 8)


class Holder(nn.Module):
    """A layer with a tensor that is neither a parameter nor a buffer, and something that it does with it."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], held: Tensor | None) -> None:
        super().__init__()
        self.layer, self.does, self.held = nn.Linear(8, 8), does, held

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.layer(x))


def averages(module: Any, y: Tensor) -> Tensor:
    module.held = 0.9 * module.held + 0.1 * y.detach().mean(0)
    return y - module.held


def averages_in_place(module: Any, y: Tensor) -> Tensor:
    module.held.lerp_(y.detach().mean(0), 0.1)
    return y


def hands_on(module: Any, y: Tensor) -> Tensor:
    before, module.held = module.held.detach(), y.mean(0)
    return torch.stack([y, before.expand_as(y)]).sum(0)


def begins(module: Any, y: Tensor) -> Tensor:
    made = y if module.held is None else y + module.held
    module.held = y.detach().mean(0)
    return made


STATE: dict[str, Callable[[], Holder]] = {
    "another": lambda: Holder(averages, torch.zeros(8)),
    "in place": lambda: Holder(averages_in_place, torch.zeros(8)),
    "detached": lambda: Holder(hands_on, torch.zeros(8)),
    "none at first": lambda: Holder(begins, None),
}


@pytest.mark.parametrize("run", ["traced", "by autograd", "reference"])
@pytest.mark.parametrize("name", STATE)
def test_state_in_a_plain_attribute_is_refused(name: str, run: str):
    """A trace held on to what the first step by hand had left there, for good: other numbers, without a word."""
    net = nn.Sequential(STATE[name](), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(4), fpipe.checkpoint(), fpipe.merge())(fpipe.program(model))
    step = fpipe.build(program, model, trace=run == "traced")
    sentence = (
        "stage 0 changes 'held' of module '0' (Holder) as it runs, a tensor that is no buffer: what a module remembers "
        "is state. Say self.register_buffer('held', ...)."
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        fpipe.reference(model, params, ROWS, microbatches=4) if run == "reference" else step(params, ROWS)


def shows(module: Any, y: Tensor) -> Tensor:
    module.held = y.detach()
    return y * 2


def grows(module: Any, y: Tensor) -> Tensor:
    if module.held is None or len(module.held) < len(y):
        module.held = torch.arange(float(len(y)))[:, None]
    return y + module.held[: len(y)]


def casts(module: Any, y: Tensor) -> Tensor:
    module.held = module.held.to(y)
    return y + module.held


NONE: dict[str, Callable[[], Holder]] = {
    "to look at": lambda: Holder(shows, torch.zeros(8)),
    "a cache": lambda: Holder(grows, None),
    "moved": lambda: Holder(casts, torch.arange(8)),
    "read": lambda: Holder(lambda module, y: y + module.held, torch.arange(8.0)),
}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", NONE)
def test_other_plain_attributes_are_left_alone(name: str, trace: bool):
    net = nn.Sequential(NONE[name](), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    program = fpipe.chain(fpipe.split(4), fpipe.checkpoint(), fpipe.merge())(fpipe.program(model))
    result = fpipe.build(program, model, trace=trace)(params, ROWS)
    for x, t in zip(ROWS[0].tensor_split(4), ROWS[1].tensor_split(4), strict=True):
        (nn.functional.mse_loss(net(x), t) * (len(x) / 10)).backward()
    found = fpipe.join_params(model, result.grads)
    assert all(torch.equal(found[name], leaf.grad) for name, leaf in net.named_parameters() if leaf.grad is not None)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layer, self.mask = layer.eval().requires_grad_(False), torch.zeros(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


@pytest.mark.parametrize("trace", [True, False])
def test_frozen_attention_keeps_its_fast_path_beside_a_plain_attribute(trace: bool):
    """Looking for state by a mode for torch's functions turned it off: other bits in the last places."""
    net = nn.Sequential(Masked(), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    x = torch.randn(4, 5, 8)
    program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    found = fpipe.build(program, model, trace=trace)(params, (x, x)).outputs
    assert torch.equal(found, torch.cat([net(part) for part in x.tensor_split(2)]))
