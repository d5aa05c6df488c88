"""Read torch's settings that change which ops or kernels the same Python runs: autocast, defaults, kernel flags, hooks.

A trace is valid for the settings that it was made under, so `ambient_key` is part of the key of the cache of traces.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, repeat
from typing import Any

import torch

from fpipe import torch_internals as torchs
from fpipe.torch_internals import dispatch_modes as dispatch_modes
from fpipe.torch_internals import in_fake_mode as in_fake_mode


class Untraceable(Exception):
    """A function that no list of ops can replace, with the reason; `stage` is its index if it is a stage."""

    stage: int | None = None

    def for_stage(self, stage: int, label: str) -> Untraceable:
        """Return a copy of this error that names a stage."""
        error = Untraceable(f"{label}: {self}")
        error.stage = stage
        return error


def ambient_key() -> tuple[Any, ...]:
    """Return autocast, defaults and kernel flags as one hashable key.

    Raises:
        Untraceable: a hook or mode observes autograd or torch's functions, which the run of a trace does not call.
    """
    if torchs.has_saved_tensors_hooks():
        raise Untraceable("saved_tensors_hooks are on, which see only what autograd saves")
    if torch.is_anomaly_enabled():
        raise Untraceable("detect_anomaly is on, which looks at what autograd computes")
    if torchs.has_hooks_on_all_modules():
        raise Untraceable("hooks on all modules are called as Python runs")
    for mode in torchs.function_modes():
        raise Untraceable(f"a TorchFunctionMode is on ({type(mode).__name__}), which sees only torch's functions")
    flags = torch.backends.mha.get_fastpath_enabled(), torchs.einsum_is_optimised()
    return torch.get_default_dtype(), torchs.default_device(), *flags, kernel_settings(), autocast_settings()


def describe_settings() -> list[str]:
    """Return the settings that all processes must share, a line each, for people to read and processes to compare.

    Devices, the number of threads and autocast are not among them.
    """
    flags = {"default dtype": torch.get_default_dtype(), "mha fastpath": torch.backends.mha.get_fastpath_enabled()}
    flags |= {"opt_einsum": torchs.einsum_is_optimised()} | {name: flag() for name, flag in torchs.FLAGS.items()}
    names = (f"fp32 precision of {' '.join(precision)}" for precision in torchs.PRECISIONS)
    flags |= dict(zip(names, torchs.fp32_precisions(), strict=True)) | {SDP_PRIORITY: [*torchs.sdp_priority()]}
    return [f"{name} {value}" for name, value in flags.items()]


def describe_autocast() -> str:
    """Return the device types that autocast is on for and their dtypes, in words, or "off"."""
    phrases = (
        f"{device_type} to {dtype}{'' if is_cached else ' without cache'}"
        for device_type, dtype, is_cached in autocast_settings()
    )
    return " and ".join(phrases) or "off"


def kernel_settings() -> tuple[Any, ...]:
    """Return the number of threads and the flags by which torch chooses among an op's kernels."""
    flags = [flag() for flag in torchs.FLAGS.values()]
    return torch.get_num_threads(), *flags, *torchs.fp32_precisions(), *torchs.sdp_priority()


def changed_settings(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    """Return the names of the settings in which two results of `kernel_settings` differ."""
    precisions = (f"fp32 precision of {' '.join(precision)}" for precision in torchs.PRECISIONS)
    names = chain(("number of threads", *torchs.FLAGS, *precisions), repeat(SDP_PRIORITY))
    return [name for name, *values in zip(names, old, new, strict=False) if values[0] != values[1]]


def attention_backends() -> list[int]:
    """Return the kernels of attention that are enabled, as numbers of `SDPBackend`, the preferred one first."""
    enabled = [number for name, number in ATTENTION_FLAGS.items() if name in torchs.FLAGS and torchs.FLAGS[name]()]
    return [number for number in torchs.sdp_priority() if number in enabled]


SDP_PRIORITY = "sdp priority"
ATTENTION_FLAGS = {
    "math_sdp_enabled": 0,
    "flash_sdp_enabled": 1,
    "mem_efficient_sdp_enabled": 2,
    "cudnn_sdp_enabled": 3,
    "overrideable_sdp_enabled": 4,
}
"""The number in `torch.nn.attention.SDPBackend` of the kernel that a flag enables."""
AutocastSettings = tuple[tuple[str, torch.dtype, bool], ...]


def autocast_settings() -> AutocastSettings:
    """Return device type, dtype and whether casts are cached, for each device type that autocast is on for."""
    if not torchs.is_autocast_on():
        return ()
    return tuple(
        (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    )


_DEVICE_TYPES = ("cpu", "cuda")


def ambient_eps() -> float:
    """Return the machine epsilon of the least precise dtype that autocast casts to now; 0 without autocast."""
    return max((torch.finfo(dtype).eps for _, dtype, _ in autocast_settings()), default=0.0)


@contextmanager
def autocast_as(settings: AutocastSettings) -> Generator[None]:
    """Switch autocast on in this context, with settings from `autocast_settings`."""
    with ExitStack() as stack:
        for device_type, dtype, is_cached in settings:
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=is_cached))
        yield


def raw_ops() -> AbstractContextManager[None]:
    """Run ops without autograd and without autocast, in this context."""
    # A graph contains the casts that autocast made while it was traced; casting again would be wrong.
    return _without_casts() if torchs.is_autocast_on() else torch.no_grad()


@contextmanager
def _without_casts() -> Generator[None]:
    with torch.no_grad(), outside_autocast():
        yield


@contextmanager
def outside_autocast() -> Generator[None]:
    """Switch autocast off for all but forwards, as torch advises: backwards, norms, updates, joined results."""
    # Under autocast the gradient of an op that autocast had left alone would be computed in the lower precision. Ops
    # that were cast have their dtype already, and a recomputed forward switches its autocast on again itself. Nor can
    # torch.cat and torch.stack join tensors of the other half precision there.
    with ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def refuse_unsupported_modes() -> None:
    """Raise RuntimeError in inference mode and inside a transform of torch.func.

    Autograd would silently give zeros there for gradients that fpipe takes itself, or tensors without memory.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fpipe computes gradients, which torch.inference_mode() switches off; leave it first.")
    if transform_name := torchs.function_transform():
        raise RuntimeError(
            f"fpipe computes gradients itself, and torch.func.{transform_name} around it does not see them. "
            "Call it for one after the other."
        )
