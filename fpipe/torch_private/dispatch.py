"""Watch, replace and look up the layers below a call of torch: ops, dispatch modes, kernels, storages."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
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
"""Return a context without any dispatch mode (2.13)."""


@contextmanager
def without_any_mode() -> Generator[None]:
    """Run without any dispatch mode and any mode for torch functions (2.13: `DisableTorchFunction`)."""
    with without_modes(), _C.DisableTorchFunction():
        yield


has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
"""Whether an op, by name, has a kernel for a dispatch key (2.13)."""
NAMESPACES: tuple[Any, ...] = (torch, _C._nn, Tensor, _C._linalg, _C._special, _C._fft)
"""Where torch keeps functions in C that call one op each (2.13)."""
C10D: Any = torch.ops._c10d_functional
"""The ops of collectives in a graph (2.11 to 2.15: `torch.ops._c10d_functional`)."""
C10D_AUTOGRAD: Any = torch.ops._c10d_functional_autograd
"""The ops of collectives with a gradient in graphs of torch before 2.13 (2.11: `_c10d_functional_autograd`)."""


def c_function_of(op: Any) -> Callable[..., Any]:
    """Return an op as a function in C (2.13: `_op`)."""
    return op._op


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread, as it does around a recomputed forward (2.13)."""
    return _C._current_graph_task_id() != -1


def overrides_torch_functions(tensor_class: type[Tensor]) -> bool:
    """Whether torch functions on tensors of a class run its own `__torch_function__` (2.13).

    It does not count if it is that of `Tensor`, or the one in C by which a class switches it off.
    """
    torch_function: Any = tensor_class.__torch_function__
    return (
        torch_function is not _C._disabled_torch_function_impl
        and getattr(torch_function, "__func__", torch_function) is not _TENSOR_FUNCTION
    )


_TENSOR_FUNCTION: Any = getattr(Tensor.__torch_function__, "__func__", Tensor.__torch_function__)


