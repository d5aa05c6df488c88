"""Refuse a change in place of what a stage is handed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fpipe import tree
from fpipe.graphs.graph import is_plain


def _odd(leaf: Tensor) -> bool:
    """Whether a tensor has no numbers to compare, or none that lie by sizes and strides."""
    return type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta or not is_plain(leaf)


@contextmanager
def unchanged(values: Any, who: str) -> Generator[None]:
    """Refuse a change in place of what a caller handed in, and put it back as it was.

    Versions tell most changes. What goes by `.data` makes no new one, so numbers are compared too.
    """
    tensors = [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    # Autograd itself refuses to change a leaf that wants a gradient, before it does; the others need a copy.
    before = [(leaf._version, None if leaf.requires_grad else leaf.clone()) for leaf in tensors]
    sentence = (
        f"{who} changed what it was given in place; a stage and a loss are pure functions. Work on a copy, or use "
        "inplace=False."
    )
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error):
            raise RuntimeError(sentence) from error
        raise
    changed = [
        (leaf, copy)
        for leaf, (version, copy) in zip(tensors, before, strict=True)
        if leaf._version != version or not (copy is None or _odd(leaf) or same_numbers(leaf, copy))
    ]
    with torch.no_grad():
        for leaf, copy in changed:
            if copy is not None:
                leaf.copy_(copy)
    if changed:
        raise RuntimeError(sentence)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Equal numbers, NaN for NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
