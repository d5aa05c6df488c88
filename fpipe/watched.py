"""Watch what a function does while it is traced: tensors it closes over are put back, generators of its own refused.

held.add_(1)                          --> held as it was
torch.rand(4, generator=mine)         --> ValueError
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]


@contextmanager
def watching(function: Callable[..., Any]) -> Generator[Callable[..., Any]]:
    """The function, watched when it is called; what it writes in place meanwhile is as before in the end."""
    mode = _Watch()

    def watched(*args: Any) -> Any:
        with mode:
            return function(*args)

    try:
        yield watched
    finally:
        with torch.no_grad():
            for written, before in mode.before.values():
                written.copy_(before)


class _Watch(TorchFunctionMode):
    """A trace computes with tensors that it knows the numbers of, and so writes those that a function closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if kwargs.get("generator") is not None:
            raise ValueError(
                f"loss_fn draws from a generator of its own ({name}), which is in no key; draw without it."
            )
        written = kwargs.get("out", args[0] if args and _writes(name) else None)
        if type(written) in (Tensor, nn.Parameter) and id(written) not in self.before:
            with _disable_current_modes(), torch.no_grad():
                self.before[id(written)] = written, written.clone()
        return func(*args, **kwargs)


def _writes(name: str) -> bool:
    """Whether a method of that name writes its tensor: add_, __iadd__, __setitem__."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
