"""Time one step on a GPU, against eager autograd: a GPT of 12 blocks of width 768 under bfloat16 autocast.

    python benchmarks/devices.py [--quick] [--compile] [--device cuda]

One process runs one rank: four stages, eight microbatches of four rows of 512 places. Each round runs every step once,
in an order drawn anew, and waits for the devices after each; a ratio is of the least times. The steps give the same
gradients, bit for bit, under deterministic algorithms (which are off where they are timed), but for compiled ones (with
--compile, beside the compiled net). On threads each of the four stages is a rank, on a GPU of its own where there are
as many. The last line is the whole step as one CUDA graph, if it can be captured. Memory is the growth of the first
GPU's allocated memory during a step.
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


def eager_step(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    def step() -> list[Tensor | None]:
        for parameter in net.parameters():
            parameter.grad = None
        for x, target in zip(*(tensor.tensor_split(MICROBATCHES) for tensor in batch), strict=True):
            (F.mse_loss(net(x), target) * (1 / MICROBATCHES)).backward()
        return [parameter.grad for parameter in net.parameters()]

    return step


def pipelined_step(net: nn.Sequential, batch: tuple[Tensor, Tensor], *transforms: Any, **options: Any) -> Step:
    model, params, _ = fpipe.from_sequential(net, stages=STAGES, loss=F.mse_loss)
    parts = (
        fpipe.split(MICROBATCHES),
        *(transforms or [fpipe.schedules.one_f_one_b(STAGES)]),
        fpipe.merge(outputs=False),
    )
    step = fpipe.build(fpipe.chain(*parts)(fpipe.program(model)), model, **options)
    return lambda: tree.leaves(step(params, batch).grads)


def threaded_step(net: nn.Sequential, batch: tuple[Tensor, Tensor], devices: list[str]) -> Step:
    net = copy.deepcopy(net)
    size = len(net) // STAGES
    for number, device in enumerate(devices):
        net[number * size : (number + 1) * size].to(device)
    return pipelined_step(net, batch, runtime="threads", devices=devices)


def capture_graph(step: Step) -> Step | str:
    """Capture a step as one CUDA graph, or return the reason why that fails."""
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


def minimal_times(steps: dict[str, Step], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    minima = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name in random.sample([*steps], len(steps)):
            wait()
            started = time.perf_counter()
            steps[name]()
            wait()
            minima[name] = min(minima[name], time.perf_counter() - started)
    return minima


def memory_growth(step: Step, count: int) -> str:
    """Return the growth of the first GPU's allocated memory during a step."""
    if not count:
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - start_bytes) / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small net, few rounds")
    parser.add_argument("--compile", action="store_true", help="compiled by torch.compile, too, which takes minutes")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
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
    net, batch = net_and_batch(device, options.quick)
    with torch.autocast(device.type, torch.bfloat16):
        steps: dict[str, Step] = {
            "eager autograd": eager_step(net, batch),
            "fpipe": pipelined_step(net, batch),
            "fpipe, record=True": pipelined_step(net, batch, record=True),
            "fpipe, GPipe": pipelined_step(net, batch, fpipe.schedules.gpipe(STAGES)),
            "fpipe, GPipe, offloaded": pipelined_step(net, batch, fpipe.schedules.gpipe(STAGES), fpipe.offload()),
            f"fpipe, threads on {len({*devices})}": threaded_step(net, batch, devices),
        }
        torch.use_deterministic_algorithms(True)
        grads_by_step = [[*step()] for step in steps.values() for _ in range(3)][2::3]
        torch.use_deterministic_algorithms(False)
        pairs = (pair for grads in grads_by_step[1:] for pair in zip(grads_by_step[0], grads, strict=True))
        equal = all(torch.equal(a, b.to(a.device)) for a, b in pairs)
        print(f"gradients bit for bit those of eager autograd: {equal}")
        for step in steps.values():
            step()
        if device.type == "cuda":
            graph_or_reason = capture_graph(steps["fpipe"])
            if isinstance(graph_or_reason, str):
                print(f"as a CUDA graph: not captured: {graph_or_reason}")
            else:
                steps["fpipe, one CUDA graph"] = graph_or_reason
        if options.compile:
            steps["eager autograd, compiled"] = eager_step(torch.compile(net), batch)
            steps["fpipe, compile=True"] = pipelined_step(net, batch, compile=True)
        times = minimal_times(steps, 2 if options.quick else 40, wait)
        grown = {name: memory_growth(step, count) for name, step in steps.items()}
    for name, seconds in times.items():
        print(f"{name:28}{seconds * 1e3:9.2f} ms{seconds / times['eager autograd']:7.2f} of eager{grown[name]:>12}")


if __name__ == "__main__":
    main()
