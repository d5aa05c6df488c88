"""Cut a batch into microbatches, and join what came of them: each leaf along its rows, anything else whole.

    12 rows in 5        --> cut -->        3 3 2 2 2        --> join -->        12 rows

Scalars and non-tensors go whole to every microbatch. Which leaves have rows, and where, is never guessed: leaves that
disagree are an error until somebody says `Chunk` or `Replicate`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree as trees
from fpipe.graphs.graph import is_strided, layout_of
from fpipe.graphs.sharded import refuse_sharded
from fpipe.runtimes.leaf_specs import What, cut_along, spread
from fpipe.transforms.specs import Chunk, Sum, in_our_words

_BATCH = ("inputs", "target")


def rows(tree: Any, spec: Any = None, *, what: What = _BATCH) -> int:
    """How many rows a batch has; a function as `spec` says Chunk or Replicate of a leaf.

    >>> import fpipe, torch
    >>> rows({"a": torch.zeros(12, 3), "b": torch.zeros(6)}, {"a": fpipe.Chunk(0), "b": fpipe.Replicate()})
    12
    """
    found: dict[str, int] = {}
    for (place, leaf), dim in zip(_named(tree, what), cut_along(tree, spec, what), strict=True):
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
    what: What = _BATCH,
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
    dims = _sequence_dims(tree, dim, spec, row_spec)
    lengths: dict[str, int] = {}
    for (place, leaf), along in zip(_named(tree, what), dims, strict=True):
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
                f"{_named(tree, what)[at][0]} is a {layout_of(leaf)}, of which torch has no part as a view: {way}. Or "
                "say Replicate() for what goes whole to each."
            )
    return trees.unflatten(containers, parts)


def _sequence_dims(tree: Any, dim: int, spec: Any, row_spec: Any) -> list[int | None]:
    """Along which dimension the sequence of each leaf is; None for a leaf that every slice takes whole."""
    if spec is not None:
        return cut_along(tree, spec)
    return [None if rows is None else dim for rows in cut_along(tree, row_spec)]


def join(
    parts: Sequence[Any], weights: Sequence[float] | None = None, spec: Any = None, *, what: str = "outputs"
) -> Any:
    """What the microbatches gave, in one: the inverse of `cut`; a function as `spec` joins the list of a leaf's parts.

    Tensors are put together along their rows; 0-d tensors become their mean, by `weights` (the microbatches' rows;
    None: all the same); anything else must be equal.

    >>> import torch
    >>> join([{"y": torch.zeros(2), "aux": torch.tensor(1.0)}, {"y": torch.ones(1), "aux": torch.tensor(4.0)}], [2, 1])
    {'y': tensor([0., 0., 1.]), 'aux': tensor(2.)}
    """
    if not parts:
        raise ValueError("there is nothing to join: the list of parts is empty.")
    named = _named(parts[0], what)
    for index, part in enumerate(parts):
        place = trees.difference(parts[0], part)
        if place is not None:
            raise ValueError(
                f"{what}{place} is in only one of microbatches 0 and {index}; all must have one structure."
            )
    shares = [1 / len(parts)] * len(parts) if weights is None else [weight / sum(weights) for weight in weights]
    columns = zip(*(_as_the_first(parts, index, what) for index in range(len(parts))), strict=True)
    specs = spread(spec, parts[0], what)
    made = [_joined(name, list(each), shares, how) for (name, _), each, how in zip(named, columns, specs, strict=True)]
    return trees.unflatten(trees.flatten(parts[0])[1], made)


def _as_the_first(parts: Sequence[Any], index: int, what: str) -> list[Any]:
    """The leaves of a part in the order of the first one's."""
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
    """The same for the slices of one microbatch: put together along the sequence, or added from the last slice back.

    >>> import torch
    >>> join_slices((torch.zeros(1, 3), torch.tensor(2.0)), [[torch.zeros(1, 2), None], [torch.ones(1, 1), None]])
    [tensor([[0., 0., 1.]]), None]
    """
    dims = _sequence_dims(inputs, dim, spec, row_spec)
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


