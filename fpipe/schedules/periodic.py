"""A schedule at a size of which no list of ops can be made: its order in runs, and its time and memory from these."""

from __future__ import annotations

from dataclasses import dataclass, field

from fpipe.limits import whole
from fpipe.orders.runs import Run, columns
from fpipe.orders.wavefront import fronts, of_ranks
from fpipe.program import ProgramError, building
from fpipe.schedules.periodic_orders import PERIODIC
from fpipe.schedules.registry import about
from fpipe.timing.costs import Costs, the_costs


@dataclass(frozen=True)
class Periodic:
    """Time and memory of a step that is too large to be a program, as a `Timeline` has them.

    Attributes:
        name, ranks, microbatches: what it is of.
        makespan, span: seconds, as `Timeline` has them; `bubble` and `bubble_span` are the idle share of each.
        peak, peak_released: per rank, in microbatches.
        rows: the order of each rank, in runs: what it warms up with, what it repeats, and how it drains.

    >>> import fpipe
    >>> found = fpipe.periodic("one_f_one_b", ranks=64, microbatches=4096)
    >>> found.makespan, found.peak[:3], round(found.bubble, 4)
    (12477.0, (64.0, 63.0, 62.0), 0.0151)
    """

    name: str
    ranks: int
    microbatches: int
    makespan: float
    span: float
    work: float
    peak: tuple[float, ...] = field(repr=False)
    peak_released: tuple[float, ...] = field(repr=False)
    rows: tuple[tuple[Run, ...], ...] = field(repr=False)

    @property
    def idle(self) -> float:
        """Makespan less the mean work of a rank, in seconds."""
        return self.makespan - self.work

    @property
    def bubble(self) -> float:
        """Idle share of the makespan."""
        return self.idle / self.makespan if self.makespan else 0.0

    @property
    def bubble_span(self) -> float:
        """Idle share of the span."""
        return 1 - self.work / self.span if self.span else 0.0

    def row(self, rank: int) -> str:
        """The order of a rank.

        >>> periodic("one_f_one_b", ranks=64, microbatches=8192).row(62)
        '62F0 | 8191 x (62F1 62B0) | 62B8191'
        """
        if rank not in range(self.ranks):
            raise ValueError(f"ranks are 0..{self.ranks - 1}, found {rank!r}.")
        return " | ".join(map(str, self.rows[rank]))

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.ranks} ranks, {self.microbatches} microbatches: makespan {self.makespan:g}, "
            f"span {self.span:g}, bubble {self.bubble:.1%}, peak {max(self.peak):g}"
        )


def periodic(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Periodic:
    """Time and memory of a schedule at any size: exactly what `simulate` says, without a list of ops.

    A rank's order is a few runs, cells that repeat for one microbatch after the other, and all ranks are simulated at
    once on these. 4096 ranks and 8192 microbatches, a hundred million ops, take two seconds and less than 500 MiB.

    Args:
        name: of a schedule whose order has a period: "one_f_one_b", "interleaved", "zb_h1", "zbv", "dualpipe", ..
        ranks, microbatches: the size. One stage a rank, or two where the schedule has two.
        costs: seconds per op and stage, as for `simulate`; one latency for all links.

    Returns:
        A `Periodic`. Starts and ends are those of `simulate` to the last bit; work, and so `bubble`, to rounding.

    Raises:
        ValueError: a schedule that has no period, or none at this size; costs that ask for more than ranks and one
            latency (bandwidth, bytes, busy ranks).

    >>> print(periodic("zbv", ranks=64, microbatches=512))
    zbv, 64 ranks, 512 microbatches: makespan 3135, span 3072, bubble 2.0%, peak 64
    >>> periodic("zb_auto", ranks=4, microbatches=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: zb_auto has no period that is known before its order is: ...
    """
    schedule = about(name)
    for word, size in (("ranks", ranks), ("microbatches", microbatches)):
        whole(word, size)
    if name not in PERIODIC:
        raise ValueError(
            f"{name} has no period that is known before its order is: it is searched or drawn for each size. Simulate "
            f"a program of it, or take one of {', '.join(PERIODIC)}."
        )
    order = PERIODIC[name]
    stages = schedule.wants(ranks, {})
    why = schedule.refuses(ranks, stages, microbatches) or order.refuses(ranks, microbatches)
    if why is not None:
        raise ProgramError(f"{name}: {why}")
    seconds = the_costs(costs)
    of_ranks(seconds)
    with building():
        rows = order.rows(ranks, microbatches)
        known = columns(rows)
        found = fronts(known, seconds)
    span = max(last - first for first, last in zip(found.first, found.last, strict=True))
    peaks = [tuple(most / order.chunks for most in each) for each in known.held()]
    works = known.worked(seconds)
    work = float(works.sum()) / max(1, int((works > 0).sum()))
    sizes = max(found.last), span, work, peaks[0], peaks[1]
    return Periodic(name, ranks, microbatches, *sizes, tuple(map(tuple, rows)))
