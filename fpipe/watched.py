"""Watch what a function does while it is traced: tensors it closes over are put back, generators of its own refused.

held.add_(1)                          --> held as it was
module.seen = module.seen + 1         --> module.seen as it was, ValueError
torch.rand(4, generator=mine)         --> ValueError
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fpipe.buffers import own_buffers
from fpipe.reached import what_it_remembers

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


@contextmanager
def watching(function: Callable[..., Any]) -> Generator[Callable[..., Any]]:
    """The function, watched when it is called; what it writes meanwhile is as before in the end.

    Raises:
        ValueError: it gave a module another tensor as a buffer or parameter.
    """
    mode, bound = _Watch(), _Bound()

    def watched(*args: Any) -> Any:
        with mode:
            return function(*args)

    failed: Exception | None = None
    try:
        with bound.noting():
            yield watched
    except Exception as error:  # what was written may well be its reason
        failed = error
    finally:
        with torch.no_grad():
            for written, before in mode.before.values():
                written.copy_(before)
        replaced = bound.put_back()
    if replaced:
        raise ValueError(what_it_remembers(f"{replaced[0]} of a module")) from failed
    if failed is not None:
        raise failed


class _Bound:
    """Which tensors modules got as buffers and parameters, whether a name leads to the modules or not.

    A module made meanwhile may have what it likes; and what `functional_call` lends one is no buffer of its own.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], tuple[nn.Module, Any, Any]] = {}

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note those of this thread."""
        thread = threading.get_ident()

        def note(module: nn.Module, name: str, new: Any) -> None:
            if threading.get_ident() == thread:
                before = self.known.get((id(module), name), (module, _held(module, name), None))[1]
                self.known[id(module), name] = module, before, new

        hooks = register_module_buffer_registration_hook(note), register_module_parameter_registration_hook(note)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def put_back(self) -> list[str]:
        """What had been another, by kind, name and module."""
        changed: list[str] = []
        for (_, name), (module, before, new) in self.known.items():
            kind = "buffer" if name in own_buffers(module) else "parameter"
            if before is not None and _held(module, name) is new is not before:
                changed.append(f"the {kind} {name!r} ({type(module).__name__})")
                vars(module)[f"_{kind}s"][name] = before
        return changed


def _held(module: nn.Module, name: str) -> Tensor | None:
    return own_buffers(module).get(name, vars(module)["_parameters"].get(name))


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
        wrapped = isinstance(written, Tensor) and _C._functorch.is_functorch_wrapped_tensor(written)
        if type(written) in (Tensor, nn.Parameter) and id(written) not in self.before and not wrapped:
            with _disable_current_modes(), torch.no_grad():
                self.before[id(written)] = written, written.clone()
        return func(*args, **kwargs)


def _writes(name: str) -> bool:
    """Whether a method of that name writes its tensor: add_, __iadd__, __setitem__."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
