"""Mark values inside a stage that a backward which computes its stage again need not compute again.

    hidden = f(x);  route = fpipe.keep(router(hidden));  y = experts(hidden, route)

Nothing happens where a stage just runs. While it is traced, the marks are results of the trace like its outputs. Where
`from_loss` writes a whole function down before it is cut, a mark is an operation that marks when its stage is traced.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fpipe import tree


class _Tracing(threading.local):
    marks: list[Tensor] | None = None
    written_down = False


_TRACING = _Tracing()
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("keep(Tensor value) -> Tensor")


def _noted(value: Tensor) -> Tensor:
    value = torch.ops.aten.alias.default(value)
    if _TRACING.marks is not None:
        _TRACING.marks.append(value)
    return value


_LIBRARY.impl("keep", _noted, "CompositeImplicitAutograd")


def keep(values: Any) -> Any:
    """Mark what `fpipe.checkpoint(grain="layer")` keeps from the forward, besides the inputs of layers.

    Args:
        values: a pytree with tensors, such as the routing decision of a mixture of experts.

    Returns:
        The same pytree.

    >>> import fpipe, torch
    >>> fpipe.keep(torch.ones(2))
    tensor([1., 1.])
    """
    if _TRACING.written_down:
        return tree.tree_map(_operation, values)
    if _TRACING.marks is not None:
        _TRACING.marks += [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return values


def _operation(leaf: Any) -> Any:
    return torch.ops.fpipe.keep(leaf) if isinstance(leaf, Tensor) else leaf


@contextmanager
def written_down() -> Generator[None]:
    """Let marks be operations, in this thread."""
    _TRACING.written_down = True
    try:
        yield
    finally:
        _TRACING.written_down = False


@contextmanager
def collecting_marks() -> Generator[list[Tensor]]:
    """Collect what this thread marks in a list; an enclosing list gets none of it."""
    before, _TRACING.marks = _TRACING.marks, []
    try:
        yield _TRACING.marks
    finally:
        _TRACING.marks = before
