"""A module whose Python looks at data is one operation of a net that is cut; the rest of the net is traced."""

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
from tests.test_distributed import local_part
from tests.toys import Toy

WIDTH = 8


class Experts(nn.Module):
    """A dropless mixture: each expert takes the rows that are sent to it."""

    def __init__(self, make_expert: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, -2)
        weight, route = self.gate(flat).softmax(-1).max(-1)
        return self.mix_experts(flat, weight[:, None], route).view_as(x)

    def mix_experts(self, x: Tensor, weight: Tensor, route: Tensor) -> Tensor:
        mixture = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(route == number)
            if len(rows) == 0:
                continue
            mixture[rows] += expert(x[rows]) * weight[rows]
        return mixture


class MaskedExperts(Experts):
    """Experts chosen by boolean masks, which torch exports with sizes that are unknown."""

    def mix_experts(self, x: Tensor, weight: Tensor, route: Tensor) -> Tensor:
        mixture = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixture[route == number] = expert(x[route == number]) * weight[route == number]
        return mixture


class Branching(nn.Module):
    """A layer that branches on the sum of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


class CountedExperts(Experts):
    """Experts that count their calls, so that a run for shapes alone shows."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def residual(module: Any, x: Tensor) -> Tensor:
    return x + module.inner(module.norm(x))


def run_blocks(module: Any, ids: Tensor) -> Tensor:
    x = module.embed(ids)
    for block in module.blocks:
        x = block(x)
    return module.head(x)


def net_around(*modules: nn.Module) -> Toy:
    blocks = nn.ModuleList(Toy(residual, norm=nn.LayerNorm(WIDTH), inner=module) for module in modules)
    return Toy(run_blocks, embed=nn.Embedding(20, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 20))


