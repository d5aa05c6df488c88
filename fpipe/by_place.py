"""A stage function that takes its parameters by place: equal ones share a trace, whatever their parameters are called.

f({"0.weight": w}, x)   f({"1.weight": w}, x)        --> pure -->        f([w], x)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Names = tuple[tuple[str, ...], ...]
"""The names of each parameter that the stage is handed."""


class ByPlace(ABC):
    """A stage of a model that a front end has cut.

    Attributes:
        number: which stage it is.
        names: what its parameters are called, the first name of each in `params`.
        holds: what the buffers are called that it reads and writes.
        writes: what all buffers are called that it or its update writes: its state.
    """

    number: int
    names: Names
    holds: Sequence[str] = ()
    writes: Sequence[str] = ()

    @abstractmethod
    def pure(self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor]) -> Any:
        """The stage's output as a function of all that it reads, in the order of names."""

    def during(self, params: Sequence[Tensor], constants: Sequence[Tensor], what: Callable[[], Any]) -> Any:
        """Do something, such as the backward of its output, while it has what it was given where it looks for it."""
        return what()

    @abstractmethod
    def twin(self) -> Any:
        """Equal for stages that compute the same function of what they take by place."""
