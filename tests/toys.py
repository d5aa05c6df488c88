"""Toy modules of one function each, and plain autograd over a net's microbatches."""

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
    """A module that is one function of itself and its input. Tensors and None become buffers; parameters, modules and
    other values become attributes."""

    def __init__(self, function: Callable[[Any, Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if value is None or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Block(nn.Module):
    """A residual block with any modules in the middle."""

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


def two_equal_stages(make_module: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a net of two equal stages."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), make_module(), nn.Tanh(), nn.Linear(8, 8), make_module(), nn.Tanh())


class Ops(TorchDispatchMode):
    """Count the ops that run while this mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count_by_op = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count_by_op[str(func)] += 1
        return func(*args, **(kwargs or {}))


def run_unsplit(net: nn.Module, batch: Any, microbatches: int = 4, loss: Any = nn.functional.mse_loss) -> Any:
    """Run plain autograd on each microbatch; return a copy of the net, with gradients and buffers, and the outputs."""
    net, outputs = copy.deepcopy(net), list[Tensor]()
    for x, t in zip(*(leaf.tensor_split(microbatches) for leaf in batch), strict=True):
        outputs.append(net(x))
        (loss(outputs[-1], t) * (len(x) / len(batch[0]))).backward()
    return net, torch.cat([output.detach() for output in outputs])


def state_by_name(result: fpipe.Result) -> dict[str, Tensor]:
    """Return the state of a step's result by the names of the net."""
    return {name: tensor for stage in result.state or () for name, tensor in stage.items()}


def assert_unsplit(model: fpipe.Model, result: fpipe.Result, expected_net: nn.Module) -> None:
    """Assert that gradients and state of a step equal the unsplit net's bit by bit."""
    grads = fpipe.join_params(model, result.grads)
    trained = {name: leaf.grad for name, leaf in expected_net.named_parameters() if leaf.requires_grad}
    assert [name for name, grad in trained.items() if not torch.equal(grads[name], grad)] == []
    assert [
        name for name, buffer in state_by_name(result).items() if not torch.equal(buffer, expected_net.get_buffer(name))
    ] == []


def scripted() -> nn.Module:
    """Return a layer that torch.jit has compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(4, 4))


def merged(model: fpipe.Model, microbatches: int, *steps: Any) -> fpipe.Program:
    """Return the program of a step: split into microbatches, transformed, and merged."""
    return fpipe.chain(fpipe.split(microbatches), *steps, fpipe.merge())(fpipe.program(model))
