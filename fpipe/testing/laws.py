"""Check a schedule against every law, over sizes and drawn models.

A program of the schedule is complete, legal and within time bounds at every size, and has the gradients of autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from fpipe.check import check
from fpipe.limits import is_transform
from fpipe.meaning.from_functions import from_functions
from fpipe.model import Model, Source, as_stage_input
from fpipe.pictures.plot import plot
from fpipe.program import Program, ProgramError, parts_of
from fpipe.schedules.registry import Schedule, about
from fpipe.timing.bounds import bounds
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.checkpoint import Policy, checkpoint
from fpipe.transforms.communicate import communicate, free
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program
from fpipe.verification.verify import verify

T = TypeVar("T")
COSTS = (Costs(), Costs(forward=2, backward_input=3, backward_weight=1, transfer=0.5))
POLICIES: tuple[Policy, ...] = ("never", "except_last", "always")


class BrokenLaw(AssertionError):
    """A schedule breaks a law; the message names the law and the size, and draws the grid.

    >>> from fpipe.schedules import from_table
    >>> check_schedule(lambda ranks: from_table("0F0 0B0"), ranks=[1], microbatches=[1, 2])
    Traceback (most recent call last):
    fpipe.testing.laws.BrokenLaw: <lambda> at ranks=1, microbatches=2, stages=1: it makes a program of these sizes.
      the table does not name 0F1; every F and every backward is named once.
    """


class Size(NamedTuple):
    """The numbers of ranks, microbatches and stages."""

    ranks: int
    microbatches: int
    stages: int

    def __str__(self) -> str:
        return f"ranks={self.ranks}, microbatches={self.microbatches}, stages={self.stages}"


@dataclass(frozen=True)
class Checked:
    """The sizes that `check_schedule` has tried, and the number of models.

    >>> print(Checked((Size(1, 1, 1), Size(1, 2, 1)), 50))
    2 sizes complete, legal and within bounds, 50 models with the gradients of plain autograd, bit by bit
    """

    sizes: tuple[Size, ...]
    models: int

    def __str__(self) -> str:
        return (
            f"{len(self.sizes)} sizes complete, legal and within bounds, {self.models} models with the gradients of "
            "plain autograd, bit by bit"
        )


def check_schedule(
    schedule: str | Callable[[int], Transform],
    *,
    ranks: Iterable[int] = range(1, 5),
    microbatches: Iterable[int] = range(1, 9),
    stages_per_rank: int | Callable[[int], int] | None = None,
    serves: Callable[[int, int], bool] | None = None,
    examples: int = 50,
) -> Checked:
    """Check a schedule against every law.

    At every size: it makes a program; the program has each F and each backward once and all results; it is legal with
    transfers and frees; it takes no less time than a lower bound. On drawn sizes and models (skips, ties, recompute and
    transfers among them) its loss and gradients are bitwise those of plain autograd.

    Args:
        schedule: `f(ranks) -> Transform`, or the name of a registered schedule.
        ranks, microbatches: the sizes to try.
        stages_per_rank: stages on each rank, or `f(ranks)`, those of all ranks together; by default what the name is
            registered with, or 1.
        serves: `f(ranks, microbatches)`, whether it serves these sizes; by default what the registry says of a name,
            else all.
        examples: the number of models.

    Returns:
        The sizes and the number of models.

    Raises:
        BrokenLaw: the first law that does not hold, at the smallest size, with the grid.
        TypeError: a transform in the place of the function that makes it.

    >>> import fpipe
    >>> print(check_schedule(fpipe.schedules.one_f_one_b, ranks=[1, 2], microbatches=[1, 3], examples=5))
    4 sizes complete, legal and within bounds, 5 models with the gradients of plain autograd, bit by bit
    """
    if is_transform(schedule):
        raise TypeError("a schedule is a function of ranks; found a transform. Hand in lambda ranks: ...")
    registered = about(schedule) if isinstance(schedule, str) else None
    factory = schedule if callable(schedule) else about(schedule).factory
    name = schedule if isinstance(schedule, str) else getattr(factory, "__name__", repr(factory))
    # A schedule that nobody has registered has one stage a rank.
    counted = registered or Schedule(name, factory)
    counted = counted if stages_per_rank is None else Schedule(name, factory, stages_per_rank)
    sizes = [Size(p, m, counted.stage_count(p, {})) for p in ranks for m in microbatches]
    if serves is not None:
        sizes = [size for size in sizes if serves(size.ranks, size.microbatches)]
    elif registered is not None:
        sizes = [size for size in sizes if registered.refuses(size.ranks, size.stages, size.microbatches) is None]
    if not sizes:
        raise ValueError("no size to try: say other ranks=, microbatches= or serves=.")
    laws = _Laws(name, factory)
    # In ascending order, so that the first broken law is shown at the smallest size.
    for size in sorted(sizes):
        laws.check_size(size)
    laws.check_gradients(sorted(sizes), examples)
    return Checked(tuple(sizes), examples)


@dataclass(frozen=True)
class _Laws:
    """The laws of one schedule, at any size."""

    name: str
    factory: Callable[[int], Transform]

    def program(self, size: Size, base: Program | None = None) -> Program:
        """Return a split program under the schedule, not merged."""
        cut = split(size.microbatches)(base_program(size.stages) if base is None else base)
        return self.attempt(size, "it makes a program of these sizes", lambda: self.factory(size.ranks)(cut))

    def check_size(self, size: Size) -> None:
        """Check that a program is complete, uses all ranks, is legal, and takes no less time than a lower bound."""
        base, program = base_program(size.stages), self.program(size)
        split_program = split(size.microbatches)(base)
        # Complete: the schedule moves the ops of the split program, and neither drops nor repeats one.
        expected_cells, cells = _cells(split_program), _cells(program)
        missing, repeated = expected_cells - cells, cells - expected_cells
        if missing or repeated:
            names = ", ".join(f"{stage}{kind}{index}" for kind, stage, index, _ in sorted(missing or repeated))
            self.fail(size, "it is complete", f"{names} {'is missing' if missing else 'stands too often'}.", program)
        results, expected_results = ({end.name for end in merge()(p).outputs} for p in (program, split_program))
        missing_results = expected_results - results
        if missing_results:
            self.fail(size, "it is complete", f"the result {min(map(str, missing_results))} is lost.", program)
        if program.ranks != size.ranks:
            self.fail(size, "it uses every rank", f"the program is on {program.ranks} ranks.", program)
        # Legal: with transfers and frees explicit, `check` sees each value sent once, received once and freed last.
        with_transfers_and_frees = chain(merge(), communicate(), free())
        self.attempt(
            size, "it is legal with transfers and frees", lambda: check(with_transfers_and_frees(program)), program
        )
        for costs in COSTS:
            timeline, bound = simulate(program, costs), bounds(program, costs)
            # Faster than a lower bound means that the simulation or the bound is wrong; 1e-9 s is for rounding.
            if timeline.makespan < bound.makespan - 1e-9 or timeline.span < bound.span - 1e-9:
                reason = f"{timeline} with {costs}, but the bounds are\n{bound}"
                self.fail(size, "it takes no less time than a lower bound", reason, program)

    def check_gradients(self, sizes: list[Size], examples: int) -> None:
        """Compare loss and gradients of drawn models at drawn sizes, the smallest first."""
        random = Random(0)  # the same models each time, so that a broken law can be reproduced
        for size in sorted(random.choices(sizes, k=examples)):
            net = DrawnModel.draw(random, size.stages)
            model = net.model
            # Recompute and transfers change which ops a stage's gradient comes from, and must not change its bits.
            policy, is_sent = random.choice(POLICIES), random.choice([False, True])
            rows = random.randint(size.microbatches, 2 * size.microbatches)
            transfers = (communicate(), free()) if is_sent else ()
            program = chain(checkpoint(policy), merge(), *transfers)(self.program(size, base_program(model)))
            law = f"its gradients on {net}, {rows} rows, are those of plain autograd"
            self.attempt(size, law, partial(verify, program, model, net.params(), net.batch(rows)), program)

    def attempt(self, size: Size, law: str, reading: Callable[[], T], program: Program | None = None) -> T:
        """Take a reading, or name the law that its error breaks."""
        try:
            return reading()
        except Exception as error:
            # A ProgramError says by itself what is wrong; any other error needs the name of its class.
            kind = "" if isinstance(error, ProgramError | AssertionError) else f"{type(error).__name__}: "
            self.fail(size, law, f"{kind}{error}", program, error)

    def fail(
        self, size: Size, law: str, reason: str, program: Program | None = None, cause: Exception | None = None
    ) -> NoReturn:
        """Raise BrokenLaw with the reason and the grid."""
        reason = reason.replace("\n", "\n  ")
        grid = f"\n{plot(program)}" if program is not None else ""
        raise BrokenLaw(f"{self.name} at {size}: {law}.\n  {reason}{grid}") from cause


WIDTH = 4


def _stage(params: dict[str, Tensor], x: Tensor | tuple[Tensor, ...]) -> Tensor:
    inputs = x if isinstance(x, tuple) else (x,)
    return torch.tanh(sum(inputs[1:], inputs[0]) @ params["w"])


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


@dataclass(frozen=True)
class DrawnModel:
    """A model of stages tanh((x + ..) @ w): the inputs of each, and the stages that share their weight."""

    inputs: tuple[Source | tuple[Source, ...], ...]
    tied: tuple[int, ...]

    @classmethod
    def draw(cls, random: Random, stages: int) -> DrawnModel:
        """Draw the inputs of each stage, the batch or earlier stages; every stage but the last has a reader."""
        inputs: list[list[Source]] = []
        for stage in range(stages):
            sources: list[Source] = ["batch", *range(stage)]
            inputs += [random.choices(sources, k=random.randint(1, 3 if stage else 1))]
        # An output that nobody reads is an error of the model: the next stage reads it.
        for stage in range(stages - 1):
            if not any(stage in sources for sources in inputs):
                inputs[stage + 1].append(stage)
        tied = sorted(random.sample(range(stages), random.randint(0, stages)))
        return cls(tuple([as_stage_input(sources) for sources in inputs]), tuple(tied) if len(tied) > 1 else ())

    @property
    def model(self) -> Model:
        """The model, with its ties."""
        ties = [[(stage, "w") for stage in self.tied]] if self.tied else []
        return from_functions([_stage] * len(self.inputs), _loss, inputs=self.inputs, ties=ties)

    def params(self) -> tuple[dict[str, Tensor], ...]:
        """Draw its parameters; a tied weight is in the first stage that reads it."""
        generator = torch.Generator().manual_seed(0)
        weights = [0.5 * torch.randn(WIDTH, WIDTH, generator=generator) for _ in self.inputs]
        return tuple({} if stage in self.tied[1:] else {"w": weight} for stage, weight in enumerate(weights))

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def _cells(program: Program) -> Counter[tuple[str, int | None, int | None, int | None]]:
    """Count each forward and each backward; an I counts as its backward."""
    names = {"F": "F", "B": "B", "I": "B"}
    return Counter((names[op.kind], *op[1:4]) for op in parts_of(program.ops) if op.kind in names)
