"""Take a schedule through every law, over sizes and models: what it must keep to be worth drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fpipe.check import check
from fpipe.pictures.plot import plot
from fpipe.program import Program, ProgramError, parts_of
from fpipe.schedules.registry import about
from fpipe.testing.drawn_models import models
from fpipe.timing.bounds import bounds
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.chain import chain
from fpipe.transforms.checkpoint import Policy, checkpoint
from fpipe.transforms.communicate import communicate
from fpipe.transforms.free import free
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.verification.verify import verify

T = TypeVar("T")
COSTS = (Costs(), Costs(forward=2, backward_input=3, backward_weight=1, transfer=0.5))
POLICIES: tuple[Policy, ...] = ("never", "except_last", "always")


class BrokenLaw(AssertionError):
    """A schedule that breaks a law; the message says which, at which size, and draws the grid.

    >>> from fpipe.schedules import from_table
    >>> check_schedule(lambda ranks: from_table("0F0 0B0"), ranks=[1], microbatches=[1, 2])
    Traceback (most recent call last):
    fpipe.testing.laws.BrokenLaw: <lambda> at ranks=1, microbatches=2, stages=1: it makes a program of these sizes.
      the table does not name 0F1; every F and every backward is named once.
    """


class Size(NamedTuple):
    """Ranks, microbatches and stages."""

    ranks: int
    microbatches: int
    stages: int

    def __str__(self) -> str:
        return f"ranks={self.ranks}, microbatches={self.microbatches}, stages={self.stages}"


@dataclass(frozen=True)
class Checked:
    """The trials of `check_schedule`: the sizes, and how many models.

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
    stages_per_rank: int | None = None,
    serves: Callable[[int, int], bool] | None = None,
    examples: int = 50,
) -> Checked:
    """Take a schedule of your own through every law.

    At every size: it makes a program; the program has each F and each backward once and all results; it is legal with
    transfers and frees; it takes no less time than a lower bound. On drawn sizes and models (skips, ties, recompute and
    transfers among them) its loss and gradients are bitwise those of plain autograd.

    Args:
        schedule: `f(ranks) -> Transform`, or the name of a registered schedule.
        ranks, microbatches: the sizes to try.
        stages_per_rank: stages on each rank; by default what the name is registered with, or 1.
        serves: `f(ranks, microbatches)`, whether it serves these sizes; by default what the registry says of a name,
            else all.
        examples: how many models.

    Returns:
        What was tried.

    Raises:
        BrokenLaw: the first law that does not hold, at the smallest size, with the grid.

    >>> import fpipe
    >>> print(check_schedule(fpipe.schedules.one_f_one_b, ranks=[1, 2], microbatches=[1, 3], examples=5))
    4 sizes complete, legal and within bounds, 5 models with the gradients of plain autograd, bit by bit
    """
    found = about(schedule) if isinstance(schedule, str) else None
    factory = schedule if callable(schedule) else about(schedule).factory
    name = schedule if isinstance(schedule, str) else getattr(factory, "__name__", repr(factory))
    each = stages_per_rank or (found.stages_per_rank if found else 1)
    tried = [Size(p, m, p * each) for p in ranks for m in microbatches]
    if serves is not None:
        tried = [size for size in tried if serves(size.ranks, size.microbatches)]
    elif found is not None:
        tried = [size for size in tried if found.refuses(size.ranks, size.stages, size.microbatches) is None]
    if not tried:
        raise ValueError("there is no size to try: say other ranks=, microbatches= or serves=.")
    schedules = _Schedules(name, factory)
    for size in sorted(tried):
        schedules.complete_and_legal(size)
    schedules.gradients(sorted(tried), examples)
    return Checked(tuple(tried), examples)


@dataclass(frozen=True)
class _Schedules:
    """The schedule at any size, and the laws."""

    name: str
    factory: Callable[[int], Transform]

    def program(self, size: Size, base: Program | None = None) -> Program:
        """A split program under the schedule, not merged."""
        cut = split(size.microbatches)(base_program(size.stages) if base is None else base)
        return self.kept(size, "it makes a program of these sizes", lambda: self.factory(size.ranks)(cut))

    def complete_and_legal(self, size: Size) -> None:
        """All ops once, all results, on all ranks; and no op that waits for ever or reads what is gone."""
        base, program = base_program(size.stages), self.program(size)
        cut = split(size.microbatches)(base)
        missing, twice = _scheduled(cut) - _scheduled(program), _scheduled(program) - _scheduled(cut)
        if missing or twice:
            cells = ", ".join(f"{stage}{kind}{index}" for kind, stage, index, _ in sorted(missing or twice))
            self.broken(size, "it is complete", f"{cells} {'is missing' if missing else 'stands too often'}.", program)
        lost = {end.name for end in merge()(cut).outputs} - {end.name for end in merge()(program).outputs}
        if lost:
            self.broken(size, "it is complete", f"the result {min(map(str, lost))} is lost.", program)
        if program.ranks != size.ranks:
            self.broken(size, "it uses every rank", f"the program is on {program.ranks} ranks.", program)
        full = chain(merge(), communicate(), free())
        self.kept(size, "it is legal with transfers and frees", lambda: check(full(program)), program)
        for costs in COSTS:
            found, least = simulate(program, costs), bounds(program, costs)
            if found.makespan < least.makespan - 1e-9 or found.span < least.span - 1e-9:
                why = f"{found} with {costs}, but the bounds are\n{least}"
                self.broken(size, "it takes no less time than a lower bound", why, program)

    def gradients(self, sizes: list[Size], examples: int) -> None:
        """Loss and gradients on drawn models at drawn sizes."""

        @settings(
            max_examples=examples,
            derandomize=True,
            report_multiple_bugs=False,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            phases=[Phase.generate, Phase.shrink],
        )
        @given(st.data())
        def same_bits(data: st.DataObject) -> None:
            size = data.draw(st.sampled_from(sizes))
            net = data.draw(models(st.just(size.stages)))
            policy = data.draw(st.sampled_from(POLICIES))
            travels = data.draw(st.booleans())
            rows = size.microbatches + data.draw(st.integers(0, size.microbatches))
            more = (communicate(), free()) if travels else ()
            program = chain(checkpoint(policy), merge(), *more)(self.program(size, base_program(net.model)))
            law = f"its gradients on {net}, {rows} rows, are those of plain autograd"
            self.kept(size, law, lambda: verify(program, net.model, net.params(), net.batch(rows)), program)

        same_bits()

    def kept(self, size: Size, law: str, reading: Callable[[], T], program: Program | None = None) -> T:
        """Take a reading, or name the law that it breaks."""
        try:
            return reading()
        except Exception as error:
            kind = "" if isinstance(error, ProgramError | AssertionError) else f"{type(error).__name__}: "
            self.broken(size, law, f"{kind}{error}", program, error)

    def broken(
        self, size: Size, law: str, why: str, program: Program | None = None, cause: Exception | None = None
    ) -> NoReturn:
        """Raise what the user reads."""
        why = why.replace("\n", "\n  ")
        grid = f"\n{plot(program)}" if program is not None else ""
        raise BrokenLaw(f"{self.name} at {size}: {law}.\n  {why}{grid}") from cause


def _scheduled(program: Program) -> Counter[tuple[str, int | None, int | None, int | None]]:
    """How often each forward and each backward stands there; an I is the backward of a W."""
    names = {"F": "F", "B": "B", "I": "B"}
    return Counter((names[op.kind], *op[1:4]) for op in parts_of(program.ops) if op.kind in names)
