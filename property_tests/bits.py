"""What is equal bit by bit: NaN to NaN, and 0 not to -0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpipe import tree


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def bits(value: Any) -> list[Any]:
    """Leaves as something to compare."""
    return [_bits(leaf) for leaf in tree.leaves(value)]


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.to_dense() if leaf.layout is not torch.strided else leaf
    flat = leaf.detach().resolve_conj().resolve_neg().flatten()
    data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # one number may have any stride
    return leaf.dtype, tuple(leaf.shape), bytes(data.tolist())
