"""Recognise torch's own modules by class, and run them without a trace in their attributes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.spectral_norm import SpectralNorm

from fpipe.torch_internals import WEIGHT_LISTS
from fpipe.torch_private.dispatch import without_deprecations


def has_torchs_forward(norm: nn.Module) -> bool:
    """Whether a norm's forward is torch's, and not one of somebody's own (2.13: three classes have one)."""
    return "forward" not in vars(norm) and type(norm).forward in _FORWARDS


_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def without_statistics(norm: Any, see: Callable[[Tensor], None]) -> Generator[None]:
    """While it lasts a batch norm in training neither reads nor writes running statistics, and shows its inputs.

    2.13: every norm's forward, that of a subclass too, hands its input to `_check_input_dim`.
    """

    def check(x: Tensor) -> None:
        type(norm)._check_input_dim(norm, x)
        see(x)

    tracked = norm.track_running_stats
    try:
        norm.track_running_stats = False
        vars(norm)["_check_input_dim"] = check
        yield
    finally:
        norm.track_running_stats = tracked
        vars(norm).pop("_check_input_dim", None)


def spectral_buffers(module: nn.Module) -> list[str]:
    """The buffers that torch's spectral norm of a module writes in training, new style and old (2.13: the
    parametrization `_SpectralNorm`, and a hook that has `_u` and `_v` behind the name of its weight)."""
    if isinstance(module, _SpectralNorm):
        return [name for name, _ in module.named_buffers(recurse=False)]
    hooks = [hook for hook in vars(module)["_forward_pre_hooks"].values() if isinstance(hook, SpectralNorm)]
    return [f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")]


def caches_weights(module: nn.Module) -> bool:
    """Whether a module may keep tensors made of its parameters as plain attributes (2.13: RNNs a list of their
    weights; pruning and the old weight norm, which are hooks, the weight)."""
    return isinstance(module, nn.RNNBase) or bool(vars(module)["_forward_pre_hooks"])


def cached_weights(module: nn.Module) -> dict[str, Any]:
    """The attributes of such a module that functional_call leaves changed, as they are (2.13: tensors, and an
    RNN's lists)."""
    attributes = vars(module).items()
    tensors = {name: value for name, value in attributes if isinstance(value, Tensor)}
    return tensors | {name: list(value) for name, value in attributes if name in WEIGHT_LISTS}


def hold(
    module: nn.Module,
    children: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    buffers: dict[str, Any] | None = None,
) -> None:
    """Give a module these very dicts as its own: what is bound in them is bound in it (2.13: three dicts)."""
    vars(module).update(_modules=children, _parameters=parameters or {}, _buffers=buffers or {})


def is_saved(module: object, name: str) -> bool:
    """Whether a tensor of a module is in its state_dict (2.13: a set of the names that are not)."""
    return name not in getattr(module, "_non_persistent_buffers_set", ())


@contextmanager
def told_of_assignments(told: Callable[[nn.Module, str, Any, Callable[..., None]], None]) -> Generator[None]:
    """Meanwhile `told(module, name, value, assign)` is called in place of each assignment to a module's attribute, of
    all threads (2.13: `Module.__setattr__`)."""
    assign: Any = nn.Module.__setattr__

    def asked(module: nn.Module, name: str, value: Any) -> None:
        told(module, name, value, assign)

    nn.Module.__setattr__ = asked  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign


def load_forward_mode() -> None:
    """Import the derivatives of torch's forward mode without the warning of torch.jit.script in them (2.13, 2.15:
    `torch._decomp.decompositions_for_jvp`, imported when first needed)."""
    with without_deprecations():
        importlib.import_module("torch._decomp.decompositions_for_jvp")
