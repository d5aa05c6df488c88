"""Describe how a tensor differs from the right one, where no mistake in adding up explains it.

numbers that bfloat16 has, as near as its epsilon        -->        "as if rounded to bfloat16"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpipe.verification.report import is_finite, list_names, relative_distance, rounding_tolerance, to_double

# All pairs of rows are compared, so the cost grows with the square of their number.
_MAX_ROWS = 4096
# The relative distance above which norm and cosine say more than the distance.
_LARGE_DISTANCE = 0.1
_COARSE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def describe_difference(actual: Tensor, expected: Tensor) -> str:
    """Say whether a tensor is rounded, out of order, or by how much it is off.

    >>> right = torch.linspace(1, 2, 6).reshape(3, 2)
    >>> print(describe_difference(right.bfloat16().float(), right))
    as if rounded to bfloat16
    >>> print(describe_difference(right[[1, 0, 2]], right))
    rows 0 and 1 are exchanged
    >>> print(describe_difference(right + torch.tensor([0.01, 0.0]), right))
    off by 0.46 % of its norm
    """
    if not is_finite(actual):
        return "NaN or infinite numbers"
    limit = rounding_tolerance(actual, expected)
    rounded = _describe_rounding(actual, expected)
    actual, expected = to_double(actual), to_double(expected)
    if not expected.count_nonzero() or not actual.count_nonzero():
        return "not zero where it should be" if actual.count_nonzero() else "zero where it should not be"
    return rounded or _describe_order(actual, expected, limit) or _describe_size(actual, expected, limit)


def _describe_rounding(actual: Tensor, expected: Tensor) -> str:
    """Name the coarser dtype to which the right numbers seem rounded: it has all numbers, each within its epsilon."""
    numbers, right = to_double(actual), to_double(expected)
    for dtype in _COARSE_DTYPES if not actual.is_complex() else ():
        eps = torch.finfo(dtype).eps
        # Below the smallest normal number the spacing is constant.
        subnormal_spacing = eps * torch.finfo(dtype).smallest_normal
        is_near = bool(((numbers - right).abs() <= eps * right.abs() + subnormal_spacing).all())
        # Coarser than its own dtype, near the right numbers, and unchanged by another rounding.
        if eps > torch.finfo(actual.dtype).eps and is_near and torch.equal(numbers.to(dtype).double(), numbers):
            return f"as if rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def _describe_order(actual: Tensor, expected: Tensor, limit: float) -> str:
    if actual.ndim == 2 and actual.shape == actual.T.shape and relative_distance(actual.T, expected) <= limit:
        return "transposed"
    if actual.is_complex():  # torch.cdist has no complex kernel
        return ""
    for dim, axis_name in zip(range(actual.ndim), ("rows", "columns"), strict=False):
        rows, right = (x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x[:, None] for x in (actual, expected))
        wrong = _differing_rows(rows, right, limit)
        if not 2 <= len(wrong) <= _MAX_ROWS:
            continue
        # Which right row each wrong row is nearest to.
        order = torch.cdist(rows[wrong], right[wrong]).argmin(1)
        # The nearest right row of each wrong one: an order of rows only if no two take the same.
        if len(order.unique()) < len(order) or relative_distance(rows[wrong], right[wrong][order]) > limit:
            continue
        sources = dict(zip(wrong.tolist(), wrong[order].tolist(), strict=True))
        upper = _format_ranges([row for row in sources if row < sources[row]])
        lower = _format_ranges([row for row in sources if row > sources[row]])
        if len(upper) == len(lower) == 1 and all(sources[sources[row]] == row for row in sources):
            return f"{axis_name} {upper[0]} and {lower[0]} are exchanged"
        return f"{axis_name} {list_names(_format_ranges([*sources]))} are in another order"
    return ""


def _differing_rows(rows: Tensor, right: Tensor, limit: float) -> Tensor:
    return ((rows - right).norm(dim=1) > limit * right.norm(dim=1)).nonzero().flatten()


def _format_ranges(numbers: Sequence[int]) -> list[str]:
    """Write ascending numbers as ranges.

    >>> _format_ranges([0, 1, 2, 7])
    ['0-2', '7']
    """
    starts = [index for index in range(len(numbers)) if not index or numbers[index] != numbers[index - 1] + 1]
    ends = [index - 1 for index in starts[1:]] + [len(numbers) - 1]
    pairs = ((numbers[start], numbers[end]) for start, end in zip(starts, ends, strict=True))
    return [
        str(start_number) if start_number == end_number else f"{start_number}-{end_number}"
        for start_number, end_number in pairs
    ]


def _describe_size(actual: Tensor, expected: Tensor, limit: float) -> str:
    """Say how large the difference is, and in which rows, if these are few."""
    share = relative_distance(actual, expected)
    if share > _LARGE_DISTANCE:
        norms = float(actual.norm()), float(expected.norm())
        cosine = float(torch.vdot(expected.flatten(), actual.flatten()).real) / (norms[0] * norms[1])
        return f"{norms[0] / norms[1]:.3g} x the norm, its cosine with the right one {cosine:.3g}"
    sentence = f"off by {100 * share:.2g} % of its norm"
    if actual.ndim < 2:
        return sentence
    ranges = _format_ranges(_differing_rows(actual.flatten(1), expected.flatten(1), limit).tolist())
    if len(ranges) != 1 or ranges[0] == f"0-{len(actual) - 1}":
        return sentence
    return f"{sentence}, in row{'s' * ('-' in ranges[0])} {ranges[0]} alone"
