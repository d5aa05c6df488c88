"""Buffers that a module writes and its output does not read: their updates are apart, forwards come in any order."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.transforms._rewrite import Transform

ROWS = (torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), torch.ones(10, 8))


class Tracker(nn.Module):
    """Counts its calls and keeps a running mean of what it is given."""

    count: Tensor
    mean: Tensor

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = torch.tanh(x) * self.scale
        with torch.no_grad():
            if self.how == "in place":
                self.mean.lerp_(x.mean(0), 0.1)
            elif self.how == "another":
                self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            elif self.how == "out":
                torch.maximum(self.mean, y.amax(0), out=self.mean)
            elif self.how == "a part":
                self.mean[2:] += y[0, 2:]
            elif self.how == "by name":
                held = self.mean
                held.mul_(0.5).add_(y.sum(0))
            elif self.how == "data":
                self.mean.data = self.mean + y[0]
            elif self.how == "a parameter":
                self.mean.lerp_(self.scale, 0.1)
            else:
                self.mean.lerp_(y.mean(0), 1 / self.count)
        return y


class Last(nn.Module):
    """Keeps what it was given last, and in which rows that was positive."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.zeros(8))
        self.register_buffer("hits", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.row = x.detach()[0]
        self.hits[(x.detach() > 0).sum(0).clamp(max=2)] += 1
        self.hits.scatter_add_(0, torch.tensor([0, 0, 1]), self.hits.new_ones(3))
        return x * 1.0


class Watching(nn.Module):
    """Looks at what passes, which the module behind it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.total.add_(y.detach()[0])
        return self.relu(y)


class Block(nn.Module):
    """Counts, around a tracker that it calls twice, norms and attention, under no_grad and casts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cast", torch.zeros(8))
        self.inner, self.norm, self.linear = Tracker(), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.inner(self.linear(x)) + self.inner(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            self.cast.copy_(torch.nn.functional.linear(self.cast + 1, self.linear.weight) + self.linear(x).mean(0))
        return self.norm(y)


class ByMode(nn.Module):
    """Normalises by its batch in training, and by what it remembers in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        now = x.mean(0)
        self.mean.lerp_(now.detach(), 0.1)
        return x - now


def counted(made: Any, args: Any, out: Tensor) -> None:
    made.seen += out.detach().sum(0)


def hooked() -> nn.Module:
    made = nn.Linear(8, 8)
    made.register_buffer("seen", torch.zeros(8))
    made.register_forward_hook(counted)
    return made


def twice(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Two equal stages."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), make(), nn.Tanh(), nn.Linear(8, 8), make(), nn.Tanh())


def again() -> nn.Sequential:
    """One module in two places of a stage."""
    made = Tracker()
    return nn.Sequential(nn.Linear(8, 8), made, made, nn.Linear(8, 8), nn.Tanh(), nn.Tanh())


NETS: dict[str, Callable[[], nn.Sequential]] = {
    how: lambda how=how: twice(lambda: Tracker(how))
    for how in ("in place", "another", "out", "a part", "by name", "data", "a parameter", "by the count")
} | {
    "what was there": lambda: twice(Last),
    "written behind it": lambda: twice(Watching),
    "a norm beside": lambda: twice(lambda: nn.Sequential(Tracker(), nn.BatchNorm1d(8), nn.ReLU(inplace=True))),
    "inside": lambda: twice(Block),
    "by mode": lambda: twice(ByMode),
    "a hook": lambda: twice(hooked),
    "in two places": again,
}
LATE = [
    ["0F2", "0F0", "0F3", "0F1", "0B1", "0B3", "0B0", "0B2"],
    ["1F1", "1B1", "1F3", "1B3", "1F0", "1B0", "1F2", "1B2"],
]
PLANS: dict[str, tuple[Transform, ...]] = {
    "gpipe": (fpipe.schedules.gpipe(2), fpipe.merge()),
    "out of order": (fpipe.schedules.from_table(LATE), fpipe.merge()),
    "out of order, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "out of order, split": (fpipe.split_backward(), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "zb-h1, recomputed": (fpipe.checkpoint("always"), fpipe.schedules.zb_h1(2), fpipe.merge()),
    "layer by layer": (fpipe.checkpoint("always", grain="layer"), fpipe.schedules.from_table(LATE), fpipe.merge()),
    "from both ends": (fpipe.schedules.chimera(2), fpipe.merge(), fpipe.communicate(), fpipe.free()),
}


def one_by_one(net: nn.Module) -> tuple[nn.Module, Tensor]:
    """A copy of the net, and the outputs, after plain autograd on one microbatch after the other."""
    net, outputs = copy.deepcopy(net), list[Tensor]()
    for x, t in zip(*(half.tensor_split(4) for half in ROWS), strict=True):
        outputs.append(net(x))
        (nn.functional.mse_loss(outputs[-1], t) * (len(x) / 10)).backward()
    return net, torch.cat([output.detach() for output in outputs])


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_updates_are_the_unsplit_modules_whatever_the_order(name: str, trace: bool):
    """A stage with a mere counter once had to take its microbatches in order."""
    net = NETS[name]()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    model, params, state = fpipe.from_sequential(net, sizes=[3, 3], loss=nn.functional.mse_loss)
    right, outputs = one_by_one(net)
    for plan in PLANS.values():
        program = fpipe.chain(fpipe.split(4), *plan)(fpipe.program(model))
        step = fpipe.build(program, model, trace=trace)
        step(params, ROWS, state=state)
        result = step(params, ROWS, state=state)  # a warning is an error
        found = {name: tensor for stage in result.state or () for name, tensor in stage.items()}
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], right.get_buffer(name)) for name in found)
        assert torch.equal(result.outputs, outputs)
        grads = fpipe.join_params(model, result.grads)
        assert all(torch.equal(grads[name], leaf.grad) for name, leaf in right.named_parameters())
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
