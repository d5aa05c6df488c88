"""Modules whose Python looks at data are one operation of a net that is cut; the rest of it is traced."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from property_tests.bits import is_same_gradient
from tests.processes import Processes
from tests.test_distributed import own
from tests.toys import Toy

WIDTH = 8


class Experts(nn.Module):
    """A dropless mixture: each expert takes the rows that are sent to it."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, -2)
        weight, route = self.gate(flat).softmax(-1).max(-1)
        return self.sent(flat, weight[:, None], route).view_as(x)

    def sent(self, x: Tensor, weight: Tensor, route: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(route == number)
            if len(rows) == 0:
                continue
            out[rows] += expert(x[rows]) * weight[rows]
        return out


class Everywhere(Experts):
    """Asks nothing of Python: torch exports it, with sizes that are not known."""

    def sent(self, x: Tensor, weight: Tensor, route: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[route == number] = expert(x[route == number]) * weight[route == number]
        return out


class Gated(nn.Module):
    """Looks at rows of which only the data say how many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


class Ticks(Experts):
    """Counts its calls, which a run that only asks for shapes must not."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def residual(own: Any, x: Tensor) -> Tensor:
    return x + own.inner(own.norm(x))


def through(own: Any, ids: Tensor) -> Tensor:
    x = own.embed(ids)
    for block in own.blocks:
        x = block(x)
    return own.head(x)


def net_around(*inside: nn.Module) -> Toy:
    blocks = nn.ModuleList(Toy(residual, norm=nn.LayerNorm(WIDTH), inner=one) for one in inside)
    return Toy(through, embed=nn.Embedding(20, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 20))


def cross_entropy(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def tokens(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randint(20, (rows, 5)), torch.randint(20, (rows, 5))


def net_of(kind: Callable[[], nn.Module]) -> Toy:
    torch.manual_seed(0)
    return net_around(dense(), kind(), dense())


def autograd(net: nn.Module, batch: Any, microbatches: int) -> dict[str, Tensor | None]:
    """The gradients under plain autograd, one microbatch after the other."""
    net.zero_grad()
    for ids, target in zip(*(half.chunk(microbatches) for half in batch), strict=True):
        (cross_entropy(net(ids), target) / microbatches).backward()
    return {name: leaf.grad for name, leaf in net.named_parameters()}


def equal(model: fpipe.Model, made: fpipe.Result, right: dict[str, Tensor | None]) -> bool:
    found = fpipe.join_params(model, made.grads)
    return found.keys() == right.keys() and all(is_same_gradient(found[name], right[name]) for name in right)


def chained(model: fpipe.Model, *more: Any) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(len(model.stages))
    return fpipe.chain(fpipe.split(4), *more, schedule, fpipe.merge())(fpipe.program(model))


KINDS: dict[str, tuple[Any, str | None]] = {
    "a branch on a length": (Experts, "module 'blocks.1.inner' (Experts), at test_opaque.py:{}, in sent: if len(rows)"),
    "boolean masks": (Everywhere, None),
    "an expert that looks": (
        lambda: Everywhere(Gated),
        "module 'blocks.1.inner.experts.0' (Gated), at test_opaque.py:",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_net_around_a_module_that_looks_at_data_is_cut(name: str):
    """It ended in torch's words for a size that is not known; of masks in those for an op without a meta kernel."""
    kind, place = KINDS[name]
    net = net_of(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, example=tokens())
        assert str(model).count("% of the operations") == 3
        step = fpipe.build(chained(model), model)
        for rows in (8, 16, 8):
            assert equal(model, step(params, tokens(rows)), autograd(net, tokens(rows), 4))
    words = [str(one.message) for one in told]
    line = Experts.sent.__code__.co_firstlineno + 4
    opaque = [one for one in words if one.startswith("The Python of 'blocks.1.inner' looks at data, so it is one op")]
    assert [(place or "").format(line) in one for one in opaque] == [True] * (place is not None)
    under = [re.search(r"a stage runs under autograd.*: (stage \d) ", one) for one in words if one not in opaque]
    assert {one and one[1] for one in under} == {"stage 1"}


@pytest.mark.parametrize("all_on_meta", [False, True])
def test_on_meta_it_is_refused_by_name(all_on_meta: bool):
    """Of a net on meta beside a real example the run that tells what it makes ended in torch's words for a device."""
    net = net_of(Experts).to("meta")
    example: Any = tuple(part.to("meta") for part in tokens()) if all_on_meta else tokens()
    with pytest.raises(ValueError, match=r"The Python of 'blocks.1.inner' looks at data, which .* on meta lack: cut"):
        fpipe.from_module(net, 3, loss=cross_entropy, example=example)


def test_it_may_be_a_stage_of_its_own():
    net = net_of(Experts)
    cuts = ["blocks.1.norm", "blocks.1.inner"]
    with pytest.warns(UserWarning, match="The Python of 'blocks.1.inner' looks at data"):
        model, params, _ = fpipe.from_module(net, cuts=cuts, loss=cross_entropy, example=tokens())
    assert [stage.name for stage in model.stages][1] == "blocks.1.inner"
    with pytest.warns(UserWarning, match="a stage runs under autograd"):
        made = fpipe.build(chained(model, fpipe.split_backward()), model)(params, tokens())
    assert equal(model, made, autograd(net, tokens(), 4))


@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_one_module_may_be_called_twice_and_have_dropout():
    """Each call is an operation of its own, and draws what its stage draws."""
    shared = Experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    net = net_around(shared, dense(), shared)
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, example=tokens())
    program = chained(model)
    assert fpipe.verify(program, model, params, tokens(), key=1).bitwise


@pytest.mark.usefixtures("small_heap")
@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_a_copy_of_a_model_has_its_own():
    net = net_of(Experts)
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, example=tokens())
    right = autograd(net, tokens(), 4)
    copy = pickle.loads(pickle.dumps(model))
    assert equal(model, fpipe.build(chained(model), model)(params, tokens()), right)
    del model, net
    gc.collect()
    assert equal(copy, fpipe.build(chained(copy), copy)(params, tokens()), right)


@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_only_steps_run_its_python_for_good():
    net = net_of(Ticks)
    inner: Any = net.blocks[1].inner
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, example=tokens())
    step = fpipe.build(chained(model), model)
    assert inner.calls == 0
    step(params, tokens())
    assert inner.calls == 4


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_what_a_module_writes_that_looks_at_data_is_refused():
    net = net_of(lambda: Experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
    with pytest.warns(UserWarning, match="The Python of"):
        model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, example=tokens())
    with pytest.raises(RuntimeError, match=r"stage 1 \(blocks.1\) writes its parameters or buffers in place"):
        fpipe.build(chained(model), model)(params, tokens())


def routed(rank: int) -> list[bool]:
    net, found = net_of(Experts), list[bool]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, params, _ = fpipe.from_module(net, 2, loss=cross_entropy, example=tokens())
        for more in ((), (fpipe.split_backward(),)):
            program = chained(model, *more)
            step = fpipe.build(program, model, runtime="distributed", example=(params, tokens()))
            for rows in (8, 16):
                grads = step(own(program, rank, params), tokens(rows)).grads[rank]
                right = autograd(net, tokens(rows), 4)
                found += [torch.equal(grads[name], right[name]) for name in grads]
    return found


def test_each_rank_of_several_processes_runs_what_is_its_own(pair: Processes):
    for found in pair.each(routed):
        assert found
        assert all(found)
