"""Batch and instance norms, whose running statistics are module state: which are, and what a trace needs of them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpipe.graphs.tracing.running_statistics import RUNNING
from fpipe.torch_internals import held_by, is_batch_norm, is_norm
from fpipe.torch_private.modules import has_torchs_forward, without_statistics

Norms = Sequence[tuple[str, Any]]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics, which it updates in training."""
    return is_norm(module) and module.running_mean is not None


def tracks(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in the mode that it is in."""
    return module.training and has_statistics(module)


@contextmanager
def without_mutation(norms: Norms) -> Generator[None]:
    """Let torch's batch norms bind new running statistics instead of mutating them, so that a trace mutates nothing.

    A norm without a momentum weighs all batches alike: by a number that it reads from a buffer, which no trace can.
    """
    with ExitStack() as stack:
        for _, norm in norms:
            if is_batch_norm(norm) and has_torchs_forward(norm):
                stack.enter_context(without_statistics(norm, partial(_update, norm)))
        yield


def _update(norm: Any, x: Tensor) -> None:
    """Bind the running statistics of a norm after this input."""
    buffers = held_by(norm).buffers
    batches = buffers["num_batches_tracked"]
    batches = buffers["num_batches_tracked"] = None if batches is None else batches + 1
    statistics = RUNNING(x.detach(), buffers["running_mean"], buffers["running_var"], norm.momentum, batches)
    buffers["running_mean"], buffers["running_var"] = statistics


def refuse_other_channels(path: str, norm: Any, state: Mapping[str, Any]) -> None:
    """A ValueError for running statistics of other channels than the norm has."""
    for name in (f"{path}.running_mean", f"{path}.running_var"):
        found = state.get(name)
        if name in state and (not isinstance(found, Tensor) or found.shape != (norm.num_features,)):
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"state {name!r} has a number for each of the {norm.num_features} channels, found {what}. Hand in the "
                "state that from_sequential gave, or Result.state."
            )
