"""Toy modules of one function each, and what plain autograd makes of a net, one microbatch after the other."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe

POLICIES: dict[str, tuple[Any, ...]] = {
    "kept": (),
    "recomputed": (fpipe.checkpoint("always"),),
    "split": (fpipe.split_backward(),),
    "recomputed and split": (fpipe.checkpoint("always"), fpipe.split_backward()),
}


class Toy(nn.Module):
    """A module that is one function of itself and its input. It holds tensors (or None) as buffers, and the rest, such
    as parameters and modules, as attributes."""

    def __init__(self, does: Callable[[Any, Any], Any], **held: Any) -> None:
        super().__init__()
        self.does = does
        for name, one in held.items():
            if one is None or (isinstance(one, Tensor) and not isinstance(one, nn.Parameter)):
                self.register_buffer(name, one)
            else:
                setattr(self, name, one)

    def forward(self, x: Any) -> Any:
        return self.does(self, x)


class Block(nn.Module):
    """A residual block with whatever is asked for in the middle."""

    def __init__(self, width: int, *middle: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.middle = nn.Sequential(*middle)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(nn.functional.gelu(self.up(self.norm(x)))))


def linear(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"]


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def twice(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Two equal stages."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), make(), nn.Tanh(), nn.Linear(8, 8), make(), nn.Tanh())


class Ops(TorchDispatchMode):
    """How often each op runs while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def one_by_one(net: nn.Module, batch: Any, parts: int = 4, loss: Any = nn.functional.mse_loss) -> Any:
    """A copy of the net after plain autograd on each microbatch, with its gradients and what it remembers; outputs."""
    net, outputs = copy.deepcopy(net), list[Tensor]()
    for x, t in zip(*(half.tensor_split(parts) for half in batch), strict=True):
        outputs.append(net(x))
        (loss(outputs[-1], t) * (len(x) / len(batch[0]))).backward()
    return net, torch.cat([output.detach() for output in outputs])


def remembered(result: fpipe.Result) -> dict[str, Tensor]:
    """The state that a step hands back, by the names of the net."""
    return {name: tensor for stage in result.state or () for name, tensor in stage.items()}


def assert_unsplit(model: fpipe.Model, result: fpipe.Result, right: nn.Module) -> None:
    """The gradients and the state of a step are those of the unsplit net, bit by bit."""
    grads = fpipe.join_params(model, result.grads)
    trained = {name: leaf.grad for name, leaf in right.named_parameters() if leaf.requires_grad}
    assert [name for name, grad in trained.items() if not torch.equal(grads[name], grad)] == []
    assert [name for name, one in remembered(result).items() if not torch.equal(one, right.get_buffer(name))] == []


def scripted() -> nn.Module:
    """A layer that torch.jit has compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(4, 4))


def merged(model: fpipe.Model, microbatches: int, *steps: Any) -> fpipe.Program:
    """The program of a step: split into microbatches, transformed, and merged."""
    return fpipe.chain(fpipe.split(microbatches), *steps, fpipe.merge())(fpipe.program(model))
