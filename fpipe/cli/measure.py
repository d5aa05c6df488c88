"""Race schedules on processes: profile, simulate and run each, over sweeps of microbatches, length and memory cap.

1F1B --profile--> costs --simulate--> zbv: 81.2 ms        zbv --run--> 83.0 ms, from barrier to the slowest rank's end
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from fpipe.cli.options import call_with_sizes, checked_model, function
from fpipe.cli.race_nets import gpt_block
from fpipe.cli.sweep import HEADS, Sweep, parse_entrant
from fpipe.measuring.profile import MeasuredModel, profile
from fpipe.measuring.sizes import sizes
from fpipe.model import Model
from fpipe.models.from_sequential import from_sequential
from fpipe.program import Program, ProgramError
from fpipe.runtimes.build import build
from fpipe.schedules.compare import parts_of_a_rank, share_costs
from fpipe.schedules.notations import NamedSchedule, parse
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

BLOCKS, REPEATS = 8, 5
Step = Callable[[], Timeline | None]


@dataclass(frozen=True)
class RaceRow:
    """The numbers of one schedule in one setting, or the reason why it has none.

    Attributes:
        schedule: its name.
        microbatches, length, memory_cap: the setting.
        tokens: of a step.
        simulated: its timeline with the profiled costs.
        predicted_peak: the most bytes of a rank by `fpipe.sizes`.
        seconds: of each round, of the slowest rank.
        measured: the timeline of the median round; None for torch's runtime, which records none.
        reason: why nothing was measured.
    """

    schedule: str
    microbatches: int
    length: int
    memory_cap: float | None
    tokens: int = 0
    simulated: Timeline | None = None
    predicted_peak: int = 0
    seconds: Sequence[float] = ()
    measured: Timeline | None = None
    reason: str = ""

    @property
    def median(self) -> float:
        """Seconds of the median round; of an even number, the shorter one in the middle."""
        return self.seconds[median_round(self.seconds)]

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers of the table by name; None for unknown ones."""
        if self.simulated is None:
            return {}
        makespan, measured = self.simulated.makespan, self.measured
        return {
            "ms": 1e3 * self.median,
            "least ms": 1e3 * min(self.seconds),
            "simulated ms": 1e3 * makespan,
            "tokens/s": self.tokens / self.median,
            "simulated tokens/s": self.tokens / makespan,
            "off": makespan / self.median - 1,
            "bubble": None if measured is None else measured.bubble,
            "simulated bubble": self.simulated.bubble,
            "MiB": None if measured is None else max(measured.peak) / 2**20,
            "predicted MiB": self.predicted_peak / 2**20,
        }


def median_round(seconds: Sequence[float]) -> int:
    """Return the index of the median round.

    >>> median_round([3.0, 1.0, 2.0, 9.0])
    2
    """
    return sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]


class RacedModel(NamedTuple):
    """A model, the arguments of its step, the tokens of a step, and the net that the model was cut from, if any."""

    model: Model
    params: Any
    batch: tuple[Any, Any]
    state: Any
    tokens: int
    net: nn.Sequential | None = None


@dataclass
class Contest:
    """A program on fpipe's runtime or torch's, with the seconds and timelines of its rounds."""

    program: Program
    torch_class: str | None
    raced_model: RacedModel
    seconds: list[float] = field(default_factory=list[float])
    timelines: list[Timeline | None] = field(default_factory=list[Timeline | None])


def race(sweep: Sweep, progress: Callable[[int, int, str], None]) -> Generator[list[RaceRow]]:
    """Yield the rows of each setting; all processes of the default group call this alike.

    Args:
        sweep: what to run.
        progress: called as `progress(done, all, what)` after each run.
    """
    for microbatches, length in product(sweep.microbatches, sweep.lengths):
        yield SettingRace(sweep, microbatches, length, progress).run()


