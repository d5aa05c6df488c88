"""Tell what changes the ops or kernels that torch runs for the same Python: autocast, defaults, kernel flags, hooks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module
from torch.utils import _device  # pyright: ignore[reportPrivateUsage]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_OVERRIDES: Any = overrides
_MODULES: Any = module
_BACKENDS: Any = torch.backends
_EINSUM = _BACKENDS.opt_einsum
_FLAGS = {
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
# Where numbers may be rounded before they are multiplied; "generic" stands for all of them.
_PLACES = ("mkldnn", "cuda") if torch.version.cuda else ("mkldnn",)
_PRECISIONS = (("generic", "all"), *((backend, op) for backend in _PLACES for op in ("all", "matmul", "conv", "rnn")))


class Untraceable(Exception):
    """A function that no list of ops stands for, and why; `stage` is its number where it is a stage's."""

    stage: int | None = None

    def of(self, stage: int, who: str) -> Untraceable:
        """This error, naming a stage."""
        made = Untraceable(f"{who}: {self}")
        made.stage = stage
        return made


def ambient() -> tuple[Any, ...]:
    """All of that as a value.

    Raises:
        Untraceable: something looks at what autograd does, or changes what torch's functions do: a trace, which calls
            neither, would pass it by.
    """
    if _C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Untraceable("saved_tensors_hooks are on, which see only what autograd saves")
    if torch.is_anomaly_enabled():
        raise Untraceable("detect_anomaly is on, which looks at what autograd computes")
    if _MODULES._has_any_global_hook() and any(map(_is_somebodys, chain.from_iterable(_HOOKS))):
        raise Untraceable("there are hooks on all modules, which are called as Python runs")
    for mode in _OVERRIDES._get_current_function_mode_stack() if _C._len_torch_function_stack() else ():
        if not isinstance(mode, _device.DeviceContext):
            raise Untraceable(f"a TorchFunctionMode is on ({type(mode).__name__}), which sees only torch's functions")
    defaults = torch.get_default_dtype(), _device.CURRENT_DEVICE
    return *defaults, _BACKENDS.mha.get_fastpath_enabled(), _einsum(), kernels(), casts()


def _einsum() -> bool:
    """The flag as assigned, or else as its own functions set it: its attribute takes four times as long."""
    return vars(_EINSUM).get("enabled", _EINSUM.m.enabled)


def settings() -> list[str]:
    """Ambient settings in lines, for people to read and processes to compare: without devices, the number of
    threads and autocast."""
    flags = {"default dtype": torch.get_default_dtype(), "mha fastpath": _BACKENDS.mha.get_fastpath_enabled()}
    flags |= {"opt_einsum": _einsum()} | {name: flag() for name, flag in _FLAGS.items()}
    flags |= {f"fp32 precision of {' '.join(place)}": _C._get_fp32_precision_getter(*place) for place in _PRECISIONS}
    flags |= {"sdp priority": [*_C._get_sdp_priority_order()]}
    return [f"{name} {value}" for name, value in flags.items()]


def autocast() -> str:
    """For which kinds of device it is on, and to which dtype."""
    words = (f"{kind} to {dtype}{'' if cached else ' without cache'}" for kind, dtype, cached in casts())
    return " and ".join(words) or "off"


_HOOKS: Any = [
    getattr(module, f"_global_{when}_hooks").values() for when in ("forward", "forward_pre", "backward", "backward_pre")
]


def _is_somebodys(hook: Any) -> bool:
    """Whether a hook is not one of torch's own, which follow where a step is, as FlopCounterMode does."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.")


def kernels() -> tuple[Any, ...]:
    """The flags and the number of threads that choose among the kernels of an op."""
    precisions = [_C._get_fp32_precision_getter(*place) for place in _PRECISIONS]
    return (torch.get_num_threads(), *[flag() for flag in _FLAGS.values()], *precisions, *_C._get_sdp_priority_order())


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is on: its tensors have no data, and it puts up with no others that are handed in."""
    return _C._get_dispatch_mode(_FAKE) is not None


_FAKE = _C._TorchDispatchModeKey.FAKE


Casts = tuple[tuple[str, torch.dtype, bool], ...]


def casts() -> Casts:
    """The kinds of device that autocast is on for, to which dtype, and whether it keeps what it has cast."""
    if not _C._is_any_autocast_enabled():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in _KINDS
        if torch.is_autocast_enabled(kind)
    )


_KINDS = ("cpu", "cuda")


@contextmanager
def casting(kinds: Casts) -> Generator[None]:
    """Under autocast as it was when `kinds` were told."""
    with ExitStack() as stack:
        for kind, dtype, cached in kinds:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        yield


@contextmanager
def raw_ops() -> Generator[None]:
    """Ops as they are written: without autograd, and without casts, which the graphs hold."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def refuse_odd_modes() -> None:
    """There are no gradients in inference mode, only zeros in their place. A transform of torch.func gets zeros too, of
    gradients that are taken inside it, or tensors without memory."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fpipe computes gradients, which torch.inference_mode() switches off; leave it first.")
    around = _C._functorch.peek_interpreter_stack()
    if around is not None and around.key() != _C._functorch.TransformType.Functionalize:
        raise RuntimeError(
            f"fpipe computes gradients itself, and torch.func.{around.key().name.lower()} around it does not see them. "
            "Call it for one after the other; or transform what torch alone computes, by torch.func.functional_call."
        )
