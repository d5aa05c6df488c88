"""Orders of schedules that are told costs or a memory cap: a search makes them, which stands above this room.

zb_auto(4, costs=..)  -->  SearchRequest  -->  SEARCHES[0], put here by fpipe/__init__.py  -->  the ordered program
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from fpipe.program import Program, ProgramError
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.place import in_order, stage_ranks

Objective = Literal["makespan", "span"]


class SearchRequest(NamedTuple):
    """The order that is asked for.

    Args:
        ranks, placement: how many, and the rank of each stage.
        costs: seconds of each op.
        memory_cap: the most microbatches a rank may hold.
        kept: the share of a microbatch's residuals that a W still needs after its I.
        objective: what to make short first.
        split_backward: whether backwards are cut in two.
        starts: orders to start from, beside those that schedules publish.
    """

    ranks: int
    placement: list[int]
    costs: Costs
    memory_cap: float
    kept: float = 1.0
    objective: Objective = "makespan"
    split_backward: bool = True
    starts: tuple[Transform, ...] = ()


SEARCHES: list[Callable[[Program, SearchRequest], Program]] = []
"""The search that answers: one, from the storey above."""


def searched(
    name: str,
    policy: str,
    ranks: int,
    costs: Costs | None,
    memory_cap: float,
    kept: float = 1.0,
    objective: Objective = "makespan",
    *,
    split_backward: bool = True,
    starts: tuple[Transform, ...] = (),
) -> Transform:
    """The transform of an order that is searched for the costs, for the schedule of this name.

    Raises:
        ValueError: a word or number that is none.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective is 'makespan' or 'span', found {objective!r}.")
    if isinstance(kept, bool) or not isinstance(kept, int | float) or not 0 <= kept <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"kept is the share of an activation that W needs after I, from 0 to 1; found {kept!r}.")
    if isinstance(memory_cap, bool) or not isinstance(memory_cap, int | float) or math.isnan(memory_cap):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"memory_cap is a number of microbatches, found {memory_cap!r}.")

    @transforming
    def transform(program: Program) -> Program:
        if memory_cap < 1:
            raise ProgramError(
                f"{name}: memory_cap is {memory_cap:g}, below the minimum: one microbatch by itself holds 1 on each "
                "rank. Say a cap of at least 1."
            )
        placement = in_order(program, ranks) if policy == "linear" else stage_ranks(policy, program.stages, ranks)
        request = SearchRequest(ranks, placement, costs or Costs(), memory_cap, kept, objective, split_backward, starts)
        return SEARCHES[0](program, request)

    return transform
