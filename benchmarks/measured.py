"""How far simulation with profiled costs is from measured makespans, and what recording a step costs.

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
from step import MICROBATCHES, within

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
        how: Any = {"runtime": self.runtime, "record": record, "example": (params, self.batch)}
        return partial(fpipe.build(self.programs[schedule], model, **how), params, self.batch)

    def profile(self, stages: int) -> tuple[Any, float]:
        model, params = self.models[stages]
        how: Any = {"runtime": self.runtime, "repeats": 5}
        return timed(partial(fpipe.profile, self.program("one_f_one_b", stages), model, params, self.batch, **how))[1:]


def timed(step: Callable[[], Any]) -> tuple[float, Any, float]:
    """Seconds, what the step returns, and for which share of the time a thread waited for a core."""
    gc.collect()
    gc.disable()
    before, start = delay(), time.perf_counter()
    found = step()
    seconds, waited = time.perf_counter() - start, delay() - before
    gc.enable()
    return seconds, found, waited / seconds


def race(rank: int, name: str, runtime: str, blocks: int) -> None:
    """All blocks; rank 0 prints."""
    entries = Race(rank, name, runtime)
    predicted: Times = {schedule: [] for schedule in STAGES}
    measured: Times = {schedule: [] for schedule in STAGES}
    times: dict[bool, Times] = {on: {name: [] for name in STAGES} for on in (True, False)}
    for block in range(blocks):
        costs = {stages: entries.profile(stages) for stages in entries.models}
        for schedule, stages in STAGES.items():
            found = fpipe.simulate(entries.programs[schedule], costs[stages][0]).makespan
            predicted[schedule].append((found, costs[stages][1]))
        for turn in range(ROUNDS + (block == 0)):
            for schedule in STAGES:
                for record in (True, False) if turn % 2 else (False, True):
                    if runtime == "distributed":
                        dist.barrier()
                    seconds, result, waited = timed(entries.steps[record][schedule])
                    if block or turn:
                        times[record][schedule].append((seconds, waited))
                        if record:
                            measured[schedule].append((result.timeline.makespan, waited))
    if runtime == "distributed":
        predicted, measured = slowest(predicted), slowest(measured)
        times = {record: slowest(found) for record, found in times.items()}
    if rank == 0:
        report(f"{name}, {runtime}", predicted, measured)
        for label, of in (("minima", min), ("medians", statistics.median)):
            each = [of(clean(times[True][name], 5)) / of(clean(times[False][name], 5)) for name in STAGES]
            print(f"{'':16} recorded of not, {label}: {within(statistics.median(each), 1.02)}", flush=True)


def slowest(found: Times) -> Times:
    """Of both processes the longer time, and the longer wait for a core."""
    whole = torch.tensor([found[name] for name in STAGES], dtype=torch.float64)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return {name: [(a, b) for a, b in rows] for name, rows in zip(STAGES, whole.tolist(), strict=True)}


def clean(found: Sequence[tuple[float, float]], least: int) -> list[float]:
    """The times of rounds in which no thread waited for a core; all if too few are left."""
    return [seconds for seconds, waited in found if waited < 0.05 or not enough(found, least)]


def enough(found: Sequence[tuple[float, float]], least: int) -> bool:
    """Whether so many rounds are left in which no thread waited for a core."""
    return sum(waited < 0.05 for _, waited in found) >= least


def report(name: str, predicted: Times, measured: Times) -> None:
    told = {schedule: statistics.median(clean(found, 2)) for schedule, found in predicted.items()}
    took = {schedule: statistics.median(clean(found, 5)) for schedule, found in measured.items()}
    waits = [waited for found in measured.values() for _, waited in found]
    dropped, every = sum(waited >= 0.05 for waited in waits), len(waits)
    print(f"{name} ({dropped} of {every} rounds had to wait for a core)")
    apart = {schedule: abs(told[schedule] / took[schedule] - 1) * 100 for schedule in STAGES}
    for schedule, off in apart.items():
        rounds = [(predicted[schedule], 2), (measured[schedule], 5)]
        busy = (
            "" if all(enough(found, least) for found, least in rounds) else ", too few rounds without a wait: all count"
        )
        print(
            f"{schedule:16} predicted {told[schedule] * 1e3:8.2f} ms, measured {took[schedule] * 1e3:8.2f} ms, least "
            f"{min(clean(measured[schedule], 5)) * 1e3:8.2f} ms: {within(off, 10.0)} % apart{busy}"
        )
    print(f"{'':16} median {within(statistics.median(apart.values()), 10.0)} % apart")
    odd = [
        f"{one} before {other}"
        for one, other in permutations(STAGES, 2)
        if took[one] * 1.05 < took[other] and told[one] > told[other]
    ]
    print(f"{'':16} {'measured, not predicted: ' + ', '.join(odd) if odd else 'in the order predicted'}")


def work(rank: int, folder: str, blocks: int, nets: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for name in nets:
        race(rank, name, "distributed", blocks)
        if rank == 0:
            race(rank, name, "threads", blocks)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--nets", nargs="*", choices=NETS, default=NETS)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, 2 if said.quick else 6, said.nets), nprocs=2, start_method="spawn")