class SettingRace:
    """The race of all schedules with one number of microbatches and one length."""

    def __init__(self, sweep: Sweep, microbatches: int, length: int, progress: Callable[[int, int, str], None]) -> None:
        self.sweep, self.microbatches, self.length, self.progress = sweep, microbatches, length, progress
        self.entrants, ranks = {name: parse_entrant(name) for name in sweep.names}, dist.get_world_size()
        self.stages = {
            name: named.stages or named.schedule.stage_count(ranks, named.options)
            for name, (named, _) in self.entrants.items()
        }
        # A model need not serve every number of stages.
        self.models, self.refusals = dict[int, RacedModel](), dict[int, str]()
        make = model_maker(sweep, sorted({*self.stages.values()}), microbatches, length)
        for stages in dict.fromkeys(self.stages.values()):
            try:
                self.models[stages] = make(stages)
            except ValueError as error:
                self.refusals[stages] = str(error)

    def run(self) -> list[RaceRow]:
        """Return a row for each memory cap and schedule."""
        costs = self._profile()
        rows: list[tuple[RaceRow, Contest | None]] = []
        contests = dict[tuple[str | None, Program], Contest]()
        steps: list[tuple[Contest, Step]] = []
        # 1) Build steps; a program that serves several caps runs once.
        for name, cap, program in self._programs(costs):
            row = RaceRow(name, self.microbatches, self.length, cap)
            if isinstance(program, str):
                rows.append((replace(row, reason=program), None))
                continue
            torch_class, raced_model = self.entrants[name][1], self.models[program.stages]
            contest = contests.get((torch_class, program)) or Contest(program, torch_class, raced_model)
            try:
                if (torch_class, program) not in contests:
                    steps.append((contest, warmed_step(contest)))
            # What is refused is refused on all ranks; another error ends the race.
            except ValueError as error:
                rows.append((replace(row, reason=str(error)), None))
                continue
            contests[torch_class, program] = contest
            rows.append((row, contest))
        # 2) Run in turn, round after round, so that a slow moment of the machine hits all of them alike.
        for run_count, (_, (contest, step)) in enumerate(product(range(self.sweep.rounds), steps), 1):
            seconds, timeline = time_step(step)
            contest.seconds.append(seconds)
            contest.timelines.append(timeline)
            self.progress(run_count, self.sweep.rounds * len(steps), "run")
        # 3) Simulate with the costs of the model.
        return [row if contest is None else measured_row(row, contest, costs) for row, contest in rows]

    def _profile(self) -> dict[int, Costs]:
        """Return the costs of each model under 1F1B, by its number of stages."""
        # `profile` runs two variants of the program, each once to warm up and then REPEATS times.
        runs, costs = 2 * (REPEATS + 1), dict[int, Costs]()
        for index, (stages, raced_model) in enumerate(self.models.items()):
            program = schedule_model(parse("one_f_one_b"), raced_model.model, self.microbatches, {})
            costs[stages] = profile(
                *(program, raced_model.model, raced_model.params, raced_model.batch),
                state=raced_model.state,
                repeats=REPEATS,
                runtime="distributed",
                progress=lambda run_count, _, first_run=index * runs: self.progress(
                    first_run + run_count, runs * len(self.models), "profile"
                ),
            )
        return costs

    def _programs(self, costs: Mapping[int, Costs]) -> list[tuple[str, float | None, Program | str]]:
        """Return the name, cap and program of each row, or why it has none; the first rank makes all."""
        rows: list[tuple[str, float | None, Program | str]] = []
        # A schedule that searches until a time is over may end otherwise on another rank.
        for cap, name in product(self.sweep.memory_caps, self.entrants) if dist.get_rank() == 0 else ():
            stages, named = self.stages[name], self.entrants[name][0]
            defaults: dict[str, Any] = {} if cap is None else {"memory_cap": cap, "cap": cap}
            try:
                if stages in self.refusals:
                    raise ProgramError(self.refusals[stages])
                defaults["costs"] = costs[stages]
                program = schedule_model(named, self.models[stages].model, self.microbatches, defaults)
                refuse_above_cap(program, cap)
            except ValueError as error:
                rows.append((name, cap, str(error)))
            else:
                rows.append((name, cap, program))
        shared = [rows]
        dist.broadcast_object_list(shared, 0)
        return shared[0]


def schedule_model(named: NamedSchedule, model: Model, microbatches: int, defaults: Mapping[str, Any]) -> Program:
    """Return the step of a model under a schedule, whose parameters have these defaults."""
    # A cap or costs reach the schedules that have a parameter for them; an option behind the name comes first.
    factory = named.schedule.factory
    options = {name: defaults[name] for name in signature(factory).parameters if name in defaults} | named.options
    return chain(split(microbatches), factory(dist.get_world_size(), **options), merge())(base_program(model))


def refuse_above_cap(program: Program, cap: float | None) -> None:
    """Raise ProgramError if a rank holds more microbatches than a cap, where its share of one is 1."""
    if cap is None:
        return
    peak = max(simulate(program, share_costs(Costs(), parts_of_a_rank(program), program.slices)).peak)
    # Shares of a rank's stages add up to a whole microbatch but for rounding.
    if peak > cap + 1e-9:
        raise ProgramError(f"a rank holds {peak:g} microbatches, more than the cap of {cap:g}.")


