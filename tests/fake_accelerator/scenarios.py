"""Steps on the fake accelerator: each returns the checker's reports and the leaves whose bits differ from autograd.

Nothing here waits for the device before the steps are over: numbers that are right only because the host was slow are
reported. So most steps are not audited.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning import recorder
from fpipe.runtimes.lowering import rank_part
from fpipe.tree import leaves
from tests.fake_accelerator import reports_of

Transform = Callable[[fpipe.Program], fpipe.Program]
schedules = fpipe.schedules
TWO = ("fake:0", "fake:1")
WIDTH, ROWS, PARTS, STEPS = 8, 16, 4, 3


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def net_of(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(stages))
    return nn.Sequential(*blocks)


def batch_of() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def pipeline_of(*transforms: Transform) -> Transform:
    return fpipe.chain(fpipe.split(PARTS), *transforms, fpipe.merge())


def build_placed(
    devices: Sequence[str], stages: int, pipeline: Transform, example: bool = False, **options: Any
) -> tuple[fpipe.Step, tuple[Any, ...], fpipe.Program]:
    """Build a step of a net whose blocks are on their ranks' devices; return it with its parameters and program."""
    net, program = net_of(stages), pipeline(fpipe.program(stages))
    homes = {end.value.stage: end.homes[0] for end in program.inputs if end.value.name == "params"}
    for stage, block in enumerate(net):
        block.to(devices[homes[stage]])
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    options = {"audit": "never"} | options | ({"example": (params, batch_of())} if example else {})
    return fpipe.build(program, model, runtime="threads", devices=[*devices], **options), params, program


def train_by_autograd(
    net: nn.Sequential, batch: tuple[Tensor, Tensor], change: Callable[[], object], steps: int = STEPS
) -> None:
    """Run steps of plain autograd, each block on its device, with a change of the parameters after each step."""
    for _ in range(steps):
        net.zero_grad()
        for x, target in zip(*(tensor.tensor_split(PARTS) for tensor in batch), strict=True):
            for block in net:
                x = block(x.to(block[0].weight.device))
            (squares(x, target.to(x.device)) * (1 / PARTS)).backward()
        change()


