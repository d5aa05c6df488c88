"""The request of a search: ranks, costs and memory, and what may be chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fpipe.orders.climb import Value, worth
from fpipe.timing.amounts import listed
from fpipe.timing.costs import Costs
from fpipe.timing.timeline import Timeline


@dataclass(frozen=True)
class Wanted:
    """The request of a search.

    Args:
        cap: the most that a rank may hold, in the unit of `Timeline.peak`.
        placements: ranks of the stages that are tried; with `free` others too, and those of named schedules.
        halves: whether backwards are split: all (True), none (False), or where it helps (None).
        without: names of schedules that it does not start from.
        choose: whether stages and microbatches that are recomputed may be any.
        offload: whether residuals may leave their rank.
        microbatches: of the whole step, of which a shorter one may be searched.
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
    offload: bool = True
    microbatches: int = 0

    @property
    def moves(self) -> bool:
        """Whether it is chosen which residuals wait on the host: where costs say what that takes, and a cap asks."""
        costs = self.costs
        said = any(any(listed(seconds)) for seconds in (costs.offload, costs.load or 0)) or bool(costs.host_bandwidth)
        return self.offload and said and self.cap < math.inf

    def value(self, timeline: Timeline) -> Value:
        """The objective of a timeline, and then the other."""
        return worth(timeline, self.objective)
