"""Access private names of torch for the core; those for the engine alone are in `torch_private`.

torch promises none of these names, so each docstring ends in the version on which it was tested, and the private name.
A step reads flags, modes and hooks each time it runs, so these are read in the cheapest way.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.autograd import profiler
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.modules import module
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils import _device  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_TORCH: Any = torch
_FAKE: Any = _C._TorchDispatchModeKey.FAKE


class _RankFilter(logging.Filter):
    """Filter that lets all records pass and gives them this process's rank."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return True


def logger_of(module_name: str) -> logging.Logger:
    """Return the logger of a module of the package, below "fpipe"; its records have the attribute `rank`."""
    logger = logging.getLogger(module_name)
    if not logger.filters:
        logger.addFilter(_RankFilter())
    return logger


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn as `warnings.warn` does; in a run of several processes the first alone warns, and others log it.

    2.13: `_get_default_store`.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        key = f"fpipe/warning/{hashlib.sha256(message.encode()).hexdigest()}"
        store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        # The process that keeps the store may be gone: then each warns.
        with suppress(RuntimeError):
            if store.add(key, 1) > 1:
                _LOG.info(message)
                return
    warnings.warn(message, stacklevel=stacklevel + 1)


_LOG = logger_of("fpipe")


def schema_arguments(op: Any) -> Any:
    """Return the arguments of an op: name, type, default and whether the op writes their memory (2.13: `_schema`)."""
    return op._schema.arguments


def returns_of(op: Any) -> Any:
    """Return the results of an op, each with its type and the argument that it aliases, if any (2.13: `_schema`)."""
    return op._schema.returns


def op_and_overload_names(op: Any) -> tuple[str, str]:
    """Return the names of an op, without its namespace, and of its overload: `add_`, `Tensor` (2.13: `_schema`)."""
    schema = op._schema
    return schema.name.partition("::")[2], schema.overload_name or "default"


def scale_each(tensors: list[Tensor], numbers: list[float]) -> Sequence[Tensor]:
    """Return each tensor times its number, by one call with the bits of separate ones (2.13: `_foreach_mul`)."""
    return _TORCH._foreach_mul(tensors, numbers)


def silence_capture_warning(optimizer: torch.optim.Optimizer) -> None:
    """Keep a capturable optimizer from warning that it steps outside of a capture, as it does before the first one.

    (2.13: `_warned_capturable_if_run_uncaptured`)
    """
    optimizer.__dict__["_warned_capturable_if_run_uncaptured"] = True


def is_view(tensor: Tensor) -> bool:
    """Whether autograd tracks a tensor as a view of another (2.13: `_is_view`)."""
    return tensor._is_view()


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data, but belongs to a trace (2.13: `torch._subclasses.fake_tensor`)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def function_behind(node: Any) -> type | None:
    """Return the `torch.autograd.Function` of an autograd node; None for an op of torch (2.13: `_forward_cls`)."""
    return getattr(node, "_forward_cls", None)


def is_leaf_write_error(error: RuntimeError) -> bool:
    """Whether autograd refused a write in place to a leaf that requires a gradient (2.13: its sentence)."""
    return "leaf Variable that requires grad" in str(error)


def is_subclass_creation_error(error: RuntimeError) -> bool:
    """Whether torch could not make a tensor of a Python class, as under any dispatch mode (2.13: its sentence)."""
    return str(error).startswith("Creating a new Tensor subclass")


def is_jagged_error(error: BaseException) -> bool:
    """Whether a trace ended where a function makes a jagged nested tensor (2.13: torch's sentence)."""
    return "nested_tensor_from_jagged does not support tracing" in str(error)


def is_hooks_forbidden_error(error: RuntimeError) -> bool:
    """Whether an error says that saved tensors hooks are forbidden, as in torch.func (2.13: its sentence)."""
    return "saved tensor hooks" in str(error)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; sparse tensors raise NotImplementedError (2.13: `_cdata`)."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the active dispatch modes of this thread (2.13: `_get_current_dispatch_mode_stack`)."""
    # The length is an int of C++; the stack is a new Python list, which most calls do not need.
    return _get_current_dispatch_mode_stack() if _C._len_torch_dispatch_stack() else []


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is on: its tensors have no data, and it refuses all others (2.13)."""
    return _C._get_dispatch_mode(_FAKE) is not None


def is_profiled() -> bool:
    """Whether torch.profiler or emit_nvtx runs in any thread of this process (2.13: `_is_profiler_enabled`)."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""The attributes in which an RNN lists its weights (2.13)."""


def version_of(tensor: Tensor) -> int:
    """Return the counter that each in-place write to a tensor increments (2.13: `_version`)."""
    return tensor._version


