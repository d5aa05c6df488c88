"""Capture steps of other models and options, and return mistakes as `graph_scenarios.py` does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fpipe
from fpipe.graphs.compiling import inductor
from fpipe.graphs.compiling.code import compile_graph
from fpipe.tree import leaves, tree_map
from tests.fake_accelerator import reports_of
from tests.fake_accelerator.graph_scenarios import (
    DEVICE,
    GPIPE,
    REPLAYS,
    batches_of,
    count_mistakes,
    counted_replays,
    cut,
    grads_by_autograd,
    losses_of,
    on_device,
)
from tests.fake_accelerator.scenarios import PARTS, WIDTH, differing_bits, net_of, squares


def mistakes_of(run_step: Callable[[Any], Any], expect_step: Callable[[Any], Any]) -> list[str]:
    """Run a step on each batch, and then compare all results with plain autograd."""
    batches, results = batches_of(), list[Any]()
    with counted_replays() as replayed:
        reports = reports_of(lambda: results.extend(map(run_step, batches)))
    expected = [tree_map(lambda leaf: leaf.detach().clone(), expect_step(batch)) for batch in batches]
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def in_autocast(**options: Any) -> list[str]:
    """Cast weights once a step, and products to bfloat16."""
    net = on_device(net_of(2))
    model, program, params = cut(copy.deepcopy(net), GPIPE)
    step = fpipe.build(program, model, graph=True, autocast=torch.bfloat16, **options)

    def expect(batch: Any) -> list[Tensor]:
        net.zero_grad()
        with torch.autocast(DEVICE.partition(":")[0], torch.bfloat16):
            losses = [*losses_of(net, batch)]
        for loss in losses:
            (loss * (1 / PARTS)).backward()
        return [param.grad for param in net.parameters() if param.grad is not None]

    return mistakes_of(lambda batch: leaves(step(params, batch).grads), expect)


class Centred(nn.Module):
    """Subtract a running mean, which a forward updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(WIDTH, WIDTH), nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)


def with_buffers() -> list[str]:
    """Hand statistics from step to step, which modules write in place as batch norms do."""
    torch.manual_seed(0)
    net = nn.Sequential(Centred(), Centred())
    # Torch copies no storage of this device.
    twin, net = copy.deepcopy(net).to(DEVICE), net.to(DEVICE)
    model, params, state = fpipe.from_sequential(net, stages=2, loss=squares, state=["0.mean", "1.mean"])
    step = fpipe.build(GPIPE(fpipe.program(model)), model, graph=True, audit="always")

    def run(batch: Any) -> list[Tensor]:
        nonlocal state
        result = step(params, batch, state=state)
        state = result.state
        return [*leaves(result.grads), *leaves(state)]

    return mistakes_of(run, lambda batch: [*grads_by_autograd(twin, batch), *twin.buffers()])


class Adapted(nn.Module):
    """A frozen matrix plus a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(freezes_stage: bool) -> list[str]:
    """Train the adapters of all stages, or of the second alone, in place."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(), Adapted()).to(DEVICE)
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    if freezes_stage:
        model = fpipe.freeze(model, 0)
        twin[0].requires_grad_(False)
    program = fpipe.chain(GPIPE, fpipe.update("AdamW"))(fpipe.program(model))
    step, opt = fpipe.build(program, model, graph=True, audit="always", donate=True), None
    optimizer = torch.optim.AdamW(
        [param for param in twin.parameters() if param.requires_grad],
        lr=torch.tensor(0.1, device=DEVICE),
        foreach=False,
        capturable=True,
    )

    def run(batch: Any) -> list[Tensor]:
        nonlocal params, opt
        opt = fpipe.optimizer_state(program, params) if opt is None else opt
        result = step(params, batch, opt=opt, lr=0.1)
        params, opt = result.params, result.opt
        return [leaf.clone() for leaf in leaves(params)]

    def expect(batch: Any) -> list[Tensor]:
        grads_by_autograd(twin, batch)
        optimizer.step()
        return [param for name, param in twin.named_parameters() if "base" not in name]

    return mistakes_of(run, expect)


