"""Recognise torch's own modules by class, and read and replace their hidden attributes."""

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
from fpipe.torch_private.dispatch import without_jit_deprecations


def has_torch_forward(norm: nn.Module) -> bool:
    """Whether a norm has torch's forward, and no override (2.13: three classes have one)."""
    return "forward" not in vars(norm) and type(norm).forward in _FORWARDS


_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def without_statistics(norm: Any, on_input: Callable[[Tensor], None]) -> Generator[None]:
    """Run a batch norm in training without its running statistics, and call `on_input` with each input.

    2.13: the forward of every norm, of subclasses too, hands its input to `_check_input_dim`.
    """

    def check(x: Tensor) -> None:
        type(norm)._check_input_dim(norm, x)
        on_input(x)

    tracked = norm.track_running_stats
    try:
        norm.track_running_stats = False
        vars(norm)["_check_input_dim"] = check
        yield
    finally:
        norm.track_running_stats = tracked
        vars(norm).pop("_check_input_dim", None)


def spectral_buffers(module: nn.Module) -> list[str]:
    """Return the buffers that torch's spectral norm of a module writes in training (2.13)."""
    # New style a parametrization, `_SpectralNorm`; old style a hook with `_u` and `_v` behind the name of its weight.
    if isinstance(module, _SpectralNorm):
        return [name for name, _ in module.named_buffers(recurse=False)]
    hooks = [hook for hook in vars(module)["_forward_pre_hooks"].values() if isinstance(hook, SpectralNorm)]
    return [f"{hook.name}{suffix}" for hook in hooks for suffix in ("_u", "_v")]


def caches_weights(module: nn.Module) -> bool:
    """Whether a module may keep tensors made of its parameters in plain attributes (2.13)."""
    # RNNs keep a list of their weights; the hooks of pruning and of the old weight norm keep the weight.
    return isinstance(module, nn.RNNBase) or bool(vars(module)["_forward_pre_hooks"])


def cached_weights(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of such a module that functional_call leaves changed: tensors, lists of an RNN (2.13)."""
    attributes = vars(module).items()
    tensors = {name: value for name, value in attributes if isinstance(value, Tensor)}
    return tensors | {name: list(value) for name, value in attributes if name in WEIGHT_LISTS}


def set_module_dicts(
    module: nn.Module,
    children: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    buffers: dict[str, Any] | None = None,
) -> None:
    """Make these very dicts the dicts of a module, so that tensors bound in them are bound in it (2.13)."""
    vars(module).update(_modules=children, _parameters=parameters or {}, _buffers=buffers or {})


def is_in_state_dict(module: object, name: str) -> bool:
    """Whether a tensor of a module is in its state_dict (2.13: a set has the names that are not)."""
    return name not in getattr(module, "_non_persistent_buffers_set", ())


@contextmanager
def intercept_assignments(on_assignment: Callable[[nn.Module, str, Any, Callable[..., None]], None]) -> Generator[None]:
    """Call `on_assignment(module, name, value, assign)` instead of each assignment to an attribute of a module.

    It holds for all threads (2.13: `Module.__setattr__`).
    """
    assign: Any = nn.Module.__setattr__

    def intercept(module: nn.Module, name: str, value: Any) -> None:
        on_assignment(module, name, value, assign)

    nn.Module.__setattr__ = intercept  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign


def load_forward_mode() -> None:
    """Import the derivatives of torch's forward mode without their warning of torch.jit.script.

    2.13, 2.15: `torch._decomp.decompositions_for_jvp`, which torch imports when it is first needed.
    """
    with without_jit_deprecations():
        importlib.import_module("torch._decomp.decompositions_for_jvp")
