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
    """The transport's: an exchange takes so many seconds, one after the other."""

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


def delayed(start: Callable[..., Any], *args: Any) -> Any:
    made, work = start(*args)
    return made, Delay(work)


@torch.library.custom_op("overlap::slept", mutates_args=())
def slept(x: Tensor, seconds: float) -> Tensor:
    if x.device.type == "cpu" and seconds:
        time.sleep(seconds)
    return x.clone()


@slept.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Work(torch.autograd.Function):
    """A product whose F, I and W take a while each."""

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


def inside(stages: list[Any], mesh: DeviceMesh) -> list[Any]:
    """Each two stages of which the second is an exchange as one stage."""
    group = mesh.get_group("ep")

    def both(work: Any, exchange: Any, params: Any, x: Tensor) -> Tensor:
        return exchange.forward.over(group.group_name, group.size(), group.rank())({}, work(params, x))

    return [partial(both, *stages[at : at + 2]) for at in range(0, len(stages), 2)]


class Steps:
    """The steps of one process, by schedule."""

    def __init__(self, rank: int, work: Any, rows: int) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
        self.place = self.mesh.get_local_rank("pp")
        torch.manual_seed(rank % 2)
        self.batch = torch.randn(MICROBATCHES * rows, WIDTH), torch.randn(MICROBATCHES * rows, WIDTH)
        self.stages = [one for _ in range(2 * BLOCKS) for one in (work, fpipe.exchange("all_to_all", axis="ep"))]
        self.params = [
            {"w": torch.randn(WIDTH, WIDTH) / WIDTH**0.5} if at % 2 == 0 else {} for at in range(len(self.stages))
        ]

    def built(
        self, name: str, whole: bool = False, record: bool = False
    ) -> tuple[fpipe.Program, Callable[[], Any], fpipe.Model, Any]:
        """A step; `whole` has the exchanges inside its stages."""
        stages = inside(self.stages, self.mesh) if whole else self.stages
        params = tuple(self.params[::2] if whole else self.params)
        model = fpipe.from_functions(stages, squares)
        schedule = fpipe.schedules.get(name)(2)
        program = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
        more: Any = {"mesh": self.mesh, "example": (params, self.batch), "record": record}
        step = fpipe.build(program, model, runtime="distributed", **more)
        own = fpipe.local_params(program, params, self.place)
        return program, lambda: step(own, self.batch), model, params

    def profiled(self, name: str) -> fpipe.Costs:
        """Costs as the ranks that run together measure them."""
        program, _, model, params = self.built(name)
        found = fpipe.profile(program, model, params, self.batch, repeats=3, runtime="distributed", mesh=self.mesh)
        return replace(found, bytes=None)


def slowest(seconds: float) -> float:
    every = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.item()


def timed(step: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    return slowest(time.perf_counter() - started)


def run(rank: int, store: str, compute: bool, rounds: int, milliseconds: float, told: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    seconds = milliseconds / 1e3
    steps = Steps(rank, computing if compute else partial(sleeping, seconds), ROWS if compute else 4)

    one, whole = steps.built("one_f_one_b")[1], steps.built("one_f_one_b", whole=True)[1]
    pairs = [(timed(one), timed(whole)) for _ in range(rounds + 2)][2:]
    told.put(("cut out", statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)))
    told.put(("at best", min(a for a, _ in pairs), min(b for _, b in pairs)))
    if compute:
        step = steps.built("one_f_one_b", record=True)[1]
        step()
        events = step().timeline.events
        seconds = slowest(
            statistics.median(e.end - e.start for e in events if e.op.kind == "F" and not is_exchange(e.op))
        )
    Delay.seconds = seconds
    exchange_lane.STARTS.update({op: partial(delayed, start) for op, start in exchange_lane.STARTS.items()})
    for start in exchange_lane.STARTS.values():
        start.__name__ = "exchange"  # pyright: ignore[reportAttributeAccessIssue]

    built = {word: steps.built(name)[1] for word, name in SCHEDULES.items()}
    found: dict[str, list[float]] = {word: [] for word in built}
    for number in range(rounds + 2):
        for word, step in built.items():
            took = timed(step)
            if number >= 2:
                found[word].append(took)
    for word, name in SCHEDULES.items():
        simulated = fpipe.simulate(steps.built(name)[0], steps.profiled(name)).makespan
        told.put((word, statistics.median(found[word]), simulated))
    told.put(("delay", seconds, 0.0))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20")
    parser.add_argument("--compute", action="store_true", help="products of matrices instead of sleep")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of sleep and delay (%(default)s)")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = mp.get_context("spawn").SimpleQueue()
        store = Path(folder, "group").as_uri()
        context = mp.spawn(
            run, (store, said.compute, 5 if said.quick else 20, said.milliseconds, told), nprocs=4, join=False
        )
        assert context is not None
        rows: dict[str, tuple[float, float]] = {}
        while not context.join(timeout=0.1):
            while not told.empty():
                word, *both = told.get()
                rows[word] = (both[0], both[1])
        while not told.empty():
            word, *both = told.get()
            rows[word] = (both[0], both[1])
    for word in ("cut out", "at best"):
        as_stages, within = rows.pop(word)
        times = f"{as_stages * 1e3:.1f} ms against {within * 1e3:.1f} ms inside, {as_stages / within:.3f}"
        print(f"{word}, 1F1B, no delay: {times}")
    delay, _ = rows.pop("delay")
    print(f"an exchange takes {delay * 1e3:.2f} ms\n")
    print("schedule             measured, ms   simulated   measured / simulated   of 1F1B")
    for word, (measured, simulated) in rows.items():
        ratio, of = measured / simulated, measured / rows["1F1B"][0]
        print(f"{word:20} {measured * 1e3:12.1f} {simulated * 1e3:11.1f} {ratio:22.3f} {of:9.3f}")


if __name__ == "__main__":
    main()
