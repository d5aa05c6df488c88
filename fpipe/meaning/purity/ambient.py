"""Tell what changes the ops or kernels that torch runs for the same Python: autocast, defaults, kernel flags, hooks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from fpipe import torch_internals as torchs
from fpipe.torch_internals import dispatch_modes as dispatch_modes
from fpipe.torch_internals import in_fake_mode as in_fake_mode


class Untraceable(Exception):
    """A function that no list of ops stands for, and why; `stage` is its number where it is a stage's."""

    stage: int | None = None

    def of(self, stage: int, who: str) -> Untraceable:
        """This error, naming a stage."""
        made = Untraceable(f"{who}: {self}")
        made.stage = stage
        return made


def ambient() -> tuple[Any, ...]:
    """Autocast, defaults and kernel flags as one hashable key.

    Raises:
        Untraceable: something looks at what autograd does, or changes what torch's functions do: a trace, which calls
            neither, would pass it by.
    """
    if torchs.has_saved_tensors_hooks():
        raise Untraceable("saved_tensors_hooks are on, which see only what autograd saves")
    if torch.is_anomaly_enabled():
        raise Untraceable("detect_anomaly is on, which looks at what autograd computes")
    if torchs.has_hooks_on_all_modules():
        raise Untraceable("there are hooks on all modules, which are called as Python runs")
    for mode in torchs.function_modes():
        raise Untraceable(f"a TorchFunctionMode is on ({type(mode).__name__}), which sees only torch's functions")
    flags = torch.backends.mha.get_fastpath_enabled(), torchs.einsum_is_optimised()
    return torch.get_default_dtype(), torchs.default_device(), *flags, kernels(), casts()


def settings() -> list[str]:
    """Ambient settings in lines, for people to read and processes to compare: without devices, the number of
    threads and autocast."""
    flags = {"default dtype": torch.get_default_dtype(), "mha fastpath": torch.backends.mha.get_fastpath_enabled()}
    flags |= {"opt_einsum": torchs.einsum_is_optimised()} | {name: flag() for name, flag in torchs.FLAGS.items()}
    places = (f"fp32 precision of {' '.join(place)}" for place in torchs.PRECISIONS)
    flags |= dict(zip(places, torchs.fp32_precisions(), strict=True)) | {"sdp priority": [*torchs.sdp_priority()]}
    return [f"{name} {value}" for name, value in flags.items()]


def autocast() -> str:
    """For which kinds of device it is on, and to which dtype."""
    words = (f"{kind} to {dtype}{'' if cached else ' without cache'}" for kind, dtype, cached in casts())
    return " and ".join(words) or "off"


def kernels() -> tuple[Any, ...]:
    """The flags and the number of threads that choose among the kernels of an op."""
    flags = [flag() for flag in torchs.FLAGS.values()]
    return torch.get_num_threads(), *flags, *torchs.fp32_precisions(), *torchs.sdp_priority()


Casts = tuple[tuple[str, torch.dtype, bool], ...]


def casts() -> Casts:
    """The kinds of device that autocast is on for, to which dtype, and whether it keeps what it has cast."""
    if not torchs.is_autocast_on():
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


def raw_ops() -> AbstractContextManager[None]:
    """Ops as they are written: without autograd, and without casts, which the graphs hold."""
    return _without_casts() if torchs.is_autocast_on() else torch.no_grad()


@contextmanager
def _without_casts() -> Generator[None]:
    with torch.no_grad(), outside_autocast():
        yield


@contextmanager
def outside_autocast() -> Generator[None]:
    """Run a backward as torch advises. The gradient of an op that autocast left alone would be computed less precisely
    within it; what was cast is computed in its own dtype, and what is computed again puts its autocast back itself."""
    with ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def refuse_odd_modes() -> None:
    """There are no gradients in inference mode, only zeros in their place. A transform of torch.func gets zeros too, of
    gradients that are taken inside it, or tensors without memory."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fpipe computes gradients, which torch.inference_mode() switches off; leave it first.")
    if around := torchs.function_transform():
        raise RuntimeError(
            f"fpipe computes gradients itself, and torch.func.{around} around it does not see them. "
            "Call it for one after the other; or transform what torch alone computes, by torch.func.functional_call."
        )
