"""Find out whether means over the labels of microbatches average to the mean over the labels of the batch.

[3 -100 -100]  mean over 1 label            mean of means: each label of the second row counts a third of the first's
[1  4    2  ]  mean over 3 labels
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.microbatch import BATCH
from fpipe.model import MeanLabels
from fpipe.torch_internals import is_fake

IGNORED = -100
"""The class that torch's losses ignore by default."""
MEAN = 1
"""Torch's number of reduction="mean" in an op of a loss."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def describe_padding(labels: MeanLabels, batch: Any, *, presplit: bool = False) -> str:
    """Return a warning if the means of microbatches do not average to the mean of the batch, else "".

    Args:
        labels: which labels the means are taken over.
        batch: inputs and target; of a batch that is split already two lists, with one entry for each microbatch.
        presplit: whether the batch is split already; then microbatches are compared, not rows.
    """
    side = batch[BATCH.index(labels.side)]
    if presplit and not isinstance(side, list | tuple):
        return ""
    leaves: list[Any] = [dict(tree.paths(part)).get(labels.path) for part in (side if presplit else [side])]
    if not all(map(_has_integers, leaves)):
        return ""
    # A mean over microbatches weighs them by their rows: it is right where all have as many labels for each row.
    if presplit:
        counts = [_count_per_row(leaf, labels) for leaf in leaves]
        differ = any(count != counts[0] for count in counts)
    else:
        rows = leaves[0].reshape(len(leaves[0]), -1)
        counted = rows.sort(1).values if labels.weighs_classes else (rows != labels.ignored).sum(1)
        differ = bool((counted != counted[0]).any())
    if not differ:
        return ""
    parts = "microbatches" if presplit else "rows"
    has_ignored = any(bool((leaf == labels.ignored).any()) for leaf in leaves)
    ignored_class = f"{labels.ignored}, a class that the loss does not count,"
    classes = "classes that the loss weighs" if labels.weighs_classes else ignored_class
    # Without any, microbatches differ in length, as those of packed sequences do.
    is_in_classes = labels.weighs_classes or has_ignored
    difference = (
        f"holds {classes} in some {parts} more often" if is_in_classes else f"has more labels a row in some {parts}"
    )
    remedy = (
        "return (total, count) and say reduction='count'"
        if labels.side == "target"
        else "hand in num_items_in_batch, a tensor with the number of labels of the whole batch, and say "
        "reduction='sum'"
    )
    return (
        f"{labels.side}{labels.path} {difference} than in others: with "
        f"reduction='mean' the loss is a mean of the microbatches' means. For that of all labels {remedy}."
    )


def _count_per_row(leaf: Tensor, labels: MeanLabels) -> dict[int, Fraction]:
    """Return how often a microbatch has each class for each row; with equal weights, all as class 0."""
    counted = leaf[leaf != labels.ignored]
    counted = counted if labels.weighs_classes else torch.zeros_like(counted)
    classes, counts = (values.tolist() for values in counted.unique(return_counts=True))
    return {label: Fraction(count, len(leaf)) for label, count in zip(classes, counts, strict=True)}


def weighs_unequally(weight: Any) -> bool:
    """Whether the weights of classes change a mean: not if there are none, or if all are known and equal."""
    if not isinstance(weight, Tensor) or weight.is_meta or is_fake(weight):
        return weight is not None
    return bool((weight != weight.flatten()[0]).any())


def _has_integers(leaf: Any) -> bool:
    """Return whether a leaf holds whole numbers that can be looked at."""
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.dtype not in _INTEGERS:
        return False
    return not (leaf.is_meta or leaf.is_nested or is_fake(leaf) or is_sharded(leaf)) and leaf.numel() > 0
