"""Say what a rank was handed as its batch, for others to compare: ranks that shuffle apart train on what is nobody's.

rank 0: inputs of batch a     rank 1: targets of batch b        -->        rank 1 differs from rank 0 in its batch[0]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.listing import held

CheckBatch = Literal["first", "always", "never"]
_FIRST, _EVERY = 10, 100


def is_compared(check: CheckBatch, step: int) -> bool:
    """Whether ranks compare what they are handed in this step.

    >>> [step for step in range(1, 301) if is_compared("first", step)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100, 200, 300]
    """
    return check == "always" or (check == "first" and (step <= _FIRST or step % _EVERY == 0))


def of_batch(batch: Any) -> Mapping[str, str]:
    """Each tensor of a batch with the hash of its data; not those that a rank was handed None for, or no data.

    >>> import torch
    >>> of_batch((torch.ones(2), None))
    {'batch[0]': 'float32[2]: 1.0, 1.0 (hash 80b8fd6d)'}
    """
    leaves = [(name, leaf) for name, leaf in tree.paths(batch) if isinstance(leaf, Tensor)]
    lines = [(name, held([leaf])) for name, leaf in leaves]
    return {f"batch{name}": line[0] for name, line in lines if line}


def digest(leaves: Mapping[str, str]) -> int:
    """Return all of them as one number; 0 if there are none."""
    return int.from_bytes(hashlib.sha256(repr(leaves).encode()).digest()[:7]) if leaves else 0
