"""Facts of a program's ops that a search asks for: which there are, what is recomputed, whether halves cost more."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace

from fpipe.program import Program, ProgramError, kind_of, parts_of
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.checkpoint import checkpoint


def made(transform: Transform, program: Program) -> Program | None:
    """Apply a schedule to a program; None where it does not serve it."""
    try:
        return transform(program)
    except (ProgramError, ValueError):
        return None


def again_of(program: Program) -> frozenset[tuple[int | None, int | None]]:
    """Stages and microbatches that are recomputed."""
    return frozenset((op.stage, op.microbatch) for op in parts_of(program.ops) if op.kind == "R")


def recomputing(again: Collection[tuple[int | None, int | None]]) -> Transform:
    """Recompute these stages of these microbatches."""
    return checkpoint(lambda stage, microbatch: (stage, microbatch) in again)


def kinds_of(program: Program) -> Hashable:
    """Which ops are on which ranks, whatever their order."""
    return frozenset(
        (op[0], *((part[0:5]) for part in op.parts or (op,))) for op in program.ops if kind_of(op.kind).time
    )


def has(program: Program, kind: str) -> bool:
    """Whether a program has ops of a kind, in pairs too."""
    return any(op.kind == kind for op in parts_of(program.ops))


def full_are_cheaper(costs: Costs, program: Program) -> bool:
    """Whether some full backward takes less than its halves."""
    fulls = [op for op in parts_of(program.ops) if op.kind == "B"]
    return any(
        costs.seconds(op) < (costs.seconds(op._replace(kind="I")) + costs.seconds(op._replace(kind="W"))) * (1 - 1e-12)
        for op in fulls
    )


def easier(costs: Costs, program: Program) -> Costs:
    """Costs at which halves together take no longer than a full backward, for bounds that hold for both."""
    seconds = replace(costs, cluster=None).seconds  # a rank's speed counts once, in the bounds
    inputs, weights = [0.0] * program.stages, [0.0] * program.stages
    for op in parts_of(program.ops):
        if op.kind == "B" and op.stage is not None:
            bare = op._replace(how=())
            full, half, rest = (seconds(bare._replace(kind=kind)) for kind in "BIW")
            inputs[op.stage] = min(full, half)
            weights[op.stage] = min(rest, full - inputs[op.stage])
    return replace(costs, backward_input=inputs, backward_weight=weights, backward=None)
