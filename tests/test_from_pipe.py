"""Torch's own splits as stages: the gradients of the module that was split, by its names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline

import fpipe
from tests.refusals import refusals

WIDTH, ROWS, MICROBATCHES = 6, 3, 4
MSE = nn.functional.mse_loss
SCHEDULES = {
    "kept": (fpipe.schedules.one_f_one_b(3),),
    "in halves": (fpipe.schedules.zb_h1(3),),
    "recomputed": (fpipe.checkpoint(), fpipe.schedules.gpipe(3)),
}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Tied ends, a skip from the first stage to the last, buffers, a parameter of its own, a frozen leaf, a mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))
        self.layers[1].norm.bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        first = h = self.embedding(ids) * self.scale + self.shift
        for layer in self.layers:
            h = layer(h)
        return self.head(h * mask + first * self.shift)


CUTS = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING}


def cut(net: nn.Module) -> Pipe:
    """A Pipe of three stages."""
    ids, mask = batch_of(ROWS)[0].values()
    return pipeline(net, (ids,), {"mask": mask}, split_spec=CUTS)


def batch_of(rows: int = ROWS * MICROBATCHES) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(11, (rows, 5)), "mask": torch.rand(rows, 5, 1)}, torch.randn(rows, 5, 11)


def chained(model: fpipe.Model, *more: Any) -> fpipe.Program:
    return fpipe.chain(fpipe.split(MICROBATCHES), *more, fpipe.merge())(fpipe.program(model))


def by_hand(net: Callable[..., Tensor], batch: tuple[dict[str, Tensor], Tensor]) -> None:
    """Plain autograd on the net, one microbatch after the other."""
    halves = [leaf.tensor_split(MICROBATCHES) for leaf in (*batch[0].values(), batch[1])]
    for *inputs, target in zip(*halves, strict=True):
        (MSE(net(*inputs), target) * (1 / MICROBATCHES)).backward()


@pytest.mark.parametrize("way", SCHEDULES)
def test_the_stages_of_a_split_give_the_gradients_of_the_net(way: str):
    """Both names of the tied leaf have its gradient, a sum over two stages: that alone rounds in another order."""
    torch.manual_seed(0)
    net = Net()
    model, params, _ = fpipe.from_pipe(cut(net), loss=MSE)
    program = chained(model, *SCHEDULES[way])
    assert model.inputs == ("batch", ((0, 0),), (1, "batch", (0, 1)))
    assert fpipe.verify(program, model, params, batch_of()).bitwise
    found = fpipe.join_params(model, fpipe.build(program, model)(params, batch_of()).grads)
    by_hand(net, batch_of())
    right = {name: leaf.grad for name, leaf in net.named_parameters(remove_duplicate=False) if leaf.grad is not None}
    assert found.keys() == right.keys()
    odd = [name for name in right if not torch.equal(found[name], right[name])]
    assert set(odd) <= {"embedding.weight", "head.weight", "shift"}
    assert all(torch.allclose(found[name], right[name], rtol=1e-5, atol=1e-6) for name in odd)


class Remembering(nn.Module):
    """A batch norm, dropout, and a counter of its own."""

    def __init__(self, training: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.train(training)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        pipe_split()
        self.calls.add_(1)
        return self.drop(self.b(self.norm(h)))


def test_buffers_that_a_split_writes_are_its_state():
    torch.manual_seed(0)
    net, x = Remembering(), torch.randn(ROWS * MICROBATCHES, WIDTH)
    net.drop.p = 0.0
    model, params, state = fpipe.from_pipe(pipeline(net, (x[:ROWS],)), loss=MSE, example=x[:ROWS])
    assert [*state[1]] == ["calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    program = chained(model, fpipe.schedules.one_f_one_b(2))
    found = fpipe.build(program, model)(params, (x, x), state=state)
    for part in x.tensor_split(MICROBATCHES):
        (MSE(net(part), part) * 0.25).backward()
    grads = fpipe.join_params(model, found.grads)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in net.named_parameters())
    assert all(torch.equal(leaf, net.get_buffer(name)) for name, leaf in found.state[1].items())


def test_a_split_that_draws_follows_from_the_key():
    net, x = Remembering(), torch.randn(ROWS * MICROBATCHES, WIDTH)
    model, params, state = fpipe.from_pipe(pipeline(net, (x[:ROWS],)), loss=MSE, example=x[:ROWS])
    program = chained(model, fpipe.checkpoint(), fpipe.schedules.one_f_one_b(2))
    assert fpipe.verify(program, model, params, (x, x), state=state, key=7).bitwise
    with pytest.raises(ValueError, match=re.escape("stage 1 (submod_pp_1) draws random numbers: hand in key=")):
        fpipe.build(program, model)(params, (x, x), state=state)


def test_a_buffer_that_a_split_writes_needs_an_example():
    net, x = Remembering(), torch.randn(ROWS * MICROBATCHES, WIDTH)
    model, params, _ = fpipe.from_pipe(pipeline(net, (x[:ROWS],)), loss=MSE)
    with pytest.raises(
        RuntimeError, match=re.escape("stage 1 (submod_pp_1) writes buffer or parameter 'calls' in place")
    ):
        fpipe.build(fpipe.split(MICROBATCHES)(fpipe.program(model)), model)(params, (x, x), key=1)


def test_what_is_handed_out_is_the_nets_but_for_what_torch_copies():
    """Torch gives each stage a parameter of its own where several read one."""
    net = Net()
    model, params, _ = fpipe.from_pipe(cut(net), loss=MSE)
    own = dict(net.named_parameters())
    copied = [name for stage in params for name, leaf in stage.items() if leaf.data_ptr() != own[name].data_ptr()]
    assert copied == ["shift", "embedding.weight"]
    assert [*fpipe.split_params(model, net.state_dict())[0]] == [*params[0]]
    assert "head.weight" in fpipe.join_params(model, params)


def test_a_module_that_a_stage_calls_twice_is_one():
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](self[0](x).tanh())
            pipe_split()
            return self[1](h)

    net, x = Twice(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS * MICROBATCHES, WIDTH)
    model, params, _ = fpipe.from_pipe(pipeline(net, (x[:ROWS],)), loss=MSE)
    program = chained(model, fpipe.schedules.zb_h1(2))
    grads = fpipe.join_params(model, fpipe.build(program, model)(params, (x, x)).grads)
    for part in x.tensor_split(MICROBATCHES):
        (MSE(net(part), part) * 0.25).backward()
    assert all(torch.allclose(grads[name], leaf.grad, rtol=1e-6) for name, leaf in net.named_parameters())


def test_a_tie_that_torch_has_lost_is_refused():
    """It copies the weight for each stage, but of the two names in the first stage it copies one."""

    class Tied(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[1](self[0](x).tanh())
            pipe_split()
            return self[2](h)

    net = Tied(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    net[1].weight = net[2].weight = net[0].weight
    sentence = (
        "'0.weight' and '1.weight' of stage 0 have the same numbers: torch's pipeline() copies a parameter that "
        "several stages read, and one that a stage reads by two names it makes two. Read it by one name there, or cut "
        "the net by fpipe.from_loss."
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.from_pipe(pipeline(net, (torch.ones(2, WIDTH),)))
    net[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model, params, _ = fpipe.from_pipe(pipeline(net, (torch.ones(2, WIDTH),)))
    assert (model.ties, [*params[0]]) == ((), ["0.bias", "0.weight", "1.bias"])


class Returning(nn.Module):
    def __init__(self, inputs: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.inputs = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), inputs

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        pipe_split()
        return self.b(h), x if self.inputs else h


test_what_is_no_pipe_of_stages_is_refused = refusals(
    globals(),
    """
