"""Rewrite the ops of a trace that mutate a tensor: one of its own becomes a new tensor, any other is refused.

y = exp(x); y.add_(1)        --> functional -->        y = exp(x); z = add(y, 1)
x.add_(1)                    --> refused: x was given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.renamed_writes import keep_layouts, mutated_by, rename_writes
from fpipe.meaning.purity.schema import BATCH_NORMS
from fpipe.torch_internals import storage_of
from fpipe.torch_private.dispatch import functionalized
from fpipe.torch_private.fx import traced_by_torch

_aten: Any = torch.ops.aten
_RRELU = (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default)


def refuse_mutation(traced: Any) -> None:
    """A function that writes what it was given, or what it holds on to, is not pure."""
    nodes = traced.graph.nodes
    given = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    storages = {storage_of(node.meta["val"]) for node in given if isinstance(node.meta.get("val"), Tensor)}
    for node in nodes:
        for changed in mutated_by(node) if node.op == "call_function" else ():
            if changed in given or storage_of(changed.meta["val"]) in storages:
                raise Untraceable(f"it changes what it is given in place ({node.target})")


def functional(traced: Any, fakes: Sequence[Tensor]) -> Any:
    """Make a graph functional: where autograd mutated tensors of its own, the result is a new tensor."""
    rename_writes(traced, keep_layouts(traced))
    calls = [node for node in traced.graph.nodes if node.op == "call_function" and mutated_by(node)]
    for node in calls:
        if node.target in BATCH_NORMS:
            node.target = _aten._native_batch_norm_legit.default
        if node.target in _RRELU and not node.args[0].meta["val"].is_contiguous():
            raise Untraceable("rrelu of transposed data draws in another order once nothing is changed in place")
    if not calls:
        return traced
    traced.recompile()
    again = traced_by_torch(functionalized(traced), fakes)
    left = next((node.target for node in again.graph.nodes if node.op == "call_function" and mutated_by(node)), None)
    if left is not None:
        raise Untraceable(f"an op in it that changes its input cannot be rewritten ({left})")
    return again
