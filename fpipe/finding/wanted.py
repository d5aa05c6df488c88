"""The request of a search: ranks, costs and memory, and what may be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from fpipe.finding.play import Value, worth
from fpipe.timing.costs import Costs
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform


@dataclass(frozen=True)
class Wanted:
    """The request of a search.

    Args:
        cap: the most that a rank may hold, in the unit of `Timeline.peak`.
        placements: ranks of the stages that are tried; with `free` others too, and those of named schedules.
        halves: whether backwards are split: all (True), none (False), or where it helps (None).
        without: names of schedules that it does not start from.
        choose: whether stages and microbatches that are recomputed may be any.
        microbatches: of the whole step, of which a shorter one may be searched.
        starts: orders by name that it starts from beside those of named schedules.
    """

    ranks: int
    costs: Costs
    cap: float
    objective: str
    placements: tuple[tuple[int, ...], ...]
    free: bool
    halves: bool | None
    seed: int
    without: frozenset[str] = frozenset()
    choose: bool = False
    microbatches: int = 0
    starts: tuple[tuple[str, Transform], ...] = ()

    def value(self, timeline: Timeline) -> Value:
        """The objective of a timeline, and then the other."""
        return worth(timeline, self.objective)
