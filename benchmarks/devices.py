"""How long one step takes on a GPU, against eager autograd: a GPT of 12 blocks of width 768 under bfloat16 autocast.

    python benchmarks/devices.py [--quick] [--compile] [--device cuda]

One process runs one rank: four stages, eight microbatches of four rows of 512 places. Each round runs every step once,
in an order drawn anew, and waits for the devices after each; a ratio is of the least times. The steps give the same
gradients, bit for bit, under deterministic algorithms (which are off where they are timed), but for compiled ones (with
--compile, beside the compiled net). On threads each of the four stages is a rank, on a GPU of its own where there are
as many. The last line is the whole step as one CUDA graph, if it can be captured. Memory is how far what is allocated
on the first GPU grows in a step.
"""

import argparse
import copy
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from step import Block
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe import tree

MICROBATCHES, STAGES = 8, 4
Step = Callable[[], Any]


def net_and_batch(device: torch.device, quick: bool) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    blocks, width, length = (4, 32, 8) if quick else (12, 768, 512)
    net = nn.Sequential(*(Block(width, 2 if quick else 12) for _ in range(blocks))).to(device)
    shape = (4 * MICROBATCHES, length, width)
    return net, (torch.randn(shape, device=device), torch.randn(shape, device=device))


def eager(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    def step() -> list[Tensor | None]:
        for parameter in net.parameters():
            parameter.grad = None
        for x, target in zip(*(whole.tensor_split(MICROBATCHES) for whole in batch), strict=True):
            (F.mse_loss(net(x), target) * (1 / MICROBATCHES)).backward()
        return [parameter.grad for parameter in net.parameters()]

    return step


def pipelined(net: nn.Sequential, batch: tuple[Tensor, Tensor], *transforms: Any, **how: Any) -> Step:
    model, params, _ = fpipe.from_sequential(net, stages=STAGES, loss=F.mse_loss)
    parts = (
        fpipe.split(MICROBATCHES),
        *(transforms or [fpipe.schedules.one_f_one_b(STAGES)]),
        fpipe.merge(outputs=False),
    )
    step = fpipe.build(fpipe.chain(*parts)(fpipe.program(model)), model, **how)
    return lambda: tree.leaves(step(params, batch).grads)


def on_threads(net: nn.Sequential, batch: tuple[Tensor, Tensor], devices: list[str]) -> Step:
    """The same with a thread for each stage, on its device."""
    net = copy.deepcopy(net)
    size = len(net) // STAGES
    for number, device in enumerate(devices):
        net[number * size : (number + 1) * size].to(device)
    return pipelined(net, batch, runtime="threads", devices=devices)


def captured(step: Step) -> Step | str:
    """The same as one CUDA graph, or why it is none."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            grads = step()
    except RuntimeError as error:
        return str(error).splitlines()[0]

    def replay() -> list[Tensor]:
        graph.replay()
        return grads

    return replay


def least(steps: dict[str, Step], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name in random.sample([*steps], len(steps)):
            wait()
            started = time.perf_counter()
            steps[name]()
            wait()
            found[name] = min(found[name], time.perf_counter() - started)
    return found


def growth(step: Step, count: int) -> str:
    """How far what is allocated on the first GPU grows in a step."""
    if not count:
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small net, few rounds")
    parser.add_argument("--compile", action="store_true", help="compiled by torch.compile, too, which takes minutes")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here, so nothing was measured; --device cpu --quick shows that this file runs.")
        return
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    devices = [f"cuda:{rank % count}" if count else "cpu" for rank in range(STAGES)]

    def wait() -> None:
        for number in range(count):
            torch.cuda.synchronize(number)

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as torch asks where algorithms are to be deterministic
    torch.manual_seed(0)
    net, batch = net_and_batch(device, asked.quick)
    with torch.autocast(device.type, torch.bfloat16):
        steps: dict[str, Step] = {
            "eager autograd": eager(net, batch),
            "fpipe": pipelined(net, batch),
            "fpipe, record=True": pipelined(net, batch, record=True),
            "fpipe, GPipe": pipelined(net, batch, fpipe.schedules.gpipe(STAGES)),
            "fpipe, GPipe, offloaded": pipelined(net, batch, fpipe.schedules.gpipe(STAGES), fpipe.offload()),
            f"fpipe, threads on {len({*devices})}": on_threads(net, batch, devices),
        }
        torch.use_deterministic_algorithms(True)
        grads = [[*step()] for step in steps.values() for _ in range(3)][2::3]
        torch.use_deterministic_algorithms(False)
        same = all(torch.equal(a, b.to(a.device)) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))
        print(f"gradients bit for bit those of eager autograd: {same}")
        for step in steps.values():
            step()
        if device.type == "cuda":
            made = captured(steps["fpipe"])
            if isinstance(made, str):
                print(f"as a CUDA graph: not captured: {made}")
            else:
                steps["fpipe, one CUDA graph"] = made
        if asked.compile:
            steps["eager autograd, compiled"] = eager(torch.compile(net), batch)
            steps["fpipe, compile=True"] = pipelined(net, batch, compile=True)
        times = least(steps, 2 if asked.quick else 40, wait)
        grown = {name: growth(step, count) for name, step in steps.items()}
    for name, seconds in times.items():
        print(f"{name:28}{seconds * 1e3:9.2f} ms{seconds / times['eager autograd']:7.2f} of eager{grown[name]:>12}")


if __name__ == "__main__":
    main()
