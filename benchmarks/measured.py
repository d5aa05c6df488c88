"""Compare simulation with profiled costs to measured makespans, and measure what recording a step costs.

    python benchmarks/measured.py [--quick]

Two processes of one gloo group, one intra-op thread each: threads in the first while the second waits, or both. In each
block 1F1B is profiled once for each number of stages, all ranks together, and its costs predict the schedules, which
then run several rounds, one after another, recorded and not. Predicted is the median over blocks, measured the median
over rounds; rounds and profiles in which a thread waited for a core more than 5 % of the time are left out, unless
fewer than five (two profiles) are left, and how many is printed.

Reach: every prediction, and their median, within 10 %, and schedules that differ by more than 5 % in the order
predicted; recording costs less than 2 % of a step, as a ratio of minima and of medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel import CASES, MSE, delay
from step import MICROBATCHES, against

import fpipe

STAGES = {"gpipe": 2, "one_f_one_b": 2, "zb_h1": 2, "interleaved": 4, "interleaved_zb": 4, "zbv": 4}
NETS = "MLP 512 x 128 rows", "MLP 512 x 8 rows", "GPT, 4 blocks, width 256"
ROUNDS = 6  # of a block
Times = dict[str, list[tuple[float, float]]]
"""Of each schedule seconds, round by round, and for which share of them a thread waited for a core."""


class Race:
    """One net on one runtime."""

    def __init__(self, rank: int, name: str, runtime: str) -> None:
        torch.manual_seed(0)
        net, x, target = CASES[name]()
        self.rank, self.runtime, self.batch = rank, runtime, (x, target)
        self.models: dict[int, Any] = {}
        for count in {*STAGES.values()}:
            sizes = [len(net) // count] * count
            self.models[count] = fpipe.from_sequential(net, sizes=sizes, loss=MSE)[:2]
        self.programs = {schedule: self.program(schedule, count) for schedule, count in STAGES.items()}
        self.steps = {record: {name: self.step(name, record) for name in STAGES} for record in (True, False)}

    def program(self, schedule: str, stages: int) -> fpipe.Program:
        transforms = fpipe.split(MICROBATCHES), fpipe.schedules.get(schedule)(2), fpipe.merge()
        return fpipe.chain(*transforms)(fpipe.program(self.models[stages][0]))

    def step(self, schedule: str, record: bool) -> Callable[[], Any]:
        model, params = self.models[STAGES[schedule]]
        options: Any = {"runtime": self.runtime, "record": record, "example": (params, self.batch)}
        return partial(fpipe.build(self.programs[schedule], model, **options), params, self.batch)

    def profile(self, stages: int) -> tuple[Any, float]:
        model, params = self.models[stages]
        run = partial(fpipe.profile, self.program("one_f_one_b", stages), model, params, self.batch)
        return timed(partial(run, runtime=self.runtime, repeats=5))[1:]


def timed(step: Callable[[], Any]) -> tuple[float, Any, float]:
    """Return seconds, the step's result, and the share of the time that a thread waited for a core."""
    gc.collect()
    gc.disable()
    start_delay, start = delay(), time.perf_counter()
    result = step()
    seconds, waited = time.perf_counter() - start, delay() - start_delay
    gc.enable()
    return seconds, result, waited / seconds


def run_race(rank: int, name: str, runtime: str, blocks: int) -> None:
    """Run all blocks; rank 0 prints."""
    contest = Race(rank, name, runtime)
    predicted: Times = {schedule: [] for schedule in STAGES}
    measured: Times = {schedule: [] for schedule in STAGES}
    times: dict[bool, Times] = {record: {name: [] for name in STAGES} for record in (True, False)}
    for block in range(blocks):
        costs = {stages: contest.profile(stages) for stages in contest.models}
        for schedule, stages in STAGES.items():
            makespan = fpipe.simulate(contest.programs[schedule], costs[stages][0]).makespan
            predicted[schedule].append((makespan, costs[stages][1]))
        for turn in range(ROUNDS + (block == 0)):
            for schedule in STAGES:
                for record in (True, False) if turn % 2 else (False, True):
                    if runtime == "distributed":
                        dist.barrier()
                    seconds, result, waited = timed(contest.steps[record][schedule])
                    if block or turn:
                        times[record][schedule].append((seconds, waited))
                        if record:
                            measured[schedule].append((result.timeline.makespan, waited))
    if runtime == "distributed":
        predicted, measured = slowest(predicted), slowest(measured)
        times = {record: slowest(samples) for record, samples in times.items()}
    if rank == 0:
        report(f"{name}, {runtime}", predicted, measured)
        for label, of in (("minima", min), ("medians", statistics.median)):
            ratios = [of(clean(times[True][name], 5)) / of(clean(times[False][name], 5)) for name in STAGES]
            print(f"{'':16} recorded of not, {label}: {against(statistics.median(ratios), 1.02)}", flush=True)


def slowest(times: Times) -> Times:
    """Return the longer time and the longer wait for a core of both processes."""
    tensor = torch.tensor([times[name] for name in STAGES], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return {name: [(a, b) for a, b in rows] for name, rows in zip(STAGES, tensor.tolist(), strict=True)}


def clean(samples: Sequence[tuple[float, float]], minimum: int) -> list[float]:
    """Return the times of rounds in which no thread waited for a core, or all if too few are left."""
    return [seconds for seconds, waited in samples if waited < 0.05 or not has_enough(samples, minimum)]


def has_enough(samples: Sequence[tuple[float, float]], minimum: int) -> bool:
    """Whether in at least `minimum` rounds no thread waited for a core."""
    return sum(waited < 0.05 for _, waited in samples) >= minimum


def report(name: str, predicted: Times, measured: Times) -> None:
    guess = {schedule: statistics.median(clean(samples, 2)) for schedule, samples in predicted.items()}
    took = {schedule: statistics.median(clean(samples, 5)) for schedule, samples in measured.items()}
    waits = [waited for samples in measured.values() for _, waited in samples]
    dropped, total = sum(waited >= 0.05 for waited in waits), len(waits)
    print(f"{name} ({dropped} of {total} rounds had to wait for a core)")
    errors = {schedule: abs(guess[schedule] / took[schedule] - 1) * 100 for schedule in STAGES}
    for schedule, error in errors.items():
        samples_and_minima = [(predicted[schedule], 2), (measured[schedule], 5)]
        busy = (
            ""
            if all(has_enough(*pair) for pair in samples_and_minima)
            else ", too few rounds without a wait: all count"
        )
        print(
            f"{schedule:16} predicted {guess[schedule] * 1e3:8.2f} ms, measured {took[schedule] * 1e3:8.2f} ms, least "
            f"{min(clean(measured[schedule], 5)) * 1e3:8.2f} ms: {against(error, 10.0)} % apart{busy}"
        )
    print(f"{'':16} median {against(statistics.median(errors.values()), 10.0)} % apart")
    misordered = [
        f"{fast} before {slow}"
        for fast, slow in permutations(STAGES, 2)
        if took[fast] * 1.05 < took[slow] and guess[fast] > guess[slow]
    ]
    print(f"{'':16} {'measured, not predicted: ' + ', '.join(misordered) if misordered else 'in the order predicted'}")


def work(rank: int, folder: str, blocks: int, nets: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for name in nets:
        run_race(rank, name, "distributed", blocks)
        if rank == 0:
            run_race(rank, name, "threads", blocks)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--nets", nargs="*", choices=NETS, default=NETS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, 2 if options.quick else 6, options.nets), nprocs=2, start_method="spawn")
