"""Steps on the fake accelerator: each gives what the checker reports, and whether the bits are those of autograd.

Nothing here waits for the device before the steps are over: what is right only since the host was slow is reported.
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


def placed(
    devices: Sequence[str], stages: int, pipeline: Transform, example: bool = False, **how: Any
) -> tuple[fpipe.Step, tuple[Any, ...], fpipe.Program]:
    """A step of a net whose blocks are at home where their ranks compute, its parameters, and its program."""
    net, program = net_of(stages), pipeline(fpipe.program(stages))
    homes = {end.value.stage: end.homes[0] for end in program.inputs if end.value.name == "params"}
    for stage, block in enumerate(net):
        block.to(devices[homes[stage]])
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    how |= {"example": (params, batch_of())} if example else {}
    return fpipe.build(program, model, runtime="threads", devices=[*devices], **how), params, program


def by_autograd(
    net: nn.Sequential, batch: tuple[Tensor, Tensor], change: Callable[[], object], steps: int = STEPS
) -> None:
    """Steps of plain autograd, each block where it is, and a change of the parameters after each."""
    for _ in range(steps):
        net.zero_grad()
        for x, target in zip(*(whole.tensor_split(PARTS) for whole in batch), strict=True):
            for block in net:
                x = block(x.to(block[0].weight.device))
            (squares(x, target.to(x.device)) * (1 / PARTS)).backward()
        change()


def sgd(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param -= 0.1 * grad


def by_sgd(net: nn.Sequential, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The parameters after steps that change each by its gradient."""
    own = [*net.parameters()]
    by_autograd(net, batch, lambda: sgd(own, [one.grad for one in own]))
    return own


def by_adamw(net: nn.Sequential, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The parameters after steps of an optimizer whose gradients are clipped."""
    own = [*net.parameters()]
    optimizer = torch.optim.AdamW(own, lr=0.1, foreach=False)

    def change() -> None:
        nn.utils.clip_grad_norm_(own, 1.0, foreach=False)
        optimizer.step()

    by_autograd(net, batch, change)
    return own


def trained(devices: Sequence[str], stages: int, pipeline: Transform, **how: Any) -> list[str]:
    """Steps one behind the other, each on the parameters that the caller has made of the gradients before."""
    step, params, program = placed(devices, stages, pipeline, **how)
    twin, batch = net_of(stages), batch_of()
    for op in program.ops:
        if op.kind == "F":
            twin[op.stage].to(devices[op.rank])

    def run() -> None:
        for _ in range(STEPS):
            sgd(leaves(params), leaves(step(params, batch).grads))

    return reports_of(run) + other_bits(leaves(params), by_sgd(twin, batch))


def other_bits(found: Any, expected: Any) -> list[str]:
    pairs = zip(found, expected, strict=True)
    return [f"bits: {one.shape}" for one, other in pairs if not torch.equal(one.cpu(), other.cpu())]


def updated(devices: Sequence[str] = TWO) -> list[str]:
    """An optimizer in the program, whose norm goes round the ranks."""
    pipeline = fpipe.chain(pipeline_of(schedules.one_f_one_b(2)), fpipe.update("AdamW", clip=1.0))
    step, params, program = placed(devices, 2, pipeline)
    opt, batch = fpipe.optimizer_state(program, params), batch_of()

    def run() -> None:
        nonlocal params, opt
        for _ in range(STEPS):
            found = step(params, batch, opt=opt, lr=0.1)
            params, opt = found.params, found.opt

    return reports_of(run) + other_bits(leaves(params), by_adamw(net_of(2).to("fake:3"), batch))


def built(**how: Any) -> tuple[fpipe.Step, tuple[Any, ...], tuple[Tensor, Tensor]]:
    step, params, _ = placed(TWO, 2, pipeline_of(schedules.one_f_one_b(2)), **how)
    return step, params, batch_of()


def on_streams_in_turn() -> list[str]:
    """The caller reads results on one stream, and has the next step on another: it was handed memory of the ranks'
    streams, which knew nothing of the first one."""
    step, params, batch = built()

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
    """What a step fills once, such as the cotangent of the loss, was made on the stream on which it was built."""

    def run() -> None:
        step, params, batch = built(example=True)
        with torch.Stream("fake:0"), torch.Stream("fake:1"):
            step(params, batch)
        for number in (0, 1):
            torch.accelerator.synchronize(number)

    return reports_of(run)


def batch_filled_anew() -> list[str]:
    """Pinned memory of the caller's was read by a copy that nothing waited for."""
    step, params, (x, target) = built()
    x = x.pin_memory()

    def run() -> None:
        for _ in range(STEPS):
            step(params, (x, target))
            x.mul_(2)

    return reports_of(run)


def shy(p: Any, x: Tensor, seconds: float = 0.0) -> Tensor:
    """A stage that raises on large numbers, after a while."""
    if x.detach().sum() > 1e6:
        time.sleep(seconds)
        raise KeyError("too much")
    return x * p["w"]


def failed() -> list[str]:
    """An error ends a step while parameters are on their way that nobody waits for any more."""

    late = partial(shy, seconds=0.2)  # until all has been sent
    model = fpipe.from_functions([lambda p, x: x * p["w"], late, lambda p, x: x * p["w"]], squares)
    place = fpipe.place([1, 1, 1], homes=lambda stage: [0])
    program = fpipe.chain(fpipe.split(2), place, fpipe.merge())(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device="fake:0")} for _ in range(3))
    step = fpipe.build(program, model, runtime="threads", devices=[*TWO])
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
    """An error ends a step whose residuals are on their way to the host, and the next step has the memory."""

    model = fpipe.from_functions([lambda p, x: (x * p["w"]).tanh() * 1e7, shy], squares)
    program = fpipe.chain(fpipe.split(2), schedules.gpipe(1), fpipe.offload(), fpipe.merge())(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device="fake:0")} for _ in range(2))
    step = fpipe.build(program, model, runtime="threads", devices=["fake:0"])
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
    """Without devices=, on whichever stream the caller is."""
    net = net_of(2).to("fake:0")
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    batch = tuple(one.to("fake:0") for one in batch_of())
    program = pipeline_of(schedules.one_f_one_b(2), fpipe.offload())(fpipe.program(model))
    step, found = fpipe.build(program, model), list[Any]()

    def run() -> None:
        for _ in range(STEPS):
            with torch.Stream("fake:0") as stream:
                found[:] = leaves(step(params, batch).grads)
            torch.accelerator.current_stream(0).wait_stream(stream)

    reports, expected = reports_of(run), fpipe.reference(model, params, batch, microbatches=PARTS)
    return reports + other_bits(found, leaves(expected.grads))


