"""Time a step compiled by inductor, as a share of the same step uncompiled.

    python benchmarks/compile.py [--rounds N]

A GPT of four blocks of width 256 in four stages, eight microbatches of 4 rows of 64, zero-bubble order, each stage
computed again in its backward. Steps alternate in one run; a ratio is of minima. The last column is the floor: what the
matrix products and attention alone take of the uncompiled step, which inductor leaves to the same libraries.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from step import MICROBATCHES, gpt
from torch import nn
from torch.profiler import profile

import fpipe

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "addmm_")


def minima(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}


def share_of_products(step: Callable[[], Any]) -> float:
    """Return the share of a step's time that its matrix products and attention take."""
    with profile() as profiler:
        step()
    rows = [(row.key.removeprefix("aten::"), row.self_cpu_time_total) for row in profiler.key_averages()]
    products = sum(seconds for name, seconds in rows if name.startswith(PRODUCTS))
    return products / sum(seconds for _, seconds in rows)


def main(rounds: int) -> None:
    torch.manual_seed(0)
    net, x, target = gpt(256)
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=nn.functional.mse_loss)
    program = fpipe.chain(
        fpipe.split(MICROBATCHES),
        fpipe.checkpoint("always"),
        fpipe.split_backward(),
        fpipe.schedules.zb_h1(4),
        fpipe.merge(),
    )(fpipe.program(model))
    torch.set_num_threads(1)
    torch.empty(31 << 20, dtype=torch.uint8)  # the C library keeps freed memory after it: see benchmarks/step.py
    for runtime in ("local", "threads"):
        built_steps = {
            name: fpipe.build(program, model, runtime=runtime, compile=name == "compiled")
            for name in ("plain", "compiled")
        }
        steps = {name: (lambda step=step: step(params, (x, target))) for name, step in built_steps.items()}
        for step in steps.values():
            step()
        times = minima(steps, rounds)
        floor = share_of_products(steps["plain"]) if runtime == "local" else None
        print(
            f"{runtime:<8} plain {times['plain'] * 1e3:7.1f} ms  compiled / plain "
            f"{times['compiled'] / times['plain']:.2f}" + (f"  products alone {floor:.2f}" if floor else ""),
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
