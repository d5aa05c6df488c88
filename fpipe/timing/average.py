"""A running average of costs: what was measured last changes what is believed by a little."""

from __future__ import annotations

from dataclasses import replace

from fpipe.timing.amounts import between
from fpipe.timing.costs import Costs

SECONDS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load", "exchange")


def average(before: Costs | None, now: Costs, weight: float = 0.1) -> Costs:
    """Costs between those believed so far and those just measured.

    Args:
        before: what was believed; None at the start.
        now: what was measured, for the same stages.
        weight: how much the new ones count, from 0 to 1.

    Returns:
        Of each op `(1 - weight) * before + weight * now` seconds; all else, such as bytes and transfers, as in `now`.

    Raises:
        ValueError: another weight, or costs of another number of stages.

    >>> import fpipe
    >>> costs = None
    >>> for seconds in (10, 20, 20):
    ...     costs = fpipe.average(costs, fpipe.Costs(forward=[seconds, 1]), weight=0.5)
    >>> costs.forward
    [17.5, 1.0]
    """
    if not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise ValueError(f"weight is how much the new costs count, from 0 to 1; found {weight!r}.")
    for word, costs in (("before", before), ("now", now)):
        if not isinstance(costs, Costs) and (word, costs) != ("before", None):
            raise TypeError(f"{word} is an fpipe.Costs, as fpipe.profile measures them; found {costs!r}.")
    if before is None:
        return now
    mixed = {word: between(word, getattr(before, word), getattr(now, word), weight) for word in SECONDS}
    return replace(now, **mixed)
