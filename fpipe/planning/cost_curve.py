"""Costs of microbatches of any size, from costs of some sizes: what was given or measured there, straight between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fpipe.program import Value
from fpipe.timing.amounts import between
from fpipe.timing.costs import Costs
from fpipe.timing.value_bytes import NamedBytes

Share = Callable[[float, int], Costs]
"""`f(parts, slices)`: the costs of an op where each rank cuts its share of a microbatch into so many parts."""


@dataclass(frozen=True)
class CostCurve:
    """Costs by the rows of a microbatch.

    Args:
        known: for some numbers of rows.
        word: what they are: "given" or "measured".

    >>> curve = CostCurve({4.0: lambda v, _: Costs(1 / v), 8.0: lambda v, _: Costs(3 / v)}, "measured")
    >>> [(costs.forward, word) for costs, word in (curve.at(4, 2), curve.at(6, 1))]
    [(0.5, 'measured'), (2.0, 'interpolated')]
    """

    known: Mapping[float, Share]
    word: str

    def at(self, rows: float, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """The costs of so many rows, and whether they were given, measured, or interpolated.

        Raises:
            ValueError: more rows than the most that are known, or fewer than the fewest.
        """
        if rows in self.known:
            return self.known[rows](parts, slices), self.word
        sizes = sorted(self.known)
        if not sizes[0] < rows < sizes[-1]:
            known = ", ".join(f"{size:g}" for size in sizes)
            raise ValueError(
                f"a microbatch has {rows:g} rows, and costs are {self.word} for {known} rows; between "
                "them they are interpolated, beyond them not: add costs for fewer or more rows."
            )
        high = bisect_left(sizes, rows)
        few, many = (self.known[size](parts, slices) for size in sizes[high - 1 : high + 1])
        return _between(few, many, (rows - sizes[high - 1]) / (sizes[high] - sizes[high - 1])), "interpolated"


_SECONDS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load", "exchange")
_SECONDS_OF_MOVES = "send", "receive"


def _between(few: Costs, many: Costs, share: float) -> Costs:
    """Straight between: seconds of ops and of transfers, and bytes; all else as for the smaller microbatch."""
    mixed = {
        word: between(word, getattr(few, word), getattr(many, word), share) for word in (*_SECONDS, *_SECONDS_OF_MOVES)
    }
    if isinstance(few.transfer, int | float) and isinstance(many.transfer, int | float):
        mixed["transfer"] = between("transfer", few.transfer, many.transfer, share)
    return replace(few, **mixed, bytes=_bytes(few.bytes, many.bytes, share))


def _bytes(few: Any, many: Any, share: float) -> Any:
    if isinstance(few, Mapping) and isinstance(many, Mapping):
        less, more = cast("Mapping[str, Any]", few), cast("Mapping[str, Any]", many)
        if less.keys() != more.keys():
            odd = ", ".join(sorted(less.keys() ^ more.keys()))
            raise ValueError(f"costs of several sizes say bytes of the same values; some say nothing of {odd}.")
        return {name: between(f"bytes of {name!r}", less[name], more[name], share) for name in less}
    if isinstance(few, NamedBytes) and isinstance(many, NamedBytes):
        return few.until(many, share)
    if not callable(few) or not callable(many):
        return few
    lesser, larger = cast("Callable[[Value], float]", few), cast("Callable[[Value], float]", many)
    return lambda value: between("bytes", lesser(value), larger(value), share)  # pyright: ignore[reportUnknownLambdaType]
