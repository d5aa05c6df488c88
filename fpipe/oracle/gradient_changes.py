"""Compute the gradients that a training step has when it makes a given mistake.

right gradients, and a way to those of some microbatches    --> scale(factor=4) -->    four times as large
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
"""The class that torch's losses ignore by default."""

Parts = Sequence[tuple[Any, int]]
"""The microbatches of a step, each with its rows."""


class StepGradients(NamedTuple):
    """The right gradients of a training step, and a function for gradients of other microbatches.

    Attributes:
        step_index: the number of the step, from 0.
        parts: the microbatches of the step, each with its rows.
        grads: the right gradients.
        compute_grads: gradients of some microbatches, as a mean over their rows.
    """

    step_index: int
    parts: Parts
    grads: Any
    compute_grads: Callable[..., Result]

    @property
    def rows(self) -> int:
        """The number of rows of all microbatches."""
        return sum(size for _, size in self.parts)

    def share(self, microbatch: int) -> Any:
        """Return the gradients of a microbatch, weighted by its share of the rows."""
        return _multiply(self.compute_grads([self.parts[microbatch]]).grads, self.parts[microbatch][1] / self.rows)


Change = Callable[[StepGradients], Any]
"""A mistake as a function: the right gradients of a step to the wrong ones."""


def scale(step: StepGradients, factor: float) -> Any:
    """Multiply all gradients by a number."""
    return _multiply(step.grads, factor)


def count_microbatch(step: StepGradients, microbatch: int, times: int) -> Any:
    """Count a microbatch `times` times."""
    return _add(step.grads, _multiply(step.share(microbatch), times - 1))


def add_in_bfloat16(step: StepGradients) -> Any:
    """Add the gradients of microbatches in bfloat16, rounding after each addition."""
    shares = [tree.leaves(step.share(k)) for k in range(len(step.parts))]
    total = reduce(_add, [[None if leaf is None else leaf.bfloat16() for leaf in leaves] for leaves in shares])
    right, spec = tree.flatten(step.grads)
    pairs = zip(total, right, strict=True)
    return tree.unflatten(spec, [None if leaf is None else leaf.to(right_leaf.dtype) for leaf, right_leaf in pairs])


def divide_repeatedly(step: StepGradients, size: int) -> Any:
    """Divide the accumulated gradients by `size` after each round of `size` microbatches, again and again."""
    rounds, total = len(step.parts) // size, None
    for start in range(0, len(step.parts), size):
        grads = _multiply(step.compute_grads(step.parts[start : start + size]).grads, size / rounds)
        total = _multiply(grads if total is None else _add(total, grads), 1 / size)
    return total


