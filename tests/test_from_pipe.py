"""Torch's own splits as stages; property_tests/test_whole_laws.py says that gradients are those of the net."""

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
from tests.toys import merged

WIDTH, ROWS, MICROBATCHES = 6, 3, 4
MSE = nn.functional.mse_loss


class Net(nn.Module):
    """Tied ends, a skip from the first stage to the last, a buffer, a parameter of two stages, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
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


def test_what_several_stages_read_has_one_gradient_under_both_names():
    """Which sums over stages round in another order."""
    net, (inputs, target) = Net(), batch_of()
    model, params, _ = fpipe.from_pipe(cut(net), loss=MSE)
    found = fpipe.build(merged(model, MICROBATCHES, fpipe.schedules.zb_h1(3)), model)(params, (inputs, target))
    for ids, mask, t in zip(*(leaf.tensor_split(MICROBATCHES) for leaf in (*inputs.values(), target)), strict=True):
        (MSE(net(ids, mask), t) / MICROBATCHES).backward()
    right = {name: leaf.grad for name, leaf in net.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(fpipe.join_params(model, found.grads), right)


class Remembering(nn.Module):
    """A batch norm, dropout, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        pipe_split()
        self.calls.add_(1)
        return self.drop(self.norm(h))


def remembering(**how: Any) -> tuple[fpipe.Program, fpipe.Model, Any, Any, Tensor]:
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    model, params, state = fpipe.from_pipe(pipeline(Remembering(), (x[:ROWS],)), loss=MSE, **how)
    return merged(model, MICROBATCHES, fpipe.schedules.gpipe(2)), model, params, state, x


def test_buffers_that_a_split_writes_are_its_state_and_dropout_follows_from_the_key():
    program, model, params, state, x = remembering(example=torch.ones(ROWS, WIDTH, device="meta"))
    assert [*state[1]] == ["calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    with pytest.raises(ValueError, match=re.escape("stage 1 (submod_pp_1) draws random numbers: hand in key=")):
        fpipe.build(program, model)(params, (x, x), state=state)


def test_a_buffer_that_a_split_writes_needs_an_example():
    program, model, params, _, x = remembering()
    sentence = "stage 1 (submod_pp_1) writes buffer or parameter 'calls' in place"
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        fpipe.build(program, model)(params, (x, x), key=1)


def test_what_is_handed_out_is_the_nets_but_for_what_torch_copies():
    """Torch gives each stage a parameter of its own where several read one."""
    net = Net()
    model, params, _ = fpipe.from_pipe(cut(net), loss=MSE)
    own = dict(net.named_parameters())
    copied = [name for stage in params for name, leaf in stage.items() if leaf.data_ptr() != own[name].data_ptr()]
    assert copied == ["shift", "embedding.weight"]
    assert model.inputs == ("batch", ((0, 0),), (1, "batch", (0, 1)))
    assert [*fpipe.split_params(model, net.state_dict())[0]] == [*params[0]]
    assert "head.weight" in fpipe.join_params(model, params)


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


def handed(inputs: Callable[..., Any], rows: int = ROWS) -> Any:
    model, params, _ = fpipe.from_pipe(cut(Net()), loss=MSE)
    whole, target = batch_of(rows * MICROBATCHES)
    return fpipe.build(merged(model, MICROBATCHES, fpipe.schedules.gpipe(3)), model)(params, (inputs(**whole), target))


test_what_is_no_pipe_of_stages_or_no_batch_of_its_inputs_is_refused = refusals(
    globals(),
    """
fpipe.from_pipe(pipeline(Returning(), (torch.ones(2, WIDTH),)))
    ValueError: which it makes in stage 0; the outputs of a pipeline are those of its last stage, 1. Return it no more,
    or split the net behind it.
fpipe.from_pipe(pipeline(Returning(inputs=True), (torch.ones(2, WIDTH),)))
    ValueError: the net returns 'x', which it is handed; the outputs of a pipeline are those of its last stage, 1.
fpipe.from_pipe(nn.Linear(2, 2))
    TypeError: what torch.distributed.pipelining.pipeline returns, found Linear.
handed(lambda ids, mask: {"ids": ids, "masks": mask})
    ValueError: the inputs must have 'mask', which is missing.
handed(lambda ids, mask: ids)
    ValueError: the net was traced for the inputs ids, mask; found 1 of them.
# Rows stand in torch's graph as numbers.
handed(lambda ids, mask: (ids, mask), rows=2)
    ValueError: ids was (3, 5) when torch's pipeline() traced the net, found (2, 5): a Pipe takes microbatches of one
    shape. Split batches so that each has 3 rows, or trace the net again.
""",
)


def test_a_split_runs_on_threads_and_as_a_value_of_its_own():
    """A copy of the model computes with tensors of its own."""
    model, params, _ = fpipe.from_pipe(cut(Net()), loss=MSE)
    program = merged(model, MICROBATCHES, fpipe.schedules.zb_h1(3))
    inputs, target = batch_of()
    right = fpipe.build(program, model)(params, (inputs, target)).grads
    for runtime, made, given in (("threads", model, inputs), ("local", copy.deepcopy(model), (*inputs.values(),))):
        found = fpipe.build(program, made, runtime=runtime)(params, (given, target)).grads
        assert all(map(torch.equal, fpipe.tree.leaves(found), fpipe.tree.leaves(right)))
