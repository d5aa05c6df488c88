"""Requests to search for an order, by schedules with costs or a memory cap.

The search stands above this room, so it is looked up in a list:

zb_auto(4, costs=..)  -->  SearchRequest  -->  SEARCHES[0], put here by fpipe/__init__.py  -->  the ordered program
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from fpipe.program import Program, ProgramError
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.place import ascending_ranks, stage_ranks

Objective = Literal["makespan", "span"]


class SearchRequest(NamedTuple):
    """The order that a schedule asks a search for.

    Args:
        ranks, placement: the number of ranks, and the rank of each stage.
        costs: seconds of each op.
        memory_cap: the most microbatches a rank may hold.
        wres_share: the share of a microbatch's residuals that a W still needs after its I.
        objective: what to minimize first, the "makespan" or the "span".
        split_backward: whether backwards are split into I and W.
        starts: orders to start from, besides the named schedules.
    """

    ranks: int
    placement: list[int]
    costs: Costs
    memory_cap: float
    wres_share: float = 1.0
    objective: Objective = "makespan"
    split_backward: bool = True
    starts: tuple[Transform, ...] = ()


SEARCHES: list[Callable[[Program, SearchRequest], Program]] = []
"""The one search, put here by `fpipe/__init__.py`, which may import it."""


def search_order(
    name: str,
    policy: str,
    ranks: int,
    costs: Costs | None,
    memory_cap: float,
    wres_share: float = 1.0,
    objective: Objective = "makespan",
    *,
    split_backward: bool = True,
    starts: tuple[Transform, ...] = (),
) -> Transform:
    """Return the transform that searches an order for the schedule of this name.

    Raises:
        ValueError: an unknown objective, or an invalid number.
    """
    if not 0 <= wres_share <= 1:
        raise ValueError(f"wres_share is the share that W needs after I, from 0 to 1; found {wres_share!r}.")
    if math.isnan(memory_cap):
        raise ValueError(f"memory_cap is a number of microbatches, found {memory_cap!r}.")

    # The search runs when the transform meets a program: only then are its stages and microbatches known.
    @as_transform
    def transform(program: Program) -> Program:
        if memory_cap < 1:
            raise ProgramError(f"{name}: memory_cap is {memory_cap:g}, below one microbatch; use a cap of at least 1.")
        placement = (
            ascending_ranks(program, ranks) if policy == "linear" else stage_ranks(policy, program.stages, ranks)
        )
        request = SearchRequest(
            ranks, placement, costs or Costs(), memory_cap, wres_share, objective, split_backward, starts
        )
        return SEARCHES[0](program, request)

    return transform
