"""What is equal bit by bit: NaN to NaN, and 0 not to -0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fpipe import tree


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def bits(value: Any) -> list[Any]:
    """Leaves as something to compare."""
    return [_bits(leaf) for leaf in tree.leaves(value)]


def is_same_gradient(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are equal, or both missing."""
    return one is other if one is None or other is None else torch.equal(one, other)


def sum_of_uses(grads: Iterable[Tensor | None]) -> Tensor | None:
    """The gradient of a leaf that is used several times, from those of its uses; None where none has one."""
    there = [grad for grad in grads if grad is not None]
    return sum(there[1:], there[0]) if there else None


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.to_dense() if leaf.layout is not torch.strided else leaf
    flat = leaf.detach().resolve_conj().resolve_neg().flatten()
    data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one number may have any stride
    return leaf.dtype, tuple(leaf.shape), bytes(data.tolist())
