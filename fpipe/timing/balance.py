"""Cut a row of layers into parts that cost as even as they can.

    1 2 3 4 5 6        --> balance(parts=2) -->        1 2 3 4 | 5 6

The largest part costs as little as possible, which is exact, not a heuristic: a pipeline runs at the pace of its
slowest stage. Among the ways that reach it, the one whose costs (by their squares), then sizes, are most even is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import isfinite


def balance(
    costs: Sequence[float], parts: int, *, parameters: Sequence[float] | None = None, scale: float = 4.0
) -> list[int]:
    """How many neighbouring layers each part gets.

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
    for word, row in (("costs", costs), ("parameters", [] if parameters is None else parameters)):
        if not isinstance(row, Collection) or isinstance(row, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{word} is a list with a number for each layer, found {type(row).__name__}.")
    if type(parts) is not int or not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} layers make 1 to {len(costs)} parts, found parts={parts!r}.")
    _check_numbers("cost", costs)
    if parameters is not None:
        if len(parameters) != len(costs):
            raise ValueError(f"parameters lists {len(parameters)} layers, costs {len(costs)}; give one number a layer.")
        _check_numbers("size of the parameters", parameters)
        if not isinstance(scale, int | float) or not isfinite(scale) or scale < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"scale is how many bytes are kept for a byte of parameters, at least 0; found {scale!r}.")
        costs = [cost + scale * more for cost, more in zip(costs, parameters, strict=True)]
    sums = [0, *accumulate(whole_numbers(costs))]
    return _most_even(sums, parts, _least_largest(sums, parts))


def _check_numbers(word: str, row: Sequence[float]) -> None:
    for layer, number in enumerate(row):
        if not isinstance(number, int | float) or not isfinite(number) or number < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the {word} of layer {layer} is a number, at least 0; found {number!r}.")


def whole_numbers(costs: Sequence[float]) -> list[int]:
    """Costs as whole numbers of one unit, so that no sum rounds."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = max(below for _, below in ratios)  # a float's denominator is a power of two, so the largest fits all
    return [above * (unit // below) for above, below in ratios]


def _least_largest(sums: Sequence[int], parts: int) -> int:
    """Find the least cost of the largest part, by bisection: parts filled up to a cost are as few as it allows."""
    low, high = max(after - before for before, after in pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fewest_parts(sums, middle) <= parts else (middle + 1, high)
    return low


def _fewest_parts(sums: Sequence[int], largest: int) -> int:
    count = start = 0
    while start < len(sums) - 1:
        count, start = count + 1, bisect_right(sums, sums[start] + largest) - 1
    return count


def _most_even(sums: Sequence[int], parts: int, largest: int) -> list[int]:
    """Sizes of parts that cost at most `largest`, with the least sum of squared costs, then of squared sizes, larger
    parts first."""
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), ())}
    for _ in range(parts):
        with_one_more: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for start, ((squares, counts), cut) in best.items():
            for end in range(start + 1, len(sums)):
                cost, size = sums[end] - sums[start], end - start
                if cost > largest:
                    break
                way = ((squares + cost * cost, counts + size * size), (*cut, -size))
                with_one_more[end] = min(way, with_one_more.get(end, way))
        best = with_one_more
    return [-size for size in best[len(sums) - 1][1]]
