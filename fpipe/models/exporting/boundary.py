"""Mark where a stage ends, inside a function that is cut: while it is traced, a mark is an operation of the graph.

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
from fpipe.meaning.stages.keys import fold_in, seeded

KEY = 0
"""The key that the example is computed with; a step has its own."""


@dataclass
class _StageSeed:
    """The stage that draws now, where a function runs as a whole for a step's microbatch."""

    key: int
    microbatch: int
    stage: int = 0

    def number(self) -> int:
        return fold_in(self.key, self.stage, self.microbatch)


class _Surroundings(threading.local):
    """The state of this thread: whether marks become operations, and which stage draws random numbers."""

    marks = False
    seed: _StageSeed | None = None


_NOW = _Surroundings()

_LIBRARY = torch.library.Library("fpipe", "DEF")
_LIBRARY.define("boundary(Tensor[] values) -> Tensor[]")


def _aliases(values: list[Tensor]) -> list[Tensor]:
    return [torch.ops.aten.alias.default(value) for value in values]


_LIBRARY.impl("boundary", _aliases, "CompositeImplicitAutograd")
MARK: Any = torch.ops.fpipe.boundary.default
"""The operation that a mark is in a graph: it returns what it is given."""


def boundary(values: Any) -> Any:
    """Mark where a stage ends and the next begins, inside a function that `from_loss` cuts; elsewhere nothing happens.

    Args:
        values: a pytree of tensors that the next stage goes on with. What else it uses reaches it too.

    Returns:
        The same pytree.

    >>> boundary({"x": torch.ones(2)})
    {'x': tensor([1., 1.])}
    """
    next_stage()
    if not _NOW.marks:
        return values
    leaves, containers = tree.flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("boundary() marks a pytree of tensors, found none in it.")
    marked = iter(MARK(tensors))
    return tree.unflatten(containers, [next(marked) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def next_stage() -> None:
    """Draw what the next stage draws from here on, where a function runs as a whole."""
    if _NOW.seed is not None:
        _NOW.seed.stage += 1
        torch.manual_seed(_NOW.seed.number())


@contextmanager
def marking() -> Generator[None]:
    """Let the marks of a function that is traced become operations."""
    before, _NOW.marks = _NOW.marks, True
    try:
        yield
    finally:
        _NOW.marks = before


@contextmanager
def seeding(key: int = KEY, microbatch: int = 0) -> Generator[None]:
    """Let a function that runs as a whole draw in each stage the random numbers of a step's microbatch."""
    before, _NOW.seed = _NOW.seed, _StageSeed(key, microbatch)
    try:
        with seeded(_NOW.seed.number(), "loss_fn"):
            yield
    finally:
        _NOW.seed = before
