"""Cut a row of layers into parts that cost as even as they can.

    1 2 3 4 5 6        --> balance(parts=2) -->        1 2 3 4 | 5 6

The largest part costs as little as possible, which is exact, not a heuristic: a pipeline runs at the pace of its
slowest stage. Among the ways that reach it, the one whose costs (by their squares), then sizes, are most even is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite


def balance(
    costs: Sequence[float], parts: int, *, parameters: Sequence[float] | None = None, scale: float = 4.0
) -> list[int]:
    """Divide a row of layers into parts, and return how many layers each has.

    Args:
        costs: what each layer costs: seconds, or bytes; at least 0.
        parts: how many parts, each of at least one layer.
        parameters: bytes of each layer's parameters, added to `costs` `scale` times: for a balance by memory.
        scale: bytes kept for a byte of parameters: 2 with its gradient, 3 with SGD's momentum, 4 with Adam's two.

    Returns:
        The number of layers of each part, as `from_sequential(sizes=)` takes them.

    Raises:
        ValueError: parts that are less than 1 or more than the layers; a cost that is not a number from 0.

    >>> balance([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance([4, 4, 1, 1], 2, parameters=[0, 0, 3, 3], scale=4)
    [3, 1]
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers make 1 to {len(costs)} parts, found parts={parts!r}.")
    _check_numbers("cost", costs)
    if parameters is not None:
        if len(parameters) != len(costs):
            raise ValueError(f"parameters lists {len(parameters)} layers, costs {len(costs)}; give equally many.")
        _check_numbers("size of the parameters", parameters)
        if not isfinite(scale) or scale < 0:
            raise ValueError(f"scale is in bytes for a byte of parameters, at least 0; found {scale!r}.")
        costs = [cost + scale * size for cost, size in zip(costs, parameters, strict=True)]
    sums = [0, *accumulate(scale_to_integers(costs))]
    return _most_even_partition(sums, parts, _smallest_maximum(sums, parts))


def _check_numbers(name: str, numbers: Sequence[float]) -> None:
    for layer, number in enumerate(numbers):
        if not isfinite(number) or number < 0:
            raise ValueError(f"the {name} of layer {layer} is a number, at least 0; found {number!r}.")


def scale_to_integers(costs: Sequence[float]) -> list[int]:
    """Scale costs to integers of one unit, exactly, so that no sum rounds and equal parts compare as equal."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    # Denominators of floats are powers of two, so the largest is a multiple of all.
    unit = max(denominator for _, denominator in ratios)
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _smallest_maximum(sums: Sequence[int], parts: int) -> int:
    """Find the least cost of the largest part, by bisection over it.

    `sums` are prefix sums: layers i to j cost sums[j] - sums[i]. Filling each part up to a cost gives the fewest parts.
    """
    lower, upper = max(end - start for start, end in pairwise(sums)), sums[-1]
    while lower < upper:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if _count_parts(sums, middle) <= parts else (middle + 1, upper)
    return lower


def _count_parts(sums: Sequence[int], largest: int) -> int:
    count = start = 0
    while start < len(sums) - 1:
        count, start = count + 1, bisect_right(sums, sums[start] + largest) - 1
    return count


def _most_even_partition(sums: Sequence[int], parts: int, largest: int) -> list[int]:
    """Find the most even sizes of parts that cost at most `largest`.

    The least sum of squared costs wins, then of squared sizes, then the partition with larger parts first.
    """
    # Dynamic programming over the number of parts: for each end, the best partition of the layers before it. Negated
    # sizes, so that of equal sums `min` takes the larger first part.
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), ())}
    for _ in range(parts):
        with_one_more: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for start, ((squares, counts), negated_sizes) in best.items():
            for end in range(start + 1, len(sums)):
                cost, size = sums[end] - sums[start], end - start
                if cost > largest:
                    break
                partition = ((squares + cost * cost, counts + size * size), (*negated_sizes, -size))
                with_one_more[end] = min(partition, with_one_more.get(end, partition))
        best = with_one_more
    return [-size for size in best[len(sums) - 1][1]]
