"""Count the floating-point operations of torch ops by their shapes, without running them.

mm(x[64, 32], w[32, 16])        -->        2 * 64 * 32 * 16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fpipe.graphs.language.graph import Graph, on_meta
from fpipe.torch_internals import OpOverload


def multiplies(op: Any) -> bool:
    """Whether an op may have more operations than it reads numbers, as products have."""
    return isinstance(op, OpOverload) and op.namespace == "aten" and not _FREE.intersection(op.tags)


_FREE = {torch.Tag.pointwise, torch.Tag.dynamic_output_shape}


def flops_of_call(op: Any, args: Any, kwargs: Any, known: dict[Any, int]) -> int:
    """The multiplications and additions of one call, on tensors without data; `known` keeps those of equal calls."""
    key = op, repr((args, kwargs))
    if key not in known:
        with FlopCounterMode(display=False, custom_mapping=_MORE) as counter, torch.no_grad():
            op(*args, **kwargs)
        known[key] = counter.get_total_flops()
    return known[key]


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_backward(dy: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])  # scores once more, and those of q, k and v


# What torch's own table lacks: the kernels of a CPU.
_MORE: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_COUNTED: set[Any] = {*flop_registry, *_MORE}


def flops_of(graph: Graph, known: dict[Any, int]) -> int:
    """The multiplications and additions of a graph, whose ops are those that kernels are for."""
    total = 0
    for node in graph.nodes:
        if getattr(node.op, "overloadpacket", None) in _COUNTED:
            total += flops_of_call(node.op, *on_meta(node, graph), known)
    return total
