"""Modules as the field writes them: norms, lazy modules, hooks, parametrizations, buffers of every kind. Each is the
unsplit module, or refused with a sentence."""

import functools
import re
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fpipe
from tests.refusals import refusals
from tests.toys import Toy, assert_unsplit, merged, remembered

SHAPE = (6, 4, 3, 5)
PLANS = {
    "split": (fpipe.split_backward(), fpipe.schedules.zb_h1(2)),
    "recomputed": (fpipe.checkpoint("always"), fpipe.schedules.one_f_one_b(2)),
}


@dataclass(frozen=True)
class Kind:
    """A module between two convolutions, which may go in eval, and what a step hands back of its buffers."""

    make: Callable[[], nn.Module]
    state: bool = True
    change: Callable[[nn.Module], Any] = lambda module: None


def masked() -> nn.Module:
    """Constants, one of which is None."""
    mask = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5])
    does = lambda own, x: x.masked_fill(own.mask == 2, 0.0) * own.mask * own.scale[0]  # noqa: E731
    return Toy(does, mask=mask, scale=torch.tensor([2, 3]), none=None)


class Both(nn.BatchNorm2d):
    """A batch norm with a buffer of its own, and another input check."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("seen", torch.zeros(()))

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() == 4

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input) * self.seen


class ByItself(nn.BatchNorm2d):
    """A batch norm with a forward of its own: nothing tells when it meets its input, and it normalises by what it
    remembers."""

    def forward(self, input: Tensor) -> Tensor:
        nn.functional.batch_norm(input.detach(), self.running_mean, self.running_var, None, None, True, 0.2)
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


class Scaled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(3 * input)


def block() -> nn.Module:
    """Two norms, one of which runs twice, inside a module of one's own."""
    norms = {"one": nn.BatchNorm2d(4), "two": nn.BatchNorm2d(4, momentum=None)}
    return Toy(lambda own, x: own.two(own.one(own.conv(own.one(x))).relu()) + x, **norms, conv=nn.Conv2d(4, 4, 1))


