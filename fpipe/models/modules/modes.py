"""Track train and eval mode: which norms update running statistics, and whether a trace is still valid.

net.train(); from_loss(..)  ;  net.eval(); step(..)        -->        ValueError: module 'net.1' was in training
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpipe.graphs.tracing.running_statistics import RUNNING_STATISTICS
from fpipe.meaning.purity.attributes import NamedModules
from fpipe.torch_internals import direct_members, is_batch_norm, is_norm
from fpipe.torch_private.modules import has_torch_forward, without_statistics


class Modes:
    """The train or eval mode that each module had at some occasion, to be compared with its mode today.

    Args:
        modules: the modules by path.
        occasion: what happened in these modes, such as "the net was traced"; the error says it.
        consequence: why a change matters and the way out; the error ends with it.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = Modes([*net.named_modules()], "the net was traced", "call from_module again.")
    >>> modes.current(), net.eval().training, modes.current()
    ((True, True, True), False, (False, False, False))
    """

    def __init__(self, modules: NamedModules, occasion: str, consequence: str) -> None:
        self.modules, self.occasion, self.consequence = modules, occasion, consequence
        self.recorded = self.current()

    def current(self) -> tuple[bool, ...]:
        """Return for each module whether it is in training."""
        return tuple([module.training for _, module in self.modules])

    def check(self) -> None:
        """Raise ValueError if a module has changed its mode."""
        for (module_path, module), was_training in zip(self.modules, self.recorded, strict=True):
            if module.training != was_training:
                old_mode, new_mode = ("training", "eval") if was_training else ("eval", "training")
                raise ValueError(
                    f"module {module_path!r} ({type(module).__name__}) was in {old_mode} when {self.occasion} "
                    f"and is in {new_mode} now: {self.consequence}"
                )


Norms = Sequence[tuple[str, Any]]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics."""
    return is_norm(module) and module.running_mean is not None


def updates_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in its present mode."""
    return module.training and has_statistics(module)


@contextmanager
def without_norm_mutation(norms: Norms) -> Generator[None]:
    """Let torch's batch norms bind new running statistics instead of mutating them, so that a trace mutates nothing.

    A norm with momentum=None weighs all batches alike, by a number that it reads from a buffer: no trace can.
    """
    with ExitStack() as stack:
        # Only torch's own forward calls `_check_input_dim`, the hook at which `without_statistics` sees the input.
        # Instance norms and norms with a forward of their own run as they are written.
        for _, norm in norms:
            if is_batch_norm(norm) and has_torch_forward(norm):
                stack.enter_context(without_statistics(norm, partial(_bind_new_statistics, norm)))
        yield


def _bind_new_statistics(norm: Any, x: Tensor) -> None:
    # The dict of buffers itself is assigned to: under functional_call it is the dict of the swapped tensors, from which
    # the stage reads its new state afterwards.
    buffers = direct_members(norm).buffers
    batches = buffers["num_batches_tracked"]
    batches = buffers["num_batches_tracked"] = None if batches is None else batches + 1
    statistics = RUNNING_STATISTICS(x.detach(), buffers["running_mean"], buffers["running_var"], norm.momentum, batches)
    buffers["running_mean"], buffers["running_var"] = statistics


def refuse_other_channels(module_path: str, norm: Any, state: Mapping[str, Any]) -> None:
    """Raise ValueError for running statistics of other channels than the norm has."""
    for name in (f"{module_path}.running_mean", f"{module_path}.running_var"):
        statistic = state.get(name)
        if name in state and (not isinstance(statistic, Tensor) or statistic.shape != (norm.num_features,)):
            actual = f"shape {tuple(statistic.shape)}" if isinstance(statistic, Tensor) else type(statistic).__name__
            raise ValueError(
                f"state {name!r} has a number for each of the {norm.num_features} channels, found {actual}. "
                "Hand in the state of from_sequential, or Result.state."
            )
