"""Hide the exchanges of a mixture of experts behind another microbatch's work, on 2 x 2 processes, against plain 1F1B.

    python benchmarks/overlap.py [--quick] [--compute]

Four processes of one gloo group, two ranks of a pipeline times two that exchange, one intra-op thread each, with blocks
of four stages: work, exchange, work, exchange. Every step runs once a round, one schedule after another, on all four; a
time is that of the slowest process, a ratio one of medians over rounds.

The transport's delay is injected: an exchange ends no earlier than so many milliseconds after it has started, and after
those before it on its lane, and whoever waits sleeps. By default so does the work, as a host does whose accelerator
works, so that four processes fit on fewer cores: F, I and W of a stage take as long as an exchange. With --compute the
work is products of matrices, and an exchange takes as long as F does while all four processes compute.

Simulated is the makespan for costs that `fpipe.profile` measures, all ranks running together; "cut out" is the net with
exchanges as stages against exchanges inside its stages, under 1F1B and without a delay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from fpipe.program import is_exchange
from fpipe.runtimes.processes import exchange_lane

MICROBATCHES, BLOCKS, WIDTH, ROWS = 8, 4, 128, 64
SCHEDULES = {
    "1F1B": "one_f_one_b",
    "ZB-H1": "zb_h1",
    "1F1B with overlap": "one_f_one_b_overlap",
    "DualPipeV": "dualpipev",
}


class Delay:
    """Work of a transport that delays each exchange by `seconds` and runs one at a time."""

    seconds, free = 0.0, 0.0

    def __init__(self, work: Any) -> None:
        self.work = work
        self.end = Delay.free = max(time.perf_counter(), Delay.free) + Delay.seconds

    def wait(self, timeout: Any) -> None:
        self.work.wait(timeout)
        time.sleep(max(0.0, self.end - time.perf_counter()))

    def get_future(self) -> Delay:
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        threading.Timer(max(0.0, self.end - time.perf_counter()), call, [None]).start()


def start_delayed(start: Callable[..., Any], *args: Any) -> Any:
    output, work = start(*args)
    return output, Delay(work)


@torch.library.custom_op("overlap::slept", mutates_args=())
def slept(x: Tensor, seconds: float) -> Tensor:
    if x.device.type == "cpu" and seconds:
        time.sleep(seconds)
    return x.clone()


@slept.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Work(torch.autograd.Function):
    """A product whose F, I and W take `seconds` each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.seconds = seconds
        return slept(x @ w, seconds)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        x, w = ctx.saved_tensors
        return slept(dy[0] @ w.T, ctx.seconds), slept(x.T @ dy[0], ctx.seconds), None


def sleeping(seconds: float, params: Any, x: Tensor) -> Tensor:
    return Work.apply(x, params["w"], seconds)


