"""Compare tensors bit by bit: NaN equals NaN, and 0 differs from -0."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fpipe import tree


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def bits(value: Any) -> list[Any]:
    """Return the bits of all leaves, comparable with ==."""
    return [_bits(leaf) for leaf in tree.leaves(value)]


def is_same_gradient(grad: Tensor | None, other_grad: Tensor | None) -> bool:
    """Whether two gradients are equal, or both missing."""
    return grad is other_grad if grad is None or other_grad is None else torch.equal(grad, other_grad)


def sum_of_uses(grads: Iterable[Tensor | None]) -> Tensor | None:
    """Add up the gradients of a leaf's uses in their order, or return None if no use has a gradient."""
    present = [grad for grad in grads if grad is not None]
    return sum(present[1:], present[0]) if present else None


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.to_dense() if leaf.layout is not torch.strided else leaf
    flat = leaf.detach().resolve_conj().resolve_neg().flatten()
    flat_bytes = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one number may have any stride
    return leaf.dtype, tuple(leaf.shape), bytes(flat_bytes.tolist())