def sgd_step(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param -= 0.1 * grad


def train_by_sgd(net: nn.Sequential, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Train by SGD under plain autograd and return the parameters."""
    params = [*net.parameters()]
    train_by_autograd(net, batch, lambda: sgd_step(params, [param.grad for param in params]))
    return params


def train_by_adamw(net: nn.Sequential, batch: tuple[Tensor, Tensor], **settings: Any) -> list[Tensor]:
    """Train by AdamW with clipped gradients under plain autograd and return the parameters."""
    params = [*net.parameters()]
    optimizer = torch.optim.AdamW(params, **{"lr": 0.1, "foreach": False, **settings})

    def change() -> None:
        nn.utils.clip_grad_norm_(params, 1.0, foreach=False)
        optimizer.step()

    train_by_autograd(net, batch, change)
    return params


def trained(devices: Sequence[str], stages: int, pipeline: Transform, **options: Any) -> list[str]:
    """Train for several steps; the caller updates the parameters by SGD between them."""
    step, params, program = build_placed(devices, stages, pipeline, **options)
    twin, batch = net_of(stages), batch_of()
    for op in program.ops:
        if op.kind == "F":
            twin[op.stage].to(devices[op.rank])

    def run() -> None:
        for _ in range(STEPS):
            sgd_step(leaves(params), leaves(step(params, batch).grads))

    return reports_of(run) + differing_bits(leaves(params), train_by_sgd(twin, batch))


def differing_bits(actual: Any, expected: Any) -> list[str]:
    pairs = zip(actual, expected, strict=True)
    return [f"bits: {leaf.shape}" for leaf, expected_leaf in pairs if not torch.equal(leaf.cpu(), expected_leaf.cpu())]


def updated(devices: Sequence[str] = TWO, **settings: Any) -> list[str]:
    """Train with an optimizer in the program, whose gradient norm is summed around the ranks."""
    pipeline = fpipe.chain(pipeline_of(schedules.one_f_one_b(2)), fpipe.update("AdamW", clip=1.0, **settings))
    step, params, program = build_placed(devices, 2, pipeline)
    opt, batch = fpipe.optimizer_state(program, params), batch_of()

    def run() -> None:
        nonlocal params, opt
        for _ in range(STEPS):
            result = step(params, batch, opt=opt, lr=0.1)
            params, opt = result.params, result.opt

    return reports_of(run) + differing_bits(leaves(params), train_by_adamw(net_of(2).to("fake:3"), batch, **settings))


def build_two_stages(**options: Any) -> tuple[fpipe.Step, tuple[Any, ...], tuple[Tensor, Tensor]]:
    step, params, _ = build_placed(TWO, 2, pipeline_of(schedules.one_f_one_b(2)), **options)
    return step, params, batch_of()


def on_streams_in_turn() -> list[str]:
    """Read results on one stream and run the next step on another.

    Used to race: results were memory of the ranks' streams, whose next step did not know of the caller's first stream.
    """
    step, params, batch = build_two_stages()

    def run() -> None:
        with torch.Stream("fake:0"), torch.Stream("fake:1"):
            grads = leaves(step(params, batch).grads)
            doubled = [grad * 2 for grad in grads]
        del grads
        with torch.Stream("fake:0"), torch.Stream("fake:1"):
            step(params, batch)
        del doubled

    return reports_of(run)


def built_on_another_stream() -> list[str]:
    """Used to race: constants, such as the cotangent of the loss, were filled on the stream of the build alone."""

    def run() -> None:
        step, params, batch = build_two_stages(example=True)
        with torch.Stream("fake:0"), torch.Stream("fake:1"):
            step(params, batch)
        for number in (0, 1):
            torch.accelerator.synchronize(number)

    return reports_of(run)


def batch_filled_anew() -> list[str]:
    """Used to race: nothing waited for the copy that reads the caller's pinned memory."""
    step, params, (x, target) = build_two_stages()
    x = x.pin_memory()

    def run() -> None:
        for _ in range(STEPS):
            step(params, (x, target))
            x.mul_(2)

    return reports_of(run)


def raise_on_large(p: Any, x: Tensor, seconds: float = 0.0) -> Tensor:
    """Scale by a weight; raise on large numbers, after some seconds."""
    if x.detach().sum() > 1e6:
        time.sleep(seconds)
        raise KeyError("too much")
    return x * p["w"]


def failed() -> list[str]:
    """Let an error end a step while parameters are in flight that nobody will wait for."""
    late_stage = partial(raise_on_large, seconds=0.2)  # long enough that all parameters have been sent
    model = fpipe.from_functions([lambda p, x: x * p["w"], late_stage, lambda p, x: x * p["w"]], squares)
    placement = fpipe.place([1, 1, 1], homes=lambda stage: [0])
    program = fpipe.chain(fpipe.split(2), placement, fpipe.merge())(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device="fake:0")} for _ in range(3))
    step = fpipe.build(program, model, runtime="threads", devices=[*TWO], audit="never")
    step(params, (torch.ones(4, WIDTH), torch.ones(4, WIDTH)))

    def run() -> None:
        try:
            step(params, (torch.full((4, WIDTH), 1e7), torch.ones(4, WIDTH)))
        except KeyError:
            for leaf in leaves(params):
                leaf.mul_(2)
        else:
            raise AssertionError("no error")

    return reports_of(run)


def failed_between_copies() -> list[str]:
    """Let an error end a step whose residuals are being copied to the host; the next step gets their memory."""
    model = fpipe.from_functions([lambda p, x: (x * p["w"]).tanh() * 1e7, raise_on_large], squares)
    program = fpipe.chain(fpipe.split(2), schedules.gpipe(1), fpipe.offload(), fpipe.merge())(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device="fake:0")} for _ in range(2))
    step = fpipe.build(program, model, runtime="threads", devices=["fake:0"], audit="never")
    good, bad = ((torch.full((4, WIDTH), x), torch.ones(4, WIDTH)) for x in (1e-9, 1.0))
    step(params, good)

    def run() -> None:
        try:
            step(params, bad)
        except KeyError:
            step(params, good)
        else:
            raise AssertionError("no error")

    return reports_of(run)


