"""Batch normalisation as a pure function: it normalises by the batch's own statistics, the running ones are a value.

    y = norm(x), buffers mutated        -->        F: y, seen = norm(x), x        U: state' = update(state, seen)

The output of a batch norm in training does not read its running statistics, so forwards may come in any order; the
updates are ops of their own, one microbatch after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

Norms = Sequence[tuple[str, Any]]
Notes = Sequence[Sequence[Any]]
"""For each norm what its update needs of its calls. By place, since equal stages share a trace, and no names."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics, which it updates in training."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def tracks(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in the mode that it is in."""
    return module.training and has_statistics(module)


def updates_apart(module: nn.Module) -> bool:
    """Whether it tracks them by torch's own forward, whose output does not read them: then updates may come later."""
    return tracks(module) and has_torchs_forward(module)


def has_torchs_forward(module: nn.Module) -> bool:
    """Whether a norm's forward is torch's, and not one of somebody's own."""
    return "forward" not in vars(module) and type(module).forward in _FORWARDS


_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)


@contextmanager
def noted(norms: Norms, who: str = "a forward") -> Generator[list[tuple[Any, ...]]]:
    """Run these norms without their running statistics meanwhile, and note in order what their updates need of each
    call.

    Every norm's forward, that of a subclass too, hands its input to `_check_input_dim`. The input itself is noted where
    autograd saves it too, so that the forward must not mutate it afterwards; else a copy.
    """
    notes: list[tuple[Any, ...]] = [() for _ in norms]
    versions: list[tuple[str, Tensor, int]] = []

    def note_input(place: int, module: Any, x: Tensor) -> None:
        type(module)._check_input_dim(module, x)
        if _is_saved(module, x):
            note = x.detach()
            versions.append((norms[place][0], x, x._version))
        else:
            note = x.detach().clone()
        notes[place] = (*notes[place], note)

    tracks = [module.track_running_stats for _, module in norms]
    try:
        for place, (_, module) in enumerate(norms):
            module.track_running_stats = False
            if not isinstance(module, _BatchNorm):  # an instance norm takes them whether it tracks or not
                vars(module)["_apply_instance_norm"] = partial(_normalised, module)
            vars(module)["_check_input_dim"] = partial(note_input, place, module)
        yield notes
        changed = next((path for path, x, version in versions if x._version != version), None)
        if changed is not None:
            raise RuntimeError(
                f"{who} changed the input of norm {changed!r} in place after the norm ran, whose backward or update of "
                "running statistics reads it. Change a copy."
            )
    finally:
        for (_, module), tracked in zip(norms, tracks, strict=True):
            module.track_running_stats = tracked
            for name in ("_check_input_dim", "_apply_instance_norm"):
                vars(module).pop(name, None)


def _normalised(module: Any, x: Tensor) -> Tensor:
    """The output of an instance norm in training."""
    return F.instance_norm(x, None, None, module.weight, module.bias, True, module.momentum or 0.0, module.eps)


def _is_saved(module: Any, x: Tensor) -> bool:
    """Whether autograd saves the input of a norm, and so refuses that it is mutated. Instance norms may save a copy."""
    leaves = (x, module.weight, module.bias)
    trained = any(leaf is not None and leaf.requires_grad for leaf in leaves)
    return trained and torch.is_grad_enabled() and isinstance(module, _BatchNorm)


def updated(norms: Norms, state: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The running statistics after the calls that were noted, bit for bit those that the modules would have."""
    made = {name: held.clone() if isinstance(held, Tensor) else held for name, held in state.items()}
    for (path, module), calls in zip(norms, notes, strict=True):
        for x in calls:
            mean, var = made[f"{path}.running_mean"], made[f"{path}.running_var"]
            single = not isinstance(module, _BatchNorm) and x.dim() == module._get_no_batch_dim()
            rows = x.unsqueeze(0) if single else x
            refuse_other_channels(path, (mean, var), rows.shape[1])
            if isinstance(module, _BatchNorm):
                _refuse_other_dtypes(path, (mean, var), rows.dtype)
                torch.batch_norm_update_stats(rows, mean, var, count_batch(path, module, made))
            else:
                F.instance_norm(rows, mean, var, None, None, True, module.momentum or 0.0, module.eps)
    return made


def refuse_other_channels(path: str, held: tuple[Any, Any], channels: int) -> None:
    """A ValueError for statistics of other channels: torch's own update of a batch norm writes past their end."""
    for name, found in zip(STATISTICS, held, strict=False):
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        if shape != (channels,):
            what = type(found).__name__ if shape is None else f"shape {shape}"
            raise ValueError(
                f"state '{path}.{name}' has a number for each of the {channels} channels, found {what}. Hand in the "
                "state that from_sequential gave, or Result.state."
            )


def _refuse_other_dtypes(path: str, held: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """A ValueError for statistics that torch does not update from rows of this dtype, in the module neither."""
    wanted = (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)
    words = " or ".join(map(str, wanted))
    for name, found in zip(STATISTICS, held, strict=False):
        if found.dtype not in wanted:
            raise ValueError(
                f"state '{path}.{name}' of a batch norm that is given {dtype} is {words}, found {found.dtype}. Hand in "
                "the state that from_sequential gave, or cast the net too."
            )


def count_batch(path: str, module: Any, state: Mapping[str, Tensor]) -> float:
    """Count a batch, and how much it weighs in the running statistics."""
    batches = state.get(f"{path}.num_batches_tracked")
    if batches is not None:
        batches.add_(1)
    if module.momentum is not None:
        return module.momentum
    if batches is None:
        return 0.0
    with suppress(RuntimeError):
        return 1.0 / float(batches)
    return 1.0  # a fake tensor has no number, and no shape depends on it
