"""Mark values inside a stage that a backward which computes its stage again need not compute again.

    hidden = f(x);  route = fpipe.keep(router(hidden));  y = experts(hidden, route)

Nothing happens where a stage just runs. While it is traced, the marks are results of the trace like its outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fpipe import tree

_TRACING = threading.local()


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
    marks: list[Tensor] | None = getattr(_TRACING, "marks", None)
    if marks is not None:
        marks += [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return values


@contextmanager
def listening() -> Generator[list[Tensor]]:
    """The list of what is marked meanwhile, in this thread."""
    before = getattr(_TRACING, "marks", None)
    _TRACING.marks = list[Tensor]()
    try:
        yield _TRACING.marks
    finally:
        _TRACING.marks = before