def _joined(place: str, parts: list[Any], shares: list[float], how: Any) -> Any:
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
                f"{place} cannot be joined along dim {kind.dim}: its parts have shapes {shapes}."
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
                f"{place} is {first!r} in microbatch 0 and {leaf!r} in microbatch {index}: what has no rows must be "
                "equal in all. Say how to join it by Sum(), or a function of the list of parts."
            )
    return first


def _sum(place: str, parts: list[Any]) -> Any:
    try:
        return functools.reduce(operator.add, parts)
    except (RuntimeError, TypeError):
        kinds = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
        raise ValueError(f"{place} cannot be joined by Sum(), which adds its parts: they are {kinds}.") from None


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if hasattr(one, "fake_mode"):  # where bytes are counted on shapes alone: the numbers are compared in the step
        return one.shape == other.shape
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _named(tree: Any, what: What) -> list[tuple[str, Any]]:
    """Every leaf with the name an error gives it: inputs['a'][0]."""
    if isinstance(what, str) or not isinstance(tree, tuple) or len(tree) != len(what):
        what, tree = (what if isinstance(what, str) else what[0],), (tree,)
    found: list[tuple[str, Any]] = []
    for word, part in zip(what, tree, strict=True):
        noun, *of = word.split(" of ")
        found += [(" of ".join([noun + place, *of]), leaf) for place, leaf in trees.paths(part)]
    return found


_AS_A_PAIR = " If the list is [inputs, target], as a DataLoader gives it, hand in tuple(batch)."


def refuse_spread(more: Sequence[Any], call: str) -> None:
    """A TypeError for what is handed in after the batch, as in `step(params, x, y)`."""
    if more:
        raise TypeError(
            f"a batch is one pair: {call.format('(inputs, target)')}; found {len(more) + 1} arguments after params. "
            "State and key are handed in by name."
        )


def check_batch(batch: Any) -> None:
    """A batch is a pair of pytrees with tensors of torch's."""
    if not isinstance(batch, tuple) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        more = (
            "" if not isinstance(batch, list) else f" What is cut already goes to split(m, presplit=True).{_AS_A_PAIR}"
        )
        raise ValueError(f"a batch is a pair (inputs, target), found {type(batch).__name__}.{more}")
    for place, leaf in _named(batch, _BATCH):
        refuse_sharded([leaf], place)
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__") and getattr(leaf, "ndim", 1):
            found = f"{type(leaf).__module__.split('.')[0]}.{type(leaf).__name__}"
            raise TypeError(
                f"{place} is a {found}, which is no tensor of torch's: hand in torch.from_numpy(...) of it, which "
                "shares its memory, or torch.as_tensor(...)."
            )


def streams(batch: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """A batch that is cut already as two streams, the inputs and the targets of its microbatches.

    It comes so, or as a list of pairs.

    >>> streams([("x0", "t0"), ("x1", "t1")], 2)
    (['x0', 'x1'], ['t0', 't1'])
    """
    if isinstance(batch, list):
        pairs: list[Any] = batch
        odd = next((at for at, pair in enumerate(pairs) if not isinstance(pair, tuple) or len(pair) != 2), None)  # pyright: ignore[reportUnknownArgumentType]
        if odd is not None:
            more = _AS_A_PAIR if len(pairs) == 2 else ""
            raise ValueError(f"microbatch {odd} is a pair (inputs, target), found {type(pairs[odd]).__name__}.{more}")
        batch = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    check_batch(batch)
    for word, stream in zip(_BATCH, batch, strict=True):
        if not isinstance(stream, tuple | list):
            raise ValueError(
                f"{word} is a list of {count} microbatches, since they are cut already (presplit=True); found "
                f"{type(stream).__name__}."
            )
    inputs, target = batch
    if len(inputs) != len(target):
        raise ValueError(f"inputs has {len(inputs)} microbatches, target has {len(target)}; none of them is left out.")
    if len(inputs) != count:
        raise ValueError(f"the batch has {len(inputs)} microbatches, the program has {count}.")
    return inputs, target


def rows_of_each(batch: tuple[Sequence[Any], Sequence[Any]], spec: Any = None) -> tuple[int, ...]:
    """The rows of each microbatch of two streams."""
    pairs = enumerate(zip(*batch, strict=True))
    words = " of microbatch ".join
    return tuple(rows(pair, spec, what=(words(("inputs", f"{at}")), words(("target", f"{at}")))) for at, pair in pairs)
