"""Cut a batch into microbatches, each leaf along its rows and anything else whole, and join what comes of them.

    12 rows in 5        --> cut -->        3 3 2 2 2        --> join -->        12 rows

Scalars and non-tensors go whole to every microbatch. Which leaves have rows, and where, is never guessed: leaves that
disagree are an error until somebody says `Chunk` or `Replicate`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree as trees
from fpipe.meaning.purity.own_memory import is_strided, layout_of
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
    sizes = rows_by_leaf(tree, spec, what)
    first, n = next(iter(sizes.items()))
    for place, size in sizes.items():
        if size != n:
            raise ValueError(
                f"{first} has {n} rows, {place} has {size}. Say Replicate() for a leaf that every microbatch takes "
                "whole, or Chunk(dim) for one whose rows are elsewhere. A leaf that counts rows, as cu_seqlens does, "
                "is neither: cut the batch yourself, for split(m, presplit=True)."
            )
    return n


def rows_by_leaf(tree: Any, spec: Any, what: What) -> dict[str, int]:
    """Return the rows of each leaf that has some, by its place; raise ValueError where none has, or a leaf has 0."""
    sizes: dict[str, int] = {}
    for (place, leaf), dim in zip(named(tree, what), cut_along(tree, spec, what), strict=True):
        if dim is not None and not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"{place} has no dim {dim} to cut along: its shape is {tuple(leaf.shape)}. Say another Chunk."
            )
        if dim is not None:
            sizes[place] = leaf.size(dim)
    if not sizes:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in trees.leaves(tree)}))
        raise ValueError(
            "no leaf of the batch has rows: scalars, non-tensors and Replicate() go whole to every microbatch. Rows "
            f"are those of torch tensors; found {kinds}."
        )
    first, n = next(iter(sizes.items()))
    if n == 0:
        raise ValueError(f"{first} has 0 rows; a microbatch has at least one.")
    return sizes


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


# Join what came of microbatches, or of the slices of a sequence: the inverse of cutting a batch.
#
# Tensors are put together along their rows. What has none is added, averaged, or must be equal in all.


def join(
    parts: Sequence[Any], weights: Sequence[float] | None = None, spec: Any = None, *, what: str = "outputs"
) -> Any:
    """Join the results of microbatches: the inverse of `cut`; a function as `spec` joins the list of a leaf's parts.

    Tensors are put together along their rows; 0-d tensors become their mean, by `weights` (the microbatches' rows;
    None: all the same); anything else must be equal.

    >>> import torch
    >>> join([{"y": torch.zeros(2), "aux": torch.tensor(1.0)}, {"y": torch.ones(1), "aux": torch.tensor(4.0)}], [2, 1])
    {'y': tensor([0., 0., 1.]), 'aux': tensor(2.)}
    """
    if not parts:
        raise ValueError("there is nothing to join: the list of parts is empty.")
    shares = [1 / len(parts)] * len(parts) if weights is None else [weight / sum(weights) for weight in weights]
    if all(isinstance(part, Tensor) for part in parts):  # no containers, at the end of most steps
        return _joined(lambda: named(parts[0], what)[0][0], list(parts), shares, *spread(spec, parts[0], what))
    _, containers = trees.flatten(parts[0])
    columns = zip(*(_as_the_first(parts, index, containers, what) for index in range(len(parts))), strict=True)
    specs = spread(spec, parts[0], what)
    made = [
        _joined(lambda at=at: named(parts[0], what)[at][0], list(each), shares, how)
        for at, (each, how) in enumerate(zip(columns, specs, strict=True))
    ]
    return trees.unflatten(containers, made)


def _as_the_first(parts: Sequence[Any], index: int, containers: trees.Spec, what: str) -> list[Any]:
    """The leaves of a part in the order of the first one's, which has these containers."""
    leaves, own = trees.flatten(parts[index])
    if own == containers:
        return leaves
    place = trees.difference(parts[0], parts[index])
    if place is not None:
        raise ValueError(f"{what}{place} is in only one of microbatches 0 and {index}; all must have one structure.")
    try:
        return trees.leaves(trees.like(parts[0], parts[index]))
    except ValueError:
        odd = trees.misfit(parts[0], parts[index])
        if odd is None:
            raise
        place, first, other = odd
        raise ValueError(
            f"{what}{place} is {first} in microbatch 0 and {other} in microbatch {index}; all must have one structure."
        ) from None


