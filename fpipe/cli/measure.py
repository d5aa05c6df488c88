"""Profile, simulate and run programs, to compare simulated with measured times.

1F1B --profile--> costs --simulate--> ZBV: 81.2 ms        ZBV --run, record--> 83.0 ms
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fpipe.measuring.profile import profile
from fpipe.measuring.sizes import sizes
from fpipe.model import Model
from fpipe.models.from_sequential import from_sequential
from fpipe.program import Program
from fpipe.runtimes.build import build
from fpipe.schedules.notations import parse
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

Workload = tuple[Model, Any, tuple[Any, Any], Any]
"""A model, its params, a batch and state."""
LAYERS, REPEATS = 8, 5


@dataclass(frozen=True)
class Measurement:
    """A program's simulated timeline, the most bytes of a rank by `sizes`, and the timelines of its rounds."""

    name: str
    simulated: Timeline
    predicted_peak: int
    runs: Sequence[Timeline]

    @property
    def median(self) -> Timeline:
        """The round whose makespan is the median; of an even number, the shorter one in the middle."""
        return sorted(self.runs, key=lambda run: run.makespan)[(len(self.runs) - 1) // 2]

    @property
    def shortest(self) -> float:
        """Seconds of the shortest round."""
        return min(run.makespan for run in self.runs)

    @property
    def error(self) -> float:
        """The simulated makespan relative to the median, less 1."""
        return self.simulated.makespan / self.median.makespan - 1


def measure(
    names: Sequence[str],
    workload: Callable[[int], Workload],
    *,
    ranks: int,
    microbatches: int,
    runtime: Literal["threads", "distributed"],
    rounds: int,
    progress: Callable[[int, int], None],
) -> list[Measurement]:
    """Simulate each schedule with the costs that 1F1B is profiled with, and run it in rounds of one run each.

    The first round warms up and is not counted.
    """
    # 1) One model for each number of stages that a schedule has on these ranks.
    workloads = {stages: workload(stages) for stages in dict.fromkeys(stages_of(name, ranks) for name in names)}
    programs = {name: scheduled(workloads[stages_of(name, ranks)][0], name, ranks, microbatches) for name in names}
    # 2) Measure the costs of each model under 1F1B. `profile` runs two variants of the program, each once to warm up
    #    and then REPEATS times.
    profile_runs = 2 * (REPEATS + 1)
    total = profile_runs * len(workloads) + (rounds + 1) * len(names)
    costs: dict[int, Costs] = {}
    for index, (stages, (model, params, batch, state)) in enumerate(workloads.items()):
        costs[stages] = profile(
            scheduled(model, "one_f_one_b", ranks, microbatches),
            model,
            params,
            batch,
            state=state,
            repeats=REPEATS,
            runtime=runtime,
            progress=lambda done, _, done_before=index * profile_runs: progress(done_before + done, total),
        )
    # 3) Run the schedules in turn, round after round, so that a slow moment of the machine hits all of them alike.
    steps = {name: _step(program, workloads[program.stages], runtime) for name, program in programs.items()}
    runs: dict[str, list[Timeline]] = {name: [] for name in names}
    names_in_turn = [name for _ in range(rounds + 1) for name in steps]
    for done, name in enumerate(names_in_turn, profile_runs * len(workloads) + 1):
        runs[name].append(steps[name]())
        progress(done, total)
    # 4) Simulate each schedule with the costs of its model, and leave out the first round, the warm-up.
    rows: list[Measurement] = []
    for name, program in programs.items():
        model, params, batch, state = workloads[program.stages]
        peak = max(sizes(program, model, params, batch, state=state, runtime=runtime).peak)
        rows.append(Measurement(name, simulate(program, costs[program.stages]), peak, runs[name][1:]))
    return rows


def scheduled(model: Model, name: str, ranks: int, microbatches: int) -> Program:
    """Return the training step of a model under a schedule."""
    chosen = parse(name)
    transform = chosen.schedule.factory(ranks, **chosen.options)
    return chain(split(microbatches), transform, merge())(base_program(model))


def stages_of(name: str, ranks: int) -> int:
    """Return how many stages a schedule has on so many ranks."""
    chosen = parse(name)
    return chosen.stages or chosen.schedule.stage_count(ranks, chosen.options)


def _step(program: Program, workload: Workload, runtime: Literal["threads", "distributed"]) -> Callable[[], Timeline]:
    """Return a function that runs the step once and returns its timeline."""
    model, params, batch, state = workload
    example = (params, batch) if state is None else (params, batch, state)
    step = build(program, model, runtime=runtime, example=example, record=True)
    return lambda: step(params, batch, state=state).timeline


def perceptron(stages: Sequence[int], microbatches: int, width: int, rows: int) -> Callable[[int], Workload]:
    """Return a function that cuts linear layers with ReLU, at least 8, into any of these numbers of equal stages."""
    # As many layers as a common multiple of the numbers of stages, so that all schedules run the same net.
    common_stages = math.lcm(*stages)
    layers = common_stages * -(-LAYERS // common_stages)
    # Every process makes the same parameters.
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    batch = torch.randn(rows * microbatches, width), torch.randn(rows * microbatches, width)

    def cut_into(count: int) -> Workload:
        model, params, _ = from_sequential(net, sizes=[layers // count] * count, loss=nn.functional.mse_loss)
        return model, params, batch, None

    return cut_into
