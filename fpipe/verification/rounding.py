"""Tell rounding from error: two computations of one gradient differ in their last bits, a mistake by more."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fpipe.verification.report import wide


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference by that of what is expected; infinite where it is not a number.

    >>> distance(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    one, other = wide(found), wide(expected)
    error, size = float((one - other).norm()), float(other.norm())
    if error == 0.0:
        return 0.0
    return error / size if size and error == error else float("inf")


def tolerance(*tensors: Tensor) -> float:
    """How large a distance rounding may make: the root of the machine epsilon of the least precise one.

    Additions in another order move a gradient by few epsilons where its terms are of its size, and by many where they
    cancel; a mistake moves half of its digits or more.

    >>> round(tolerance(torch.ones(1)), 5)
    0.00035
    """
    return max(torch.finfo(leaf.dtype).eps for leaf in tensors) ** 0.5


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return sum(float(wide(leaf).norm()) ** 2 for leaf in tensors) ** 0.5


def vanish(found: Tensor, expected: Tensor, whole: float) -> bool:
    """Whether both are zero but for the rounding of a gradient whose norm is `whole`, as that of a key's bias under
    softmax is: its terms cancel."""
    eps = tolerance(found, expected) ** 2
    return max(float(wide(found).norm()), float(wide(expected).norm())) <= 10 * eps * whole


def to_rounding(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether gradients agree but for rounding with those expected, each leaf for itself."""
    both = list(pairs)
    whole = norm(expected for _, expected in both)
    return all(distance(a, b) <= tolerance(a, b) or vanish(a, b, whole) for a, b in both)
