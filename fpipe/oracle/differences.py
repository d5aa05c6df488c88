"""Say how a tensor differs from the right one where no mistake in adding up explains it.

numbers that bfloat16 has, as near as its epsilon        -->        "as if rounded to bfloat16"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpipe.verification.report import distance, is_finite, listed, tolerance, wide

_MOST_ROWS = 4096  # all pairs of rows are compared
_NEAR = 0.1  # relative distance from which on norm and cosine say more
_COARSE = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def difference_in_words(found: Tensor, expected: Tensor) -> str:
    """Say whether a tensor is rounded, out of order, or by how much it is off.

    >>> right = torch.linspace(1, 2, 6).reshape(3, 2)
    >>> print(difference_in_words(right.bfloat16().float(), right))
    as if rounded to bfloat16
    >>> print(difference_in_words(right[[1, 0, 2]], right))
    rows 0 and 1 are exchanged
    >>> print(difference_in_words(right + torch.tensor([0.01, 0.0]), right))
    off by 0.46 % of its norm
    """
    if not is_finite(found):
        return "NaN or infinite numbers"
    limit = tolerance(found, expected)
    rounded = _rounding(found, expected)
    found, expected = wide(found), wide(expected)
    if not expected.count_nonzero() or not found.count_nonzero():
        return "not zero where it should be" if found.count_nonzero() else "zero where it should not be"
    return rounded or _order(found, expected, limit) or _size(found, expected, limit)


def _rounding(found: Tensor, expected: Tensor) -> str:
    """Name the coarser dtype that has all numbers, each within its epsilon of the right one."""
    numbers, right = wide(found), wide(expected)
    for dtype in _COARSE if not found.is_complex() else ():
        eps = torch.finfo(dtype).eps
        least = eps * torch.finfo(dtype).smallest_normal  # the distance of numbers below that
        is_near = bool(((numbers - right).abs() <= eps * right.abs() + least).all())
        if eps > torch.finfo(found.dtype).eps and is_near and torch.equal(numbers.to(dtype).double(), numbers):
            return f"as if rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def _order(found: Tensor, expected: Tensor, limit: float) -> str:
    """Say which rows or columns are exchanged."""
    if found.ndim == 2 and found.shape == found.T.shape and distance(found.T, expected) <= limit:
        return "transposed"
    if found.is_complex():  # torch has no distances of complex rows
        return ""
    for dim, word in zip(range(found.ndim), ("rows", "columns"), strict=False):
        rows, right = (x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None] for x in (found, expected))
        wrong = _wrong_rows(rows, right, limit)
        if not 2 <= len(wrong) <= _MOST_ROWS:
            continue
        order = torch.cdist(rows[wrong], right[wrong]).argmin(1)
        if len(order.unique()) < len(order) or distance(rows[wrong], right[wrong][order]) > limit:
            continue
        sources = dict(zip(wrong.tolist(), wrong[order].tolist(), strict=True))
        upper = _ranges([row for row in sources if row < sources[row]])
        lower = _ranges([row for row in sources if row > sources[row]])
        if len(upper) == len(lower) == 1 and all(sources[sources[row]] == row for row in sources):
            return f"{word} {upper[0]} and {lower[0]} are exchanged"
        return f"{word} {listed(_ranges([*sources]))} are in another order"
    return ""


def _wrong_rows(rows: Tensor, right: Tensor, limit: float) -> Tensor:
    return ((rows - right).norm(dim=1) > limit * right.norm(dim=1)).nonzero().flatten()


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Write ascending numbers as ranges.

    >>> _ranges([0, 1, 2, 7])
    ['0-2', '7']
    """
    starts = [k for k in range(len(numbers)) if not k or numbers[k] != numbers[k - 1] + 1]
    ends = [k - 1 for k in starts[1:]] + [len(numbers) - 1]
    pairs = ((numbers[start], numbers[end]) for start, end in zip(starts, ends, strict=True))
    return [str(first) if first == last else f"{first}-{last}" for first, last in pairs]


def _size(found: Tensor, expected: Tensor, limit: float) -> str:
    """Say how large the difference is, and in which rows, if these are few."""
    share = distance(found, expected)
    if share > _NEAR:
        norms = float(found.norm()), float(expected.norm())
        cosine = float(torch.vdot(expected.flatten(), found.flatten()).real) / (norms[0] * norms[1])
        return f"{norms[0] / norms[1]:.3g} x the norm, its cosine with the right one {cosine:.3g}"
    sentence = f"off by {100 * share:.2g} % of its norm"
    if found.ndim < 2:
        return sentence
    ranges = _ranges(_wrong_rows(found.flatten(1), expected.flatten(1), limit).tolist())
    if len(ranges) != 1 or ranges[0] == f"0-{len(found) - 1}":
        return sentence
    return f"{sentence}, in row{'s' * ('-' in ranges[0])} {ranges[0]} alone"
