"""Watch what a function does while it is traced: tensors it closes over are put back, generators of its own refused.

held.add_(1)                          --> held as it was
module.seen = module.seen + 1         --> module.seen as it was, ValueError
torch.rand(4, generator=mine)         --> ValueError
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fpipe.models.buffers import own_buffers
from fpipe.models.reached import what_it_remembers

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
        replaced = bound.put_back(failed is not None)
    if replaced:
        raise ValueError(what_it_remembers(f"{replaced[0]} of a module")) from failed
    if failed is not None:
        raise failed


class _Given(NamedTuple):
    """A tensor that a module got as a buffer or parameter: which module, by which name, what it had there before, and
    what it got."""

    module: ref[nn.Module]
    name: str
    before: Any
    new: Any

    @property
    def holder(self) -> nn.Module | None:
        """The module, if it still is, and has that instead of what it had before."""
        module = self.module()
        stays = module is not None and self.before is not _FREE and _held(module, self.name) is self.new
        return module if stays and self.new is not self.before else None


_MISSING, _FREE = object(), object()
"""In place of what a module had by a name: it had no such name, and may have by it what it likes."""


class _Bound:
    """Which tensors modules got as buffers and parameters, whether a name leads to the modules or not.

    A module made meanwhile may have what its `__init__` gives it, and anything if it is gone in the end; and what
    `functional_call` lends one is no buffer of its own.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, str], _Given] = {}

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note those of this thread."""
        thread = threading.get_ident()

        def note(module: nn.Module, name: str, new: Any) -> None:
            if threading.get_ident() == thread:
                place = id(module), name
                found = self.known.get(place)
                if found is None or found.module() is not module:
                    before = _held(module, name)
                    before = _FREE if before is _MISSING and _is_being_made(module) else before
                    found = _Given(ref(module), name, before, new)
                self.known[place] = found._replace(new=new)

        hooks = register_module_buffer_registration_hook(note), register_module_parameter_registration_hook(note)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def put_back(self, failed: bool) -> list[str]:
        """What had been another, by kind, name and module. A function that failed keeps all modules that it made: what
        they have besides is nobody's, for all one knows."""
        if any(given.holder for given in self.known.values()):
            gc.collect()  # some may be gone but for references to themselves
        changed: list[str] = []
        for given in self.known.values():
            module = given.holder
            if module is not None:
                kind = "buffer" if given.name in own_buffers(module) else "parameter"
                if not (failed and given.before is _MISSING):
                    changed.append(f"the {kind} {given.name!r} ({type(module).__name__})")
                if given.before is _MISSING:
                    delattr(module, given.name)
                else:
                    vars(module)[f"_{kind}s"][given.name] = given.before
        return changed


def _held(module: nn.Module, name: str) -> Any:
    return own_buffers(module).get(name, vars(module)["_parameters"].get(name, _MISSING))


def _is_being_made(module: nn.Module) -> bool:
    """Whether its `__init__` runs, which calls whoever asks."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False


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