fpipe.from_pipe(pipeline(Returning(), (torch.ones(2, WIDTH),)))
    ValueError: which it makes in stage 0; the outputs of a pipeline are those of its last stage, 1. Return it no more,
    or split the net behind it.
fpipe.from_pipe(pipeline(Returning(inputs=True), (torch.ones(2, WIDTH),)))
    ValueError: the net returns 'x', which it is handed; the outputs of a pipeline are those of its last stage, 1.
fpipe.from_pipe(nn.Linear(2, 2))
    TypeError: what torch.distributed.pipelining.pipeline returns, found Linear.
""",
)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (lambda ids, mask: {"ids": ids, "masks": mask}, "the inputs must have 'mask', which is missing."),
        (lambda ids, mask: ids, "the net was traced for the inputs ids, mask; found 1 of them."),
    ],
)
def test_a_batch_that_the_split_was_not_traced_for_is_refused(inputs: Callable[..., Any], sentence: str):
    model, params, _ = fpipe.from_pipe(cut(Net()), loss=MSE)
    whole, target = batch_of()
    step = fpipe.build(chained(model, fpipe.schedules.gpipe(3)), model)
    assert torch.equal(step(params, (whole, target)).loss, step(params, (tuple(whole.values()), target)).loss)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        step(params, (inputs(**whole), target))


def test_a_microbatch_of_another_shape_is_refused():
    """Its rows stand in torch's graph as numbers."""
    model, params, _ = fpipe.from_pipe(cut(Net()), loss=MSE)
    sentence = (
        "ids was (3, 5) when torch's pipeline() traced the net, found (2, 5): a Pipe takes microbatches of one shape. "
        "Split batches so that each has 3 rows, or trace the net again."
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fpipe.build(chained(model, fpipe.schedules.gpipe(3)), model)(params, batch_of(2 * MICROBATCHES))


def test_a_split_runs_on_threads_and_as_a_value_of_its_own():
    """A copy of the model computes with tensors of its own."""
    model, params, _ = fpipe.from_pipe(cut(Net()), loss=MSE)
    program = chained(model, fpipe.schedules.zb_h1(3))
    right = fpipe.build(program, model)(params, batch_of()).grads
    for runtime, made in (("threads", model), ("local", copy.deepcopy(model))):
        found = fpipe.build(program, made, runtime=runtime)(params, batch_of()).grads
        assert all(map(torch.equal, fpipe.tree.leaves(found), fpipe.tree.leaves(right)))
