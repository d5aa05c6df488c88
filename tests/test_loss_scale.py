"""Loss scaling for float16 in a program: scales, skipped steps and parameters equal `torch.amp.GradScaler`'s."""

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
from tests.test_steps import make_batches
from tests.test_update import differences, join_stages, net_of

GROWING = {"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
SCALES: dict[str, tuple[float, Any]] = {  # the first scale, and how it goes on
    "all finite": (2.0**10, "dynamic"),
    "first ones skipped": (2.0**22, GROWING),
    "grows": (2.0**8, GROWING),
}


def scaled_program(
    model: Any, *transforms: Any, suffix: Any = (), loss_scale: Any = "dynamic", **options: Any
) -> fpipe.Program:
    update = fpipe.update("AdamW", loss_scale=loss_scale, **options)
    return fpipe.chain(fpipe.split(4), *transforms, fpipe.merge(outputs=False), *suffix, update)(fpipe.program(model))


def train_with_grad_scaler(net: nn.Module, all_batches: Any, init_scale: float, growth: Any, clip: float | None) -> Any:
    """Return losses, whether each step was taken, scales and the optimizer of a plain loop with torch's scaler."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **({} if growth == "dynamic" else growth))
    losses, is_taken, scales = list[Tensor](), list[bool](), list[float]()
    for batch in all_batches:
        optimizer.zero_grad()
        parts = list[Tensor]()
        for x, target in zip(*(half.tensor_split(4) for half in batch), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = MSE(net(x), target) * 0.25
            scaler.scale(loss).backward()
            parts.append(loss.detach())
        scaler.unscale_(optimizer)
        is_taken.append(all(leaf.grad is None or bool(leaf.grad.isfinite().all()) for leaf in net.parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        losses.append(sum(parts[1:], parts[0]))
        scales.append(scaler.get_scale())
    return losses, is_taken, scales, optimizer


@pytest.mark.crossed
@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}, {"donate": True}], ids=repr)
def test_steps_equal_those_of_torchs_scaler(options: dict[str, Any], clip: float | None, case: str):
    net, all_batches, (init_scale, growth) = net_of(), make_batches(5), SCALES[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4, loss=MSE)
    program = scaled_program(model, fpipe.split_backward(), fpipe.schedules.zb_h1(4), loss_scale=growth, clip=clip)
    assert fpipe.Program.parse(str(program)) == program
    step = fpipe.build(program, model, autocast=torch.float16, **options)
    params = fpipe.tree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    opt, scale, outcomes = fpipe.optimizer_state(program, params), init_scale, list[Any]()
    for batch in all_batches:
        result = step(params, batch, opt=opt, lr=0.01, scale=scale)
        params, opt, scale = result.params, result.opt, result.scale
        outcomes.append((result.loss, bool(result.valid), float(result.scale[0])))
    *expected, optimizer = train_with_grad_scaler(net, all_batches, init_scale, growth, clip)
    assert outcomes == [*zip(*expected, strict=True)]
    assert (False in expected[1]) == (case == "first ones skipped")
    assert differences(net, optimizer, result) == []


def test_gradients_come_divided_by_the_scale():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    batch, program = make_batches(1)[0], scaled_program(model, grads=True)
    opt = fpipe.optimizer_state(program, params)
    grads = fpipe.build(program, model)(params, batch, opt=opt, lr=0.01, scale=2.0**10).grads
    unscaled_program = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    expected_grads = fpipe.build(unscaled_program, model)(params, batch).grads
    assert all(
        map(torch.equal, join_stages(grads).values(), join_stages(expected_grads).values())
    )  # powers of two round nothing here


def step_on_rank(rank: int) -> list[Any]:
    """Return for a too large and a fitting scale: is the step valid, are parameters unchanged, and the next scale.

    Only rows of the first replica are so large that their gradients overflow.
    """
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(net_of(), stages=4, loss=MSE)
    program = scaled_program(model, fpipe.schedules.interleaved(2), suffix=[fpipe.shard()], clip=0.05)
    batch = tuple(half * (1.0 if replica else 64.0) for half in make_batches(1)[0])
    step, local_params = started(model, params, program, batch, autocast=torch.float16)
    outcomes = list[Any]()
    for scale in (2.0**14, 2.0**4):
        result = step(local_params, batch, opt=fpipe.optimizer_state(program, local_params), lr=0.01, scale=scale)
        pairs = zip(fpipe.tree.leaves(result.params), fpipe.tree.leaves(local_params), strict=True)
        unchanged = [torch.equal(new.to_local(), old.to_local()) for new, old in pairs if new is not None]
        outcomes.append((bool(result.valid), all(unchanged), float(result.scale[0])))
    return outcomes


def test_replicas_and_ranks_skip_a_step_together(four: Processes):
    assert four.run(step_on_rank) == [[(False, True, 2.0**13), (True, False, 2.0**4)]] * 4


def step_with(**options: Any) -> Any:
    model, params, _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
    program = scaled_program(model, loss_scale=options.pop("loss_scale", "dynamic"))
    step = fpipe.build(program, model, **options.pop("build", {}))
    return step(params, make_batches(1)[0], opt=fpipe.optimizer_state(program, params), lr=0.1, **options)


test_refusals = refusals(
    globals(),
    """
step_with()
    ValueError: this program reads scale: hand it in as step(..., scale=2.0**16)
step_with(loss_scale=None, scale=8.0)
    ValueError: this program scales no loss; leave scale= out
step_with(scale=-1.0)
    TypeError: scale is a number above 0, or the scale of a result; found -1.0
step_with(build={"loss_scale": 2.0}, scale=8.0)
    ValueError: leave loss_scale= out
fpipe.update("SGD", loss_scale={"growth": 2.0})
    ValueError: loss_scale is 'dynamic', or a dict with some of
fpipe.update("SGD", loss_scale={"growth_interval": 0})
    ValueError: growth_interval of loss_scale= is a number
""",
)


@pytest.mark.parametrize(
    "init_scale", [2.0**16, 2.0**125, float("inf")], ids=["taken", "the first skipped", "all skipped"]
)
def test_verify_compares_with_torchs_scaler(init_scale: float):
    model, params, _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
    all_batches = make_batches(3)
    growth = {"growth_interval": 1, "backoff_factor": 2.0**-20}
    program = fpipe.steps(3)(scaled_program(model, fpipe.schedules.zb_h1(2), loss_scale=growth, clip=0.05))
    report = fpipe.verify(program, model, params, all_batches, scale=init_scale)
    assert report.bitwise, report
    assert {"norm", "valid", "scale"} < {leaf.name.partition("[")[0] for leaf in report.leaves}
    text = str(program)
    wrong_text = text.replace("sum[0,7] scale[,3]", "sum[0,7] scale")
    assert wrong_text != text
    if init_scale == 2.0**125:
        with pytest.raises(fpipe.GradientMismatch):
            fpipe.verify(fpipe.Program.parse(wrong_text), model, params, all_batches, scale=init_scale)
