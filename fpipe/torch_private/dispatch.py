"""Watch, switch off and look up what happens below a call of torch: ops, dispatch modes, kernels, storages."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from fpipe.torch_internals import ThreadFlag

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_TORCH: Any = torch

without_modes = _disable_current_modes
"""A context without any dispatch mode (2.13)."""


@contextmanager
def unwatched() -> Generator[None]:
    """A context without any mode, of functions neither (2.13: `DisableTorchFunction`)."""
    with without_modes(), _C.DisableTorchFunction():
        yield


has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
"""Whether an op, by name, has a kernel for a dispatch key (2.13)."""
NAMESPACES: tuple[Any, ...] = (torch, _C._nn, Tensor, _C._linalg, _C._special, _C._fft)
"""Where torch keeps functions in C that call one op each (2.13)."""
C10D: Any = torch.ops._c10d_functional
"""The ops of collectives in a graph (2.11 to 2.15: `torch.ops._c10d_functional`)."""
C10D_AUTOGRAD: Any = torch.ops._c10d_functional_autograd
"""Those that torch before 2.13 traces where there is a gradient (2.11: `torch.ops._c10d_functional_autograd`)."""


def handle_of(op: Any) -> Callable[..., Any]:
    """An op as a function in C (2.13: `_op`)."""
    return op._op


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` made a function of another (2.13: `_torchdynamo_orig_callable`)."""
    return hasattr(function, "_torchdynamo_orig_callable")


def has_own_functions(kind: type[Tensor]) -> bool:
    """Whether calls of torch on tensors of a class run its own `__torch_function__` (2.13: those that do not have that
    of `Tensor`, or one in C that is switched off)."""
    own: Any = kind.__torch_function__
    return own is not _C._disabled_torch_function_impl and getattr(own, "__func__", own) is not _PLAIN


_PLAIN: Any = getattr(Tensor.__torch_function__, "__func__", Tensor.__torch_function__)


def fake_tensor_class() -> Any:
    """The class of fake tensors; its module takes a while to import (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@contextmanager
def kernel_instead(name: str, kernel: Callable[..., Any]) -> Generator[None]:
    """Meanwhile an op of torch's that is made of others is made of others still (2.13: `_destroy`; .04 ms)."""
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says once that there is a kernel already
            library.impl(name, kernel, "CompositeImplicitAutograd", allow_override=True)
        yield
    finally:
        library._destroy()


def fake_mode_class() -> Any:
    """The mode under which torch makes fake tensors (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode


@contextmanager
def refused_data_assignments(refuse: Callable[[], None]) -> Generator[None]:
    """Call `refuse`, which raises, where this thread assigns the `.data` of a fake tensor (2.13: only a mode for
    functions sees it, under which modules take other ways; so the class has a property while a thread is in here)."""
    kind, data = fake_tensor_class(), _DATA

    def assign(tensor: Any, value: Any) -> None:
        if _ASSIGNMENTS.value is not None:
            _ASSIGNMENTS.value()
        data.__set__(tensor, value)

    with _LOCK:
        _THREADS_INSIDE.append(threading.get_ident())
        kind.data = property(data.__get__, assign)
    try:
        with _ASSIGNMENTS.set_to(refuse):
            yield
    finally:
        with _LOCK:
            _THREADS_INSIDE.remove(threading.get_ident())
            if not _THREADS_INSIDE:
                del kind.data


_DATA: Any = Tensor.data
_ASSIGNMENTS, _LOCK, _THREADS_INSIDE = ThreadFlag(), threading.Lock(), list[int]()


@contextmanager
def told_of_dtensor_moves(told: Callable[..., Any]) -> Generator[None]:
    """Call `told(name, method, *args, **options)` in place of the methods by which DTensors are made and moved, of all
    threads (2.13: these go through no mode that sees them whole). One thread at a time: each restores what it found."""
    from torch.distributed.tensor import DTensor  # its import takes long

    kind: Any = DTensor

    def replacement(name: str) -> Any:
        method = getattr(kind, name)

        def move(*args: Any, **options: Any) -> Any:
            return told(name, method, *args, **options)

        return staticmethod(move) if name == "from_local" else move

    with _MOVES_LOCK:
        before = {name: vars(kind)[name] for name in ("from_local", "redistribute", "to_local", "full_tensor")}
        try:
            for name in before:
                setattr(kind, name, replacement(name))
            yield
        finally:
            for name, method in before.items():
                setattr(kind, name, method)


_MOVES_LOCK = threading.RLock()


@contextmanager
def unlogged_fake_errors() -> Generator[None]:
    """Keep torch from logging the errors of fake tensors in this thread, which are raised (2.13: a logger named as
    their module). The filter stays: a logger is of all threads, and it lets through what others log."""
    _filter_fake_errors()
    with _UNLOGGED.set_to(True):
        yield


_UNLOGGED = ThreadFlag()


@cache
def _filter_fake_errors() -> None:
    logging.getLogger(fake_mode_class().__module__).addFilter(lambda record: not _UNLOGGED.value)


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose ops mutate nothing that it was handed or made (2.13: `dispatch_functionalize`)."""
    from torch._subclasses.functional_tensor import dispatch_functionalize

    return dispatch_functionalize(function)


def compiled_by_inductor(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
    """Compile a graph without autograd or guards; it takes seconds (2.13: `standalone_compile`)."""
    with without_deprecations():
        from torch._inductor import standalone_compile

        return standalone_compile(graph, example, dynamic_shapes="from_example_inputs")


@contextmanager
def without_deprecations() -> Generator[None]:
    """Meanwhile torch does not warn of its own use of torch.jit.script, which would fail who makes warnings errors
    (2.11 and 2.13 by a DeprecationWarning, 2.15 by a FutureWarning)."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", ".torch.jit.(script|trace|script_method). is", category)
        yield


# Switch `torch.utils.checkpoint` off where a function is traced.


@contextmanager
def without_checkpoints(refuse: Callable[[], Any]) -> Generator[None]:
    """Meanwhile a checkpoint calls its function and no more; a reentrant one calls `refuse` (2.13, 2.15: the functions
    of its module that `checkpoint` looks up when it is called)."""

    class Refused:
        @staticmethod
        def apply(*_: Any) -> Any:
            return refuse()

    def around(*_: Any, **__: Any) -> Generator[None]:
        yield

    torchs: Any = checkpoints
    ours = {"CheckpointFunction": Refused, _GENERATOR: around}
    before = {name: getattr(torchs, name) for name in ours}
    vars(torchs).update(ours)
    try:
        yield
    finally:
        vars(torchs).update(before)


# What stands around a checkpoint's function; torch 2.15 calls it by the second name.
_NAMES = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
_GENERATOR = _NAMES[hasattr(checkpoints, _NAMES[1])]
