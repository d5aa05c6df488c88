"""Make gradients of a training step as they are when something is done wrong.

right gradients, and a way to those of some microbatches        --> scaled(by=4) -->        four times as large
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.reference import total_norm
from fpipe.meaning.single_device.result import Result
from fpipe.model import TiedLeaf
from fpipe.oracle.rank_pieces import Region
from fpipe.program import Value

IGNORED = -100
"""The class that torch's losses do not count."""

Parts = Sequence[tuple[Any, int]]
"""The microbatches of a step, each with its rows."""


class StepGradients(NamedTuple):
    """The gradients of a training step, and the way to others.

    Attributes:
        number: of the step.
        parts: its microbatches.
        grads: the right ones.
        of: gradients of some microbatches, as a mean over their rows.
    """

    number: int
    parts: Parts
    grads: Any
    of: Callable[..., Result]

    def share(self, k: int) -> Any:
        """Gradients of a microbatch, at the weight that it has among all."""
        part, size = self.parts[k]
        return _weighed(self.of([(part, size)]).grads, size / sum(rows for _, rows in self.parts))

    def shares(self) -> list[Any]:
        """Gradients of each microbatch."""
        return [self.share(k) for k in range(len(self.parts))]


Change = Callable[[StepGradients], Any]
"""The gradients of a step as a mistake makes them."""


def scaled(step: StepGradients, by: float) -> Any:
    """Gradients times a number."""
    return _weighed(step.grads, by)


def counting(step: StepGradients, k: int, times: int) -> Any:
    """Gradients in which a microbatch counts so many times."""
    return _plus(step.grads, _weighed(step.share(k), times - 1))


def in_bfloat16(step: StepGradients) -> Any:
    """Gradients that are rounded to bfloat16 whenever those of a microbatch are added."""
    leaves = [[None if leaf is None else leaf.bfloat16() for leaf in tree.leaves(one)] for one in step.shares()]
    right, spec = tree.flatten(step.grads)
    total = map(_like, reduce(_plus, leaves), right)
    return tree.unflatten(spec, [*total])


def _like(leaf: Any, other: Any) -> Any:
    return leaf if leaf is None else leaf.to(other.dtype)


def divided_again(step: StepGradients, size: int) -> Any:
    """Gradients that a round of so many microbatches divides, those of the rounds before among them."""
    rounds, total = len(step.parts) // size, None
    for at in range(0, len(step.parts), size):
        own = _weighed(step.of(step.parts[at : at + size]).grads, size / rounds)
        total = _weighed(own if total is None else _plus(total, own), 1 / size)
    return total