class ModuleDicts(NamedTuple):
    """The dicts of a module's direct parameters, buffers and children by name, to read and to bind."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    children: dict[str, Any]


def direct_members(module: nn.Module) -> ModuleDicts:
    """Return the direct tensors and children of a module, past its `__getattr__` (2.13: three dicts)."""
    attributes = vars(module)
    return ModuleDicts(attributes["_parameters"], attributes["_buffers"], attributes["_modules"])


_SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTED = (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def all_ops() -> list[OpOverload]:
    """Return every registered op, sorted by name (2.13: `_dispatch_get_all_op_names`)."""
    ops: list[OpOverload] = []
    for name in sorted(_C._dispatch_get_all_op_names()):
        namespace, _, qualified_name = name.partition("::")
        op_name, _, overload = qualified_name.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), op_name, None), overload or "default", None)
        if isinstance(op, OpOverload):
            ops.append(cast("OpOverload", op))
    return ops


def selective_checkpoint_answers(policy: Callable[..., Any]) -> dict[str, bool]:
    """Ask a selective checkpoint policy of every op by name (2.13: the context is made by hand)."""
    context: Any = SelectiveCheckpointContext(is_recompute=False)  # pyright: ignore[reportCallIssue]
    return {str(op): _is_saved(policy, context, op) for op in all_ops()}


def _is_saved(policy: Callable[..., Any], context: Any, op: OpOverload) -> bool:
    try:
        answer = policy(context, op)
    except Exception as error:
        rule = "It is asked as policy(ctx, op), without tensors, since a program knows none."
        raise TypeError(f"the policy for {op} raised {type(error).__name__}: {error}. {rule}") from error
    if answer not in (*_SAVED, *_RECOMPUTED):
        raise TypeError(f"a policy answers with a torch.utils.checkpoint.CheckpointPolicy, found {answer!r} for {op}.")
    return answer in _SAVED


_OVERRIDES: Any = overrides
_MODULES: Any = module
_EINSUM: Any = torch.backends.opt_einsum  # pyright: ignore[reportAttributeAccessIssue]
_HOOKS: Any = [
    getattr(module, f"_global_{when}_hooks").values() for when in ("forward", "forward_pre", "backward", "backward_pre")
]


FLAGS: dict[str, Any] = {
    name: getattr(_C, f"_get_{name}")
    for name in (
        "deterministic_algorithms",
        "deterministic_algorithms_warn_only",
        "flash_sdp_enabled",
        "mem_efficient_sdp_enabled",
        "math_sdp_enabled",
        "cudnn_sdp_enabled",
        "overrideable_sdp_enabled",
        "math_sdp_allow_fp16_bf16_reduction",
        "mkldnn_enabled",
        "mkldnn_deterministic",
        "nnpack_enabled",
        "cpu_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "linalg_preferred_backend",
        "blas_preferred_backend",
    )
    if hasattr(_C, f"_get_{name}")
}
"""Getters of the flags by which torch chooses kernels, as far as this version has them (2.13)."""


# Backends that may round float32 to tf32 or bfloat16 before a product; "generic" sets all of them.
_FP32_BACKENDS = ("mkldnn", "cuda") if torch.version.cuda else ("mkldnn",)
PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in _FP32_BACKENDS for op in ("all", "matmul", "conv", "rnn")),
)
"""The backends and ops that have a precision of their own for float32."""


def fp32_precisions() -> list[str]:
    """Return how float32 is rounded before products, for each of `PRECISIONS` (2.13)."""
    return [_C._get_fp32_precision_getter(*backend_and_op) for backend_and_op in PRECISIONS]


def sdp_priority() -> list[int]:
    """Return the order in which attention kernels are tried (2.13)."""
    return _C._get_sdp_priority_order()


def einsum_is_optimised() -> bool:
    """Whether einsum optimises the order of its contractions (2.13)."""
    # A user's assignment leaves a plain attribute in the dict of `backends.opt_einsum`, which hides the flag in the
    # module behind it. Reading both dicts takes a quarter of the time of reading the attribute.
    return vars(_EINSUM).get("enabled", _EINSUM.m.enabled)


def default_device() -> Any:
    """Return the default device of this thread; None for the host (2.13: a function mode)."""
    return next((mode.device for mode in reversed(_function_modes()) if isinstance(mode, _device.DeviceContext)), None)


def has_saved_tensors_hooks() -> bool:
    """Whether saved_tensors_hooks are active (2.13)."""
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_hooks_on_all_modules() -> bool:
    """Whether a user has registered hooks on all modules (2.13)."""
    # torch's own global hooks, which follow which module is running, do not count.
    if not _MODULES._has_any_global_hook():
        return False
    modules = (str(getattr(hook, "__module__", "")) for hook in chain.from_iterable(_HOOKS))
    return any(not module.startswith("torch.") for module in modules)


def function_modes() -> Iterator[Any]:
    """Return the active TorchFunctionModes, except a default device (2.13)."""
    return (mode for mode in _function_modes() if not isinstance(mode, _device.DeviceContext))


def _function_modes() -> Sequence[Any]:
    return _OVERRIDES._get_current_function_mode_stack() if _C._len_torch_function_stack() else ()


def is_autocast_on() -> bool:
    """Whether autocast is on for any kind of device (2.13)."""
    return _C._is_any_autocast_enabled()


def function_transform() -> str | None:
    """Return the name of the innermost torch.func transform around a call, except functionalize (2.13)."""
    around = _C._functorch.peek_interpreter_stack()
    if around is None or around.key() == _C._functorch.TransformType.Functionalize:
        return None
    return around.key().name.lower()


def is_compiled(function: Any) -> bool:
    """Whether torch.compile made a function or a module, or a module's call (2.13: three attributes)."""
    if isinstance(function, nn.Module):
        has_compiled_call = vars(function).get("_compiled_call_impl") is not None
        return "_orig_mod" in direct_members(function).children or has_compiled_call
    return hasattr(function, "_torchdynamo_orig_callable")


