"""Read what train or eval mode decides: which norms update running statistics, and whether a trace is still valid.

net.train(); from_loss(..)  ;  net.eval(); step(..)        -->        ValueError: module 'net.1' was in training
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fpipe.graphs.tracing.running_statistics import RUNNING
from fpipe.meaning.purity.attributes import Modules
from fpipe.torch_internals import held_by, is_batch_norm, is_norm
from fpipe.torch_private.modules import has_torchs_forward, without_statistics


class Modes:
    """The modes of modules when something was `done` in them; the error after a change says `why` that matters.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = Modes([*net.named_modules()], "the net was traced", "call from_module again.")
    >>> modes.now(), net.eval().training, modes.now()
    ((True, True, True), False, (False, False, False))
    """

    def __init__(self, modules: Modules, done: str, why: str) -> None:
        self.modules, self.done, self.why = modules, done, why
        self.then = self.now()

    def now(self) -> tuple[bool, ...]:
        """Whether each module is in training."""
        return tuple([module.training for _, module in self.modules])

    def check(self) -> None:
        """Raise ValueError if a module has changed its mode."""
        for (path, module), was in zip(self.modules, self.then, strict=True):
            if module.training != was:
                before, now = ("training", "eval") if was else ("eval", "training")
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) was in {before} when {self.done} and is in {now} now: "
                    f"{self.why}"
                )


Norms = Sequence[tuple[str, Any]]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics."""
    return is_norm(module) and module.running_mean is not None


def tracks(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in its present mode."""
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
    """Raise ValueError for running statistics of other channels than the norm has."""
    for name in (f"{path}.running_mean", f"{path}.running_var"):
        statistic = state.get(name)
        if name in state and (not isinstance(statistic, Tensor) or statistic.shape != (norm.num_features,)):
            what = f"shape {tuple(statistic.shape)}" if isinstance(statistic, Tensor) else type(statistic).__name__
            raise ValueError(
                f"state {name!r} has a number for each of the {norm.num_features} channels, found {what}. Hand in the "
                "state that from_sequential gave, or Result.state."
            )