def computing(params: Any, x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.tanh(x @ params["w"])
    return x


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def merge_exchanges(stages: list[Any], mesh: DeviceMesh) -> list[Any]:
    """Merge each stage with the exchange behind it into one stage."""
    group = mesh.get_group("ep")

    def work_and_exchange(work: Any, exchange: Any, params: Any, x: Tensor) -> Tensor:
        return exchange.forward.over(group.group_name, group.size(), group.rank())({}, work(params, x))

    return [partial(work_and_exchange, *stages[start : start + 2]) for start in range(0, len(stages), 2)]


class Steps:
    """The steps of one process, by schedule."""

    def __init__(self, rank: int, work: Any, rows: int) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
        self.pp_rank = self.mesh.get_local_rank("pp")
        torch.manual_seed(rank % 2)
        self.batch = torch.randn(MICROBATCHES * rows, WIDTH), torch.randn(MICROBATCHES * rows, WIDTH)
        self.stages = [stage for _ in range(2 * BLOCKS) for stage in (work, fpipe.exchange("all_to_all", axis="ep"))]
        self.params = [
            {"w": torch.randn(WIDTH, WIDTH) / WIDTH**0.5} if index % 2 == 0 else {} for index in range(len(self.stages))
        ]

    def build(
        self, name: str, exchanges_inside: bool = False, record: bool = False
    ) -> tuple[fpipe.Program, Callable[[], Any], fpipe.Model, Any]:
        """Build a step; with `exchanges_inside` its stages contain the exchanges."""
        stages = merge_exchanges(self.stages, self.mesh) if exchanges_inside else self.stages
        params = tuple(self.params[::2] if exchanges_inside else self.params)
        model = fpipe.from_functions(stages, squares)
        schedule = fpipe.schedules.get(name)(2)
        program = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
        options: Any = {"mesh": self.mesh, "example": (params, self.batch), "record": record}
        step = fpipe.build(program, model, runtime="distributed", **options)
        local_params = fpipe.local_params(program, params, self.pp_rank)
        return program, lambda: step(local_params, self.batch), model, params

    def profile_costs(self, name: str) -> fpipe.Costs:
        """Measure the costs while all ranks run together."""
        program, _, model, params = self.build(name)
        costs = fpipe.profile(program, model, params, self.batch, repeats=3, runtime="distributed", mesh=self.mesh)
        return replace(costs, bytes=None)


def slowest(seconds: float) -> float:
    times = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()


def timed(step: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    return slowest(time.perf_counter() - started)


def run(rank: int, store: str, compute: bool, rounds: int, milliseconds: float, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    seconds = milliseconds / 1e3
    steps = Steps(rank, computing if compute else partial(sleeping, seconds), ROWS if compute else 4)

    separate_step, merged_step = steps.build("one_f_one_b")[1], steps.build("one_f_one_b", exchanges_inside=True)[1]
    pairs = [(timed(separate_step), timed(merged_step)) for _ in range(rounds + 2)][2:]
    results.put(("cut out", statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)))
    results.put(("at best", min(a for a, _ in pairs), min(b for _, b in pairs)))
    if compute:
        step = steps.build("one_f_one_b", record=True)[1]
        step()
        events = step().timeline.events
        seconds = slowest(
            statistics.median(e.end - e.start for e in events if e.op.kind == "F" and not is_exchange(e.op))
        )
    Delay.seconds = seconds
    exchange_lane.STARTS.update({op: partial(start_delayed, start) for op, start in exchange_lane.STARTS.items()})
    for start in exchange_lane.STARTS.values():
        start.__name__ = "exchange"  # pyright: ignore[reportAttributeAccessIssue]

    step_by_label = {label: steps.build(name)[1] for label, name in SCHEDULES.items()}
    times: dict[str, list[float]] = {label: [] for label in step_by_label}
    for number in range(rounds + 2):
        for label, step in step_by_label.items():
            took = timed(step)
            if number >= 2:
                times[label].append(took)
    for label, name in SCHEDULES.items():
        simulated = fpipe.simulate(steps.build(name)[0], steps.profile_costs(name)).makespan
        results.put((label, statistics.median(times[label]), simulated))
    results.put(("delay", seconds, 0.0))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20")
    parser.add_argument("--compute", action="store_true", help="products of matrices instead of sleep")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of sleep and delay (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        store, rounds = Path(folder, "group").as_uri(), 5 if options.quick else 20
        context = mp.spawn(run, (store, options.compute, rounds, options.milliseconds, results), nprocs=4, join=False)
        assert context is not None
        rows: dict[str, tuple[float, float]] = {}
        while not context.join(timeout=0.1):
            while not results.empty():
                label, *numbers = results.get()
                rows[label] = (numbers[0], numbers[1])
        while not results.empty():
            label, *numbers = results.get()
            rows[label] = (numbers[0], numbers[1])
    for label in ("cut out", "at best"):
        separate, merged = rows.pop(label)
        times = f"{separate * 1e3:.1f} ms against {merged * 1e3:.1f} ms inside, {separate / merged:.3f}"
        print(f"{label}, 1F1B, no delay: {times}")
    delay, _ = rows.pop("delay")
    print(f"an exchange takes {delay * 1e3:.2f} ms\n")
    print("schedule             measured, ms   simulated   measured / simulated   of 1F1B")
    for label, (measured, simulated) in rows.items():
        ratio, share = measured / simulated, measured / rows["1F1B"][0]
        print(f"{label:20} {measured * 1e3:12.1f} {simulated * 1e3:11.1f} {ratio:22.3f} {share:9.3f}")


if __name__ == "__main__":
    main()
