"""Replace in-place ops of a trace by functional ones; refuse ops that mutate an input of the trace.

y = exp(x); y.add_(1)        --> functionalize -->        y = exp(x); z = add(y, 1)
x.add_(1)                    --> refused: x is an input
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.tracing.running_statistics import split_statistics
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.write_guard import BATCH_NORMS, is_view_in_place, mutated_nodes
from fpipe.torch_internals import OpOverload, op_and_overload_names, schema_arguments, storage_of
from fpipe.torch_private.dispatch import as_functional
from fpipe.torch_private.fx import trace_on_fakes

_aten: Any = torch.ops.aten
_RRELU = (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default)


def refuse_mutation(traced: Any) -> None:
    """Raise Untraceable if a traced function mutates an input or a tensor that it closes over."""
    nodes = traced.graph.nodes
    inputs = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    storages = {storage_of(node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), Tensor)}
    for node in nodes:
        for mutated in mutated_nodes(node) if node.op == "call_function" else ():
            if mutated in inputs or storage_of(mutated.meta["val"]) in storages:
                raise Untraceable(f"it changes what it is given in place ({node.target})")


def functionalize(traced: Any, fakes: Sequence[Tensor]) -> Any:
    """Return a traced graph without in-place ops: each writes a new tensor instead."""
    # 1. Rewrite what torch's functionalization would not keep bitwise, or need not rewrite at all.
    split_statistics(traced)
    keep_layouts(traced.graph)
    mutating_calls = [node for node in traced.graph.nodes if node.op == "call_function" and mutated_nodes(node)]
    for node in mutating_calls:
        # The schema of the plain op denies that it mutates its statistics, so torch would leave the mutation in.
        if node.target in BATCH_NORMS:
            node.target = _aten._native_batch_norm_legit.default
        if node.target in _RRELU and not node.args[0].meta["val"].is_contiguous():
            raise Untraceable("rrelu of transposed data draws in another order once it is functional")
    if not mutating_calls:
        return traced
    # 2. Trace the graph anew under torch's functionalization.
    traced.recompile()
    rewritten = trace_on_fakes(as_functional(traced), fakes)
    mutating_calls = [node for node in rewritten.graph.nodes if node.op == "call_function" and mutated_nodes(node)]
    if mutating_calls:
        raise Untraceable(f"an op that changes its input cannot be rewritten ({mutating_calls[0].target})")
    drop_copies(rewritten.graph)
    return rewritten


def keep_layouts(graph: fx.Graph) -> None:
    """Let an in-place op become a functional op and a copy, where the functional op would write other strides.

    h.sigmoid_()        --> keep_layouts -->        h.copy_(sigmoid(h))        where h is a slice of columns

    torch's functionalization replaces `h` by `sigmoid(h)`, whose strides differ. Later ops choose their kernels by the
    strides of their inputs, and kernels differ in the last bits: seen in GRUCell, whose gates are slices of columns.
    """
    for node in [*graph.nodes]:
        twin = _functional_twin(node)
        if twin is None:
            continue
        target, result = node.args[0].meta["val"], _run_abstractly(twin, node)
        if result.shape == target.shape and result.stride() != target.stride():
            with graph.inserting_before(node):
                computed = graph.call_function(twin, node.args, node.kwargs)
                copy = graph.call_function(_aten.copy_.default, (node.args[0], computed))
            computed.meta["val"], copy.meta["val"] = result, node.meta["val"]
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def drop_copies(graph: fx.Graph) -> None:
    """Drop copies into other strides whose readers are all arithmetic, which gives the same bits for any strides.

    t = copy(h, s); y = t * 2        --> drop_copies -->        y = s * 2        so the base of h is not kept alive
    """
    # `copy(destination, source)` is what functionalization makes of `destination.copy_(source)`.
    for node in graph.find_nodes(op="call_function", target=_aten.copy.default):
        source = node.args[1]
        old, new = node.meta["val"], source.meta["val"]
        # A copy that casts, broadcasts or moves to another device computes something.
        is_cast = (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device)
        if not is_cast and old.is_floating_point() and all(_ignores_strides(user, node, source) for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


_ARITHMETIC = (
    *(packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul)),
    *(packet.default for packet in (_aten.neg, _aten.cat, _aten.sigmoid_backward, _aten.tanh_backward)),
)
"""Ops that compute each element by itself, with the same bits in every vector lane."""


def _ignores_strides(user: fx.Node, copy: fx.Node, source: Any) -> bool:
    """Whether an op gives the same bits and strides if it reads the source of a copy instead."""
    if user.target in (_aten.detach.default, _aten.alias.default):  # torch 2.15 traces a detach as an alias
        return all(_ignores_strides(reader, user, source) for reader in user.users)
    if user.target not in _ARITHMETIC:
        return False
    return _run_abstractly(user.target, user, {copy: source}).stride() == user.meta["val"].stride()


def _run_abstractly(op: Any, node: fx.Node, substitutes: Mapping[fx.Node, Any] = {}) -> Tensor:
    """Run an op on the fake values of a node's arguments, or of substitutes."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: substitutes.get(x, x).meta["val"])
    with node.meta["val"].fake_mode:
        return op(*args, **kwargs)


def _functional_twin(node: fx.Node) -> Any:
    """Return the functional twin of an op that mutates its first argument only; None if torch has none."""
    # torch relates the two only by name, `sigmoid_` and `sigmoid`, so their argument types are compared too.
    op: Any = node.target
    if not isinstance(op, OpOverload) or is_view_in_place(op) or mutated_nodes(node) != [*node.args[:1]]:
        return None
    name, overload = op_and_overload_names(op)
    twin = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
    return twin if twin is not None and twin is not op and _argument_types(twin) == _argument_types(op) else None


def _argument_types(op: Any) -> list[str]:
    return [str(argument.type) for argument in schema_arguments(op)]
