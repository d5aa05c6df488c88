"""What an update inside of a program takes, against the same gradients handed to torch.optim outside.

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


def ways(width: int, rows: int, clip: float | None) -> tuple[dict[str, Callable[[], float]], dict[str, Any]]:
    """A training step by each way, and where its parameters are; under "bare" the seconds of a step without update."""
    batch = torch.randn(rows, width), torch.randn(rows, width)
    made, now = dict[str, Callable[[], Any]](), dict[str, Any]()
    parts = fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False)
    bare = list[float]()

    def outside() -> None:
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
    made["torch.optim"], now["torch.optim"], now["bare"] = outside, params, bare
    for name, donate in (("donated", True), ("pure", False)):
        model, own, _ = fpipe.from_sequential(net_of(width), stages=2, loss=nn.functional.mse_loss)
        program = fpipe.chain(*parts, fpipe.update("AdamW", clip=clip))(fpipe.program(model))
        step = fpipe.build(program, model, donate=donate)
        held = [own, fpipe.optimizer_state(program, own)]

        def inside(step: Any = step, held: list[Any] = held, name: str = name) -> None:
            result = step(held[0], batch, opt=held[1], lr=RATE)
            held[:] = result.params, result.opt
            now[name] = result.params

        made[name] = inside
    return made, now


def held(width: int, name: str) -> tuple[float, float]:
    """By how many MiB the resident peak grows in a step, and what was told of ours."""
    each, _ = ways(width, 8, None)
    for _ in range(3):
        each[name]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    each[name]()
    grown = (_resident("VmHWM") - before) / 1024
    model, params, _ = fpipe.from_sequential(net_of(width), stages=2, loss=nn.functional.mse_loss)
    parts = fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False), fpipe.update("AdamW")
    program, batch = fpipe.chain(*parts)(fpipe.program(model)), (torch.randn(8, width), torch.randn(8, width))
    return grown, sum(fpipe.sizes(program, model, params, batch, donate=name == "donated").peak) / MIB


def _resident(word: str) -> int:
    return int(re.search(rf"{word}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def memory(width: int) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    one = 4 * width * (width + 1) * 4 / MIB
    print(f"AdamW, {4 * width * (width + 1):,} numbers, {one:.0f} MiB: parameters and state {3 * one:.0f}")
    context = multiprocessing.get_context("spawn")
    for name in ("torch.optim", "donated", "pure"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            grown, told = pool.submit(held, width, name).result()
        also = "" if name == "torch.optim" else f"; told {told:6.1f}"
        print(f"{name:12s} grows by {grown:6.1f} MiB, {grown / one:.2f} x the parameters{also}")


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--memory", action="store_true", help="memory, not time")
    said = parser.parse_args()
    if said.memory:
        memory(2048)
        return
    rounds = 15 if said.quick else 60
    torch.set_num_threads(1)
    print(f"{'':38s}{'ms':>8s}{'beside':>8s}{'whole':>8s}{'beside':>8s}")
    for width, rows in ((1084, 8), (16, 8)):
        for clip in (None, 1.0):
            each, now = ways(width, rows, clip)
            found: dict[str, list[float]] = {name: [] for name in each}
            for number in range(rounds):
                for name, way in each.items():
                    took = seconds(way)
                    if number > 2:
                        found[name].append(took)
            whole = {name: statistics.median(times) for name, times in found.items()}
            bare = statistics.median(now["bare"][3:])
            for name, took in whole.items():
                about = f"{4 * width * (width + 1):,} numbers{', clip' if clip else ''}, {name}"
                beside, outside = took - bare, whole["torch.optim"] - bare
                ratios = took / whole["torch.optim"], beside / outside
                print(f"{about:38s}{took * 1e3:8.2f}{beside * 1e3:8.2f}{ratios[0]:8.2f}{ratios[1]:8.2f}")
            ours, theirs = (
                [leaf for stage in now[name] for leaf in stage.values()] for name in ("donated", "torch.optim")
            )
            assert all(map(torch.equal, ours, theirs))


if __name__ == "__main__":
    main()
