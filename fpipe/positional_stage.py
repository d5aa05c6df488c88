"""A stage function that was cut out of a net: it also takes its parameters by position, and lists what else it reads.

f({"0.weight": w}, x)   f({"1.weight": w}, x)        --> pure -->        f([w], x)

So equal stages share a trace, whatever their parameters are called.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Names = tuple[tuple[str, ...], ...]
"""The names of each parameter that the stage is handed."""


class PositionalStage(ABC):
    """A stage function of a net. Attributes that a front door does not set are empty.

    Attributes:
        number: the number of the stage.
        names: the names of its parameters, the first name of each in `params`.
        holds: the names of the buffers that it reads and writes: its state.
        fixed: the names of its constants, all that it reads besides parameters and state.
        homes: the owner and the attribute of each constant.
        modules: the modules that it runs, by path, and the `lock` to hold while they run.
        norms: the modules that keep running statistics.
    """

    number: int
    names: Names
    holds: Sequence[str] = ()
    fixed: Sequence[str] = ()
    homes: Sequence[tuple[Any, str]] = ()
    modules: Sequence[tuple[str, Any]] = ()
    lock: AbstractContextManager[Any] = nullcontext()
    norms: Sequence[tuple[str, Any]] = ()

    @abstractmethod
    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """The stage as a function of parameters by name."""

    @abstractmethod
    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Compute the output and the `state` after it from all that the stage reads, in the order of names."""

    @abstractmethod
    def twin(self) -> Any:
        """A key that is equal for stages which compute the same function of what they take by position."""

    @cached_property
    def pieces(self) -> Sequence[Any]:
        """The parts that it runs one after the other, each traced alone; none where it is traced as a whole."""
        return ()

    def in_pieces(self, params: Sequence[Any], constants: Sequence[Any], x: Any) -> tuple[dict[Any, Any], Any] | None:
        """The stage's inputs among the values of its pieces, and its output in such values; None without pieces."""
        return None

    def during(self, params: Sequence[Tensor], constants: Sequence[Tensor], what: Callable[[], Any]) -> Any:
        """Call `what`, such as the backward of its output, while these tensors stand in the modules."""
        return what()

    @abstractmethod
    def home_of(self, name: str) -> tuple[Any, str]:
        """Where the net has a tensor: its owner, and the attribute."""

    def all_names(self) -> Iterable[str]:
        """The names of all tensors of its modules, or of the whole net."""
        return [name for name, _ in self.named_tensors()]

    def constants(self) -> list[Tensor]:
        """The current values of its constants."""
        with self.lock:
            return [getattr(owner, name) for owner, name in self.homes]

    def literals_now(self) -> list[Tensor]:
        """The constants that its code makes of numbers."""
        return []

    def modes(self) -> tuple[Any, ...]:
        """The modes of its modules, and the momentum of its norms: its traces depend on them."""
        return (*(module.training for _, module in self.modules), *(norm.momentum for _, norm in self.norms))

    def moved(self) -> Mapping[str, int]:
        """The parameters that the net has moved since they were handed out, each with the address it had then."""
        return {}

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """All tensors of its modules, by name."""
        return ()

    def drawing(self) -> list[str]:
        """The modules that draw random numbers as they are now, in words."""
        return []


def of_net(function: Any) -> PositionalStage | None:
    """The stage that a front door has cut out of a net, also where a transform of the model wraps its function."""
    inner: Any = inspect.unwrap(function) if callable(function) else None
    return inner if isinstance(inner, PositionalStage) else None