def cross_entropy(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def make_dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def tokens(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randint(20, (rows, 5)), torch.randint(20, (rows, 5))


def net_of(make_module: Callable[[], nn.Module]) -> Toy:
    torch.manual_seed(0)
    return net_around(make_dense(), make_module(), make_dense())


def autograd_grads(net: nn.Module, batch: Any, microbatches: int) -> dict[str, Tensor | None]:
    """Return the gradients of plain autograd over the microbatches in order."""
    net.zero_grad()
    for ids, target in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        (cross_entropy(net(ids), target) / microbatches).backward()
    return {name: leaf.grad for name, leaf in net.named_parameters()}


def has_grads(model: fpipe.Model, result: fpipe.Result, expected_grads: dict[str, Tensor | None]) -> bool:
    actual_grads = fpipe.join_params(model, result.grads)
    return actual_grads.keys() == expected_grads.keys() and all(
        is_same_gradient(actual_grads[name], expected_grads[name]) for name in expected_grads
    )


def make_program(model: fpipe.Model, *transforms: Any) -> fpipe.Program:
    schedule = fpipe.schedules.one_f_one_b(len(model.stages))
    return fpipe.chain(fpipe.split(4), *transforms, schedule, fpipe.merge())(fpipe.program(model))


KINDS: dict[str, tuple[Any, str | None]] = {
    "a branch on a length": (
        Experts,
        "module 'blocks.1.inner' (Experts), at test_opaque.py:{}, in mix_experts: if len(rows)",
    ),
    "boolean masks": (MaskedExperts, None),
    "an expert that looks": (
        lambda: MaskedExperts(Branching),
        "module 'blocks.1.inner.experts.0' (Branching), at test_opaque.py:",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_net_around_a_module_that_looks_at_data_is_cut(name: str):
    """Used to end in torch's message about an unknown size, or about an op without a meta kernel."""
    make_module, site = KINDS[name]
    net = net_of(make_module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, batch=tokens())
        assert str(model).count("% of the operations") == 3
        step = fpipe.build(make_program(model), model)
        for rows in (8, 16, 8):
            assert has_grads(model, step(params, tokens(rows)), autograd_grads(net, tokens(rows), 4))
    messages = [str(warning.message) for warning in caught]
    line = Experts.mix_experts.__code__.co_firstlineno + 4
    opaque = [
        message
        for message in messages
        if message.startswith("The Python of 'blocks.1.inner' looks at data, so it is one op")
    ]
    assert [(site or "").format(line) in message for message in opaque] == [True] * (site is not None)
    untraced = [
        re.search(r"a stage runs under autograd.*: (stage \d) ", message)
        for message in messages
        if message not in opaque
    ]
    assert {match and match[1] for match in untraced} == {"stage 1"}


@pytest.mark.parametrize("all_on_meta", [False, True])
def test_from_module_refuses_an_opaque_module_on_meta_by_name(all_on_meta: bool):
    """Used to end in torch's message about devices for a net on meta with a real example."""
    net = net_of(Experts).to("meta")
    example: Any = tuple(part.to("meta") for part in tokens()) if all_on_meta else tokens()
    with pytest.raises(ValueError, match=r"The Python of 'blocks.1.inner' looks at data, which .* on meta lack: cut"):
        fpipe.from_module(net, 3, loss=cross_entropy, batch=example)


def test_an_opaque_module_may_be_a_stage():
    net = net_of(Experts)
    cuts = ["blocks.1.norm", "blocks.1.inner"]
    with pytest.warns(UserWarning, match="The Python of 'blocks.1.inner' looks at data"):
        model, params, _ = fpipe.from_module(net, cuts=cuts, loss=cross_entropy, batch=tokens())
    assert [stage.name for stage in model.stages][1] == "blocks.1.inner"
    with pytest.warns(UserWarning, match="a stage runs under autograd"):
        result = fpipe.build(make_program(model, fpipe.split_backward()), model)(params, tokens())
    assert has_grads(model, result, autograd_grads(net, tokens(), 4))


@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_an_opaque_module_may_be_called_twice_and_have_dropout():
    """Each call is an operation, and draws as its stage draws."""
    shared = Experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    net = net_around(shared, make_dense(), shared)
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, batch=tokens())
    program = make_program(model)
    assert fpipe.verify(program, model, params, tokens(), key=1).bitwise


@pytest.mark.usefixtures("small_heap")
@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_a_copied_model_runs_after_the_original_is_deleted():
    net = net_of(Experts)
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, batch=tokens())
    expected_grads = autograd_grads(net, tokens(), 4)
    copy = pickle.loads(pickle.dumps(model))
    assert has_grads(model, fpipe.build(make_program(model), model)(params, tokens()), expected_grads)
    del model, net
    gc.collect()
    assert has_grads(copy, fpipe.build(make_program(copy), copy)(params, tokens()), expected_grads)


@pytest.mark.filterwarnings("ignore:The Python of", "ignore:a stage runs under autograd")
def test_only_steps_run_an_opaque_module():
    net = net_of(CountedExperts)
    counter: Any = net.blocks[1].inner
    model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, batch=tokens())
    step = fpipe.build(make_program(model), model)
    assert counter.calls == 0
    step(params, tokens())
    assert counter.calls == 4


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_an_opaque_module_that_writes_buffers_is_refused():
    net = net_of(lambda: Experts(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
    with pytest.warns(UserWarning, match="The Python of"):
        model, params, _ = fpipe.from_module(net, 3, loss=cross_entropy, batch=tokens())
    with pytest.raises(RuntimeError, match=r"stage 1 \(blocks.1\) writes its parameters or buffers in place"):
        fpipe.build(make_program(model), model)(params, tokens())


def compare_rank_grads(rank: int) -> list[bool]:
    net, is_equal = net_of(Experts), list[bool]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, params, _ = fpipe.from_module(net, 2, loss=cross_entropy, batch=tokens())
        for transforms in ((), (fpipe.split_backward(),)):
            program = make_program(model, *transforms)
            step = fpipe.build(program, model, runtime="distributed", example=(params, tokens()))
            for rows in (8, 16):
                grads = step(local_part(program, rank, params), tokens(rows)).grads[rank]
                expected_grads = autograd_grads(net, tokens(rows), 4)
                is_equal += [torch.equal(grads[name], expected_grads[name]) for name in grads]
    return is_equal


def test_opaque_modules_run_on_the_ranks_of_several_processes(pair: Processes):
    for is_equal in pair.run(compare_rank_grads):
        assert is_equal
        assert all(is_equal)
