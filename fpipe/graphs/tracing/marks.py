"""Mark values inside a function that is traced: those to keep for the backward, and those where a stage ends.

    x = boundary(embed(inputs));  route = keep(router(x));  y = experts(x, route)        -->        embed | experts

A mark does nothing where a function just runs. While a stage is traced, values to keep become results of the trace,
next to its outputs. While `from_loss` traces a whole function to cut it, each mark is an op of the graph.
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
from fpipe.meaning.purity.keys import fold_in, with_seed

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


class _MarkState(threading.local):
    """The state of a thread, since several threads may trace different stages at once.

    Attributes:
        kept_tensors: those that are kept in the stage that is traced.
        keeps_are_ops, boundaries_are_ops: whether each mark is an op of the graph that is traced.
        stage_seed: the stage that draws random numbers.
    """

    kept_tensors: list[Tensor] | None = None
    keeps_are_ops = False
    boundaries_are_ops = False
    stage_seed: _StageSeed | None = None


_STATE = _MarkState()


# An op may not return its input itself, so each mark is an alias of it.
def _keep_alias(value: Tensor) -> Tensor:
    """Return an alias of a value, which the traced stage notes as one that must not be computed twice."""
    value = torch.ops.aten.alias.default(value)
    if _STATE.kept_tensors is not None:
        _STATE.kept_tensors.append(value)
    return value


def _alias_all(values: list[Tensor]) -> list[Tensor]:
    return [torch.ops.aten.alias.default(value) for value in values]


_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("keep(Tensor value) -> Tensor")
_LIBRARY.define("boundary(Tensor[] values) -> Tensor[]")
_LIBRARY.impl("keep", _keep_alias, "CompositeImplicitAutograd")
_LIBRARY.impl("boundary", _alias_all, "CompositeImplicitAutograd")
MARK: Any = torch.ops.fpipe.boundary.default
"""The op of a boundary in a graph: it returns aliases of its inputs."""


def keep(values: Any) -> Any:
    """Mark values that `fpipe.checkpoint(grain="layer")` keeps from the forward, besides the inputs of layers.

    Args:
        values: a pytree with tensors, such as the routing decision of a mixture of experts.

    Returns:
        The same pytree.

    >>> import fpipe, torch
    >>> fpipe.keep(torch.ones(2))
    tensor([1., 1.])
    """
    if _STATE.keeps_are_ops:
        return tree.tree_map(_keep_by_op, values)
    if _STATE.kept_tensors is not None:
        _STATE.kept_tensors += [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return values


def _keep_by_op(leaf: Any) -> Any:
    return torch.ops.fpipe.keep(leaf) if isinstance(leaf, Tensor) else leaf


@contextmanager
def collect_marks() -> Generator[list[Tensor]]:
    """Collect the tensors that this thread keeps; an enclosing collection gets nothing."""
    enclosing_tensors, _STATE.kept_tensors = _STATE.kept_tensors, []
    try:
        yield _STATE.kept_tensors
    finally:
        _STATE.kept_tensors = enclosing_tensors


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
    if not _STATE.boundaries_are_ops:
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
def seed_stages(key: int = KEY, microbatch: int = 0) -> Generator[None]:
    """Let a function that runs as a whole draw the random numbers of the stages of a step's microbatch."""
    outer_seed, _STATE.stage_seed = _STATE.stage_seed, _StageSeed(key, microbatch)
    try:
        with with_seed(_STATE.stage_seed.seed_number(), "loss_fn"):
            yield
    finally:
        _STATE.stage_seed = outer_seed


@contextmanager
def record_marks(*, keeps: bool = False) -> Generator[None]:
    """Let `boundary`, and `keep` too if asked, record an op for each mark, in this thread."""
    outer_flags = _STATE.boundaries_are_ops, _STATE.keeps_are_ops
    _STATE.boundaries_are_ops, _STATE.keeps_are_ops = True, keeps
    try:
        yield
    finally:
        _STATE.boundaries_are_ops, _STATE.keeps_are_ops = outer_flags
