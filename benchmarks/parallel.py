"""Time a step on two threads and on two processes, against eager autograd in one process and torch's runtime.

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
from step import MICROBATCHES, Case, against, eager, gpt, mlp
from torch import nn

import fpipe
from fpipe.cli.measure import torch_step
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
# Ours, torch's own, and the number of stages on two ranks.
SCHEDULES = {
    "gpipe": ("GPipe", 2),
    "one_f_one_b": ("1F1B", 2),
    "interleaved": ("Interleaved1F1B", 4),
    "interleaved_zb": ("InterleavedZeroBubble", 4),
    "zbv": ("ZBVZeroBubble", 4),
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
WORST = {"MLP 8 x 1 row": 0.55}


def build_steps(rank: int, name: str, case: Case) -> tuple[dict[str, tuple[Step, bool]], float]:
    """Build our steps and torch's, each with whether only rank 0 takes it, and simulate the bubble."""
    net, x, target = case
    torch_class, stages = SCHEDULES[name]
    model, params, _ = fpipe.from_sequential(net, sizes=[len(net) // stages] * stages, loss=MSE)
    program = fpipe.chain(fpipe.split(MICROBATCHES), fpipe.schedules.get(name)(2), fpipe.merge())(fpipe.program(model))
    mine = fpipe.local_params(program, params, rank)
    example = (params, (x, target))

    def threads() -> Step:
        return partial(fpipe.build(program, model, runtime="threads", example=example), *example)

    def processes(**options: Any) -> Step:
        step = fpipe.build(program, model, runtime="distributed", example=example, timeout=60, **options)
        return partial(step, mine, (x, target))

    steps = {"local": (partial(fpipe.build(program, model), *example), True)}
    steps |= {"threads": (threads(), True), "gloo": (processes(), False)}
    values = dict[Value, list[Any]]()
    build_local_step(
        with_transfers(program), model, StepOptions(), see=lambda value, leaves: values.update({value: [*leaves]})
    )(*example)
    with without_messages("in_process.threads.HandOver", HandOver, values):
        steps["threads apart"] = threads(), True
    with without_messages("processes.distributed.Transfers", Transfers, values):
        steps["gloo apart"] = processes(check_batch="never"), False  # batches are compared by messages
    size = x.numel() * x.element_size() // MICROBATCHES
    steps["bare"] = build_bare_step(rank, program, size), False
    steps["torch"] = torch_step(torch_class, program, net, (x, target), MSE), False
    return steps, fpipe.simulate(program).bubble


def without_messages(name: str, base: type[Any], values: dict[Value, list[Any]]) -> Any:
    """Patch the transport of a runtime, so that steps send nothing and receive values that are at hand."""

    class Prereceived(base):
        def begin_step(self, *arguments: Any, **options: Any) -> None:
            self._incoming_by_source = {}  # nothing is asked for
            super().begin_step(*arguments, **options)

        def send(self, *arguments: Any) -> Callable[..., Any]:
            return lambda *lists: ()

        def receive(self, *arguments: Any) -> Callable[..., Any]:
            # A loss has no copy on another rank.
            leaf_lists = [values.get(value) or values[value._replace(location="")] for value in arguments[-1].reads]
            return lambda: [leaves[:] for leaves in leaf_lists]

    return mock.patch(f"fpipe.runtimes.{name}", Prereceived)


def build_bare_step(rank: int, program: fpipe.Program, size: int) -> Step:
    """Build a step of a rank's transfers, each of `size` bytes, and nothing else."""
    group, peer = dist.group.WORLD, 1 - rank
    program = with_results_last(with_transfers(program))
    numbers = {message.value: message.number for message in messages_of(program)}
    transfers = [op for op in parts_of(program.ops) if op.rank == rank and op.kind in ("SEND", "RECV")]
    values = [(op.kind, op.writes if op.kind == "SEND" else op.reads) for op in transfers]
    kinds_and_numbers = [(kind, [numbers[value] for value in op_values]) for kind, op_values in values]
    buffers = {n: torch.zeros(size, dtype=torch.uint8) for _, op_numbers in kinds_and_numbers for n in op_numbers}

    def step() -> None:
        coming = {
            number: group.recv([buffers[number]], peer, number)
            for kind, op_numbers in kinds_and_numbers
            if kind == "RECV"
            for number in op_numbers
        }
        sends = []
        for kind, op_numbers in kinds_and_numbers:
            for number in op_numbers:
                if kind == "SEND":
                    sends.append(group.send([buffers[number]], peer, number))
                else:
                    coming[number].wait()
        for work in sends:
            work.wait()

    return step


def delay() -> float:
    """Seconds for which threads of this process were ready and had no core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def work(rank: int, folder: str, rounds: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    times = {name: {schedule: compare(rank, name, schedule, rounds) for schedule in SCHEDULES} for name in cases}
    if rank == 0:
        print_summary(times)
    dist.destroy_process_group()


def compare(rank: int, name: str, schedule: str, rounds: int) -> dict[str, float]:
    """Return the least seconds of each step, and the limit; an empty dict on rank 1."""
    torch.manual_seed(0)
    case = CASES[name]()
    pipeline_steps, bubble = build_steps(rank, schedule, case)
    steps = {"eager": (eager(*case), True), **pipeline_steps}
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in steps}
    gc.collect()
    gc.freeze()  # what is built is looked at no more: a collection before each step is short
    for turn in range(WARM_UP + 2 * rounds):
        for label, (step, alone) in steps.items():
            gc.collect()
            gc.disable()
            dist.barrier()
            start_delay, start = delay(), time.perf_counter()
            if rank == 0 or not alone:
                step()
            seconds, waited = time.perf_counter() - start, delay() - start_delay
            gc.enable()
            slowest = torch.tensor([seconds, waited / max(seconds, 1e-9)])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                times[label].append((float(slowest[0]), float(slowest[1])))
        if min(map(len, map(clean, times.values()))) >= rounds:  # the same on both
            break
    gc.unfreeze()
    return report(name, schedule, bubble, times) if rank == 0 else {}


def clean(samples: list[tuple[float, float]]) -> list[float]:
    return [seconds for seconds, waited in samples if waited < 0.05]


def report(name: str, schedule: str, bubble: float, times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    clean_times = {label: clean(samples) for label, samples in times.items()}
    noisy = [label for label, samples in clean_times.items() if len(samples) < 5]
    kept_or_all = clean_times | {label: [seconds for seconds, _ in times[label]] for label in noisy}
    minima = {label: min(samples) for label, samples in kept_or_all.items()}
    sizes = [*map(len, clean_times.values())]
    rounds = f"{min(sizes)} to {max(sizes)} of {len(times['eager'])} rounds kept"
    rounds += f", all of {', '.join(noisy)}" * bool(noisy)
    of_eager = "  ".join(f"{label} {minima[label] / minima['eager']:5.2f}" for label in times if label != "eager")
    limit = 0.5 * (1 + bubble / (1 - bubble))
    print(
        f"{name:<25}{schedule:<15} eager {minima['eager'] * 1e3:7.2f} ms  of eager: {of_eager}  limit {limit:.2f}  "
        f"gloo/torch {minima['gloo'] / minima['torch']:.2f}  threads/local {minima['threads'] / minima['local']:.2f}  "
        f"({rounds})",
        flush=True,
    )
    return minima | {"limit": limit}


def print_summary(times_by_net: dict[str, dict[str, dict[str, float]]]) -> None:
    print()
    for name, times in times_by_net.items():
        for (step, base), reach in BEST.get(name, {}).items():
            best = min(times, key=lambda schedule: times[schedule][step] / times[schedule][base])
            ratio, floor = (times[best][label] / times[best][base] for label in (step, f"{step} apart"))
            limits = f"limit {times[best]['limit']:.2f}, apart {floor:.2f}"
            print(f"{name:<25} {step}/{base}, {best}: {against(ratio, reach)}, {limits}")
        for (step, base), reach in AVERAGE.get(name, {}).items():
            ratio, floor = (
                statistics.mean(seconds[label] / seconds[base] for seconds in times.values())
                for label in (step, f"{step} apart")
            )
            print(f"{name:<25} {step}/{base} on average: {against(ratio, reach)}, apart {floor:.2f}")
        ratios = [seconds["gloo"] / seconds["torch"] for seconds in times.values()]
        worst = against(max(ratios), WORST.get(name, 1.0))
        print(f"{name:<25} gloo/torch: {statistics.mean(ratios):.2f} on average, at most {worst}")
    ratios = [seconds["gloo"] / seconds["torch"] for times in times_by_net.values() for seconds in times.values()]
    average, worst = against(statistics.mean(ratios), 0.75), against(max(ratios), 1.0)
    print(f"{'all':<25} gloo/torch on average: {average}; at most {worst}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, 6 if options.quick else 30, options.cases), nprocs=2, start_method="spawn")
