"""Loss scales of float16 in a program: scales, skipped steps and parameters are those of `torch.amp.GradScaler`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_data_parallel import meshed, started
from tests.test_distributed import MSE
from tests.test_steps import batches
from tests.test_update import differences, joined, net_of

GROWING = {"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
SCALES: dict[str, tuple[float, Any]] = {  # the first scale, and how it goes on
    "all finite": (2.0**10, "dynamic"),
    "first ones skipped": (2.0**22, GROWING),
    "grows": (2.0**8, GROWING),
}


def scaled(model: Any, *before: Any, behind: Any = (), loss_scale: Any = "dynamic", **how: Any) -> fpipe.Program:
    update = fpipe.update("AdamW", loss_scale=loss_scale, **how)
    return fpipe.chain(fpipe.split(4), *before, fpipe.merge(outputs=False), *behind, update)(fpipe.program(model))


def torchs(net: nn.Module, each: Any, first: float, said: Any, clip: float | None) -> Any:
    """Losses, whether each step was taken, scales and the optimizer of a plain loop with torch's own scaler."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, **({} if said == "dynamic" else said))
    losses, taken, scales = list[Tensor](), list[bool](), list[float]()
    for batch in each:
        optimizer.zero_grad()
        parts = list[Tensor]()
        for x, target in zip(*(half.tensor_split(4) for half in batch), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = MSE(net(x), target) * 0.25
            scaler.scale(loss).backward()
            parts.append(loss.detach())
        scaler.unscale_(optimizer)
        taken.append(all(leaf.grad is None or bool(leaf.grad.isfinite().all()) for leaf in net.parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        losses.append(sum(parts[1:], parts[0]))
        scales.append(scaler.get_scale())
    return losses, taken, scales, optimizer


@pytest.mark.crossed
@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("how", [{}, {"trace": False}, {"runtime": "threads"}, {"donate": True}], ids=repr)
def test_steps_are_those_of_torchs_own_scaler(how: dict[str, Any], clip: float | None, case: str):
    net, each, (first, said) = net_of(), batches(5), SCALES[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    program = scaled(model, fpipe.split_backward(), fpipe.schedules.zb_h1(4), loss_scale=said, clip=clip)
    assert fpipe.Program.parse(str(program)) == program
    step = fpipe.build(program, model, autocast=torch.float16, **how)
    params = fpipe.tree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    opt, scale, found = fpipe.optimizer_state(program, params), first, list[Any]()
    for batch in each:
        result = step(params, batch, opt=opt, lr=0.01, scale=scale)
        params, opt, scale = result.params, result.opt, result.scale
        found.append((result.loss, bool(result.valid), float(result.scale[0])))
    *right, optimizer = torchs(net, each, first, said, clip)
    assert found == [*zip(*right, strict=True)]
    assert (False in right[1]) == (case == "first ones skipped")
    assert differences(net, optimizer, result) == []


def test_gradients_come_divided_by_the_scale():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    batch, program = batches(1)[0], scaled(model, grads=True)
    opt = fpipe.optimizer_state(program, params)
    found = fpipe.build(program, model)(params, batch, opt=opt, lr=0.01, scale=2.0**10).grads
    bare = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    right = fpipe.build(bare, model)(params, batch).grads
    assert all(map(torch.equal, joined(found).values(), joined(right).values()))  # powers of two round nothing here


def on_four(rank: int) -> list[Any]:
    """For a scale that is too large and one that is not: whether the step was taken, whether parameters changed, and
    the next scale. Rows of the first replica alone are so large that their gradients overflow."""
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(net_of(), stages=4, loss=MSE)
    program = scaled(model, fpipe.schedules.interleaved(2), behind=[fpipe.shard()], clip=0.05)
    batch = tuple(half * (1.0 if replica else 64.0) for half in batches(1)[0])
    step, mine = started(model, params, program, batch, autocast=torch.float16)
    told = list[Any]()
    for scale in (2.0**14, 2.0**4):
        result = step(mine, batch, opt=fpipe.optimizer_state(program, mine), lr=0.01, scale=scale)
        pairs = zip(fpipe.tree.leaves(result.params), fpipe.tree.leaves(mine), strict=True)
        same = [torch.equal(one.to_local(), other.to_local()) for one, other in pairs if one is not None]
        told.append((bool(result.valid), all(same), float(result.scale[0])))
    return told


def test_replicas_and_ranks_skip_a_step_together(four: Processes):
    assert four.each(on_four) == [[(False, True, 2.0**13), (True, False, 2.0**4)]] * 4


def taken(**more: Any) -> Any:
    model, params, _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
    program = scaled(model, loss_scale=more.pop("loss_scale", "dynamic"))
    step = fpipe.build(program, model, **more.pop("build", {}))
    return step(params, batches(1)[0], opt=fpipe.optimizer_state(program, params), lr=0.1, **more)


test_refusals = refusals(
    globals(),
    """
taken()
    ValueError: this program reads scale: hand it in as step(..., scale=2.0**16)
taken(loss_scale=None, scale=8.0)
    ValueError: this program scales no loss; leave scale= out
taken(scale=-1.0)
    TypeError: scale is a number above 0, or the scale of a result; found -1.0
taken(build={"loss_scale": 2.0}, scale=8.0)
    ValueError: leave loss_scale= out
fpipe.update("SGD", loss_scale="static")
    ValueError: loss_scale is 'dynamic', or a dict with some of growth_factor
fpipe.update("SGD", loss_scale={"growth": 2.0})
    ValueError: loss_scale is 'dynamic', or a dict with some of
fpipe.update("SGD", loss_scale={"growth_interval": 0})
    ValueError: growth_interval of loss_scale= is a number
""",
)


@pytest.mark.parametrize("first", [2.0**16, 2.0**125, float("inf")], ids=["taken", "the first skipped", "all skipped"])
def test_verify_compares_with_torchs_scaler(first: float):
    model, params, _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
    each = batches(3)
    small = {"growth_interval": 1, "backoff_factor": 2.0**-20}
    program = fpipe.steps(3)(scaled(model, fpipe.schedules.zb_h1(2), loss_scale=small, clip=0.05))
    report = fpipe.verify(program, model, params, each, scale=first)
    assert report.bitwise, report
    assert {"norm", "valid", "scale"} < {leaf.name.partition("[")[0] for leaf in report.leaves}
    text = str(program)
    wrong = text.replace("sum[0,7] scale[,3]", "sum[0,7] scale")
    assert wrong != text
    if first == 2.0**125:
        with pytest.raises(fpipe.GradientMismatch):
            fpipe.verify(fpipe.Program.parse(wrong), model, params, each, scale=first)
