"""The result of a search: the schedule, its times, a lower bound, and the named schedules it was compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fpipe.finding.schedule_table import ScheduleTable
from fpipe.program import HtmlRepr, Program
from fpipe.timing.timeline import Timeline


@dataclass(frozen=True)
class NamedRow:
    """A named schedule under the same costs.

    Attributes:
        name: its name, with options.
        makespan, span: in seconds.
        peak: the most that a rank holds, in the unit of `Timeline.peak`.
        fits: whether it keeps the cap and the other conditions of the search.
    """

    name: str
    makespan: float
    span: float
    peak: float
    fits: bool


@dataclass(frozen=True, repr=False)
class SearchResult(HtmlRepr):
    """The best schedule that a search found.

    Attributes:
        schedule: a transform, kept as a table: `fpipe.chain(fpipe.split(m), found.schedule, fpipe.merge())`.
        program: the program that was searched for, in this schedule.
        timeline: start and end of each op.
        objective: what was minimized, "makespan" or "span".
        bound: seconds that no order of these ops on these ranks goes below, under the cap: by the solver's proof, or by
            `fpipe.bounds`.
        gap: how far above the bound it is, as a share of it: 0 is optimal.
        beat: the best named schedule that fits, and its seconds; None where none does.
        named: all named schedules that serve the sizes, the best first.
        complete: whether the search ran to its end; False after Ctrl-C.
        gather: the best policy of gathering parameters, of those that were asked for; `program` and `timeline` have it,
            and a chain has `fpipe.shard(gather=found.gather)` behind `merge`.

    >>> import fpipe
    >>> found = fpipe.search(2, fpipe.Costs(2, 3, 1), ranks=2, microbatches=3, seconds=0.1, solver="local")
    >>> found.timeline.makespan, found.bound, found.beat
    (21.0, 21.0, ('zb_h2', 21.0))
    """

    schedule: ScheduleTable
    program: Program = field(compare=False)
    timeline: Timeline = field(compare=False)
    objective: str
    bound: float
    named: tuple[NamedRow, ...]
    complete: bool = True
    gather: str = ""

    @property
    def value(self) -> float:
        """Seconds of the objective."""
        return getattr(self.timeline, self.objective)

    @property
    def gap(self) -> float:
        """How far the value is above the bound, as a share of the bound."""
        return max(0.0, self.value / self.bound - 1) if self.bound else 0.0

    @property
    def beat(self) -> tuple[str, float] | None:
        """The best named schedule that fits, and its seconds."""
        return next(((row.name, getattr(row, self.objective)) for row in self.named if row.fits), None)

    @property
    def pictured(self) -> Mapping[str, Timeline]:
        """The timeline, under the name of its picture."""
        return {"found": self.timeline}

    def __str__(self) -> str:
        best = "no order of these ops on these ranks takes less"
        if self.gap > 1e-9:
            best = f"none of these ops on these ranks takes less than {self.bound:g}, this is {self.gap:.1%} above"
        lines = [f"{self.timeline}", f"{self.objective} {self.value:g}: {best}"]
        if self.beat is not None:
            lines.append(f"the best schedule by name is {self.beat[0]} with {self.beat[1]:g}")
        if self.gather:
            lines.append(f"parameters are gathered by fpipe.shard(gather={self.gather!r}), which no bound here counts")
        return "\n".join(lines)

    def __repr__(self) -> str:
        stopped = "" if self.complete else ", stopped"
        return f"<SearchResult: {self.objective} {self.value:g}, gap {self.gap:.1%}{stopped}>"
