"""Flags, modes and hooks around a call of torch that change its ops or kernels, as cheap to read as a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module
from torch.utils import _device  # pyright: ignore[reportPrivateUsage]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
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
"""Functions that read the flags by which torch chooses kernels; a version has some of them (2.13)."""
# Where numbers may be rounded before they are multiplied; "generic" stands for all of them.
_PLACES = ("mkldnn", "cuda") if torch.version.cuda else ("mkldnn",)
PRECISIONS = (("generic", "all"), *((backend, op) for backend in _PLACES for op in ("all", "matmul", "conv", "rnn")))
"""The backends and ops that have a precision of their own for float32."""


def fp32_precisions() -> list[str]:
    """How float32 is rounded before it is multiplied, for each of `PRECISIONS` (2.13)."""
    return [_C._get_fp32_precision_getter(*place) for place in PRECISIONS]


def sdp_priority() -> list[int]:
    """The order in which kernels of attention are tried (2.13)."""
    return _C._get_sdp_priority_order()


def einsum_is_optimised() -> bool:
    """The flag as assigned, or as its own functions set it: its attribute takes four times as long (2.13)."""
    return vars(_EINSUM).get("enabled", _EINSUM.m.enabled)


def default_device() -> Any:
    """The device on which this thread makes tensors that name none; None for the host (2.13: a function mode)."""
    return next((mode.device for mode in reversed(_function_modes()) if isinstance(mode, _device.DeviceContext)), None)


def has_saved_tensors_hooks() -> bool:
    """Whether saved_tensors_hooks are on (2.13)."""
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_hooks_on_all_modules() -> bool:
    """Whether there are global hooks of modules besides torch's own, which follow where a step is (2.13)."""
    return _MODULES._has_any_global_hook() and any(map(_is_somebodys, chain.from_iterable(_HOOKS)))


def _is_somebodys(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("torch.")


def function_modes() -> Iterator[Any]:
    """The TorchFunctionModes that are on, but for a default device (2.13)."""
    return (mode for mode in _function_modes() if not isinstance(mode, _device.DeviceContext))


def _function_modes() -> Sequence[Any]:
    return _OVERRIDES._get_current_function_mode_stack() if _C._len_torch_function_stack() else ()


def is_autocast_on() -> bool:
    """Whether autocast is on for any kind of device (2.13)."""
    return _C._is_any_autocast_enabled()


def function_transform() -> str | None:
    """The transform of torch.func that is around a call, but for functionalize (2.13)."""
    around = _C._functorch.peek_interpreter_stack()
    if around is None or around.key() == _C._functorch.TransformType.Functionalize:
        return None
    return around.key().name.lower()
