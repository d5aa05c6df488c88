"""Stand for the loss on ranks that do not compute it, and say how they get it."""

from __future__ import annotations

from typing import Any, NoReturn


class Elsewhere:
    """The loss of a step on a rank that has none: false, and an error with the way out for who computes with it.

    >>> loss = Elsewhere(3)
    >>> loss, bool(loss), f"loss {loss}"
    (on rank 3, False, 'loss on rank 3')
    >>> loss.item()
    Traceback (most recent call last):
    AttributeError: the loss is on rank 3; build(..., broadcast=True) gives it to every rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"on rank {self._rank}"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __float__(self) -> NoReturn:
        raise TypeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __format__(self, how: str) -> str:
        return str(self) if not how else format(float(self), how)

    def __add__(self, other: Any) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __add__
