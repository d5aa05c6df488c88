"""Tell rounding from error: two computations of one gradient differ in their last bits, a mistake by more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fpipe.torch_internals import TorchDispatchMode
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


class Coarsest(TorchDispatchMode):
    """Looks for the least precise numbers that ops compute with: under autocast these are not the parameters'.

    >>> with Coarsest() as seen, torch.autocast("cpu", torch.bfloat16):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> seen.eps
    0.0078125
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in made if isinstance(made, tuple | list) else (made,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return made


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return sum(float(wide(leaf).norm()) ** 2 for leaf in tensors) ** 0.5


def vanish(found: Tensor, expected: Tensor, whole: float) -> bool:
    """Whether both are zero but for the rounding of a gradient whose norm is `whole`, as that of a key's bias under
    softmax is: its terms cancel."""
    eps = tolerance(found, expected) ** 2
    return max(float(wide(found).norm()), float(wide(expected).norm())) <= 10 * eps * whole


def to_rounding(pairs: Iterable[tuple[Tensor, Tensor]], eps: float = 0.0) -> bool:
    """Whether gradients agree but for rounding with those expected, each leaf for itself; `eps` is that of the least
    precise numbers that they were computed with."""
    both = list(pairs)
    whole = norm(expected for _, expected in both)
    return all(distance(a, b) <= max(tolerance(a, b), eps**0.5) or vanish(a, b, whole) for a, b in both)


def is_mean_to_rounding(one: Tensor, other: Tensor, eps: float = 0.0) -> bool:
    """Whether two means over many rows agree but for rounding, which cancels in them: within the epsilon to the power
    of three quarters, 6e-6 in float32.

    >>> is_mean_to_rounding(torch.tensor(5.57124), torch.tensor(5.57056))
    False
    """
    return distance(one, other) <= max(tolerance(one, other), eps**0.5) ** 1.5
