"""Join what came of microbatches, or of the slices of a sequence: the inverse of cutting a batch.

    3 3 2 2 2        --> join -->        12 rows

Tensors are put together along their rows. What has none is added, averaged, or must be equal in all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree as trees
from fpipe.meaning.single_device.microbatch import cut_along, named, sequence_dims, spread
from fpipe.transforms.specs import Chunk, Sum, in_our_words


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
