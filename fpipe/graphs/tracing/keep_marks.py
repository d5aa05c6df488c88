"""Mark values inside a stage that are kept for the backward when the rest of the stage is recomputed.

    hidden = f(x);  route = fpipe.keep(router(hidden));  y = experts(hidden, route)

A mark does nothing where a stage just runs. While a stage is traced, its marks become results of the trace, next to its
outputs. While `from_loss` traces a whole function to cut it, a mark is an op that marks once its stage is traced.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fpipe import tree


# State of a thread: several threads may trace different stages at once.
class _MarkState(threading.local):
    marks: list[Tensor] | None = None
    marks_are_ops = False


_MARKS = _MarkState()
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("keep(Tensor value) -> Tensor")


def _append_mark(value: Tensor) -> Tensor:
    # An op may not return its input itself, so the mark is an alias of it.
    value = torch.ops.aten.alias.default(value)
    if _MARKS.marks is not None:
        _MARKS.marks.append(value)
    return value


_LIBRARY.impl("keep", _append_mark, "CompositeImplicitAutograd")


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
    if _MARKS.marks_are_ops:
        return tree.tree_map(_mark_by_op, values)
    if _MARKS.marks is not None:
        _MARKS.marks += [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return values


def _mark_by_op(leaf: Any) -> Any:
    return torch.ops.fpipe.keep(leaf) if isinstance(leaf, Tensor) else leaf


@contextmanager
def record_marks_as_ops() -> Generator[None]:
    """Let `keep` record an op for each mark, in this thread."""
    _MARKS.marks_are_ops = True
    try:
        yield
    finally:
        _MARKS.marks_are_ops = False


@contextmanager
def collect_marks() -> Generator[list[Tensor]]:
    """Collect the tensors that this thread marks; an enclosing collection gets nothing."""
    enclosing_marks, _MARKS.marks = _MARKS.marks, []
    try:
        yield _MARKS.marks
    finally:
        _MARKS.marks = enclosing_marks
