"""How long a step takes on two threads and on two processes, against plain eager autograd in one, and torch's runtime.

    python benchmarks/parallel.py [--quick]

Two processes of one gloo group, one intra-op thread each. In each round every step runs once, one after another: eager
autograd, our local step and our threads in the first process while the second waits; our processes, and torch's own
schedule of the same kind on the same group, in both. A time is that of the slower process. A ratio is of minima over
rounds; those in which a thread waited for a core more than 5 % of the time (/proc/self/task/*/schedstat) are left out,
unless fewer than five are left. Rounds go on until 30 of each step are kept, or twice as many were run; how many were
kept is printed.

Bare are the messages of the same schedule without the rest: torch's own sends and receives of as many bytes, in the
order of each rank, each waited for. What is below that only gloo could be.

Apart are our threads and processes without messages: every rank makes the same calls with all that it receives at hand,
so none waits. What is above half of the local step there is what two ranks cost each other on this machine: threads
take turns with the lock that Python holds, and processes share caches and memory.

The limit of two ranks is half of eager's time and the bubble: 0.5 * (1 + bubble) of eager, where the bubble is a share
of the work. At the end the ratios stand beside what is to be reached.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import MICROBATCHES, Case, eager, gpt, mlp, within
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import fpipe
from fpipe.meaning.step import StepOptions
from fpipe.program import Value, parts_of
from fpipe.runtimes.in_process.local import build_local_step
from fpipe.runtimes.in_process.threads import HandOver
from fpipe.runtimes.processes.message_order import messages_of, with_results_last
from fpipe.runtimes.processes.transfers import Transfers
from fpipe.transforms.communicate import with_transfers

Step = Callable[[], Any]
CASES: dict[str, Callable[[], Case]] = {
    "MLP 512 x 128 rows": partial(mlp, 512, 128),
    "MLP 512 x 8 rows": partial(mlp, 512, 8),
    "MLP 8 x 1 row": partial(mlp, 8, 1),
    "GPT, 4 blocks, width 256": partial(gpt, 256),
}
# Ours, torch's own, stages a rank, and on which rank of two each stage is.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, (0, 1)),
    "one_f_one_b": ("Schedule1F1B", 1, (0, 1)),
    "interleaved": ("ScheduleInterleaved1F1B", 2, (0, 1, 0, 1)),
    "interleaved_zb": ("ScheduleInterleavedZeroBubble", 2, (0, 1, 0, 1)),
    "zbv": ("ScheduleZBVZeroBubble", 2, (0, 1, 1, 0)),
}
MSE = nn.functional.mse_loss
WARM_UP = 10  # until ranks no longer compare their batches in each step
# Of the best schedule of a net, or on average over all of them: what is to be reached, of what.
BEST = {
    "MLP 512 x 128 rows": {("threads", "eager"): 0.60, ("gloo", "eager"): 0.62},
    "MLP 512 x 8 rows": {("threads", "eager"): 0.50, ("gloo", "eager"): 0.58},
}
AVERAGE = {
    "MLP 8 x 1 row": {("gloo", "torch"): 0.50, ("threads", "local"): 1.20},
    "GPT, 4 blocks, width 256": {("gloo", "torch"): 0.90},
}
# In every schedule, of torch's.
MOST = {"MLP 8 x 1 row": 0.55}


def torchs(rank: int, name: str, case: Case) -> Step:
    """torch's schedule on the stages of this rank."""
    net, x, target = case
    kind, _, placement = SCHEDULES[name]
    parts = [nn.Sequential(*part) for part in split(list(net), len(placement))]
    mine = [n for n, home in enumerate(placement) if home == rank]
    stages = [PipelineStage(parts[n], n, len(placement), torch.device("cpu")) for n in mine]
    # torch 2.13 says `scale_grads` of a loss that is a mean.
    made = getattr(schedules, kind)(stages if len(placement) > 2 else stages[0], MICROBATCHES, loss_fn=MSE)
    last = len(placement) - 1

    def step() -> None:
        for n in mine:
            parts[n].zero_grad()
        made.step(*((x,) if 0 in mine else ()), **({"target": target} if last in mine else {}))

    return step


