"""Cut a batch into microbatches, each leaf along its rows and anything else whole, and join their results.

    12 rows in 5        --> cut -->        3 3 2 2 2        --> join -->        12 rows

Scalars and non-tensors go whole to every microbatch. Which leaves have rows, and where, is never guessed: leaves that
disagree are an error until a spec says `Chunk` or `Replicate`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree as trees
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.write_guard import is_strided, layout_of
from fpipe.transforms.specs import Chunk, Sum, as_spec

BATCH = ("inputs", "target")

Label = str | tuple[str, ...]
"""The name of a pytree in errors, or of each part of a tuple; by default a pair is a batch, (inputs, target)."""


def count_batch_rows(tree: Any, spec: Any = None, *, label: Label = BATCH) -> int:
    """Return the number of rows of a batch; a function as `spec` returns Chunk or Replicate for a leaf.

    >>> import fpipe, torch
    >>> count_batch_rows({"a": torch.zeros(12, 3), "b": torch.zeros(6)}, {"a": fpipe.Chunk(0), "b": fpipe.Replicate()})
    12
    """
    sizes = rows_by_leaf(tree, spec, label)
    first_path, row_count = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != row_count:
            raise ValueError(
                f"{first_path} has {row_count} rows, {path} has {size}. Say Replicate() for a leaf that goes whole, "
                "Chunk(dim) for other rows; a leaf like cu_seqlens needs split(m, presplit=True)."
            )
    return row_count


def rows_by_leaf(tree: Any, spec: Any, label: Label) -> dict[str, int]:
    """Return the number of rows by path, for each leaf with rows; raise ValueError if no leaf has any."""
    sizes = _sizes_along(tree, cut_dims(tree, spec, label), label, "cut", "Say another Chunk.")
    if not sizes:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in trees.leaves(tree)}))
        raise ValueError(
            "no leaf of the batch has rows: scalars, non-tensors and Replicate() go whole to every microbatch; found "
            f"{kinds}."
        )
    first_path, row_count = next(iter(sizes.items()))
    if row_count == 0:
        raise ValueError(f"{first_path} has 0 rows; a microbatch has at least one.")
    return sizes


def _sizes_along(tree: Any, dims: Sequence[int | None], label: Label, verb: str, remedy: str) -> dict[str, int]:
    """Return the size of each leaf along its dimension, by path; `verb` and `remedy` are for errors."""
    sizes: dict[str, int] = {}
    for (path, leaf), dim in zip(named_leaves(tree, label), dims, strict=True):
        if dim is not None and not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(f"{path} has no dim {dim} to {verb} along: its shape is {tuple(leaf.shape)}. {remedy}")
        if dim is not None:
            sizes[path] = leaf.size(dim)
    return sizes


def _range_of_part(index: int, count: int, total: int) -> tuple[int, int]:
    """Return the start and the length of a part; the first `total % count` of `count` parts are one longer."""
    quotient, remainder = divmod(total, count)
    return index * quotient + min(index, remainder), quotient + (index < remainder)


def cut(
    tree: Any,
    index: int,
    count: int,
    spec: Any = None,
    *,
    size: int | None = None,
    total: int | None = None,
    label: Label = BATCH,
) -> tuple[Any, int]:
    """Return one of `count` microbatches, as views of the batch, and its number of rows.

    Of n rows, the first n mod count microbatches get one more. With `size` each has that many rows, the last one the
    rest. `total` is the number of rows of the batch, if it is known already.

    >>> import torch
    >>> [cut({"x": torch.arange(7), "scale": 2.0}, index, 4)[0]["x"].tolist() for index in range(4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    rows = count_batch_rows(tree, spec, label=label) if total is None else total
    if size is not None:
        if -(-rows // size) != count:
            raise ValueError(f"{rows} rows in microbatches of {size} make {-(-rows // size)}, not {count}.")
        start, length = index * size, min(size, rows - index * size)
    else:
        if rows < count:
            remedy = f"use split({count}, rows={rows}, allow_fewer=True)"
            raise ValueError(f"{rows} rows cannot fill {count} microbatches; {remedy}.")
        start, length = _range_of_part(index, count, rows)
    remedy = "hand in a list of microbatches, to split(m, presplit=True)"
    return _narrow(tree, cut_dims(tree, spec), start, length, label, remedy), length


def cut_sequence(
    tree: Any,
    index: int,
    count: int,
    dim: int = 1,
    spec: Any = None,
    *,
    sizes: Sequence[int] | None = None,
    row_spec: Any = None,
    label: str = "inputs",
) -> tuple[Any, float]:
    """Return one of `count` slices of the sequences in a batch, as views, and its share of the length.

    Sequences are along `dim` of each leaf that has rows, unless `spec` says otherwise of a leaf. Slices have these
    `sizes`; without them, of n positions the first n mod count slices get one more.

    >>> import torch
    >>> [(part.tolist(), share) for part, share in (cut_sequence(torch.arange(4)[None], k, 2) for k in range(2))]
    [([[0, 1]], 0.5), ([[2, 3]], 0.5)]
    """
    dims = sequence_dims(tree, dim, spec, row_spec)
    lengths = _sizes_along(tree, dims, label, "slice", "Say where its sequence is by slice_sequence(..., spec=).")
    if not lengths:
        raise ValueError(f"no leaf of the {label} has a sequence to slice.")
    first_path, length = next(iter(lengths.items()))
    misfit_path = next((path for path in lengths if lengths[path] != length), None)
    if misfit_path is not None:
        raise ValueError(
            f"the sequence of {first_path} has {length} positions, that of {misfit_path} has {lengths[misfit_path]}; "
            "say Replicate() in slice_sequence(..., spec=) for a whole leaf."
        )
    if length < count:
        raise ValueError(f"the sequence of {first_path} has {length} positions, too few for {count} slices.")
    if sizes and sum(sizes) != length:
        raise ValueError(f"the sequence of {first_path} has {length} positions, and slices of {sizes} {sum(sizes)}.")
    start, size = (sum(sizes[:index]), sizes[index]) if sizes else _range_of_part(index, count, length)
    remedy = "pad it, or leave slices out"
    return _narrow(tree, dims, start, size, label, remedy), size / length


def _narrow(tree: Any, dims: Sequence[int | None], start: int, length: int, label: Label, remedy: str) -> Any:
    """Return `length` rows or positions of each leaf from `start`, as views; leaves without that dimension whole."""
    leaves, containers = trees.flatten(tree)
    parts = list[Any]()
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        # Sparse and nested tensors have no views of rows; one that goes whole to a single microbatch needs none.
        if dim is None or (not is_strided(leaf) and leaf.size(dim) == length):
            parts.append(leaf)
        elif is_strided(leaf):
            parts.append(leaf.narrow(dim, start, length))
        else:
            raise ValueError(
                f"{named_leaves(tree, label)[index][0]} is a {layout_of(leaf)}, of which torch has no part as a view: "
                f"{remedy}, or say Replicate()."
            )
    return trees.unflatten(containers, parts)


def sequence_dims(tree: Any, dim: int, spec: Any, row_spec: Any) -> list[int | None]:
    """Return the dimension of the sequence in each leaf; None for a leaf that every slice takes whole."""
    if spec is not None:
        return cut_dims(tree, spec)
    return [None if row_dim is None else dim for row_dim in cut_dims(tree, row_spec)]


def named_leaves(tree: Any, label: Label) -> list[tuple[str, Any]]:
    """Return each leaf with its name in errors, such as inputs['a'][0]."""
    if isinstance(label, str) or not isinstance(tree, tuple) or len(tree) != len(label):
        label, tree = (label if isinstance(label, str) else label[0],), (tree,)
    path_and_leaf: list[tuple[str, Any]] = []
    for part_label, part in zip(label, tree, strict=True):
        noun, *owner_words = part_label.split(" of ")
        path_and_leaf += [(" of ".join([noun + path, *owner_words]), leaf) for path, leaf in trees.paths(part)]
    return path_and_leaf


def cut_dims(tree: Any, spec: Any, label: Label = "batch") -> list[int | None]:
    """Return the dimension that each leaf is cut along; None for a leaf that goes whole."""
    dims: list[int | None] = []
    for leaf, leaf_spec in zip(trees.leaves(tree), spec_per_leaf(spec, tree, label), strict=True):
        meant = as_spec(leaf_spec(leaf) if callable(leaf_spec) and not isinstance(leaf_spec, type) else leaf_spec)
        if isinstance(meant, Sum):
            raise ValueError(
                "Sum() says how parts are joined, and not how a leaf is cut: say Chunk(dim) or Replicate()."
            )
        dims.append(meant.dim if isinstance(meant, Chunk) and isinstance(leaf, Tensor) and leaf.ndim else None)
    return dims


def spec_per_leaf(spec: Any, tree: Any, label: Label = "batch") -> list[Any]:
    """Return the spec of each leaf; a spec for a container holds for all leaves in it.

    Raises:
        ValueError: the spec has containers that the pytree does not have.

    >>> from fpipe.transforms.specs import Replicate
    >>> spec_per_leaf({"x": Chunk(), "more": Replicate()}, {"x": 1, "more": [2, 3]})
    [Chunk(dim=0), Replicate(), Replicate()]
    """
    try:
        return trees.broadcast_prefix(spec, tree)
    except ValueError:
        misfit = trees.find_mismatch(spec, tree)
        if misfit is None:
            raise
        path, specified, actual = misfit
        for index, part_label in enumerate(label if isinstance(label, tuple) else ()):
            path = path.replace(f"[{index}]", part_label, 1) if path.startswith(f"[{index}]") else path
        name = path if isinstance(label, tuple) else label + path
        raise ValueError(
            f"the spec has {specified} where {name or 'the batch'} is {actual}; a spec says one thing of all, or "
            "is built like it."
        ) from None


# Join the results of microbatches, or of the slices of a sequence: the inverse of cutting a batch.
#
# Tensors are concatenated along their rows. Results without rows are added, averaged, or must be equal in all.


@outside_autocast()
def join(
    parts: Sequence[Any], weights: Sequence[float] | None = None, spec: Any = None, *, label: str = "outputs"
) -> Any:
    """Join the results of microbatches: the inverse of `cut`; a function as `spec` joins the list of a leaf's parts.

    Tensors are concatenated along their rows; 0-d tensors become their mean, weighted by `weights` (the microbatches'
    numbers of rows; None: all equal); anything else must be equal.

    >>> import torch
    >>> join([{"y": torch.zeros(2), "aux": torch.tensor(1.0)}, {"y": torch.ones(1), "aux": torch.tensor(4.0)}], [2, 1])
    {'y': tensor([0., 0., 1.]), 'aux': tensor(2.)}
    """
    if not parts:
        raise ValueError("nothing to join: the list of parts is empty.")
    shares = [1 / len(parts)] * len(parts) if weights is None else [weight / sum(weights) for weight in weights]
    # A short cut without containers, for the outputs of most models.
    if all(isinstance(part, Tensor) for part in parts):
        return _join_leaf(
            lambda: named_leaves(parts[0], label)[0][0], list(parts), shares, *spec_per_leaf(spec, parts[0], label)
        )
    _, containers = trees.flatten(parts[0])
    columns = zip(*(_leaves_like_first(parts, index, containers, label) for index in range(len(parts))), strict=True)
    specs = spec_per_leaf(spec, parts[0], label)
    joined = [
        _join_leaf(lambda index=index: named_leaves(parts[0], label)[index][0], list(column), shares, leaf_spec)
        for index, (column, leaf_spec) in enumerate(zip(columns, specs, strict=True))
    ]
    return trees.unflatten(containers, joined)


def _leaves_like_first(parts: Sequence[Any], index: int, containers: trees.Spec, label: str) -> list[Any]:
    """Return the leaves of a part in the order of the first part's leaves, whose containers these are."""
    # Dicts with the same keys in another order are equal for tree.like.
    leaves, own_containers = trees.flatten(parts[index])
    if own_containers == containers:
        return leaves
    path = trees.first_difference(parts[0], parts[index])
    if path is not None:
        raise ValueError(f"{label}{path} is in only one of microbatches 0 and {index}; all must have one structure.")
    try:
        return trees.leaves(trees.in_order_of(parts[0], parts[index]))
    except ValueError:
        misfit = trees.find_mismatch(parts[0], parts[index])
        if misfit is None:
            raise
        path, first_kind, own_kind = misfit
        raise ValueError(
            f"{label}{path} is {first_kind} in microbatch 0 and {own_kind} in microbatch {index}; all must have one "
            "structure."
        ) from None


def join_gradients(inputs: Any, parts: Sequence[Sequence[Any]], spec: Any = None) -> list[Any]:
    """Join the gradients of a batch's leaves from its microbatches; None for a leaf without a gradient.

    They are concatenated along rows, and added for a leaf that every microbatch took whole.

    >>> import torch
    >>> join_gradients((torch.zeros(3), torch.tensor(2.0)), [[torch.zeros(2), torch.ones(())], [torch.ones(1)] * 2])
    [tensor([0., 0., 1.]), tensor([2.])]
    """
    return _join_columns(parts, cut_dims(inputs, spec))


def join_slices(
    inputs: Any, parts: Sequence[Sequence[Any]], dim: int = 1, spec: Any = None, *, row_spec: Any = None
) -> list[Any]:
    """Join the gradients of a microbatch's leaves from its slices.

    They are concatenated along the sequence, and added for a leaf that every slice took whole, from the last slice to
    the first.

    >>> import torch
    >>> join_slices((torch.zeros(1, 3), torch.tensor(2.0)), [[torch.zeros(1, 2), None], [torch.ones(1, 1), None]])
    [tensor([[0., 0., 1.]]), None]
    """
    dims = sequence_dims(inputs, dim, spec, row_spec)
    return _join_columns(parts, dims, from_last=True)


@outside_autocast()
def _join_columns(parts: Sequence[Sequence[Any]], dims: Sequence[int | None], from_last: bool = False) -> list[Any]:
    """Concatenate the gradients of each leaf along its dimension, or add them if it has none."""
    # Backwards of slices run from the last to the first, so sums over slices start at the last (`from_last`).
    joined: list[Any] = []
    for dim, column in zip(dims, zip(*parts, strict=True), strict=True):
        grads = [grad for grad in (reversed(column) if from_last and dim is None else column) if grad is not None]
        if dim is None or not grads:
            joined.append(functools.reduce(torch.add, grads) if grads else None)
        else:
            joined.append(torch.cat(grads, dim))
    return joined


def _join_leaf(path: Callable[[], str], parts: list[Any], shares: list[float], leaf_spec: Any) -> Any:
    """Join one leaf of all microbatches by its spec; `path` names the leaf in errors."""
    # torch.distributed.pipelining's _CustomReducer.
    if hasattr(leaf_spec, "reduce_fn"):
        return functools.reduce(leaf_spec.reduce_fn, parts, leaf_spec.init_value)
    if callable(leaf_spec) and not isinstance(leaf_spec, type):
        return leaf_spec(parts)
    meant, first_part = as_spec(leaf_spec), parts[0]
    if isinstance(meant, Sum):
        return _sum_parts(path, parts)
    if isinstance(meant, Chunk) and all(isinstance(leaf, Tensor) and leaf.ndim for leaf in parts):
        try:
            return torch.cat(parts, meant.dim)
        except (RuntimeError, IndexError):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in parts)
            raise ValueError(
                f"{path()} cannot be joined along dim {meant.dim}: its parts have shapes {shapes}."
            ) from None
    # A leaf that every microbatch took whole, and returned, comes back unchanged.
    if all(leaf is first_part for leaf in parts):
        return first_part
    if isinstance(meant, Chunk) and all(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.ndim for leaf in parts
    ):
        return functools.reduce(torch.add, [leaf * share for leaf, share in zip(parts, shares, strict=True)])
    for index, leaf in enumerate(parts):
        if not _equal(first_part, leaf):
            raise ValueError(
                f"{path()} is {first_part!r} in microbatch 0 and {leaf!r} in microbatch {index}: what has no rows must "
                "be equal in all. Say Sum(), or a function of the parts."
            )
    return first_part


def _sum_parts(path: Callable[[], str], parts: list[Any]) -> Any:
    try:
        return functools.reduce(operator.add, parts)
    except (RuntimeError, TypeError):
        kinds = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
        raise ValueError(f"{path()} cannot be joined by Sum(), which adds its parts: they are {kinds}.") from None


def _equal(part: Any, other_part: Any) -> bool:
    if part is other_part or type(part) is not type(other_part):
        return part is other_part
    # Fake tensors, on which bytes are counted, have no numbers; the step itself compares those.
    if hasattr(part, "fake_mode"):
        return part.shape == other_part.shape
    return torch.equal(part, other_part) if isinstance(part, Tensor) else bool(part == other_part)
