"""Time an update inside a program, against the same gradients given to torch.optim outside.

    python benchmarks/update.py [--quick | --memory]

One process, one thread, AdamW, two stages of linear layers. Each round trains one step by each way, in turn:
torch.optim on the gradients of a step without an update, and steps with one, donated and pure. A ratio is that of
medians: of whole training steps, and of what stands beside the gradients, which is the whole less the bare step; that
runs on parameters which an update has just written, as the others do. Gradients are dropped behind each update, as a
loop's zero_grad does. All ways give the same bits.

--memory prints by how much the resident peak of a process grows in a step, which holds parameters and state before,
beside what `fpipe.sizes` told, which leaves out what torch's own update needs while it runs. Its C library gives what
is freed back at once (MALLOC_MMAP_THRESHOLD_).
"""

import argparse
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpipe

RATE, MIB = 1e-3, 2**20


def net_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def build_trainers(width: int, rows: int, clip: float | None) -> tuple[dict[str, Callable[[], float]], dict[str, Any]]:
    """Build a training step of each kind, and its parameters by name; "bare" has seconds of steps without update."""
    batch = torch.randn(rows, width), torch.randn(rows, width)
    trainers, params_by_name = dict[str, Callable[[], Any]](), dict[str, Any]()
    parts = fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False)
    bare = list[float]()

    def train_outside() -> None:
        began = time.perf_counter()
        grads = plain(params, batch).grads
        bare.append(time.perf_counter() - began)
        for leaf, grad in zip(leaves, (grad for stage in grads for grad in stage.values()), strict=True):
            leaf.grad = grad
        del grads, grad
        if clip is not None:
            nn.utils.clip_grad_norm_(leaves, clip, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    net = net_of(width)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
    plain = fpipe.build(fpipe.chain(*parts)(fpipe.program(model)), model)
    leaves: list[Tensor] = [leaf for stage in params for leaf in stage.values()]
    optimizer = torch.optim.AdamW(leaves, lr=RATE, foreach=False)
    trainers["torch.optim"], params_by_name["torch.optim"], params_by_name["bare"] = train_outside, params, bare
    for name, donate in (("donated", True), ("pure", False)):
        model, initial_params, _ = fpipe.from_sequential(net_of(width), stages=2, loss=nn.functional.mse_loss)
        program = fpipe.chain(*parts, fpipe.update("AdamW", clip=clip))(fpipe.program(model))
        step = fpipe.build(program, model, donate=donate)
        current = [initial_params, fpipe.optimizer_state(program, initial_params)]

        def train_inside(step: Any = step, current: list[Any] = current, name: str = name) -> None:
            result = step(current[0], batch, opt=current[1], lr=RATE)
            current[:] = result.params, result.opt
            params_by_name[name] = result.params

        trainers[name] = train_inside
    return trainers, params_by_name


def measure_growth(width: int, name: str) -> tuple[float, float]:
    """Return the growth of the resident peak in a step, in MiB, and the prediction of `fpipe.sizes`."""
    trainers, _ = build_trainers(width, 8, None)
    for _ in range(3):
        trainers[name]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = _resident("VmRSS")
    trainers[name]()
    grown = (_resident("VmHWM") - start) / 1024
    model, params, _ = fpipe.from_sequential(net_of(width), stages=2, loss=nn.functional.mse_loss)
    parts = fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False), fpipe.update("AdamW")
    program, batch = fpipe.chain(*parts)(fpipe.program(model)), (torch.randn(8, width), torch.randn(8, width))
    return grown, sum(fpipe.sizes(program, model, params, batch, donate=name == "donated").peak) / MIB


def _resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def compare_memory(width: int) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    param_mib = 4 * width * (width + 1) * 4 / MIB
    print(f"AdamW, {4 * width * (width + 1):,} numbers, {param_mib:.0f} MiB: parameters and state {3 * param_mib:.0f}")
    context = multiprocessing.get_context("spawn")
    for name in ("torch.optim", "donated", "pure"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            grown, predicted = pool.submit(measure_growth, width, name).result()
        also = "" if name == "torch.optim" else f"; told {predicted:6.1f}"
        print(f"{name:12s} grows by {grown:6.1f} MiB, {grown / param_mib:.2f} x the parameters{also}")


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--memory", action="store_true", help="memory, not time")
    options = parser.parse_args()
    if options.memory:
        compare_memory(2048)
        return
    rounds = 15 if options.quick else 60
    torch.set_num_threads(1)
    print(f"{'':38s}{'ms':>8s}{'beside':>8s}{'whole':>8s}{'beside':>8s}")
    for width, rows in ((1084, 8), (16, 8)):
        for clip in (None, 1.0):
            trainers, params_by_name = build_trainers(width, rows, clip)
            seconds_by_name: dict[str, list[float]] = {name: [] for name in trainers}
            for number in range(rounds):
                for name, trainer in trainers.items():
                    elapsed = seconds(trainer)
                    if number > 2:
                        seconds_by_name[name].append(elapsed)
            medians = {name: statistics.median(times) for name, times in seconds_by_name.items()}
            bare = statistics.median(params_by_name["bare"][3:])
            for name, elapsed in medians.items():
                about = f"{4 * width * (width + 1):,} numbers{', clip' if clip else ''}, {name}"
                update_time, outside_time = elapsed - bare, medians["torch.optim"] - bare
                ratios = elapsed / medians["torch.optim"], update_time / outside_time
                print(f"{about:38s}{elapsed * 1e3:8.2f}{update_time * 1e3:8.2f}{ratios[0]:8.2f}{ratios[1]:8.2f}")
            actual, expected = (
                [leaf for stage in params_by_name[name] for leaf in stage.values()]
                for name in ("donated", "torch.optim")
            )
            assert all(map(torch.equal, actual, expected))


if __name__ == "__main__":
    main()
