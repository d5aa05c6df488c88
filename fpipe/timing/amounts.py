"""The numbers that costs are made of, checked where they enter: times, rates, bytes, one for all or one for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from fpipe.limits import LARGEST_NUMBER


def listed(given: Any) -> Iterable[Any]:
    """The numbers of a field: one, or one for each stage."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def of_links(word: str, unit: str, given: Any) -> Iterable[Any]:
    """The numbers of a field: one, or one for each link; of a function none yet."""
    if callable(given):
        return ()
    if not isinstance(given, Mapping):
        return (given,)
    table = cast("Mapping[object, Any]", given)
    for link in table:
        if not isinstance(link, tuple) or [type(rank) for rank in cast("tuple[object, ...]", link)] != [int, int]:
            raise ValueError(
                f"{word} is a number, or a table {{(from, to): {unit}}} with the numbers of two ranks; found the key "
                f"{link!r}."
            )
        if min(cast("tuple[int, int]", link)) < 0:
            raise ValueError(f"{word} has a link {link!r}; ranks are numbers from 0 on.")
    return table.values()


def checked_seconds(word: str, cost: object) -> float:
    """A time."""
    return _number(f"{word} is a time in seconds, at least 0", cost)


def checked_rate(word: str, rate: object) -> float:
    """Bytes a second."""
    if rate == 0:
        raise ValueError(f"{word} is in bytes a second, more than 0; found {rate!r}.")
    found = _number(f"{word} is in bytes a second, more than 0", rate)
    if found * LARGEST_NUMBER < 1:
        raise ValueError(f"{word} is in bytes a second, at least {1 / LARGEST_NUMBER:.1g}; found {rate!r}.")
    return found


def checked_count(word: str, size: object) -> float:
    """An amount, such as bytes."""
    return _number(f"{word} are a number, at least 0", size)


def _number(expected: str, found: object) -> float:
    """A number from 0 on whose sums are finite. A truth value is none, though Python counts with it."""
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"{expected}; found {found!r}, which is no number.")
    if not (found >= 0 and math.isfinite(found)):
        raise ValueError(f"{expected}; found {found!r}.")
    if found > LARGEST_NUMBER:
        raise ValueError(f"{expected}, at most {LARGEST_NUMBER:.3g}; found {found:.3g}.")
    return found