def fake_tensor_class() -> Any:
    """Return the class of fake tensors, whose module takes a while to import (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@contextmanager
def override_kernel(name: str, kernel: Callable[..., Any]) -> Generator[None]:
    """Replace the kernel of a composite op, within this context (2.13: `_destroy`; it takes 0.04 ms)."""
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        # Torch warns once that there is a kernel already.
        with warnings.catch_warnings(action="ignore"):
            library.impl(name, kernel, "CompositeImplicitAutograd", allow_override=True)
        yield
    finally:
        library._destroy()


def fake_mode_class() -> Any:
    """Return the class of the mode under which torch makes fake tensors (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode


def fake_rule_of(op: Any) -> Callable[..., Any] | None:
    """Return the rule by which a higher-order op runs on fake tensors; None if it is the mode's own (2.13)."""
    from torch._higher_order_ops.utils import registered_hop_fake_fns

    return None if op in registered_hop_fake_fns else op.python_key_table[fake_mode_class()]


@contextmanager
def numbers_of_data_refused(fake_mode: Any) -> Generator[None]:
    """Give a fake mode the ShapeEnv that rules of loops ask for, without any number that depends on data (2.13)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without one, the rules of cond and while_loop end in an AttributeError.
    original = fake_mode.shape_env
    fake_mode.shape_env = original or ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    try:
        yield
    finally:
        fake_mode.shape_env = original


@contextmanager
def refuse_data_assignments(refuse: Callable[[], None]) -> Generator[None]:
    """Call `refuse`, which raises, when this thread assigns the `.data` of a fake tensor (2.13)."""
    # Only a mode for torch functions would see the assignment, and modules behave differently under one. So the class
    # has a property of that name while any thread is in here, and the property asks which thread assigns.
    fake_class, data_descriptor = fake_tensor_class(), _DATA_DESCRIPTOR

    def assign(tensor: Any, value: Any) -> None:
        if _ASSIGNMENTS.value is not None:
            _ASSIGNMENTS.value()
        data_descriptor.__set__(tensor, value)

    with _LOCK:
        _THREADS_INSIDE.append(threading.get_ident())
        fake_class.data = property(data_descriptor.__get__, assign)
    try:
        with _ASSIGNMENTS.set_to(refuse):
            yield
    finally:
        with _LOCK:
            _THREADS_INSIDE.remove(threading.get_ident())
            if not _THREADS_INSIDE:
                del fake_class.data


_DATA_DESCRIPTOR: Any = Tensor.data
_ASSIGNMENTS, _LOCK, _THREADS_INSIDE = ThreadFlag(), threading.Lock(), list[int]()


@contextmanager
def intercept_dtensor_moves(on_move: Callable[..., Any]) -> Generator[None]:
    """Call `on_move(name, method, *args, **options)` instead of the methods that make and move DTensors (2.13).

    No mode sees these calls whole. It holds for all threads, and one thread at a time may be in here, since each puts
    back the methods that it found.
    """
    from torch.distributed.tensor import DTensor  # its import takes long

    dtensor_class: Any = DTensor

    def replacement(name: str) -> Any:
        method = getattr(dtensor_class, name)

        def move(*args: Any, **options: Any) -> Any:
            return on_move(name, method, *args, **options)

        return staticmethod(move) if name == "from_local" else move

    with _MOVES_LOCK:
        original_methods = {
            name: vars(dtensor_class)[name] for name in ("from_local", "redistribute", "to_local", "full_tensor")
        }
        try:
            for name in original_methods:
                setattr(dtensor_class, name, replacement(name))
            yield
        finally:
            for name, method in original_methods.items():
                setattr(dtensor_class, name, method)


_MOVES_LOCK = threading.RLock()


@contextmanager
def intercept_functions(on_apply: Callable[[type, Any, Any], Any]) -> Generator[None]:
    """Call `on_apply(function, args, kwargs)` in this thread in place of `apply` of each autograd.Function (2.13).

    Those of torch and of fpipe are left alone, what `on_apply` applies itself, and where it returns NotImplemented. One
    thread at a time may be in here, since each puts back the method that it found.
    """
    # Subclasses find `apply` in this class: a classmethod, in Python or from torch 2.15 on in C, which no mode sees.
    function_class: Any = torch.autograd.Function
    original = vars(function_class)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        handler = None if cls.__module__.startswith(("torch.", "fpipe.")) else _ON_APPLY.value
        if handler is not None:
            with _ON_APPLY.set_to(None):
                result = handler(cls, args, kwargs)
            if result is not NotImplemented:
                return result
        return original.__get__(None, cls)(*args, **kwargs)

    with _MOVES_LOCK, _ON_APPLY.set_to(on_apply):
        function_class.apply = classmethod(apply)
        try:
            yield
        finally:
            function_class.apply = original


_ON_APPLY = ThreadFlag()


@contextmanager
def intercept_saved_tensors_hooks(on_enter: Callable[[], None]) -> Generator[None]:
    """Call `on_enter` where this thread enters saved_tensors_hooks that may change numbers (2.13: `__enter__`).

    Those of `save_on_cpu` do not. One thread at a time may be in here, as in `intercept_functions`.
    """
    hooks_class: Any = torch.autograd.graph.saved_tensors_hooks
    original, thread = hooks_class.__enter__, threading.get_ident()

    def enter(hooks: Any) -> None:
        if threading.get_ident() == thread and not isinstance(hooks, torch.autograd.graph.save_on_cpu):
            on_enter()
        original(hooks)

    with _MOVES_LOCK:
        hooks_class.__enter__ = enter
        try:
            yield
        finally:
            hooks_class.__enter__ = original


@contextmanager
def silence_fake_errors() -> Generator[None]:
    """Keep torch from logging errors of fake tensors in this thread, which are raised anyway (2.13: logger by module).

    The filter stays on the logger, which all threads share, and lets the messages of other threads through.
    """
    _filter_fake_errors()
    with _UNLOGGED.set_to(True):
        yield


_UNLOGGED = ThreadFlag()


@cache
def _filter_fake_errors() -> None:
    logging.getLogger(fake_mode_class().__module__).addFilter(lambda record: not _UNLOGGED.value)


def as_functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose ops mutate neither arguments nor intermediates (2.13: `dispatch_functionalize`)."""
    from torch._subclasses.functional_tensor import dispatch_functionalize

    return dispatch_functionalize(function)


def compile_with_inductor(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
    """Compile a graph without autograd or guards, which takes seconds (2.13: `standalone_compile`)."""
    with without_jit_deprecations():
        from torch._inductor import standalone_compile

        return standalone_compile(graph, example, dynamic_shapes="from_example_inputs")


@contextmanager
def without_jit_deprecations() -> Generator[None]:
    """Ignore torch's warnings about its own use of torch.jit.script, which would be errors to who asks for that.

    2.11 and 2.13 give a DeprecationWarning, 2.15 a FutureWarning.
    """
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", ".torch.jit.(script|trace|script_method). is", category)
        yield


# Switch `torch.utils.checkpoint` off where a function is traced.


@contextmanager
def without_checkpoints(refuse: Callable[[], Any]) -> Generator[None]:
    """Let checkpoints only call their function, and reentrant ones call `refuse`, within this context.

    2.13, 2.15: `checkpoint` looks these functions of its module up when it is called.
    """

    class Refused:
        @staticmethod
        def apply(*_: Any) -> Any:
            return refuse()

    def run_plainly(*_: Any, **__: Any) -> Generator[None]:
        yield

    checkpoint_module: Any = checkpoints
    replacements = {"CheckpointFunction": Refused, _GENERATOR: run_plainly}
    # Threads may overlap as enter A, enter B, leave A, leave B: the last one puts torch's own functions back.
    with _SWITCH_LOCK:
        if not _SWITCHED_OFF:
            _ORIGINALS.update({name: getattr(checkpoint_module, name) for name in replacements})
        _SWITCHED_OFF.append(None)
        vars(checkpoint_module).update(replacements)
    try:
        yield
    finally:
        with _SWITCH_LOCK:
            _SWITCHED_OFF.pop()
            if not _SWITCHED_OFF:
                vars(checkpoint_module).update(_ORIGINALS)


_SWITCH_LOCK = threading.Lock()
_SWITCHED_OFF: list[None] = []
"""An entry for each context that is open."""
_ORIGINALS: dict[str, Any] = {}


# The generator that torch runs around a checkpoint's function; torch 2.15 has it under the second name.
_NAMES = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
_GENERATOR = _NAMES[hasattr(checkpoints, _NAMES[1])]


def python_dispatcher() -> AbstractContextManager[Any]:
    """Run kernels that torch has in Python where it has both (2.13: `torch._dispatch.python`)."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()
