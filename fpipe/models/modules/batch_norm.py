"""Batch normalisation as a pure function: it normalises by the batch's own statistics, the running ones are a value.

    y = norm(x), buffers mutated        -->        F: y, seen = norm(x), x        U: state' = update(state, seen)

The output of a batch norm in training does not read its running statistics, so forwards may come in any order. Modules
are split as they run, which is also done without a trace; the graph of a net is split by `split_norms`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpipe.torch_internals import is_batch_norm, is_norm, version_of
from fpipe.torch_private.modules import has_torchs_forward, is_single, without_statistics

Norms = Sequence[tuple[str, Any]]
Notes = Sequence[Sequence[Any]]
"""For each norm what its update needs of its calls. By place, since equal stages share a trace, and no names."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics, which it updates in training."""
    return is_norm(module) and module.running_mean is not None


def tracks(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in the mode that it is in."""
    return module.training and has_statistics(module)


def updates_apart(module: nn.Module) -> bool:
    """Whether it tracks them by torch's own forward, whose output does not read them: then updates may come later."""
    return tracks(module) and has_torchs_forward(module)


@contextmanager
def noted(norms: Norms, who: str = "a forward") -> Generator[list[tuple[Any, ...]]]:
    """Run these norms without their running statistics meanwhile, and note in order what their updates need of each
    call: the input itself where autograd saves it too, so that the forward must not mutate it afterwards; else a copy.
    """
    notes: list[tuple[Any, ...]] = [() for _ in norms]
    versions: list[tuple[str, Tensor, int]] = []

    def note_input(place: int, x: Tensor) -> None:
        path, norm = norms[place]
        saved = _is_saved(norm, x)
        if saved:
            versions.append((path, x, version_of(x)))
        notes[place] = (*notes[place], x.detach() if saved else x.detach().clone())

    with ExitStack() as stack:
        for place, (_, norm) in enumerate(norms):
            stack.enter_context(without_statistics(norm, partial(note_input, place)))
        yield notes
        for changed in (path for path, x, version in versions if version_of(x) != version):
            raise RuntimeError(
                f"{who} changed the input of norm {changed!r} in place after the norm ran, whose backward or update of "
                "running statistics reads it. Change a copy."
            )


def _is_saved(module: Any, x: Tensor) -> bool:
    """Whether autograd saves the input of a norm, and so refuses that it is mutated. Instance norms may save a copy."""
    trained = any(leaf is not None and leaf.requires_grad for leaf in (x, module.weight, module.bias))
    return trained and torch.is_grad_enabled() and is_batch_norm(module)


def updated(norms: Norms, state: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The running statistics after the calls that were noted, bit for bit those that the modules would have."""
    made = {name: held.clone() if isinstance(held, Tensor) else held for name, held in state.items()}
    for (path, module), calls in zip(norms, notes, strict=True):
        for x in calls:
            mean, var = made[f"{path}.running_mean"], made[f"{path}.running_var"]
            rows = x.unsqueeze(0) if is_single(module, x) else x
            refuse_other_channels(path, (mean, var), rows.shape[1])
            if is_batch_norm(module):
                _refuse_other_dtypes(path, (mean, var), rows.dtype)
                torch.batch_norm_update_stats(rows, mean, var, count_batch(path, module, made))
            else:
                F.instance_norm(rows, mean, var, None, None, True, module.momentum or 0.0, module.eps)
    return made


def refuse_other_channels(path: str, held: tuple[Any, Any], channels: int) -> None:
    """A ValueError for statistics of other channels: torch's own update of a batch norm writes past their end."""
    for name, found in zip(STATISTICS, held, strict=False):
        if not isinstance(found, Tensor) or found.shape != (channels,):
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
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