def evaluated() -> list[str]:
    """Compute outputs and the loss alone, by the forwards of training."""
    net = on_device(net_of(2))
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=squares)
    program = fpipe.chain(GPIPE, fpipe.forward_only())(fpipe.program(model))
    step = fpipe.build(program, model, graph=True, audit="always")

    def run(batch: Any) -> list[Any]:
        result = step(params, batch)
        assert result.grads is None
        return [*leaves(result.outputs), result.loss]

    def expect(batch: Any) -> list[Tensor]:
        outputs = [net(x) for x in batch[0].tensor_split(PARTS)]
        losses = [loss * (1 / PARTS) for loss in losses_of(net, batch)]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return [torch.cat(outputs), total]

    return mistakes_of(run, expect)


def scaled_by_a_constant() -> list[str]:
    """Multiply the cotangent of the loss by a number of `build`."""
    net = on_device(net_of(2))
    model, program, params = cut(copy.deepcopy(net), GPIPE)
    step = fpipe.build(program, model, graph=True, audit="always", loss_scale=3.0)

    def expect(batch: Any) -> list[Tensor]:
        net.zero_grad()
        for loss in losses_of(net, batch):
            loss.backward(torch.tensor(3.0 / PARTS, device=DEVICE))
        return [param.grad for param in net.parameters() if param.grad is not None]

    return mistakes_of(lambda batch: leaves(step(params, batch).grads), expect)


def scaled_twice() -> list[str]:
    """Run two steps a replay, each with the loss scale that the step before leaves, and the second overflows."""
    net = on_device(net_of(2))
    growth = {"growth_factor": 2.0**20, "growth_interval": 1, "backoff_factor": 2.0**-20}
    pipeline = fpipe.chain(GPIPE, fpipe.update("AdamW", loss_scale=growth), fpipe.steps(2))
    model, program, params = cut(copy.deepcopy(net), pipeline)
    step, scale, flags = fpipe.build(program, model, graph=True, audit="never", donate=True), 2.0**115, list[bool]()
    opt = fpipe.optimizer_state(program, params)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1, device=DEVICE), foreach=False, capturable=True)

    def pair_of(batch: Any) -> list[Any]:
        # The gradients of the second are too large for the scale that the first leaves.
        return [batch, (batch[0], batch[1] * 1e6)]

    def run(batch: Any) -> list[Tensor]:
        nonlocal params, opt, scale
        result = step(params, pair_of(batch), opt=opt, lr=0.1, scale=scale)
        params, opt, scale = result.params, result.opt, result.scale
        flags.extend(map(bool, leaves(result.valid)))
        return [leaf.clone() for leaf in leaves(params)]

    remaining_flags = iter(flags)

    def expect(batch: Any) -> list[Tensor]:
        for step_batch in pair_of(batch):
            grads_by_autograd(net, step_batch)
            if next(remaining_flags):
                optimizer.step()
        return [*net.parameters()]

    mistakes = mistakes_of(run, expect)
    return mistakes if len({*flags[4:]}) == 2 else [*mistakes, f"no scale overflowed in a replay, or each did: {flags}"]


def compiled() -> list[str]:
    """Compile before the capture, by a backend that changes nothing: inductor has none for this device."""

    def compile_plainly(graph: Any, name: str) -> Any:
        compiled_names.append(name)
        return compile_graph(graph, "compiled")

    compiled_names = list[str]()
    model, program, params = cut(on_device(net_of(2)), GPIPE)
    with patch.object(inductor, "_compile_by_inductor", compile_plainly):
        step = fpipe.build(program, model, graph=True, compile=True, audit="always")
        # Compiled code may round otherwise than autograd, and replays it.
        plain_step = fpipe.build(program, model, compile=True, audit="never")
        mistakes = mistakes_of(*(lambda batch, run=run: leaves(run(params, batch).grads) for run in (step, plain_step)))
    return mistakes if compiled_names else [*mistakes, "nothing was compiled"]


MODEL_GRAPH_SCENARIOS: dict[str, Callable[[], Sequence[str]]] = {
    "autocast": partial(in_autocast, audit="never"),
    "autocast without hoisting, next to audits": partial(in_autocast, audit="always", hoist=False),
    "buffers": with_buffers,
    "adapters": partial(adapted, freezes_stage=False),
    "adapters of one stage": partial(adapted, freezes_stage=True),
    "evaluation": evaluated,
    "a loss scale of build": scaled_by_a_constant,
    "loss scales of two steps": scaled_twice,
    "compiled code": compiled,
}
