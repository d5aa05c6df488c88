"""Profile, simulate and run programs: what was predicted of each, and what was measured.

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
from fpipe.schedules.named import parse
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.training import program as base_program
from fpipe.transforms.chain import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split

Made = tuple[Model, Any, tuple[Any, Any], Any]
"""A model, its params, a batch and state."""
LAYERS, REPEATS = 8, 5


@dataclass(frozen=True)
class Measurement:
    """A program: its simulated timeline, the most bytes that a rank was told to hold, and those of the rounds."""

    name: str
    simulated: Timeline
    told: int
    runs: Sequence[Timeline]

    @property
    def median(self) -> Timeline:
        """The round whose makespan is the median; of an even number, the shorter one in the middle."""
        return sorted(self.runs, key=lambda run: run.makespan)[(len(self.runs) - 1) // 2]

    @property
    def least(self) -> float:
        """Seconds of the shortest round."""
        return min(run.makespan for run in self.runs)

    @property
    def off(self) -> float:
        """How far the simulated makespan is from the median, as a share of that."""
        return self.simulated.makespan / self.median.makespan - 1


def measure(
    names: Sequence[str],
    made: Callable[[int], Made],
    *,
    ranks: int,
    microbatches: int,
    runtime: Literal["threads", "distributed"],
    rounds: int,
    progress: Callable[[int, int], None],
) -> list[Measurement]:
    """Each schedule's simulated timeline, with costs that 1F1B was profiled with, and those of its rounds, after one
    that is not counted; a round runs every schedule once."""
    given = {stages: made(stages) for stages in dict.fromkeys(stages_of(name, ranks) for name in names)}
    programs = {name: scheduled(given[stages_of(name, ranks)][0], name, ranks, microbatches) for name in names}
    profiled = 2 * (REPEATS + 1)
    every = profiled * len(given) + (rounds + 1) * len(names)
    costs: dict[int, Costs] = {}
    for at, (stages, (model, params, batch, state)) in enumerate(given.items()):
        costs[stages] = profile(
            scheduled(model, "one_f_one_b", ranks, microbatches),
            model,
            params,
            batch,
            state=state,
            repeats=REPEATS,
            runtime=runtime,
            progress=lambda done, _, before=at * profiled: progress(before + done, every),
        )
    steps = {name: _step(program, given[program.stages], runtime) for name, program in programs.items()}
    runs: dict[str, list[Timeline]] = {name: [] for name in names}
    turns = [name for _ in range(rounds + 1) for name in steps]
    for done, name in enumerate(turns, profiled * len(given) + 1):
        runs[name].append(steps[name]())
        progress(done, every)
    rows: list[Measurement] = []
    for name, program in programs.items():
        model, params, batch, state = given[program.stages]
        told = max(sizes(program, model, params, batch, state=state, runtime=runtime).peak)
        rows.append(Measurement(name, simulate(program, costs[program.stages]), told, runs[name][1:]))
    return rows


def scheduled(model: Model, name: str, ranks: int, microbatches: int) -> Program:
    """The training step of a model under a schedule."""
    chosen = parse(name)
    transform = chosen.schedule.factory(ranks, **chosen.options)
    return chain(split(microbatches), transform, merge())(base_program(model))


def stages_of(name: str, ranks: int) -> int:
    """How many stages a schedule has here."""
    chosen = parse(name)
    return chosen.stages or chosen.schedule.wants(ranks, chosen.options)


def _step(program: Program, made: Made, runtime: Literal["threads", "distributed"]) -> Callable[[], Timeline]:
    """Run once, and tell when everything happened."""
    model, params, batch, state = made
    example = (params, batch) if state is None else (params, batch, state)
    step = build(program, model, runtime=runtime, example=example, record=True)
    return lambda: step(params, batch, state=state).timeline


def perceptron(stages: Sequence[int], microbatches: int, width: int, rows: int) -> Callable[[int], Made]:
    """Linear layers with ReLU, as many a stage and the same for each of some numbers of stages: at least 8."""
    most = math.lcm(*stages)
    layers = most * -(-LAYERS // most)
    torch.manual_seed(0)  # every process has the same
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    batch = torch.randn(rows * microbatches, width), torch.randn(rows * microbatches, width)

    def made(count: int) -> Made:
        model, params, _ = from_sequential(net, sizes=[layers // count] * count, loss=nn.functional.mse_loss)
        return model, params, batch, None

    return made
