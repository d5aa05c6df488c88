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
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import total_norm
from fpipe.model import TiedLeaf
from fpipe.oracle.named_leaves import Region
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
        grads: the right gradients.
        of: gradients of some microbatches, as a mean over their rows.
    """

    number: int
    parts: Parts
    grads: Any
    of: Callable[..., Result]

    @property
    def rows(self) -> int:
        """The rows of all microbatches."""
        return sum(size for _, size in self.parts)

    def share(self, k: int) -> Any:
        """Return gradients of microbatch k, at the weight that it has among all."""
        return _times(self.of([self.parts[k]]).grads, self.parts[k][1] / self.rows)


Change = Callable[[StepGradients], Any]
"""The gradients of a step as a mistake makes them."""


def scaled(step: StepGradients, by: float) -> Any:
    """Multiply by a number."""
    return _times(step.grads, by)


def counting(step: StepGradients, k: int, times: int) -> Any:
    """Count a microbatch so many times."""
    return _plus(step.grads, _times(step.share(k), times - 1))


def in_bfloat16(step: StepGradients) -> Any:
    """Round to bfloat16 whenever the gradients of a microbatch are added."""
    shares = [tree.leaves(step.share(k)) for k in range(len(step.parts))]
    total = reduce(_plus, [[None if leaf is None else leaf.bfloat16() for leaf in leaves] for leaves in shares])
    right, spec = tree.flatten(step.grads)
    pairs = zip(total, right, strict=True)
    return tree.unflatten(spec, [None if leaf is None else leaf.to(like.dtype) for leaf, like in pairs])


def divided_again(step: StepGradients, size: int) -> Any:
    """Divide at each round of so many microbatches, the gradients of the rounds before among them."""
    rounds, total = len(step.parts) // size, None
    for start in range(0, len(step.parts), size):
        grads = _times(step.of(step.parts[start : start + size]).grads, size / rounds)
        total = _times(grads if total is None else _plus(total, grads), 1 / size)
    return total


def of_first_replica(step: StepGradients, replicas: int) -> Any:
    """Take the microbatches of the first of so many replicas alone."""
    return step.of(step.parts[: len(step.parts) // replicas]).grads


def by_tokens(step: StepGradients) -> Any:
    """Take the mean over what the loss does not ignore in all microbatches."""
    counts = [counts_of(target)[-1] for (_, target), _ in step.parts]
    shares = zip(step.parts, counts, strict=True)
    return reduce(_plus, (_times(step.of([part]).grads, count / max(sum(counts), 1)) for part, count in shares))


def counts_of(target: Any) -> list[int]:
    """Return how many rows, numbers and valid numbers a target has: what a sum may run over."""
    leaf = next((leaf for leaf in tree.leaves(target) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return [1] if leaf is None else [len(leaf), leaf.numel(), int((leaf != IGNORED).sum())]


def of_uses(step: StepGradients, uses: Sequence[TiedLeaf], times: Sequence[int]) -> Any:
    """Count each use of a tied leaf so many times."""
    values: dict[Value, Any] = {}
    step.of(step.parts, see=values.__setitem__)
    total: Any = 0
    for use, count in zip(uses, times, strict=True):
        for index in range(len(step.parts)) if count else ():
            total = total + count * values[Value("g", use.stage, index, port=use.bundle)][0]
    stages, owner = [*step.grads], uses[0]
    stages[owner.owner] = {**stages[owner.owner], owner.name: total}
    return tuple(stages)


def with_targets(step: StepGradients, order: Tensor) -> Any:
    """Give each row of the whole batch the target of another; a leaf of the target with other rows stays."""
    sizes = [size for _, size in step.parts]
    targets = [tree.flatten(target) for (_, target), _ in step.parts]

    def reordered(leaves: Sequence[Any]) -> Sequence[Any]:
        rows = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        return torch.cat([*leaves])[order].split(sizes) if rows == sizes else leaves

    moved = zip(*map(reordered, zip(*(leaves for leaves, _ in targets), strict=True)), strict=True)
    specs = (spec for _, spec in targets)
    return _of_targets(step, [tree.unflatten(spec, [*leaves]) for spec, leaves in zip(specs, moved, strict=True)])


def with_shifted_targets(step: StepGradients, by: int) -> Any:
    """Move targets along their second dimension."""

    def shifted(leaf: Any) -> Any:
        return leaf.roll(by, 1) if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf

    return _of_targets(step, [tree.tree_map(shifted, target) for (_, target), _ in step.parts])


def _of_targets(step: StepGradients, targets: Sequence[Any]) -> Any:
    return step.of([((x, target), size) for ((x, _), size), target in zip(step.parts, targets, strict=True)]).grads


def clipped_by_stage(step: StepGradients, most: float) -> Any:
    """Clip the gradients of each stage by their own norm."""
    return tuple(_clipped(stage, most) for stage in step.grads)


def clipped_before_sums(step: StepGradients, most: float) -> Any:
    """Clip the gradients of each microbatch before they are added up."""
    return reduce(_plus, (_times(_clipped(step.of([part]).grads, most), part[1] / step.rows) for part in step.parts))


def clipped_by_count(step: StepGradients, most: float, times: Callable[[int], float]) -> Any:
    """Clip by a norm in which each leaf counts so many times."""
    leaves = enumerate(tree.leaves(tuple(step.grads)))
    counted = [leaf * times(k) ** 0.5 for k, leaf in leaves if leaf is not None]
    return _times(step.grads, _clip_factor(counted, most))


def clipped_by_rank(step: StepGradients, most: float, regions: Sequence[Mapping[int, Region | None]]) -> Any:
    """Clip what each rank has by the norm of that; of copies that of the first rank is left."""
    leaves, spec = tree.flatten(tuple(step.grads))
    clipped: list[Any] = [leaf if leaf is None else leaf.clone() for leaf in leaves]
    for regions_by_leaf in reversed(regions):
        present = [(k, region) for k, region in regions_by_leaf.items() if leaves[k] is not None]
        pieces = _clipped([_slice_region(leaves[k], region) for k, region in present], most)
        for (k, region), piece in zip(present, pieces, strict=True):
            _slice_region(clipped[k], region).copy_(piece)
    return tree.unflatten(spec, clipped)


def never_zeroed() -> Change:
    """Add the gradients of all steps before."""
    total: list[Any] = []

    def change(step: StepGradients) -> Any:
        total[:] = [step.grads if step.number == 0 else _plus(total[0], step.grads)]
        return total[0]

    return change


def _times(grads: Any, factor: float) -> Any:
    def multiply(leaf: Any) -> Any:
        return leaf if leaf is None else leaf * factor

    return tree.tree_map(multiply, grads)


def _plus(grads: Any, more: Any) -> Any:
    def add(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(add, grads, more)


def _clipped(grads: Any, most: float) -> Any:
    return _times(grads, _clip_factor([leaf for leaf in tree.leaves(grads) if leaf is not None], most))


def _clip_factor(leaves: Sequence[Tensor], most: float) -> float:
    return float(torch.clamp(most / (total_norm(leaves) + 1e-6), max=1.0)) if leaves else 1.0


def _slice_region(tensor: Tensor, region: Region | None) -> Tensor:
    return tensor if region is None else tensor.narrow(*region)