def split(children: list[nn.Module], parts: int) -> list[list[nn.Module]]:
    size = len(children) // parts
    return [children[n * size : (n + 1) * size] for n in range(parts)]


def ours(rank: int, name: str, case: Case) -> tuple[dict[str, tuple[Step, bool]], float]:
    """Our steps, each with whether rank 0 takes it alone, and the simulated bubble."""
    net, x, target = case
    model, params, _ = fpipe.from_sequential(
        net, sizes=[len(net) // len(SCHEDULES[name][2])] * len(SCHEDULES[name][2]), loss=MSE
    )
    program = fpipe.chain(fpipe.split(MICROBATCHES), fpipe.schedules.get(name)(2), fpipe.merge())(fpipe.program(model))
    mine = fpipe.local_params(program, params, rank)
    example = (params, (x, target))

    def threads() -> Step:
        return partial(fpipe.build(program, model, runtime="threads", example=example), *example)

    def processes(**how: Any) -> Step:
        step = fpipe.build(program, model, runtime="distributed", example=example, timeout=60, **how)
        return partial(step, mine, (x, target))

    steps = {"local": (partial(fpipe.build(program, model), *example), True)}
    steps |= {"threads": (threads(), True), "gloo": (processes(), False)}
    values = dict[Value, list[Any]]()
    build_local_step(
        with_transfers(program), model, StepOptions(), see=lambda value, leaves: values.update({value: [*leaves]})
    )(*example)
    with at_hand("in_process.threads.HandOver", HandOver, values):
        steps["threads apart"] = threads(), True
    with at_hand("processes.distributed.Transfers", Transfers, values):
        steps["gloo apart"] = processes(check_batch="never"), False  # batches are compared by messages
    size = x.numel() * x.element_size() // MICROBATCHES
    steps["bare"] = bare(rank, program, size), False
    return steps, fpipe.simulate(program).bubble


def at_hand(name: str, kind: type[Any], values: dict[Value, list[Any]]) -> Any:
    """While this lasts, steps are built that send nothing, and receive what was received before."""

    class AtHand(kind):
        def begin_step(self, *about: Any, **how: Any) -> None:
            self._incoming_by_source = {}  # nothing is asked for
            super().begin_step(*about, **how)

        def send(self, *about: Any) -> Callable[..., Any]:
            return lambda *lists: ()

        def receive(self, *about: Any) -> Callable[..., Any]:
            here = [values.get(value) or values[value._replace(at="")] for value in about[-1].reads]  # or the loss
            return lambda: [leaves[:] for leaves in here]

    return mock.patch(f"fpipe.runtimes.{name}", AtHand)


def bare(rank: int, program: fpipe.Program, size: int) -> Step:
    """The transfers of a rank, each of so many bytes, and nothing else."""
    group, peer = dist.group.WORLD, 1 - rank
    program = with_results_last(with_transfers(program))
    numbers = {one.value: one.number for one in messages_of(program)}
    own = [op for op in parts_of(program.ops) if op.rank == rank and op.kind in ("SEND", "RECV")]
    ways = [(op.kind, [numbers[value] for value in (op.writes if op.kind == "SEND" else op.reads)]) for op in own]
    buffers = {number: torch.zeros(size, dtype=torch.uint8) for _, each in ways for number in each}

    def step() -> None:
        coming = {
            number: group.recv([buffers[number]], peer, number)
            for kind, each in ways
            if kind == "RECV"
            for number in each
        }
        sent = []
        for kind, each in ways:
            for number in each:
                if kind == "SEND":
                    sent.append(group.send([buffers[number]], peer, number))
                else:
                    coming[number].wait()
        for work in sent:
            work.wait()

    return step


def delay() -> float:
    """Seconds for which threads of this process were ready and had no core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def work(rank: int, folder: str, rounds: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = {name: {schedule: compare(rank, name, schedule, rounds) for schedule in SCHEDULES} for name in cases}
    if rank == 0:
        summary(found)
    dist.destroy_process_group()


def compare(rank: int, name: str, schedule: str, rounds: int) -> dict[str, float]:
    """The least seconds of each step, and the limit; on rank 0."""
    torch.manual_seed(0)
    case = CASES[name]()
    own, bubble = ours(rank, schedule, case)
    steps = {"eager": (eager(*case), True), **own, "torch": (torchs(rank, schedule, case), False)}
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in steps}
    gc.collect()
    gc.freeze()  # what is built is looked at no more: a collection before each step is short
    for turn in range(WARM_UP + 2 * rounds):
        for label, (step, alone) in steps.items():
            gc.collect()
            gc.disable()
            dist.barrier()
            before, start = delay(), time.perf_counter()
            if rank == 0 or not alone:
                step()
            seconds, waited = time.perf_counter() - start, delay() - before
            gc.enable()
            both = torch.tensor([seconds, waited / max(seconds, 1e-9)])
            dist.all_reduce(both, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                times[label].append((float(both[0]), float(both[1])))
        if min(map(len, map(clean, times.values()))) >= rounds:  # the same on both
            break
    gc.unfreeze()
    return report(name, schedule, bubble, times) if rank == 0 else {}


def clean(found: list[tuple[float, float]]) -> list[float]:
    """The seconds of rounds in which no thread waited for a core."""
    return [seconds for seconds, waited in found if waited < 0.05]


def report(name: str, schedule: str, bubble: float, times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    kept = {label: clean(found) for label, found in times.items()}
    few = [label for label, found in kept.items() if len(found) < 5]
    least = {label: min([each for each, _ in times[label]] if label in few else found) for label, found in kept.items()}
    sizes = [*map(len, kept.values())]
    rounds = f"{min(sizes)} to {max(sizes)} of {len(times['eager'])} rounds kept"
    rounds += f", all of {', '.join(few)}" * bool(few)
    of_eager = "  ".join(f"{label} {least[label] / least['eager']:5.2f}" for label in times if label != "eager")
    limit = 0.5 * (1 + bubble / (1 - bubble))
    print(
        f"{name:<25}{schedule:<15} eager {least['eager'] * 1e3:7.2f} ms  of eager: {of_eager}  limit {limit:.2f}  "
        f"gloo/torch {least['gloo'] / least['torch']:.2f}  threads/local {least['threads'] / least['local']:.2f}  "
        f"({rounds})",
        flush=True,
    )
    return least | {"limit": limit}


def summary(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Each ratio beside what is to be reached."""
    print()
    for name, each in found.items():
        for (one, other), reach in BEST.get(name, {}).items():
            best = min(each, key=lambda schedule: each[schedule][one] / each[schedule][other])
            ratio, floor = (each[best][label] / each[best][other] for label in (one, f"{one} apart"))
            limits = f"limit {each[best]['limit']:.2f}, apart {floor:.2f}"
            print(f"{name:<25} {one}/{other}, {best}: {within(ratio, reach)}, {limits}")
        for (one, other), reach in AVERAGE.get(name, {}).items():
            ratio, floor = (
                statistics.mean(times[label] / times[other] for times in each.values())
                for label in (one, f"{one} apart")
            )
            print(f"{name:<25} {one}/{other} on average: {within(ratio, reach)}, apart {floor:.2f}")
        ratios = [times["gloo"] / times["torch"] for times in each.values()]
        most = within(max(ratios), MOST.get(name, 1.0))
        print(f"{name:<25} gloo/torch: {statistics.mean(ratios):.2f} on average, at most {most}")
    ratios = [times["gloo"] / times["torch"] for each in found.values() for times in each.values()]
    average, most = within(statistics.mean(ratios), 0.75), within(max(ratios), 1.0)
    print(f"{'all':<25} gloo/torch on average: {average}; at most {most}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, 6 if said.quick else 30, said.cases), nprocs=2, start_method="spawn")
