"""Cut a batch into microbatches: each leaf along its rows, anything else whole.

    12 rows in 5        --> cut -->        3 3 2 2 2

Scalars and non-tensors go whole to every microbatch. Which leaves have rows, and where, is never guessed: leaves that
disagree are an error until somebody says `Chunk` or `Replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fpipe import tree as trees
from fpipe.meaning.stages.memory_layout import is_strided, layout_of
from fpipe.transforms.specs import Chunk, Sum, in_our_words

BATCH = ("inputs", "target")

What = str | tuple[str, ...]
"""How errors call a tree, or each part of a tuple: by default a pair is a batch, (inputs, target)."""


def rows(tree: Any, spec: Any = None, *, what: What = BATCH) -> int:
    """How many rows a batch has; a function as `spec` says Chunk or Replicate of a leaf.

    >>> import fpipe, torch
    >>> rows({"a": torch.zeros(12, 3), "b": torch.zeros(6)}, {"a": fpipe.Chunk(0), "b": fpipe.Replicate()})
    12
    """
    found: dict[str, int] = {}
    for (place, leaf), dim in zip(named(tree, what), cut_along(tree, spec, what), strict=True):
        if dim is not None and not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"{place} has no dim {dim} to cut along: its shape is {tuple(leaf.shape)}. Say another Chunk."
            )
        if dim is not None:
            found[place] = leaf.size(dim)
    if not found:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in trees.leaves(tree)}))
        raise ValueError(
            "no leaf of the batch has rows: scalars, non-tensors and Replicate() go whole to every microbatch. Rows "
            f"are those of torch tensors; found {kinds}."
        )
    first, n = next(iter(found.items()))
    for place, size in found.items():
        if size != n:
            raise ValueError(
                f"{first} has {n} rows, {place} has {size}. Say Replicate() for a leaf that every microbatch takes "
                "whole, or Chunk(dim) for one whose rows are elsewhere."
            )
    if n == 0:
        raise ValueError(f"{first} has 0 rows; a microbatch has at least one.")
    return n


def cut(
    tree: Any,
    index: int,
    count: int,
    spec: Any = None,
    *,
    size: int | None = None,
    total: int | None = None,
    what: What = BATCH,
) -> tuple[Any, int]:
    """One of `count` microbatches, as views of the batch, and its rows: of n rows, the first n mod count get one more.

    With `size` each has that many rows, the last what is left. `total` says the rows of the batch where `rows` has
    found them; the leaves are then not looked at again.

    >>> import torch
    >>> [cut({"x": torch.arange(7), "scale": 2.0}, index, 4)[0]["x"].tolist() for index in range(4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    n = rows(tree, spec, what=what) if total is None else total
    if size is not None:
        if -(-n // size) != count:
            raise ValueError(f"{n} rows in microbatches of {size} are {-(-n // size)} microbatches, not {count}.")
        start, length = index * size, min(size, n - index * size)
    else:
        if n < count:
            raise ValueError(
                f"{n} rows cannot fill {count} microbatches; use split({count}, rows={n}, allow_fewer=True)."
            )
        start, length = index * (n // count) + min(index, n % count), n // count + (index < n % count)
    way = "hand in a list of microbatches, to split(m, presplit=True)"
    return _part(tree, cut_along(tree, spec), start, length, what, way), length


def cut_sequence(
    tree: Any, index: int, count: int, dim: int = 1, spec: Any = None, *, row_spec: Any = None, what: str = "inputs"
) -> tuple[Any, float]:
    """One of `count` slices of the sequences in a batch, as views, and its share of the length.

    Sequences are along `dim` of each leaf that has rows, unless `spec` says otherwise of a leaf. Of n positions the
    first n mod count slices get one more.

    >>> import torch
    >>> [(part.tolist(), share) for part, share in (cut_sequence(torch.arange(4)[None], k, 2) for k in range(2))]
    [([[0, 1]], 0.5), ([[2, 3]], 0.5)]
    """
    dims = sequence_dims(tree, dim, spec, row_spec)
    lengths: dict[str, int] = {}
    for (place, leaf), along in zip(named(tree, what), dims, strict=True):
        if along is not None and not -leaf.ndim <= along < leaf.ndim:
            raise ValueError(
                f"{place} has no dim {along} to slice along: its shape is {tuple(leaf.shape)}. Say where its sequence "
                "is by slice_sequence(..., spec=): Chunk(dim), or Replicate() for what every slice takes whole."
            )
        if along is not None:
            lengths[place] = leaf.shape[along]
    if not lengths:
        raise ValueError(f"no leaf of the {what} has a sequence to slice.")
    first, length = next(iter(lengths.items()))
    other = next((place for place in lengths if lengths[place] != length), None)
    if other is not None:
        raise ValueError(
            f"the sequence of {first} has {length} positions, that of {other} has {lengths[other]}; say Replicate() in "
            "slice_sequence(..., spec=) for a leaf that every slice takes whole."
        )
    if length < count:
        raise ValueError(f"the sequence of {first} has {length} positions, too few for {count} slices.")
    start, size = index * (length // count) + min(index, length % count), length // count + (index < length % count)
    way = "pad it, or leave slices out"
    return _part(tree, dims, start, size, what, way), size / length


def _part(tree: Any, dims: Sequence[int | None], start: int, length: int, what: What, way: str) -> Any:
    """So many rows or positions of each leaf, as views; those leaves whole that have no such dimension."""
    leaves, containers = trees.flatten(tree)
    parts = list[Any]()
    for at, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None or (not is_strided(leaf) and leaf.size(dim) == length):
            parts.append(leaf)
        elif is_strided(leaf):
            parts.append(leaf.narrow(dim, start, length))
        else:
            raise ValueError(
                f"{named(tree, what)[at][0]} is a {layout_of(leaf)}, of which torch has no part as a view: {way}. Or "
                "say Replicate() for what goes whole to each."
            )
    return trees.unflatten(containers, parts)


def sequence_dims(tree: Any, dim: int, spec: Any, row_spec: Any) -> list[int | None]:
    """Along which dimension the sequence of each leaf is; None for a leaf that every slice takes whole."""
    if spec is not None:
        return cut_along(tree, spec)
    return [None if rows is None else dim for rows in cut_along(tree, row_spec)]


def named(tree: Any, what: What) -> list[tuple[str, Any]]:
    """Every leaf with the name an error gives it: inputs['a'][0]."""
    if isinstance(what, str) or not isinstance(tree, tuple) or len(tree) != len(what):
        what, tree = (what if isinstance(what, str) else what[0],), (tree,)
    found: list[tuple[str, Any]] = []
    for word, part in zip(what, tree, strict=True):
        noun, *of = word.split(" of ")
        found += [(" of ".join([noun + place, *of]), leaf) for place, leaf in trees.paths(part)]
    return found


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