@contextmanager
def without_compiler() -> Generator[None]:
    """Run what torch.compile made as plain Python, under make_fx too (2.13: `error_on_nested_fx_trace`)."""
    # It imports the compiler, as the first trace does.
    with torch.compiler.set_stance("force_eager"), _TORCH._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def wrap_higher_order_op(name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(call, *args)` for each call of a higher-order op from now on (2.13: `__call__` of its class)."""
    op_class: Any = type(getattr(torch.ops.higher_order, name))
    original = op_class.__call__

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        # The keywords of these ops, `additional_inputs`, are their last arguments.
        return wrapper(partial(original, op), *args, *kwargs.values())

    op_class.__call__ = call


def on_fake_tensors(function: Callable[..., Any], example: Sequence[Any]) -> None:
    """Call a function on fake tensors like these, without gradients, out of sight of all modes (2.13)."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(example) or FakeTensorMode(allow_non_fake_inputs=True)
    with _disable_current_modes(), mode, torch.no_grad():
        function(*(torch.empty_like(x) if isinstance(x, Tensor) else x for x in example))


def index_ops_on_0d_tensors() -> AbstractContextManager[Any]:
    """Let `x[i]` be an op where `i` is a 0-d tensor, which would be read as a number (2.13)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


MEMBER_DICTS = ("_modules", "_parameters", "_buffers")
"""The attributes in which a module has its children and tensors (2.13)."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm of any dimensions (2.13: `_NormBase`)."""
    return isinstance(module, _NormBase)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of any dimensions (2.13: `_BatchNorm`)."""
    return isinstance(module, _BatchNorm)


def is_dropout(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Whether a module is a dropout of any kind (2.13: `_DropoutNd`)."""
    return isinstance(module, _DropoutNd)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that a call of a module, or its backward, runs (2.13: four dicts)."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for kind in kinds for hook in vars(module).get(kind, {}).values()]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient (2.13: two dicts)."""
    return any(getattr(tensor, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def has_own_samples(pool: nn.Module) -> bool:
    """Whether a fractional pool has random numbers given by its caller (2.13: `_random_samples`)."""
    return getattr(pool, "_random_samples", None) is not None


@contextmanager
def watch_bindings(on_binding: Callable[[nn.Module, str], None]) -> Generator[None]:
    """Call `told(module, name)` before this thread binds a tensor to a parameter or buffer of a module (2.13).

    The hooks are installed once and stay: torch iterates over its dict of hooks without a lock, so removing one while
    another thread binds would break that iteration.
    """
    _install_binding_hooks()
    with _ON_BINDING.set_to(on_binding):
        yield


class ThreadFlag(threading.local):
    """A value of each thread, read by a permanent patch of torch: None outside of `with flag.set_to(value)`."""

    value: Any = None

    @contextmanager
    def set_to(self, value: object) -> Generator[None]:
        """Set the value within this context."""
        old_value, self.value = self.value, value
        try:
            yield
        finally:
            self.value = old_value


_ON_BINDING = ThreadFlag()


@cache
def _install_binding_hooks() -> None:
    def bind(module: nn.Module, name: str, value: Any) -> None:
        if _ON_BINDING.value is not None:
            _ON_BINDING.value(module, name)

    register_module_buffer_registration_hook(bind)
    register_module_parameter_registration_hook(bind)


def as_expression(x: Any) -> Any:
    """Return an open number as an expression, or as a number if it is one; return anything else unchanged (2.13)."""
    if not isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return x
    expr: Any = x.node.expr
    if expr.free_symbols:
        return expr
    return bool(expr) if isinstance(x, torch.SymBool) else int(expr) if isinstance(x, torch.SymInt) else float(expr)
