"""Rewrite the ops of a trace that mutate a tensor: one of its own becomes a new tensor, any other is refused.

y = exp(x); y.add_(1)        --> functional -->        y = exp(x); z = add(y, 1)
x.add_(1)                    --> refused: x was given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.ambient import Untraceable
from fpipe.graphs.graph import storage_of
from fpipe.graphs.schema import BATCH_NORMS, written

_aten: Any = torch.ops.aten


def mutated_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op mutates."""
    return [value for value in written(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]


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
    """The same ops with none that changes a tensor: what autograd did in place, on tensors of its own, is a new one."""
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target in BATCH_NORMS and mutated_by(node):
            node.target = _aten._native_batch_norm_legit.default
        elif node.op == "call_function" and _reorders(node):
            with traced.graph.inserting_before(node):
                made = traced.graph.call_function(_not_in_place(node), node.args, node.kwargs)
                copy = traced.graph.call_function(_aten.copy_.default, (node.args[0], made))
            node.replace_all_uses_with(copy)
            traced.graph.erase_node(node)
    traced.recompile()
    again: Any = make_fx(dispatch_functionalize(traced), tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    left = next((node.target for node in again.graph.nodes if node.op == "call_function" and mutated_by(node)), None)
    if left is not None:
        raise Untraceable(f"an op in it that changes its input cannot be rewritten ({left})")
    return again


def _not_in_place(node: fx.Node) -> Any:
    """The op that writes what this one leaves in its first argument, if there is one that takes the same: only by their
    names does torch say that they belong together."""
    target: Any = node.target
    packet = getattr(_aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None)
    kinds = [[str(argument.type) for argument in op._schema.arguments] for op in (target, found) if op is not None]
    return found if found is not target and len(kinds) == 2 and kinds[0] == kinds[1] else None


def _reorders(node: fx.Node) -> bool:
    """Whether an op in place keeps an order in memory that the other would not: masked_fill writes all in a row."""
    if mutated_by(node) != [node.args[0]] or _not_in_place(node) is None:
        return False
    before = _value(node.args[0])
    if before.is_contiguous() or not _aten.is_non_overlapping_and_dense(before):
        return False
    with before.fake_mode:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        made = _not_in_place(node)(*args, **kwargs)
    return made.shape == before.shape and made.stride() != before.stride()


def _value(node: Any) -> Any:
    return node.meta["val"]