def use_first_replica(step: StepGradients, replicas: int) -> Any:
    """Use only the microbatches of the first of so many replicas."""
    return step.compute_grads(step.parts[: len(step.parts) // replicas]).grads


def weigh_by_tokens(step: StepGradients) -> Any:
    """Weigh each microbatch by its number of valid targets, rather than rows."""
    counts = [target_counts(target)[-1] for (_, target), _ in step.parts]
    shares = zip(step.parts, counts, strict=True)
    weighed = (_multiply(step.compute_grads([part]).grads, count / max(sum(counts), 1)) for part, count in shares)
    return reduce(_add, weighed)


def target_counts(target: Any) -> list[int]:
    """Return the numbers of rows, elements and valid elements of a target, which a sum may run over."""
    leaf = next((leaf for leaf in tree.leaves(target) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return [1] if leaf is None else [len(leaf), leaf.numel(), int((leaf != IGNORED).sum())]


def count_uses(step: StepGradients, uses: Sequence[TiedLeaf], times: Sequence[int]) -> Any:
    """Count each use of a tied leaf `times` times."""
    values: dict[Value, Any] = {}
    step.compute_grads(step.parts, observe=values.__setitem__)
    total: Any = 0
    for use, count in zip(uses, times, strict=True):
        for index in range(len(step.parts)) if count else ():
            total = total + count * values[Value("g", use.stage, index, port=use.bundle)][0]
    stages, owner = [*step.grads], uses[0]
    stages[owner.owner] = {**stages[owner.owner], owner.name: total}
    return tuple(stages)


def permute_targets(step: StepGradients, order: Tensor) -> Any:
    """Permute the targets of the whole batch; leaves without a row for each of the batch stay."""
    sizes = [size for _, size in step.parts]
    targets = [tree.flatten(target) for (_, target), _ in step.parts]

    def reorder(leaves: Sequence[Any]) -> Sequence[Any]:
        rows = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        return torch.cat([*leaves])[order].split(sizes) if rows == sizes else leaves

    permuted = zip(*map(reorder, zip(*(leaves for leaves, _ in targets), strict=True)), strict=True)
    specs = (spec for _, spec in targets)
    return _grads_with_targets(
        step, [tree.unflatten(spec, [*leaves]) for spec, leaves in zip(specs, permuted, strict=True)]
    )


def shift_targets(step: StepGradients, offset: int) -> Any:
    """Shift targets along their second dimension."""

    def shift(leaf: Any) -> Any:
        return leaf.roll(offset, 1) if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf

    return _grads_with_targets(step, [tree.tree_map(shift, target) for (_, target), _ in step.parts])


def _grads_with_targets(step: StepGradients, targets: Sequence[Any]) -> Any:
    return step.compute_grads(
        [((x, target), size) for ((x, _), size), target in zip(step.parts, targets, strict=True)]
    ).grads


def clip_by_stage(step: StepGradients, max_norm: float) -> Any:
    """Clip the gradients of each stage by their own norm."""
    return tuple(_clip(stage, max_norm) for stage in step.grads)


def clip_before_sums(step: StepGradients, max_norm: float) -> Any:
    """Clip the gradients of each microbatch before they are added up."""
    clipped = (_multiply(_clip(step.compute_grads([part]).grads, max_norm), part[1] / step.rows) for part in step.parts)
    return reduce(_add, clipped)


def clip_by_counted_norm(step: StepGradients, max_norm: float, times: Callable[[int], float]) -> Any:
    """Clip by a norm in which leaf k counts `times(k)` times."""
    # norm^2 = sum_k times(k) * norm(leaf_k)^2, so each leaf is scaled by the root of its count.
    leaves = enumerate(tree.leaves(tuple(step.grads)))
    counted = [leaf * times(k) ** 0.5 for k, leaf in leaves if leaf is not None]
    return _multiply(step.grads, _clip_factor(counted, max_norm))


def clip_by_rank(step: StepGradients, max_norm: float, regions: Sequence[Mapping[int, Region | None]]) -> Any:
    """Clip the part of each rank by the norm of that part; of copies, the first rank's is returned."""
    leaves, spec = tree.flatten(tuple(step.grads))
    clipped: list[Any] = [leaf if leaf is None else leaf.clone() for leaf in leaves]
    # Reversed, so that the first rank writes its copies last.
    for regions_by_leaf in reversed(regions):
        present = [(k, region) for k, region in regions_by_leaf.items() if leaves[k] is not None]
        pieces = _clip([_slice_region(leaves[k], region) for k, region in present], max_norm)
        for (k, region), piece in zip(present, pieces, strict=True):
            _slice_region(clipped[k], region).copy_(piece)
    return tree.unflatten(spec, clipped)


def accumulate_all_steps() -> Change:
    """Return a change that adds the gradients of all earlier steps, as without zero_grad."""
    # A closure with memory: the steps of one loop call it in order, and step 0 starts anew.
    total: list[Any] = []

    def change(step: StepGradients) -> Any:
        total[:] = [step.grads if step.step_index == 0 else _add(total[0], step.grads)]
        return total[0]

    return change


def _multiply(grads: Any, factor: float) -> Any:
    def multiply(leaf: Any) -> Any:
        return leaf if leaf is None else leaf * factor

    return tree.tree_map(multiply, grads)


def _add(grads: Any, other_grads: Any) -> Any:
    def add(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(add, grads, other_grads)


def _clip(grads: Any, max_norm: float) -> Any:
    return _multiply(grads, _clip_factor([leaf for leaf in tree.leaves(grads) if leaf is not None], max_norm))


def _clip_factor(leaves: Sequence[Tensor], max_norm: float) -> float:
    return float(torch.clamp(max_norm / (total_norm(leaves) + 1e-6), max=1.0)) if leaves else 1.0


def _slice_region(tensor: Tensor, region: Region | None) -> Tensor:
    return tensor if region is None else tensor.narrow(*region)
