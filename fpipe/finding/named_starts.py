"""Named schedules as starts of a search: each one that fits the sizes of a program."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fpipe.program import Program, ProgramError
from fpipe.schedules.registry import about, names
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform

WITHOUT_COSTS = " without costs"
"""Suffix of a schedule that takes costs and is tried without them."""


def named_starts(
    program: Program, ranks: int, costs: Costs, cap: float, *, step_microbatches: int, excluded: Collection[str] = ()
) -> Iterator[tuple[str, Transform]]:
    """Yield the name of each start, with options behind a colon, and its transform.

    Args:
        cap: the microbatches that a rank may hold, for schedules that have such an option.
        step_microbatches: microbatches of the whole step; this program may be shorter.
        excluded: names to leave out.
    """
    for name in names():
        schedule = about(name)
        if name in excluded or schedule.refuses(ranks, program.stages, program.microbatches) is not None:
            continue
        costs_by_suffix: dict[str, dict[str, Any]] = {"": {}}
        # By costs it takes the shortest of its orders, which may exceed the cap; without costs it may hold less.
        if picks_order_by_costs(name):
            costs_by_suffix = {"": {"costs": costs}, WITHOUT_COSTS: {}}
        binding_cap = cap if cap < step_microbatches else None
        for options in option_choices(factory_parameters(name), ranks, program.stages, binding_cap):
            option_text = ",".join(f"{suffix}={value:g}" for suffix, value in options.items())
            for suffix, cost_options in costs_by_suffix.items():
                try:
                    transform = schedule.factory(ranks, **cost_options, **options)
                except (ProgramError, ValueError):
                    continue
                yield name + suffix + (f":{option_text}" if option_text else ""), transform


def schedule_of(start: str) -> str:
    """Return the name of the schedule that a start is made of.

    >>> schedule_of("interleaved without costs"), schedule_of("pipe_offload:cap=2")
    ('interleaved', 'pipe_offload')
    """
    return start.replace(":", " ").split()[0]


def picks_order_by_costs(start: str) -> bool:
    """Whether the schedule takes the shortest of a few orders by the costs: another step may get another order."""
    return "costs" in factory_parameters(start) and not about(schedule_of(start)).searches


def factory_parameters(start: str) -> Mapping[str, object]:
    """Return the parameters of the factory of a start's schedule."""
    return inspect.signature(about(schedule_of(start)).factory).parameters


def option_choices(parameters: Collection[str], ranks: int, stages: int, cap: float | None) -> list[dict[str, Any]]:
    """Return the options to try a schedule with: the defaults, and each choice that changes how much it holds."""
    choices: list[dict[str, Any]] = [{}]
    if "waves" in parameters and stages % (2 * ranks) == 0:
        choices = [{"waves": stages // (2 * ranks)}]
    if "overlap" in parameters:
        choices.append({"overlap": False})
    if "group" in parameters and ranks > 1:
        # Each schedule refuses one of the two, or has it by default.
        choices += [{"group": ranks}, {"group": -(-ranks // 2)}]
    if "cap" in parameters and cap is not None:
        choices += [options | {"cap": cap} for options in choices]
    return choices