def of_first_replica(step: StepGradients, replicas: int) -> Any:
    """Gradients of the microbatches of one replica alone."""
    return step.of(step.parts[: len(step.parts) // replicas]).grads


def by_tokens(step: StepGradients) -> Any:
    """Gradients as a mean over what the loss does not ignore in all microbatches."""
    counts = [counts_of(target)[-1] for (_, target), _ in step.parts]
    pairs = zip(step.parts, counts, strict=True)
    return reduce(_plus, (_weighed(step.of([part]).grads, count / max(sum(counts), 1)) for part, count in pairs))


def counts_of(target: Any) -> list[int]:
    """How many rows, numbers and valid numbers a target has: what a sum may run over."""
    leaf = next((one for one in tree.leaves(target) if isinstance(one, Tensor) and one.ndim), None)
    return [1] if leaf is None else [len(leaf), leaf.numel(), int((leaf != IGNORED).sum())]


def of_uses(step: StepGradients, uses: Sequence[TiedLeaf], times: Sequence[int]) -> Any:
    """Gradients in which those of the uses of a tied leaf count so many times each."""
    noted: dict[Value, Any] = {}
    step.of(step.parts, see=noted.__setitem__)
    total: Any = 0
    for use, many in zip(uses, times, strict=True):
        for index in range(len(step.parts)) if many else ():
            total = total + many * noted[Value("g", use.stage, index, port=use.bundle)][0]
    stages, owner = [*step.grads], uses[0]
    stages[owner.owner] = {**stages[owner.owner], owner.name: total}
    return tuple(stages)


def with_targets(step: StepGradients, order: Tensor) -> Any:
    """Gradients where each row of the whole batch meets the target of another; a target of other rows stays."""
    sizes = [size for _, size in step.parts]
    each = [tree.flatten(target) for (_, target), _ in step.parts]

    def reordered(leaves: Sequence[Any]) -> Sequence[Any]:
        rows = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        return torch.cat([*leaves])[order].split(sizes) if rows == sizes else leaves

    moved = zip(*map(reordered, zip(*(leaves for leaves, _ in each), strict=True)), strict=True)
    targets = [tree.unflatten(spec, [*leaves]) for (_, spec), leaves in zip(each, moved, strict=True)]
    return step.of([((x, target), size) for ((x, _), size), target in zip(step.parts, targets, strict=True)]).grads


def with_shifted_targets(step: StepGradients, by: int) -> Any:
    """Gradients where targets are moved along their second dimension."""

    def shifted(leaf: Any) -> Any:
        return leaf.roll(by, 1) if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf

    return step.of([((x, tree.tree_map(shifted, target)), size) for (x, target), size in step.parts]).grads


def clipped_by_stage(step: StepGradients, most: float) -> Any:
    """Gradients of which each stage's are clipped by themselves."""
    return tuple(_clipped(stage, most) for stage in step.grads)


def clipped_before_sums(step: StepGradients, most: float) -> Any:
    """Gradients of which those of each microbatch are clipped before they are added up."""
    rows = sum(size for _, size in step.parts)
    return reduce(_plus, (_weighed(_clipped(step.of([part]).grads, most), part[1] / rows) for part in step.parts))


def clipped_by_count(step: StepGradients, most: float, times: Callable[[int], float]) -> Any:
    """Gradients that are clipped by a norm in which each leaf counts so many times."""
    leaves = enumerate(tree.leaves(tuple(step.grads)))
    counted = [leaf * times(at) ** 0.5 for at, leaf in leaves if leaf is not None]
    return _weighed(step.grads, _clip(counted, most))


def clipped_where_it_is(step: StepGradients, most: float, places: Sequence[Mapping[int, Region | None]]) -> Any:
    """Gradients of which each rank clips what it has by the norm of that; of a copy that of the first rank is left."""
    leaves, spec = tree.flatten(tuple(step.grads))
    now: list[Any] = [leaf if leaf is None else leaf.clone() for leaf in leaves]
    for own in reversed(places):
        there = [(at, place) for at, place in own.items() if leaves[at] is not None]
        clipped = _clipped([_part(leaves[at], place) for at, place in there], most)
        for (at, place), part in zip(there, clipped, strict=True):
            _part(now[at], place).copy_(part)
    return tree.unflatten(spec, now)


def never_zeroed() -> Change:
    """Gradients to which those of all steps before are added."""
    before: list[Any] = []

    def change(step: StepGradients) -> Any:
        before[:] = [step.grads if step.number == 0 else _plus(before[0], step.grads)]
        return before[0]

    return change


def _weighed(grads: Any, by: float) -> Any:
    def weighed(leaf: Any) -> Any:
        return leaf if leaf is None else leaf * by

    return tree.tree_map(weighed, grads)


def _plus(one: Any, other: Any) -> Any:
    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(added, one, other)


def _clipped(grads: Any, most: float) -> Any:
    """Gradients scaled to a norm of their own."""
    return _weighed(grads, _clip([leaf for leaf in tree.leaves(grads) if leaf is not None], most))


def _clip(leaves: Sequence[Tensor], most: float) -> float:
    """The factor by which a clip multiplies gradients."""
    return float(torch.clamp(most / (total_norm(leaves) + 1e-6), max=1.0)) if leaves else 1.0


def _part(whole: Tensor, place: Region | None) -> Tensor:
    return whole if place is None else place.of(whole)
