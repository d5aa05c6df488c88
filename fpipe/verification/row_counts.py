"""Find out which rows of a batch a gradient counts, how often, and with whose targets.

gradient = 0 of row 0, 2 of row 1, 1 of row 2 ..        -->        "Row 0 is missing, row 1 counts 2 times."
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Reduction
from fpipe.single_device.microbatch import cut
from fpipe.single_device.result import Result
from fpipe.verification.gradient_changes import Parts
from fpipe.verification.report import listed, wide

_MOST = 128
"""Rows from which on they are not told apart: each takes a backward."""


def odd_rows(
    parts: Parts, gradients: Callable[[Parts], Result], found: Mapping[int, Tensor], reduction: Reduction
) -> str | None:
    """Rows that count otherwise than once in the gradients `found` of some leaves, in words; None where that explains
    nothing.

    Args:
        parts: the microbatches of a step, each with its rows.
        gradients: what computes those of some microbatches.
        found: gradients from elsewhere, by the number of their leaf.
        reduction: how the model's loss is reduced.
    """
    rows = [row for part, size in parts for row in ((cut(part, index, size)[0], 1) for index in range(size))]
    right = _flat(found)
    if not 1 < len(rows) <= min(_MOST, right.numel()) or right.is_complex() or reduction == "count":
        return None
    whole = _counts(rows, len(rows), gradients, found, reduction)
    if whole is None:
        return _other_targets(rows, gradients, found, reduction)
    named = defaultdict[int, list[str]](list)
    for row, count in enumerate(whole):
        named[count].append(str(row))
    said = [
        f"row{'s' * (len(own) > 1)} {listed(own)} {_times(count, len(own) > 1)}"
        for count, own in sorted(named.items())
        if count != 1
    ]
    return f"{', '.join(said)}: ranks have drawn their rows each by itself, or some twice" if said else None


_NEAR = 1e-3


def _other_targets(
    rows: Parts, gradients: Callable[[Parts], Result], found: Mapping[int, Tensor], reduction: Reduction
) -> str | None:
    """Rows whose inputs met the targets of others, in words: each pair of an input and a target counts once or not."""
    n, numel = len(rows), _flat(found).numel()
    if n > _MOST_PAIRED or not n * n <= numel <= _NUMBERS // (n * n):
        return None
    if not all(isinstance(row, tuple) and len(row) == 2 for row, _ in rows):
        return None
    pairs = [((x, target), size) for (x, _), size in rows for (_, target), _ in rows]
    counts = _counts(pairs, n, gradients, found, reduction)
    if counts is None:
        return None
    table = torch.tensor(counts).view(n, n)
    others = table.argmax(1).tolist()
    if sorted(others) != [*range(n)] or not torch.equal(table, torch.eye(n, dtype=table.dtype)[others]):
        return None
    moved = [(row, other) for row, other in enumerate(others) if row != other]
    if not moved:
        return None
    said = [f"row {row} with that of row {other}" for row, other in moved[1:_SAID]]
    said = [f"row {moved[0][0]} was trained with the target of row {moved[0][1]}", *said]
    more = f", and {len(moved) - _SAID} more" if len(moved) > _SAID else ""
    return f"targets belong to other inputs: {', '.join(said)}{more}"


_MOST_PAIRED, _NUMBERS, _SAID = 24, 2**26, 2
"""Rows up to which all pairs are tried, numbers that their gradients may have, and rows that are named."""


def _counts(
    rows: Parts, share: int, gradients: Callable[[Parts], Result], found: Mapping[int, Tensor], reduction: Reduction
) -> list[int] | None:
    """How often each row counts in gradients that are a mean over `share` rows; None where that is not one answer."""
    right = _flat(found)
    each = [tree.leaves(tuple(gradients([row]).grads)) for row in rows]
    if any(grads[at] is None for grads in each for at in found):
        return None
    columns = torch.stack([_flat({at: grads[at] for at in found}) for grads in each], 1)
    columns = columns / share if reduction == "mean" else columns
    if not columns.isfinite().all() or not right.isfinite().all():
        return None
    counts, _, rank, _ = torch.linalg.lstsq(columns, right.unsqueeze(1), driver="gelsd")
    whole = counts.round()
    near = (columns @ whole).squeeze(1)
    if int(rank) < len(rows) or not whole.any() or float((near - right).norm()) > _NEAR * float(right.norm()):
        return None
    return whole.flatten().int().tolist()


def _times(count: int, several: bool) -> str:
    if not count:
        return "are missing" if several else "is missing"
    return f"{'count' if several else 'counts'} {count} times"


def _flat(grads: Mapping[int, Any]) -> Tensor:
    return torch.cat([wide(grads[at]).flatten() for at in grads])