class DeviceTime:
    """The host's clock on the time of the streams, so that a timeline says what the device did."""

    def __enter__(self) -> None:
        self.real = time
        shown = types.SimpleNamespace(perf_counter=torch.ops.fake_accelerator.now)
        recorder.time = rank_part.time = shown

    def __exit__(self, *error: object) -> None:
        recorder.time = rank_part.time = self.real


def recorded() -> list[str]:
    """In the first step, and in those that only note events, an op takes as long as its work on the device."""
    step, params, batch = built(record=True)
    found = list[str]()
    with DeviceTime():
        for number in range(STEPS):
            torch.ops.fake_accelerator.reset()
            events = step(params, batch).timeline.events
            found += [
                f"step {number}: {op.cell} took {end - start} s"
                for op, start, end in events
                if op.kind in "FB" and not 1e-4 < end - start < 0.1
            ]
    return found


def timed(pipeline: Transform, devices: Sequence[str], home: str) -> fpipe.Timeline:
    """When ops ran on the device, on its own time, in a step that only notes events."""
    net = net_of(2).to(home)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    program = pipeline(fpipe.program(model))
    step = fpipe.build(program, model, runtime="threads", devices=[*devices], record=True)
    with DeviceTime():
        for _ in range(2):
            torch.ops.fake_accelerator.reset()
            found = step(params, batch_of())
    assert found.timeline is not None
    return found.timeline


ZB = pipeline_of(schedules.zbv(2))
HOST = pipeline_of(fpipe.place("linear", homes=lambda stage: [2]))
SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "an error between copies": failed_between_copies,
    "an error": failed,
    "streams in turn": on_streams_in_turn,
    "built on another stream": built_on_another_stream,
    "device time": recorded,
    "two devices": lambda: trained(TWO, 4, ZB),
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
    "a batch filled anew": batch_filled_anew,
}
"""Those come first that alone notice when some wait is gone."""
