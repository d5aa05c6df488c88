"""Read the sizes that a trace leaves open as expressions: which a value has, and which follow from others.

x: (s93, 2*s93, 4)        -->        open_sizes(x) = {0: s93, 1: 2*s93}
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fpipe.torch_private.fx import expression, has_floor


def open_sizes(node: fx.Node) -> dict[int, Any]:
    """Of a value's dimensions those that the trace leaves open, each as an expression."""
    shape = getattr(node.meta.get("val"), "shape", ())
    found = {dim: expression(size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
    return {dim: expr for dim, expr in found.items() if expr.free_symbols}


def is_size(node: fx.Node) -> bool:
    """Whether a node is a size that the trace leaves open, or is computed of such."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)


def expr_of(size: fx.Node) -> Any:
    """A size as an expression, of one symbol for what must be equal."""
    return expression(size.meta["val"])


def follows(expr: Any, known: Collection[Any]) -> bool:
    """Whether a size is one of those known, or can be computed from them; torch computes no floor of symbols."""
    return expr in known or (not has_floor(expr) and all(one in known for one in expr.free_symbols))
