"""Define the stage function of a net, which takes parameters by name or by position, and lists what else it reads.

f({"0.weight": w}, x)   f({"1.weight": w}, x)        --> pure -->        f([w], x)

By position, stages that compute the same function share one trace, whatever their parameters are called.
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
"""The names of each parameter that a stage takes; a tied parameter has several."""


class PositionalStage(ABC):
    """The stage function of a net; attributes that a front door does not set are empty.

    Attributes:
        number: the number of the stage.
        names: the names of its parameters, the first name of each in `params`.
        state_names: the names of the buffers that it reads and writes: its state.
        fixed: the names of its constants, all that it reads besides parameters and state.
        homes: the owner and the attribute of each constant.
        modules: the modules that it runs, by path, and the `lock` to hold while they run.
        norms: the modules that keep running statistics.
    """

    number: int
    names: Names
    state_names: Sequence[str] = ()
    fixed: Sequence[str] = ()
    homes: Sequence[tuple[Any, str]] = ()
    modules: Sequence[tuple[str, Any]] = ()
    lock: AbstractContextManager[Any] = nullcontext()
    norms: Sequence[tuple[str, Any]] = ()

    @abstractmethod
    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """Compute the stage's output from parameters by name."""

    @abstractmethod
    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Compute the output and the `state` after it from all that the stage reads, in the order of names."""

    @abstractmethod
    def sharing_key(self) -> Any:
        """Return a key that is equal for stages that compute the same function of their arguments by position."""

    @cached_property
    def pieces(self) -> Sequence[Any]:
        """The pieces of the stage, which run in sequence and are traced separately; none if it is traced whole."""
        return ()

    def map_to_pieces(
        self, params: Sequence[Any], constants: Sequence[Any], x: Any
    ) -> tuple[dict[Any, Any], Any, dict[str, Any]] | None:
        """Return the stage's inputs, its output and its loss in terms of the values of its pieces; None without."""
        return None

    def with_tensors_bound(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], function: Callable[[], Any]
    ) -> Any:
        """Call `function`, such as the backward of its output, while these tensors stand in the modules."""
        return function()

    @abstractmethod
    def home_of(self, name: str) -> tuple[Any, str]:
        """Return where the net has a tensor: its owner, and the attribute."""

    def all_names(self) -> Iterable[str]:
        """Return the names of all tensors of its modules, or of the whole net."""
        return [name for name, _ in self.named_tensors()]

    def constants(self) -> list[Tensor]:
        """Return the current values of its constants."""
        with self.lock:
            return [getattr(owner, name) for owner, name in self.homes]

    def wrappers(self) -> list[Tensor]:
        """Return the frozen tensors of another class, such as quantized weights, which its traces keep."""
        return []

    def literal_constants(self) -> list[Tensor]:
        """Return the constant tensors that its code makes from numbers."""
        return []

    def modes(self) -> tuple[Any, ...]:
        """Return the modes of its modules and the momentum of its norms, on which its traces depend."""
        return (*(module.training for _, module in self.modules), *(norm.momentum for _, norm in self.norms))

    def moved_params(self) -> Mapping[str, int]:
        """Return the parameters that the net has moved since a front door returned them, with their old addresses."""
        return {}

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield all tensors of its modules, by name."""
        return ()

    def random_modules(self) -> list[str]:
        """Return descriptions of the modules that draw random numbers in their current mode."""
        return []


def net_stage_of(function: Any) -> PositionalStage | None:
    """Return the stage of a net behind a stage function, which a transform may wrap; None if there is none."""
    unwrapped: Any = inspect.unwrap(function) if callable(function) else None
    return unwrapped if isinstance(unwrapped, PositionalStage) else None
