"""Mark where a stage ends inside a function that `from_loss` cuts: while it is traced, a mark is an op of the graph.

x = embed(inputs);  x = boundary(x);  y = block(x)        -->        embed  MARK  block
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.stages.keys import fold_in, with_seed

KEY = 0
"""The random key for the run on the example; each step has a key of its own."""


@dataclass
class _StageSeed:
    """The stage whose random numbers are drawn now, while a function runs as a whole on a step's microbatch."""

    key: int
    microbatch: int
    stage: int = 0

    def seed_number(self) -> int:
        return fold_in(self.key, self.stage, self.microbatch)


class _ThreadState(threading.local):
    """The state of a thread: whether marks become ops, and which stage draws random numbers."""

    records_marks = False
    stage_seed: _StageSeed | None = None


_STATE = _ThreadState()

_LIBRARY = torch.library.Library("fpipe", "DEF")
_LIBRARY.define("boundary(Tensor[] values) -> Tensor[]")


def _alias_all(values: list[Tensor]) -> list[Tensor]:
    return [torch.ops.aten.alias.default(value) for value in values]


_LIBRARY.impl("boundary", _alias_all, "CompositeImplicitAutograd")
MARK: Any = torch.ops.fpipe.boundary.default
"""The op of a mark in a graph: it returns aliases of its inputs."""


def boundary(values: Any) -> Any:
    """Mark where a stage ends and the next begins, inside a function that `from_loss` cuts; elsewhere do nothing.

    Args:
        values: a pytree of tensors that the next stage goes on with. What else it uses reaches it too.

    Returns:
        The same pytree.

    >>> boundary({"x": torch.ones(2)})
    {'x': tensor([1., 1.])}
    """
    next_stage()
    if not _STATE.records_marks:
        return values
    leaves, containers = tree.flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("boundary() marks a pytree of tensors, found none in it.")
    marked_tensors = iter(MARK(tensors))
    return tree.unflatten(containers, [next(marked_tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def next_stage() -> None:
    """Seed torch's generator for the next stage, while a function runs as a whole.

    Stages of a pipeline draw from seeds of their own, so a run of the whole function has to switch at each boundary.
    """
    if _STATE.stage_seed is not None:
        _STATE.stage_seed.stage += 1
        torch.manual_seed(_STATE.stage_seed.seed_number())


@contextmanager
def record_boundaries() -> Generator[None]:
    """Let `boundary` record an op for each mark, in this thread."""
    was_recording, _STATE.records_marks = _STATE.records_marks, True
    try:
        yield
    finally:
        _STATE.records_marks = was_recording


@contextmanager
def seed_stages(key: int = KEY, microbatch: int = 0) -> Generator[None]:
    """Let a function that runs as a whole draw the random numbers of the stages of a step's microbatch."""
    outer_seed, _STATE.stage_seed = _STATE.stage_seed, _StageSeed(key, microbatch)
    try:
        with with_seed(_STATE.stage_seed.seed_number(), "loss_fn"):
            yield
    finally:
        _STATE.stage_seed = outer_seed
