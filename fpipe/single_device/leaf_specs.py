"""Spread a spec over the leaves of a batch: along which dimension each of them is cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fpipe import tree as trees
from fpipe.transforms.specs import Chunk, Sum, in_our_words

What = str | tuple[str, ...]
"""How errors call a tree, or each part of a tuple: by default a pair is a batch, (inputs, target)."""


def cut_along(tree: Any, spec: Any, what: What = "batch") -> list[int | None]:
    """Along which dimension each leaf is cut; None for a leaf that goes whole."""
    found: list[int | None] = []
    for leaf, how in zip(trees.leaves(tree), spread(spec, tree, what), strict=True):
        kind = in_our_words(how(leaf) if callable(how) and not isinstance(how, type) else how)
        if isinstance(kind, Sum):
            raise ValueError(
                "Sum() says how parts are joined, and not how a leaf is cut: say Chunk(dim) or Replicate()."
            )
        found.append(kind.dim if isinstance(kind, Chunk) and isinstance(leaf, Tensor) and leaf.ndim else None)
    return found


def spread(spec: Any, tree: Any, what: What = "batch") -> list[Any]:
    """Spec of each leaf: one for all below a place where it says one thing.

    Raises:
        ValueError: it says more than there is.

    >>> from fpipe.transforms.specs import Replicate
    >>> spread({"x": Chunk(), "more": Replicate()}, {"x": 1, "more": [2, 3]})
    [Chunk(dim=0), Replicate(), Replicate()]
    """
    try:
        return trees.broadcast_prefix(spec, tree)
    except ValueError:
        odd = trees.misfit(spec, tree)
        if odd is None:
            raise
        place, said, found = odd
        for index, word in enumerate(what if isinstance(what, tuple) else ()):
            place = place.replace(f"[{index}]", word, 1) if place.startswith(f"[{index}]") else place
        name = place if isinstance(what, tuple) else what + place
        raise ValueError(
            f"the spec has {said} where {name or 'the batch'} is {found}; a spec says one thing of all, or is built "
            "as what it is for."
        ) from None
