"""Rewrite the ops of a trace that mutate a tensor: one of its own becomes a new tensor, any other is refused.

y = exp(x); y.add_(1)        --> functional -->        y = exp(x); z = add(y, 1)
x.add_(1)                    --> refused: x was given
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.tracing.running_statistics import split_statistics
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.own_memory import BATCH_NORMS, is_view_in_place, mutated_by
from fpipe.torch_internals import OpOverload, arguments_of, names_of, storage_of
from fpipe.torch_private.dispatch import functionalized
from fpipe.torch_private.fx import traced_by_torch

_aten: Any = torch.ops.aten
_RRELU = (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default)


def refuse_mutation(traced: Any) -> None:
    """Raise Untraceable if a function writes what it is given, or what it holds on to."""
    nodes = traced.graph.nodes
    inputs = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    storages = {storage_of(node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), Tensor)}
    for node in nodes:
        for changed in mutated_by(node) if node.op == "call_function" else ():
            if changed in inputs or storage_of(changed.meta["val"]) in storages:
                raise Untraceable(f"it changes what it is given in place ({node.target})")


def functional(traced: Any, fakes: Sequence[Tensor]) -> Any:
    """Make a graph functional: an op that mutates a tensor of autograd's own writes a new tensor."""
    split_statistics(traced)
    keep_layouts(traced.graph)
    calls = [node for node in traced.graph.nodes if node.op == "call_function" and mutated_by(node)]
    for node in calls:
        if node.target in BATCH_NORMS:
            node.target = _aten._native_batch_norm_legit.default
        if node.target in _RRELU and not node.args[0].meta["val"].is_contiguous():
            raise Untraceable("rrelu of transposed data draws in another order once nothing is changed in place")
    if not calls:
        return traced
    traced.recompile()
    rewritten = traced_by_torch(functionalized(traced), fakes)
    calls = [node for node in rewritten.graph.nodes if node.op == "call_function" and mutated_by(node)]
    if calls:
        raise Untraceable(f"an op in it that changes its input cannot be rewritten ({calls[0].target})")
    drop_copies(rewritten.graph)
    return rewritten


def keep_layouts(graph: fx.Graph) -> None:
    """Copy the result of a functional op into place where its strides differ from those of its twin in place.

    h.sigmoid_()        --> keep_layouts -->        h.copy_(sigmoid(h))        where h is some columns of a table

    torch's rewriting puts `sigmoid(h)` in the place of `h`. Later ops choose their kernels by the strides of what they
    read, and so their last bits: those of a GRUCell, whose gates are columns.
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
    """Drop each copy into other strides that only arithmetic reads, which gives the same bits for any strides.

    t = copy(h, s); y = t * 2        --> drop_copies -->        y = s * 2        where s is not kept with all of a table
    """
    for node in graph.find_nodes(op="call_function", target=_aten.copy.default):
        source = node.args[1]
        old, new = node.meta["val"], source.meta["val"]
        is_cast = (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device)
        if not is_cast and old.is_floating_point() and all(_ignores_strides(user, node, source) for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


_ARITHMETIC = (
    *(packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul)),
    *(packet.default for packet in (_aten.neg, _aten.cat, _aten.sigmoid_backward, _aten.tanh_backward)),
)
"""Ops that compute each element for itself, with the same bits in every vector lane."""


def _ignores_strides(user: fx.Node, copy: fx.Node, source: Any) -> bool:
    """Whether an op gives the same bits and strides if it reads the source of a copy instead."""
    if user.target is _aten.detach.default:
        return all(_ignores_strides(reader, user, source) for reader in user.users)
    if user.target not in _ARITHMETIC:
        return False
    return _run_abstractly(user.target, user, {copy: source}).stride() == user.meta["val"].stride()


def _run_abstractly(op: Any, node: fx.Node, replaced: Mapping[fx.Node, Any] = {}) -> Tensor:
    """Return what an op gives for the arguments of a node, without data."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: replaced.get(arg, arg).meta["val"])
    with node.meta["val"].fake_mode:
        return op(*args, **kwargs)


def _functional_twin(node: fx.Node) -> Any:
    """Return the op that computes what an op in place leaves in its first argument; None if torch has none.

    Only by their names does torch say that they belong together: `sigmoid_` and `sigmoid`.
    """
    op: Any = node.target
    if not isinstance(op, OpOverload) or is_view_in_place(op) or mutated_by(node) != [*node.args[:1]]:
        return None
    name, overload = names_of(op)
    twin = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
    return twin if twin is not None and twin is not op and _argument_types(twin) == _argument_types(op) else None


def _argument_types(op: Any) -> list[str]:
    return [str(argument.type) for argument in arguments_of(op)]
