"""The problem that a search solves: ranks, costs, memory and free choices."""

from __future__ import annotations

from dataclasses import dataclass

from fpipe.finding.play import OrderValue, order_value
from fpipe.timing.costs import Costs
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform


@dataclass(frozen=True)
class SearchProblem:
    """The checked arguments of a search.

    Args:
        cap: the most that a rank may hold, in the unit of `Timeline.peak`.
        placements: placements to try, each as the rank of every stage.
        any_placement: whether others may be tried too, and those of named schedules.
        split_backward: whether backwards are split: all (True), none (False), or where it helps (None).
        excluded: names of schedules not to start from.
        choose_recompute: whether the search chooses which stages and microbatches are recomputed.
        microbatches: those of the whole step; a shorter step may be searched in its place.
        starts: further orders to start from, by name.
    """

    ranks: int
    costs: Costs
    cap: float
    objective: str
    placements: tuple[tuple[int, ...], ...]
    any_placement: bool
    split_backward: bool | None
    seed: int
    excluded: frozenset[str] = frozenset()
    choose_recompute: bool = False
    microbatches: int = 0
    starts: tuple[tuple[str, Transform], ...] = ()

    def value(self, timeline: Timeline) -> OrderValue:
        """Return the makespan and the span of a timeline, the objective first."""
        return order_value(timeline, self.objective)
