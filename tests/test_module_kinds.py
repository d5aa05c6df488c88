"""Real-world modules: norms, lazy modules, hooks, parametrizations, buffers of every kind.

Each trains like the unsplit net, or is refused in one sentence.
"""

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
from tests.toys import Toy, assert_unsplit, merged, state_by_name

SHAPE = (6, 4, 3, 5)
PLANS = {
    "split": (fpipe.split_backward(), fpipe.schedules.zb_h1(2)),
    "recomputed": (fpipe.checkpoint("always"), fpipe.schedules.one_f_one_b(2)),
}


@dataclass(frozen=True)
class Case:
    """A module to put between two convolutions, a change after it is made, and whether it has state."""

    make: Callable[[], nn.Module]
    state: bool = True
    change: Callable[[nn.Module], Any] = lambda module: None


def masking_module() -> nn.Module:
    """Return a module of constants, including None."""
    mask = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5])
    forward = lambda module, x: x.masked_fill(module.mask == 2, 0.0) * module.mask * module.scale[0]  # noqa: E731
    return Toy(forward, mask=mask, scale=torch.tensor([2, 3]), none=None)


class NormWithBuffer(nn.BatchNorm2d):
    """A batch norm with an extra buffer and another input check."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("seen", torch.zeros(()))

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() == 4

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input) * self.seen


class NormWithOwnForward(nn.BatchNorm2d):
    """A batch norm with its own forward, which normalises by running statistics.

    No input check marks where it meets its input.
    """

    def forward(self, input: Tensor) -> Tensor:
        nn.functional.batch_norm(input.detach(), self.running_mean, self.running_var, None, None, True, 0.2)
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


class Scaled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(3 * input)


def two_norm_block() -> nn.Module:
    """Return a custom block of two norms; it calls the first one twice."""
    norms = {"one": nn.BatchNorm2d(4), "two": nn.BatchNorm2d(4, momentum=None)}
    return Toy(
        lambda module, x: module.two(module.one(module.conv(module.one(x))).relu()) + x,
        **norms,
        conv=nn.Conv2d(4, 4, 1),
    )


def run_lazy(module: nn.Module, *shape: int) -> nn.Module:
    """Return the lazy module after a call on an example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are said to be under development
        module(torch.randn(shape))
    return module


def lazy(make: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


def register_hook(hook_kind: str, function: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    return lambda module: getattr(module, f"register_{hook_kind}")(function)


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
CASES: dict[str, Case] = {
    **{
        f"{name}{option}": Case(functools.partial(OPTIONS[option], norm), option not in (", eval", ", no statistics"))
        for name, norm in NORMS.items()
        for option in OPTIONS
    },
    "SyncBatchNorm, one process": Case(lambda: nn.SyncBatchNorm(4)),
    "converted to SyncBatchNorm": Case(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(two_norm_block())),
    "a subclass": Case(NormWithBuffer),
    "a subclass with a forward of its own": Case(lambda: NormWithOwnForward(4)),
    "a subclass around torch's forward": Case(lambda: Scaled(4)),
    "an instance with a forward of its own": Case(
        lambda: nn.BatchNorm2d(4),
        change=lambda module: setattr(module, "forward", types.MethodType(NormWithOwnForward.forward, module)),
    ),
    "norms inside a block": Case(two_norm_block),
    "LazyBatchNorm2d that has seen an example": Case(lambda: run_lazy(lazy(nn.LazyBatchNorm2d), 2, 4, 3, 5)),
    "LazyConv2d that has seen an example": Case(lambda: run_lazy(lazy(nn.LazyConv2d, 4, 1), 2, 4, 3, 5), state=False),
    "LazyLinear that has seen an example": Case(lambda: run_lazy(lazy(nn.LazyLinear, 5), 2, 4, 3, 5), state=False),
    "constants": Case(masking_module, state=False),
    "a forward hook": Case(
        lambda: nn.Conv2d(4, 4, 1), state=False, change=register_hook("forward_hook", lambda module, args, y: 2 * y)
    ),
    "a pre-hook": Case(
        lambda: nn.BatchNorm2d(4), change=register_hook("forward_pre_hook", lambda module, args: (args[0] + 1.0,))
    ),
    "a hook on a norm": Case(
        lambda: nn.BatchNorm2d(4), change=register_hook("forward_hook", lambda module, args, y: y.tanh())
    ),
    "a backward hook": Case(
        lambda: Toy(lambda module, x: x + x),
        state=False,
        change=register_hook("full_backward_hook", lambda module, dx, dy: (3 * dx[0],)),
    ),
    "a parametrization of one's own": Case(
        lambda: nn.Linear(5, 5),
        state=False,
        change=lambda module: parametrize.register_parametrization(
            module, "weight", Toy(lambda module, x: x.triu() + x.triu(1).mT)
        ),
    ),
    "weight norm": Case(lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), state=False),
    "orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(5, 5)), state=False),
    "pruned": Case(lambda: prune.l1_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5), state=False),
}


def net_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    module = case.make()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if "running" in name and not module.training:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    case.change(module)
    return nn.Sequential(nn.Conv2d(4, 4, 1), module, nn.Tanh(), nn.Conv2d(4, 4, 1))


@functools.cache
def cut_case(name: str) -> tuple[nn.Sequential, nn.Sequential, Any, Any]:
    """Return a net, its twin after plain autograd on each microbatch, the batch, and the cut net."""
    net, unsplit = net_of(CASES[name]), net_of(CASES[name])
    x, target = torch.randn(SHAPE), torch.randn(SHAPE)
    for part, t in zip(x.tensor_split(3), target.tensor_split(3), strict=True):
        (nn.functional.mse_loss(unsplit(part), t) * (len(part) / 6)).backward()
    batch = x, target
    return net, unsplit, batch, fpipe.from_sequential(net, sizes=[2, 2], loss=nn.functional.mse_loss, batch=batch)


@pytest.mark.crossed
@pytest.mark.filterwarnings("ignore:a stage runs under autograd")  # for a backward hook
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_module_cut_into_stages_trains_as_the_unsplit_net(name: str, trace: bool, plan: str):
    buffers_before = {name: buffer.clone() for name, buffer in net_of(CASES[name]).named_buffers()}
    net, unsplit, batch, (model, params, state) = cut_case(name)
    step = fpipe.build(merged(model, 3, *PLANS[plan]), model, trace=trace)
    result = step(params, batch, state=state)
    assert_unsplit(model, result, unsplit)
    state_buffers = state_by_name(result)
    assert bool(state_buffers) is CASES[name].state
    unwritten = [name for name, _ in unsplit.named_buffers() if name not in state_buffers]
    assert all(torch.equal(buffers_before[name], unsplit.get_buffer(name)) for name in unwritten)
    assert all(torch.equal(buffers_before[name], buffer) for name, buffer in net.named_buffers())


def cut(module: nn.Module, batch: Any = None) -> Any:
    return fpipe.from_sequential(nn.Sequential(nn.Conv2d(4, 4, 1), module, nn.Tanh()), stages=2, batch=batch)[0]


X = torch.zeros(2, 4, 3, 3)


test_modules_that_no_stage_can_hold_are_refused_by_name = refusals(
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
fpipe.deferred_batch_norm(cut(Scaled(4), (X, X)))
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
