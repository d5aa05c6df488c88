"""The problem that a search solves, its questions about a program, and the named schedules that it starts from."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fpipe.finding.play import OrderValue, order_value
from fpipe.program import Program, ProgramError, kind_of, parts_of
from fpipe.schedules.registry import about, names
from fpipe.timing.costs import Costs
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.checkpoint import checkpoint


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


def apply_if_legal(transform: Transform, program: Program) -> Program | None:
    """Apply a schedule to a program, or return None if it refuses the program."""
    try:
        return transform(program)
    except (ProgramError, ValueError):
        return None


def recomputed_cells(program: Program) -> frozenset[tuple[int | None, int | None]]:
    """Return the (stage, microbatch) pairs that are recomputed."""
    return frozenset((op.stage, op.microbatch) for op in parts_of(program.ops) if op.kind == "R")


def recompute_cells(cells: Collection[tuple[int | None, int | None]]) -> Transform:
    """Return the transform that recomputes these (stage, microbatch) pairs."""
    return checkpoint(lambda stage, microbatch: (stage, microbatch) in cells)


def placed_ops(program: Program) -> Hashable:
    """Return a key that programs share if the same ops are on the same ranks, in any order."""
    return frozenset((op[0], *(part[0:5] for part in op.parts or (op,))) for op in program.ops if kind_of(op.kind).time)


def has_kind(program: Program, kind: str) -> bool:
    """Whether a program has an op of this kind, alone or in a pair."""
    return any(op.kind == kind for op in parts_of(program.ops))


def full_backward_is_cheaper(costs: Costs, program: Program) -> bool:
    """Whether some full backward takes less time than its I and W together."""
    fulls = [op for op in parts_of(program.ops) if op.kind == "B"]
    return any(
        costs.seconds(op) < (costs.seconds(op._replace(kind="I")) + costs.seconds(op._replace(kind="W"))) * (1 - 1e-12)
        for op in fulls
    )


def relaxed_costs(costs: Costs, program: Program) -> Costs:
    """Return costs at which I and W together take no longer than B, so that a bound for split backwards holds for both.

    A bound is computed on the program with split backwards. An order with some full backwards may be shorter than that
    if B costs less than I and W.
    """
    # Without the cluster: `bounds` divides by the speed of a rank itself.
    seconds = replace(costs, cluster=None).seconds
    # One column for all microbatches where they are alike, so that these costs serve longer steps too.
    columns = program.microbatches if costs.vary_by_microbatch else 1
    input_seconds, weight_seconds = ([[0.0] * columns for _ in range(program.stages)] for _ in range(2))
    for op in parts_of(program.ops):
        if op.kind == "B" and op.stage is not None:
            bare = op._replace(options=())
            full, input_half, weight = (seconds(bare._replace(kind=kind)) for kind in "BIW")
            column = (op.microbatch or 0) % columns
            input_seconds[op.stage][column] = min(full, input_half)
            weight_seconds[op.stage][column] = min(weight, full - min(full, input_half))
    tables = input_seconds, weight_seconds
    inputs, weights = tables if costs.vary_by_microbatch else ([row[0] for row in table] for table in tables)
    return replace(costs, backward_input=inputs, backward_weight=weights, backward=None)


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
