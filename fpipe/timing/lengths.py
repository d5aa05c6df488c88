"""Costs of microbatches that differ, as in lengths.

costs as a function of length, [300, 900]        -->        Costs of the first and second microbatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from fpipe.program import Program
from fpipe.timing.costs import Costs


@runtime_checkable
class CostsOfLengths(Protocol):
    """Protocol of costs as a function of the lengths of microbatches, as `fpipe.fit_lengths` makes them."""

    def at(self, lengths: Sequence[float]) -> Costs:
        """Return the costs of microbatches of these lengths."""
        ...


def costs_at_lengths(program: Program, costs: Any, lengths: Sequence[float]) -> Costs:
    """Return the costs of a program's microbatches, which have these lengths.

    Raises:
        TypeError: costs that are no function of length.
        ValueError: another number of lengths than of microbatches.
    """
    # Fits are made by torch, and time does without it: so this asks for the method, and not for the class.
    if not hasattr(costs, "at"):
        raise TypeError(f"lengths= needs costs by fpipe.fit_lengths, found {type(costs).__name__}.")
    if len(lengths) != program.microbatches:
        raise ValueError(f"the program has {program.microbatches} microbatches, and lengths= {len(lengths)}.")
    return costs.at(lengths)


def require_equal_microbatches(costs: Costs, purpose: str) -> None:
    """Refuse costs that vary by microbatch, for a purpose that has no microbatches.

    Raises:
        ValueError: they vary.
    """
    if costs.vary_by_microbatch:
        raise ValueError(f"{purpose} takes one cost a stage, such as the mean over microbatches.")
