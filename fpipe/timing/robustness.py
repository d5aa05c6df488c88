"""How fragile schedules are: the makespan that they have in most runs, when costs vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fpipe.limits import whole
from fpipe.program import HtmlRepr, Program, building, the_program
from fpipe.timing.costs import Costs, the_costs
from fpipe.timing.noise import Noise, makespans
from fpipe.timing.simulate import simulate

At = Literal["nominal", "median", "p95"]
"""The nominal makespan, or one that half or 95 of 100 draws stay below."""


@dataclass(frozen=True)
class Spread:
    """The makespans of a program in many draws, in seconds.

    Attributes:
        name: what it is called.
        nominal: the nominal makespan.
        makespans: those of the draws, shortest first.
    """

    name: str
    nominal: float
    makespans: tuple[float, ...] = field(repr=False)

    def at(self, share: float) -> float:
        """The makespan that this share of draws stays below.

        >>> Spread("mine", 1.0, (1.0, 2.0, 3.0)).at(0.75)
        2.5
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share of the draws is from 0 to 1, found {share!r}.")
        place = share * (len(self.makespans) - 1)
        low = int(place)
        high = min(low + 1, len(self.makespans) - 1)
        return self.makespans[low] + (place - low) * (self.makespans[high] - self.makespans[low])

    @property
    def median(self) -> float:
        """Half of the draws take no longer."""
        return self.at(0.5)

    @property
    def p95(self) -> float:
        """95 of 100 draws take no longer."""
        return self.at(0.95)

    @property
    def fragile(self) -> float:
        """The share by which `p95` is above the nominal makespan."""
        return self.p95 / self.nominal - 1 if self.nominal else 0.0


@dataclass(frozen=True, repr=False)
class Robustness(HtmlRepr):
    """Programs under noise, in the order in which they were named. Prints as a table.

    >>> import fpipe
    >>> four = fpipe.split(4)(fpipe.program(2))
    >>> programs = {"gpipe": fpipe.schedules.gpipe(2)(four), "one_f_one_b": fpipe.schedules.one_f_one_b(2)(four)}
    >>> found = fpipe.robustness(programs, noise=fpipe.Noise(jitter=0.1), samples=20)
    >>> found.best("nominal").name, len(found.rows), found["gpipe"].nominal
    ('gpipe', 2, 15.0)
    """

    rows: tuple[Spread, ...]

    def __iter__(self) -> Iterator[Spread]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Spread:
        """A row by its name."""
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise KeyError(f"there is no row {name!r}; there are {', '.join(row.name for row in self.rows)}.")
        return found

    def best(self, at: At = "p95") -> Spread:
        """The row with the shortest makespan; of equal ones the first."""
        if at not in get_args(At):
            raise ValueError(f'the best is at "nominal", "median" or "p95", found {at!r}.')
        return min(self.rows, key=lambda row: getattr(row, at))

    def __str__(self) -> str:
        width = max(len("program"), *(len(row.name) for row in self.rows))
        lines = [f"{'program':{width}}  {'nominal':>8}  {'median':>8}  {'p95':>8}  fragile"]
        lines += [
            f"{row.name:{width}}  {row.nominal:8.5g}  {row.median:8.5g}  {row.p95:8.5g}  {row.fragile:7.1%}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        best = self.best()
        return f"<Robustness: {len(self.rows)} programs, at the 95th percentile {best.name} ({best.p95:g})>"


def robustness(
    programs: Program | Mapping[str, Program],
    costs: Costs | Callable[[Program], Costs] | None = None,
    *,
    noise: Noise,
    samples: int = 200,
    seed: int = 0,
) -> Robustness:
    """How long programs take when costs vary: the median and the 95th percentile of makespans, and who is best there.

    The order of ops stays; each op starts as soon as it can. Programs share their draws: the forward of stage 2 for
    microbatch 5 is as slow in each of them, so that they differ by their order alone.

    Args:
        programs: one, or several by name.
        costs: as for `simulate`, the mean of each; or `f(program) -> Costs`, where programs cut ranks into stages of
            different size.
        noise: how far costs vary.
        samples: how many draws.
        seed: of the draws; the same seed gives the same numbers.

    Returns:
        A `Robustness`, a row for each program.

    Raises:
        ValueError: no program, no draw, costs that are missing.

    >>> import fpipe
    >>> named = {name: fpipe.schedules.about(name).program(4, 8) for name in ("one_f_one_b", "zb_h1")}
    >>> found = robustness(named, noise=Noise(jitter=0.1, slow_rank=1.3))
    >>> found.best("median").name, found["zb_h1"].nominal
    ('zb_h1', 27.0)
    >>> 0.1 < found["zb_h1"].fragile < 0.5
    True
    """
    given: Any = {"program": programs} if isinstance(programs, Program) else programs
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"robustness takes a program, or several as {{name: program}}; found {programs!r}.")
    if not isinstance(noise, Noise):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"noise is an fpipe.Noise, such as fpipe.Noise(jitter=0.1); found {noise!r}.")
    whole("samples", samples)
    whole("seed", seed, least=0, most=math.inf)
    rows: list[Spread] = []
    for name, one in given.items():
        program = the_program(one)
        own = the_costs(costs(program) if callable(costs) else costs, program)
        with building():
            drawn = makespans(program, own, noise, samples, seed)
        rows.append(Spread(name, simulate(program, own).makespan, tuple(sorted(drawn))))
    return Robustness(tuple(rows))