def lazily(module: nn.Module, *shape: int) -> nn.Module:
    """A lazy module that has seen an example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are said to be under development
        module(torch.randn(shape))
    return module


def lazy(make: Callable[..., nn.Module], *args: Any, **how: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **how)


def hook(where: str, function: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    return lambda module: getattr(module, f"register_{where}")(function)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "BatchNorm2d": nn.BatchNorm2d,
    "InstanceNorm2d": functools.partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
}
OPTIONS: dict[str, Callable[[Callable[..., nn.Module]], nn.Module]] = {
    "": lambda norm: norm(4),
    ", not affine": lambda norm: norm(4, affine=False),
    ", momentum None": lambda norm: norm(4, momentum=None),
    ", frozen": lambda norm: norm(4).requires_grad_(False),
    ", eval": lambda norm: norm(4).eval(),
    ", no statistics": lambda norm: norm(4, track_running_stats=False),
}
KINDS: dict[str, Kind] = {
    **{
        f"{name}{how}": Kind(functools.partial(OPTIONS[how], norm), how not in (", eval", ", no statistics"))
        for name, norm in NORMS.items()
        for how in OPTIONS
    },
    "SyncBatchNorm, one process": Kind(lambda: nn.SyncBatchNorm(4)),
    "converted to SyncBatchNorm": Kind(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(block())),
    "a subclass": Kind(Both),
    "a subclass with a forward of its own": Kind(lambda: ByItself(4)),
    "a subclass around torch's forward": Kind(lambda: Scaled(4)),
    "an instance with a forward of its own": Kind(
        lambda: nn.BatchNorm2d(4),
        change=lambda module: setattr(module, "forward", types.MethodType(ByItself.forward, module)),
    ),
    "norms inside a block": Kind(block),
    "LazyBatchNorm2d that has seen an example": Kind(lambda: lazily(lazy(nn.LazyBatchNorm2d), 2, 4, 3, 5)),
    "LazyConv2d that has seen an example": Kind(lambda: lazily(lazy(nn.LazyConv2d, 4, 1), 2, 4, 3, 5), state=False),
    "LazyLinear that has seen an example": Kind(lambda: lazily(lazy(nn.LazyLinear, 5), 2, 4, 3, 5), state=False),
    "constants": Kind(masked, state=False),
    "a forward hook": Kind(
        lambda: nn.Conv2d(4, 4, 1), state=False, change=hook("forward_hook", lambda module, args, y: 2 * y)
    ),
    "a pre-hook": Kind(
        lambda: nn.BatchNorm2d(4), change=hook("forward_pre_hook", lambda module, args: (args[0] + 1.0,))
    ),
    "a hook on a norm": Kind(lambda: nn.BatchNorm2d(4), change=hook("forward_hook", lambda module, args, y: y.tanh())),
    "a backward hook": Kind(
        lambda: Toy(lambda own, x: x + x),
        state=False,
        change=hook("full_backward_hook", lambda module, dx, dy: (3 * dx[0],)),
    ),
    "a parametrization of one's own": Kind(
        lambda: nn.Linear(5, 5),
        state=False,
        change=lambda module: parametrize.register_parametrization(
            module, "weight", Toy(lambda own, x: x.triu() + x.triu(1).mT)
        ),
    ),
    "weight norm": Kind(lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), state=False),
    "orthogonal": Kind(lambda: parametrizations.orthogonal(nn.Linear(5, 5)), state=False),
    "pruned": Kind(lambda: prune.l1_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5), state=False),
}


def net_of(kind: Kind) -> nn.Sequential:
    torch.manual_seed(0)
    module = kind.make()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if "running" in name and not module.training:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    kind.change(module)
    return nn.Sequential(nn.Conv2d(4, 4, 1), module, nn.Tanh(), nn.Conv2d(4, 4, 1))


@functools.cache
def cut_case(name: str) -> tuple[nn.Sequential, nn.Sequential, Any, Any]:
    """A net, the same net after plain autograd on each microbatch, the batch, and the first net cut."""
    net, whole = net_of(KINDS[name]), net_of(KINDS[name])
    x, target = torch.randn(SHAPE), torch.randn(SHAPE)
    for part, t in zip(x.tensor_split(3), target.tensor_split(3), strict=True):
        (nn.functional.mse_loss(whole(part), t) * (len(part) / 6)).backward()
    return net, whole, (x, target), fpipe.from_sequential(net, sizes=[2, 2], loss=nn.functional.mse_loss, example=x)


@pytest.mark.crossed
@pytest.mark.filterwarnings("ignore:a stage runs under autograd")  # for a backward hook
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_module_in_stages_is_the_module(name: str, trace: bool):
    before = {name: buffer.clone() for name, buffer in net_of(KINDS[name]).named_buffers()}
    net, whole, batch, (model, params, state) = cut_case(name)
    for plan in PLANS.values():
        step = fpipe.build(merged(model, 3, *plan), model, trace=trace)
        result = step(params, batch, state=state)
        assert_unsplit(model, result, whole)
        held = remembered(result)
        assert bool(held) is KINDS[name].state
        rest = [name for name, _ in whole.named_buffers() if name not in held]
        assert all(torch.equal(before[name], whole.get_buffer(name)) for name in rest)
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def cut(module: nn.Module, example: Any = None) -> Any:
    return fpipe.from_sequential(nn.Sequential(nn.Conv2d(4, 4, 1), module, nn.Tanh()), stages=2, example=example)[0]


X = torch.zeros(2, 4, 3, 3)


test_what_no_stage_can_be_is_refused_by_name = refusals(
    globals(),
    """
cut(lazy(nn.LazyLinear, 5))
    ValueError: '1.weight' is not initialised yet (a lazy module); run the net once on an example.
cut(lazy(nn.LazyBatchNorm2d))
    ValueError: '1.weight' is not initialised yet (a lazy module); run the net once on an example.
cut(lazy(nn.LazyBatchNorm2d, affine=False))
    ValueError: '1.running_mean' is not initialised yet (a lazy module); run the net once on an example.
cut(nn.Embedding(4, 4, max_norm=1.0))
    ValueError: module '1' (Embedding): max_norm rewrites the weight as it runs, which a pure function cannot; leave it
    out.
fpipe.deferred_batch_norm(cut(Scaled(4), X))
    ValueError: batch norm '1' (Scaled) has a forward of its own; only torch's batch
    norms can be deferred.
""",
)


def test_a_norm_over_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.SyncBatchNorm(4))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    sentence = (
        "module '1' (SyncBatchNorm) averages over 4 processes in the middle of a forward, which a pure function "
        "cannot. Use fpipe.deferred_batch_norm."
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.from_sequential(net, stages=2)
    fpipe.from_sequential(net.eval(), stages=2)
