"""Count what the operations of a graph cost, without running them: multiplications and additions of their shapes.

linear(x[4, 16, 32], w[64, 32])        -->        2 * 4 * 16 * 32 * 64
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.language.flops import flops_of_call, multiplies
from fpipe.models.tracing.opaque import OPAQUE, call_of_node
from fpipe.torch_private.fx import example_number


def costs_of(nodes: Sequence[fx.Node]) -> list[int]:
    """The floating-point operations of each node; equal operations on equal shapes are counted once."""
    known: dict[Any, int] = {}
    return [_cost(node, known) for node in nodes]


def _cost(node: fx.Node, known: dict[Any, int]) -> int:
    op = node.target
    if op is OPAQUE:
        return call_of_node(node).flops
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
    if len(tensors) < 2 or not multiplies(op):
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _abstract)
    return flops_of_call(op, args, kwargs, known)


def _abstract(node: fx.Node) -> Any:
    """A tensor without data that stands for a value, a number for an open size."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        shape, strides = (tuple(map(example_number, sizes)) for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return example_number(value) if isinstance(value, torch.SymInt) else value
