"""Hand each row of a microbatch parameters of its own, which are all equal: their gradient is then one for each row.

w: float32[4, 8]        --> of_each_row(.., 32 rows) -->        float32[32, 4, 8], a view that takes no memory
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def rows_of(leaves: Iterable[Any]) -> int:
    """How many rows there are in what a stage takes: scalars and what is no tensor have none."""
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def of_each_row(leaves: Sequence[Any], rows: int) -> list[Any]:
    """The parameters of a stage, each with a dimension of rows in front."""
    return [
        leaf.detach().expand(rows, *leaf.shape).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