def warmed_step(contest: Contest) -> Step:
    """Build the step of a contest, and run it once."""
    program, (model, params, batch, state, _, net) = contest.program, contest.raced_model
    if contest.torch_class is None:
        example = (params, batch) if state is None else (params, batch, state)
        run = build(program, model, runtime="distributed", example=example, record=True)

        def step() -> Timeline | None:
            return run(params, batch, state=state).timeline
    else:
        if net is None:
            raise ValueError("torch's classes run a net: let --model return (nn.Sequential, loss, batch).")
        step = torch_step(contest.torch_class, program, net, batch, model.loss)
    step()
    return step


def torch_step(
    torch_class: str, program: Program, net: nn.Sequential, batch: tuple[Any, Any], loss: Any
) -> Callable[[], None]:
    """Build the step of a class of torch.distributed.pipelining, with the parts of a net where a program has stages."""
    rank, size = dist.get_rank(), len(net) // program.stages
    homes = [index for index, home in enumerate(program.placement) if home == rank]
    # A slice of a Sequential shares its modules, so torch and fpipe train the same memory.
    parts = [net[index * size : (index + 1) * size] for index in homes]
    device = torch.device("cpu")
    stages: Any = [PipelineStage(part, index, program.stages, device) for index, part in zip(homes, parts, strict=True)]
    schedule_class: Any = get_schedule_class(torch_class)
    local_stages = stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages
    schedule = schedule_class(local_stages, program.microbatches, loss_fn=loss)
    inputs = batch[:1] if 0 in homes else ()
    targets = {"target": batch[1]} if program.stages - 1 in homes else {}

    def step() -> None:
        # Torch adds to the gradients of the step before.
        for part in parts:
            part.zero_grad()
        schedule.step(*inputs, **targets, return_outputs=False)

    return step


def time_step(step: Step) -> tuple[float, Timeline | None]:
    """Return the seconds of a step from a barrier to the end of the slowest rank, and its timeline."""
    # A collection inside a step would count as its time.
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    timeline = step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), timeline


def measured_row(row: RaceRow, contest: Contest, costs: Mapping[int, Costs]) -> RaceRow:
    """Return a row with its numbers."""
    program, (model, params, batch, state, tokens, _) = contest.program, contest.raced_model
    return replace(
        row,
        tokens=tokens,
        simulated=simulate(program, costs[program.stages]),
        predicted_peak=max(sizes(program, model, params, batch, state=state, runtime="distributed").peak),
        seconds=tuple(contest.seconds),
        measured=contest.timelines[median_round(contest.seconds)],
    )


def model_maker(
    sweep: Sweep, stage_counts: Sequence[int], microbatches: int, length: int
) -> Callable[[int], RacedModel]:
    """Return a function that cuts one net into any of these numbers of stages: a user's, or blocks of a GPT."""
    # Every process makes the same parameters.
    torch.manual_seed(0)
    if sweep.model is not None:
        return partial(_user_model, function(sweep.model), microbatches, length)
    # As many blocks as a common multiple of the numbers of stages, so that all schedules run the same net.
    common_stages = math.lcm(*stage_counts)
    blocks = common_stages * -(-BLOCKS // common_stages)
    net = nn.Sequential(*(gpt_block(sweep.width, HEADS) for _ in range(blocks)))
    shape = sweep.rows * microbatches, length, sweep.width
    batch, tokens = (torch.randn(shape), torch.randn(shape)), shape[0] * length
    return partial(_cut_net, net, nn.functional.mse_loss, batch, tokens)


def _cut_net(net: nn.Sequential, loss: Any, batch: tuple[Any, Any], tokens: int, stages: int) -> RacedModel:
    if len(net) % stages:
        raise ValueError(f"the net of --model has {len(net)} modules, which {stages} stages cannot share equally.")
    model, params, state = from_sequential(net, sizes=[len(net) // stages] * stages, loss=loss)
    return RacedModel(model, params, batch, state if any(state) else None, tokens, net)


def _user_model(make: Callable[..., Any], microbatches: int, length: int, stages: int) -> RacedModel:
    """Call the function of --model, and return its model, or its net in that many stages."""
    torch.manual_seed(0)
    returned = call_with_sizes(make, stages=stages, microbatches=microbatches, length=length)
    tokens_of_row = length if "length" in signature(make).parameters else 1
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], nn.Sequential):
        net, loss, batch = returned
        return _cut_net(net, loss, batch, len(batch[0]) * tokens_of_row, stages)
    model, params, batch, state = checked_model(returned)
    if len(model.stages) != stages:
        raise ValueError(
            f"--model returns a model of {len(model.stages)} stages, and a schedule wants {stages}. Let it take "
            f"stages, or say NAME:stages={len(model.stages)}."
        )
    return RacedModel(model, params, batch, state, MeasuredModel(model, params, batch, state).rows * tokens_of_row)