def join_gradients(inputs: Any, parts: Sequence[Sequence[Any]], spec: Any = None) -> list[Any]:
    """The gradients of a batch's leaves from those of its microbatches: put together along the rows, or added for a
    leaf that every microbatch took whole; None for a leaf without one.

    >>> import torch
    >>> join_gradients((torch.zeros(3), torch.tensor(2.0)), [[torch.zeros(2), torch.ones(())], [torch.ones(1)] * 2])
    [tensor([0., 0., 1.]), tensor([2.])]
    """
    return _put_together(parts, cut_along(inputs, spec))


def join_slices(
    inputs: Any, parts: Sequence[Sequence[Any]], dim: int = 1, spec: Any = None, *, row_spec: Any = None
) -> list[Any]:
    """Gradients of a microbatch from those of its slices: along the sequence, or added from the last slice back.

    >>> import torch
    >>> join_slices((torch.zeros(1, 3), torch.tensor(2.0)), [[torch.zeros(1, 2), None], [torch.ones(1, 1), None]])
    [tensor([[0., 0., 1.]]), None]
    """
    dims = sequence_dims(inputs, dim, spec, row_spec)
    return _put_together(parts, dims, back=True)


def _put_together(parts: Sequence[Sequence[Any]], dims: Sequence[int | None], back: bool = False) -> list[Any]:
    """The gradients of each leaf along its dimension; added if it has none, from the first or from the last `back`."""
    made: list[Any] = []
    for dim, column in zip(dims, zip(*parts, strict=True), strict=True):
        found = [one for one in (reversed(column) if back and dim is None else column) if one is not None]
        if dim is None or not found:
            made.append(functools.reduce(torch.add, found) if found else None)
        else:
            made.append(torch.cat(found, dim))
    return made


def _joined(place: Callable[[], str], parts: list[Any], shares: list[float], how: Any) -> Any:
    """One leaf from those of all microbatches."""
    if hasattr(how, "reduce_fn"):  # torch's _CustomReducer
        return functools.reduce(how.reduce_fn, parts, how.init_value)
    if callable(how) and not isinstance(how, type):
        return how(parts)
    kind, first = in_our_words(how), parts[0]
    if isinstance(kind, Sum):
        return _sum(place, parts)
    if isinstance(kind, Chunk) and all(isinstance(leaf, Tensor) and leaf.ndim for leaf in parts):
        try:
            return torch.cat(parts, kind.dim)
        except (RuntimeError, IndexError):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in parts)
            raise ValueError(
                f"{place()} cannot be joined along dim {kind.dim}: its parts have shapes {shapes}."
            ) from None
    if all(leaf is first for leaf in parts):  # what cut handed out whole comes back as it was
        return first
    if isinstance(kind, Chunk) and all(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.ndim for leaf in parts
    ):
        return functools.reduce(torch.add, [leaf * share for leaf, share in zip(parts, shares, strict=True)])
    for index, leaf in enumerate(parts):
        if not _equal(first, leaf):
            raise ValueError(
                f"{place()} is {first!r} in microbatch 0 and {leaf!r} in microbatch {index}: what has no rows must be "
                "equal in all. Say how to join it by Sum(), or a function of the list of parts."
            )
    return first


def _sum(place: Callable[[], str], parts: list[Any]) -> Any:
    try:
        return functools.reduce(operator.add, parts)
    except (RuntimeError, TypeError):
        kinds = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
        raise ValueError(f"{place()} cannot be joined by Sum(), which adds its parts: they are {kinds}.") from None


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if hasattr(one, "fake_mode"):  # where bytes are counted on shapes alone: the numbers are compared in the step
        return one.shape == other.shape
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
