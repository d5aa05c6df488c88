"""Pad a batch to the next of few lengths, so that steps have few signatures: few traces, compilations and graphs.

length 100        --> pad(to=64) -->        length 128, a mask, and waste 0.28
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.label_means import IGNORED
from fpipe.meaning.single_device.microbatch import BATCH, cut_dims, named_leaves


class Padded(NamedTuple):
    """A batch that `pad` made longer.

    Attributes:
        batch: the longer batch.
        mask: bool, `[rows, length]`, True where the batch was before; of a list a list.
        waste: how many positions of padding there are for each position of the batch.
    """

    batch: Any
    mask: Any
    waste: float


def pad(
    batch: Any, to: int | float | Sequence[int], *, dim: int = 1, spec: object = None, ignored: int = IGNORED
) -> Padded:
    """Pad a batch to the next of few lengths, so that steps have few signatures.

    A list of microbatches is padded to one length. Whole numbers of a target, or called `labels`, are padded with
    `ignored`, `document_ids` with -1, and others with 0. In `cu_seqlens` the padding is one more document, and empty
    ones fill up to a power of two.

    Args:
        batch: a pair (inputs, target), or a list of pairs, as `pack` makes them.
        to: the lengths: multiples of a whole number, powers of a float such as 2**0.5, or a list of lengths.
        dim: the dimension that is padded, of tensors that have it.
        spec: of other batches, what is padded: Chunk(dim) or Replicate(), or a pytree of them, as for `split`.
        ignored: the class of padded labels, which the loss ignores.

    Returns:
        A tuple `(batch, mask, waste)`.

    Raises:
        ValueError: nothing has that dimension, two tensors have several lengths, or no length of `to` is long enough.

    >>> import torch
    >>> batch, mask, waste = pad((torch.ones(1, 5), torch.ones(1, 5, dtype=torch.int64)), to=4)
    >>> batch[1].tolist(), mask.sum().item(), waste
    ([[1, 1, 1, 1, 1, -100, -100, -100]], 5, 0.6)
    """
    parts: list[Any] = batch if isinstance(batch, list) else [batch]
    dims_by_part = [_padded_dims(part, dim, spec) for part in parts]
    shapes = [_shape_of_positions(part, dims) for part, dims in zip(parts, dims_by_part, strict=True)]
    length = _next_length(max(shape[-1] for shape in shapes), to)
    padded_parts = [_pad_part(part, dims, length, ignored) for part, dims in zip(parts, dims_by_part, strict=True)]
    masks = [(torch.arange(length) < shape[-1]).repeat(*shape[:-1], 1) for shape in shapes]
    masks = [mask.to(tree.leaves(part)[0].device) for mask, part in zip(masks, parts, strict=True)]
    positions = sum(shape.numel() for shape in shapes)
    waste = (sum(mask.numel() for mask in masks) - positions) / positions
    return Padded(padded_parts, masks, waste) if isinstance(batch, list) else Padded(padded_parts[0], masks[0], waste)


_BORDERS = "['cu_seqlens']"


def _padded_dims(part: Any, dim: int, spec: object) -> list[int | None]:
    """Return the dimension that is padded of each leaf; None for a leaf without one."""
    if spec is not None:
        return cut_dims(part, spec, BATCH)
    return [dim if isinstance(leaf, Tensor) and leaf.ndim > dim else None for leaf in tree.leaves(part)]


def _shape_of_positions(part: Any, dims: Sequence[int | None]) -> torch.Size:
    """Return the shape of the first leaf that is padded, up to its length, which the others share."""
    leaves = [(path, leaf, dim) for (path, leaf), dim in zip(named_leaves(part, BATCH), dims, strict=True)]
    shape_by_path = {path: leaf.shape[: dim + 1] for path, leaf, dim in leaves if dim is not None}
    if not shape_by_path:
        raise ValueError("no tensor has that dimension: say dim= or spec=.")
    first_path, first_shape = next(iter(shape_by_path.items()))
    for path, shape in shape_by_path.items():
        if shape[-1] != first_shape[-1]:
            raise ValueError(
                f"{first_path} has length {first_shape[-1]}, {path} {shape[-1]}: say Replicate() in spec=."
            )
    return first_shape


def _next_length(length: int, buckets: int | float | Sequence[int]) -> int:
    """Return the first length of `buckets` that is long enough.

    >>> [_next_length(length, 2**0.5) for length in (3, 4, 5, 9)], _next_length(100, 128), _next_length(9, [8, 12])
    ([3, 4, 6, 12], 128, 12)
    """
    if isinstance(buckets, float) and buckets > 1:
        # Powers of a root of 2 are off by rounding where they are whole numbers.
        lengths = (ceil(buckets**power - 1e-6) for power in count())
        return next(candidate for candidate in lengths if candidate >= length)
    if isinstance(buckets, int) and buckets > 0:
        return -(-length // buckets) * buckets
    if not isinstance(buckets, Sequence) or not buckets:
        raise ValueError(f"to is a whole number, a float above 1 or a list of lengths; found {buckets!r}.")
    if length > max(buckets):
        raise ValueError(f"the batch has length {length}, above to={max(buckets)}.")
    return min(candidate for candidate in buckets if candidate >= length)


def _pad_part(part: Any, dims: Sequence[int | None], length: int, ignored: int) -> Any:
    padded_leaves: list[Any] = []
    for (path, leaf), dim in zip(named_leaves(part, BATCH), dims, strict=True):
        if dim is not None:
            is_label = path.startswith("target") or path.endswith("['labels']")
            is_label = is_label and not (leaf.is_floating_point() or leaf.dtype == torch.bool)
            value = -1 if path.endswith("['document_ids']") else ignored if is_label else 0
            shape = [*leaf.shape]
            shape[dim] = length - leaf.size(dim)
            leaf = torch.cat([leaf, leaf.new_full(shape, value)], dim)
        elif path.endswith(_BORDERS):
            # Kernels leave what lies behind the last border unwritten, so the padding is a document too.
            documents = len(leaf) - 1
            room = 1 << documents.bit_length()
            leaf = torch.cat([leaf, leaf.new_full((room - documents,), length)])
        padded_leaves.append(leaf)
    return tree.unflatten(tree.flatten(part)[1], padded_leaves)
