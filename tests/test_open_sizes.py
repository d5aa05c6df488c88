"""Open traces: one trace with symbols for sizes gives, filled with numbers, the graph that a closed trace gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe.graphs.compiling import code
from fpipe.graphs.tracing import trace_cache
from fpipe.graphs.tracing.open_sizes import canonical_parts
from fpipe.graphs.tracing.stage_call import StageCall, aval_with_grad
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.model import Model, Stage


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.gelu(self.out(y.transpose(1, 2).reshape(rows, length, width)))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.shape[1] < 12 else x.sigmoid()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1] ** 0.5 + torch.arange(x.shape[1])[:, None]


LAYERS = {
    "attention": Attention(),
    "convolution": nn.Sequential(
        nn.Conv1d(8, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm1d(4, track_running_stats=False)
    ),
    "pooling": nn.AvgPool1d(2),
    "pad": nn.ConstantPad1d(2, 0.5),
    "softmax": nn.Sequential(nn.Linear(8, 4), nn.Softmax(1)),
    "scaled": Scaled(),
    "transposed": nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 3), nn.Softplus()),
    "branching": Branching(),
    "sampled": nn.Upsample(scale_factor=1.5, mode="linear"),
}
SWAPPED = ("convolution", "pooling", "pad", "sampled")


def graph_of(traces: Traces, name: str, params: Any, length: int) -> Any:
    x = torch.randn(2, 8, length) if name in SWAPPED else torch.randn(2, length, 8)
    leaves = {"params": fpipe.tree.flatten(params), "x": fpipe.tree.flatten(x)}
    reads = tuple((label, tuple(map(aval_with_grad, avals))) for label, (avals, _) in leaves.items())
    call = StageCall(0, reads, tuple((label, spec) for label, (_, spec) in leaves.items()), autograd_leaves=("x",))
    outline = traces.outline(call)
    cotangents = {"dy": tuple(leaf._replace(wants_grad=False) for leaf in outline.avals("y"))}
    return outline, traces.graph(call, cotangents).filled()


@pytest.mark.parametrize("name", LAYERS)
def test_a_filled_trace_is_the_closed_one(name: str) -> None:
    layer = LAYERS[name]
    params = {path: leaf.detach() for path, leaf in layer.named_parameters()}

    def forward(params: Any, x: Tensor) -> Any:
        return torch.func.functional_call(layer, params, (x,))

    model = Model((Stage(forward),), None, ("batch",))
    for length in (6, 8, 7, 17):
        opened = graph_of(Traces(model), name, params, length)
        closed_model = Model((Stage(forward),), None, ("batch",))
        closed = graph_of(Traces(closed_model), name, params, length)
        assert [*map(canonical_parts, opened)] == [*map(canonical_parts, closed)]


def gradients_of(net: nn.Module, inputs: Tensor, target: Tensor, loss: Any = F.mse_loss) -> list[Tensor]:
    net = copy.deepcopy(net)
    total = torch.zeros(())
    for x, t in zip(inputs.split(1), target.split(1), strict=True):
        part = loss(net(x), t) / len(inputs)
        part.backward()
        total += part.detach()
    return [total, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def build_step(net: nn.Sequential, loss: Any = F.mse_loss, **options: Any) -> Any:
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=loss)
    chain = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(ranks=2), fpipe.merge(outputs=False))
    step = fpipe.build(chain(fpipe.program(model)), model, **options)
    return lambda *batch: step(params, batch)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by each trace."""
    numbers, trace = list[int](), trace_cache.trace
    monkeypatch.setattr(trace_cache, "trace", lambda *args: [numbers.append(1), trace(*args)][1])
    return numbers


@pytest.mark.parametrize("loss", [F.mse_loss, mean_square])
def test_new_lengths_have_the_bits_of_autograd_without_a_trace(traced: list[int], loss: Any) -> None:
    """A mean over one row, and `x[:, None]` of an open size, were traced at each length."""
    net = nn.Sequential(Attention(), Scaled(), Attention())
    step = build_step(net, loss)
    for count, length in enumerate((5, 8, 6, 31, 9, 8)):
        traced.clear()
        inputs, target = torch.randn(2, length, 8), torch.randn(2, length, 8)
        result = step(inputs, target)
        actual = [result.loss, *fpipe.tree.leaves(result.grads)]
        assert all(map(torch.equal, actual, gradients_of(net, inputs, target, loss)))
        assert bool(traced) == (count < 2)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def test_sizes_that_cannot_be_open_run_by_the_definition_until_they_have_come_back(traced: list[int]) -> None:
    net = nn.Sequential(Recurrent(8, 8, batch_first=True), nn.Dropout(0.5), nn.Linear(8, 8))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    program = fpipe.chain(
        fpipe.split(2), fpipe.schedules.zb_h1(ranks=2), fpipe.merge(outputs=False), fpipe.update("AdamW")
    )(fpipe.program(model))
    step, reference_step = fpipe.build(program, model), fpipe.build(program, model, trace=False)
    opt = fpipe.optimizer_state(program, params)
    for key, (length, is_traced) in enumerate([(5, 1), (8, 1), (6, 0), (7, 0), (6, 0), (6, 0), (6, 0), (6, 1), (6, 0)]):
        traced.clear()
        batch = torch.randn(2, length, 8), torch.randn(2, length, 8)
        result = step(params, batch, opt=opt, lr=0.1, key=key)
        expected = reference_step(params, batch, opt=opt, lr=0.1, key=key)
        actual_leaves, expected_leaves = (fpipe.tree.leaves((x.loss, x.params, x.opt)) for x in (result, expected))
        assert all(
            a.equal(b) if isinstance(a, Tensor) else a == b for a, b in zip(actual_leaves, expected_leaves, strict=True)
        )
        assert bool(traced) == is_traced
        params, opt = result.params, result.opt


def test_lengths_share_their_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    step, generated, counts = build_step(nn.Sequential(Attention(), Attention())), list[str](), list[int]()
    generate = code._generate

    def generate_counted(example: Any, name: str, **options: Any) -> Any:
        generated.append(name)
        return generate(example, name, **options)

    monkeypatch.setattr(code, "_generate", generate_counted)
    for length in (5, 8, 6, 31, 9):
        step(torch.randn(2, length, 8), torch.randn(2, length, 8))
        counts.append(len(generated))
    assert 0 < counts[0] < counts[1]
    assert counts[1:] == [counts[1]] * 4


def test_a_net_that_computes_its_loss_is_not_traced_at_each_length() -> None:
    """Its absent loss was a new function at each length, so steps warned that they were traced again."""
    stages = [lambda p, x: x * p["w"], lambda p, x: (x * p["w"]).square().mean()]
    model = fpipe.from_functions(stages, loss=None)
    params = ({"w": torch.ones(8)},) * 2
    step = fpipe.build(fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model)), model, audit="never")
    for length in range(4, 16):  # eight traces would warn
        x = torch.randn(4, length, 8)
        assert torch.equal(step(params, (x, None)).loss, sum(half.square().mean() * 0.5 for half in x.split(2)))


def test_a_branch_on_a_length_is_a_guard() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Branching())
    step = build_step(net)
    for length in (6, 8, 7, 13, 20, 11, 14):
        inputs, target = torch.randn(2, length, 8), torch.randn(2, length, 8)
        result = step(inputs, target)
        assert all(map(torch.equal, [result.loss, *fpipe.tree.leaves(result.grads)], gradients_of(net, inputs, target)))
