"""Count the floating-point operations of torch ops by their shapes, without running them.

mm(x[64, 32], w[32, 16])        -->        2 * 64 * 32 * 16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fpipe.graphs.language.graph import Graph, meta_arguments
from fpipe.torch_internals import OpOverload


def may_multiply(op: Any) -> bool:
    """Whether an op may have more operations than it reads numbers, as products have."""
    return isinstance(op, OpOverload) and op.namespace == "aten" and not _TAGS_WITHOUT_PRODUCTS.intersection(op.tags)


_TAGS_WITHOUT_PRODUCTS = {torch.Tag.pointwise, torch.Tag.dynamic_output_shape}


def flops_of_call(op: Any, args: Any, kwargs: Any, flops_by_call: dict[Any, int]) -> int:
    """Count the multiplications and additions of a call on meta tensors; `flops_by_call` caches equal calls."""
    # The text of meta tensors has their shape and dtype, on which the count depends.
    key = op, repr((args, kwargs))
    if key not in flops_by_call:
        with FlopCounterMode(display=False, custom_mapping=_CPU_FORMULAS) as counter, torch.no_grad():
            op(*args, **kwargs)
        flops_by_call[key] = counter.get_total_flops()
    return flops_by_call[key]


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    # Shapes are (batch, heads, length, width): scores are q @ k.T, outputs are scores @ v.
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_backward(dy: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    # The scores again, then the gradients of the scores, q, k and v.
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


# What torch's own table lacks: the kernels of a CPU.
_CPU_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_COUNTED: set[Any] = {*flop_registry, *_CPU_FORMULAS}


def flops_of(graph: Graph, flops_by_call: dict[Any, int]) -> int:
    """Count the multiplications and additions of a graph's products, convolutions and attention."""
    total = 0
    for node in graph.nodes:
        if getattr(node.op, "overloadpacket", None) in _COUNTED:
            total += flops_of_call(node.op, *meta_arguments(node, graph), flops_by_call)
    return total
