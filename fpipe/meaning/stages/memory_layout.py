"""Describe how a tensor lies in memory, and alias the value that a stage reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def is_strided(tensor: Tensor) -> bool:
    """Whether it is in one piece of memory, by sizes and strides: sparse and nested tensors are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def layout_of(tensor: Tensor) -> str:
    """Name the layout of a tensor that is not strided."""
    return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"


@lru_cache(maxsize=1024)
def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many places in memory a tensor reaches over."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def alias(leaf: Any) -> Any:
    """Alias a value for the stage that reads it: no leaf of autograd's graph, as in the model that is not cut.

    Autocast casts a leaf once for all its uses, and so adds their gradients up in the lower precision."""
    known = isinstance(leaf, Tensor) and leaf.requires_grad and is_strided(leaf)
    return torch.ops.aten.alias.default(leaf) if known else leaf


# Hand each row of a microbatch parameters of its own, which are all equal: their gradient is then one for each row.


def rows_of(leaves: Iterable[Any]) -> int:
    """How many rows there are in what a stage takes: scalars and what is no tensor have none."""
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def of_each_row(leaves: Sequence[Any], rows: int) -> list[Any]:
    """The parameters of a stage, each with a dimension of rows in front."""
    return [
        leaf.detach().expand(rows, *leaf.shape).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