def offloaded_in_one_thread() -> list[str]:
    """Offload without devices=, on the stream of the caller."""
    net = net_of(2).to("fake:0")
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    batch = tuple(tensor.to("fake:0") for tensor in batch_of())
    program = pipeline_of(schedules.one_f_one_b(2), fpipe.offload())(fpipe.program(model))
    step, actual_grads = fpipe.build(program, model, audit="never"), list[Any]()

    def run() -> None:
        for _ in range(STEPS):
            with torch.Stream("fake:0") as stream:
                actual_grads[:] = leaves(step(params, batch).grads)
            torch.accelerator.current_stream(0).wait_stream(stream)

    reports, expected = reports_of(run), fpipe.reference(model, params, batch, microbatches=PARTS)
    return reports + differing_bits(actual_grads, leaves(expected.grads))


class DeviceTime:
    """Replace the clock of timelines by the time of the fake streams."""

    def __enter__(self) -> None:
        self.real = time
        device_clock = types.SimpleNamespace(perf_counter=torch.ops.fake_accelerator.now)
        recorder.time = rank_part.time = device_clock

    def __exit__(self, *error: object) -> None:
        recorder.time = rank_part.time = self.real


def recorded() -> list[str]:
    """List the ops whose recorded seconds differ from their work on the device, in measured and noted steps."""
    step, params, batch = build_two_stages(record=True)
    wrong_durations = list[str]()
    with DeviceTime():
        for number in range(STEPS):
            torch.ops.fake_accelerator.reset()
            events = step(params, batch).timeline.events
            wrong_durations += [
                f"step {number}: {op.cell} took {end - start} s"
                for op, start, end in events
                if op.kind in "FB" and not 1e-4 < end - start < 0.1
            ]
    return wrong_durations


def timeline_of(pipeline: Transform, devices: Sequence[str], home: str) -> fpipe.Timeline:
    """Return the timeline of a step that only notes events, in device time."""
    net = net_of(2).to(home)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    program = pipeline(fpipe.program(model))
    step = fpipe.build(program, model, runtime="threads", devices=[*devices], record=True)
    with DeviceTime():
        for _ in range(2):
            torch.ops.fake_accelerator.reset()
            result = step(params, batch_of())
    assert result.timeline is not None
    return result.timeline


ZB = pipeline_of(schedules.zbv(2))
HOST = pipeline_of(fpipe.place("linear", homes=lambda stage: [2]))
SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "an error between copies": failed_between_copies,
    "an error": failed,
    "streams in turn": on_streams_in_turn,
    "built on another stream": built_on_another_stream,
    "device time": recorded,
    "two devices": lambda: trained(TWO, 4, ZB),
    "two devices, with audits": lambda: trained(TWO, 4, ZB, audit="first"),
    "one device": lambda: trained(["fake:0", "fake:0"], 4, ZB),
    "a device and the host": lambda: trained(["fake:0", "cpu"], 4, ZB),
    "recorded, with a host": lambda: trained(["cpu", "fake:1"], 4, ZB, record=True),
    "replicas": lambda: trained(TWO, 2, pipeline_of(schedules.dualpipe(2))),
    "recomputed": lambda: trained(TWO, 2, pipeline_of(fpipe.checkpoint(), schedules.one_f_one_b(2)), record=True),
    "offloaded": lambda: trained(TWO, 2, pipeline_of(schedules.one_f_one_b(2), fpipe.offload())),
    "offloaded in one thread": offloaded_in_one_thread,
    "offloaded to a partner": lambda: trained(TWO, 2, pipeline_of(schedules.bpipe(2))),
    "weights of a host": lambda: trained([*TWO, "cpu"], 2, HOST),
    "weights of a host, on one device": lambda: trained(
        ["fake:0", "fake:0", "cpu"], 2, fpipe.chain(HOST, fpipe.communicate(again=("params",)))
    ),
    "weights of another device": lambda: trained([*TWO, "fake:2"], 2, HOST),
    "roundpipe": lambda: trained([*TWO, "cpu"], 4, pipeline_of(schedules.roundpipe(2))),
    "numbers looked at": lambda: trained(TWO, 2, pipeline_of(schedules.one_f_one_b(2)), check_finite=True),
    "updates": updated,
    "capturable updates": partial(updated, capturable=True),
    "fused updates": partial(updated, fused=True),
    "a batch filled anew": batch_filled_anew,
}
"""Scenarios in order: first those that are the only one to notice some missing wait."""
