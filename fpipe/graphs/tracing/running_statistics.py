"""Split each batch norm of a trace into one that keeps no running statistics, and an op that makes the next ones.

y = batch_norm(x, w, b, mean, var)        -->        y = batch_norm(x, w, b)
                                                     mean', var' = running_statistics(x, mean, var)

So a trace mutates nothing: whoever needs only y leaves the statistics alone, and a forward that needs both does them in
one pass (`compiling/one_pass_norms.py`). The backward of a batch norm in training reads neither mean nor var.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.meaning.purity.own_memory import BATCH_NORMS, memory, tensors_in

_aten: Any = torch.ops.aten
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "running_statistics(Tensor x, Tensor mean, Tensor var, float? momentum, Tensor? batches) -> (Tensor, Tensor)"
)


def _next_statistics(
    x: Tensor, mean: Tensor, var: Tensor, momentum: float | None, batches: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Make the next running statistics, with the bits of the norm; without a momentum all batches weigh alike."""
    if momentum is None:
        momentum = 0.0 if batches is None else 1.0 / float(batches)
    mean, var = (old.clone(memory_format=torch.contiguous_format) for old in (mean, var))
    torch.batch_norm_update_stats(x, mean, var, momentum)
    return mean, var


def _empty_statistics(
    x: Tensor, mean: Tensor, var: Tensor, momentum: float | None, batches: Tensor | None
) -> tuple[Tensor, Tensor]:
    return mean.new_empty(mean.shape), var.new_empty(var.shape)


_LIBRARY.impl("running_statistics", _next_statistics, "CompositeExplicitAutograd")
torch.library.register_fake("fpipe::running_statistics", _empty_statistics, lib=_LIBRARY)
RUNNING: Any = torch.ops.fpipe.running_statistics.default
_MAY_EVALUATE = (_aten.native_batch_norm_backward.default,)
_BACKWARDS = (
    *_MAY_EVALUATE,
    _aten.cudnn_batch_norm_backward.default,
    _aten.miopen_batch_norm_backward.default,
)  # the running statistics are their fourth and fifth arguments
_TRAINING = 7  # the place of that argument of the first


def split_statistics(traced: fx.GraphModule) -> None:
    """Rewrite the batch norms of a trace, and their counts of batches, where nobody reads an earlier view of what they
    mutate: torch need not rewrite the trace then, which takes half as long again."""
    graph = traced.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node, place in order.items():
        if _counts(node) and not _is_viewed(node.args[0], place, order):
            with graph.inserting_before(node):
                count = graph.call_function(_aten.add.Tensor, node.args, node.kwargs)
            count.meta["val"] = _like(node)
            _replace_after(place, node.args[0], count, order)
            node.replace_all_uses_with(count)
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in BATCH_NORMS:
            _split_norm(node, place, order)
    for node in order:
        if node.target in _BACKWARDS and (node.target not in _MAY_EVALUATE or node.args[_TRAINING]):
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _split_norm(norm: fx.Node, place: int, order: Mapping[fx.Node, int]) -> None:
    """Let a norm keep no statistics, and an op behind it make the next ones."""
    x, weight, bias, *arguments, training, momentum, eps = norm.args
    statistics = [statistic for statistic in arguments if isinstance(statistic, fx.Node)]
    if not training or len(statistics) < len(arguments):
        return
    if any(_is_viewed(statistic, place, order) for statistic in statistics):
        return
    norm.args = (x, weight, bias, None, None, training, momentum, eps)
    with norm.graph.inserting_after(norm):
        update = norm.graph.call_function(RUNNING, (x, *statistics, momentum, None))
    update.meta["val"] = tuple(map(_like, statistics))
    for at, statistic in reversed([*enumerate(statistics)]):
        with norm.graph.inserting_after(update):
            part = norm.graph.call_function(getitem, (update, at))
        part.meta["val"] = update.meta["val"][at]
        _replace_after(place, statistic, part, order)


def _replace_after(place: int, old: Any, new: fx.Node, order: Mapping[fx.Node, int]) -> None:
    """Let the ops behind a place read another value."""

    def comes_after(user: fx.Node) -> bool:
        return order.get(user, -1) > place

    old.replace_all_uses_with(new, comes_after)


def _counts(node: fx.Node) -> bool:
    """Whether an op counts something, in place."""
    if node.op != "call_function" or node.target is not _aten.add_.Tensor:
        return False
    known: Any = node.meta.get("val")
    return not known.shape and not known.is_floating_point() and [type(arg) for arg in node.args[1:]] == [int]


def _is_viewed(statistic: Any, place: int, order: Mapping[fx.Node, int]) -> bool:
    """Whether another value in the memory of a statistic is there before an op, and read after it."""
    storage = memory(statistic.meta["val"])
    return any(
        memory(tensor) == storage and any(order.get(user, -1) > place for user in node.users)
        for node in order
        if node is not statistic and order[node] < place
        for tensor in tensors_in((node.meta.get("val"),))
    )


def _like(node: fx.Node) -> Tensor:
    """A tensor without data for the next value of a running statistic."""
    known: Any = node.meta["val"]
    with known.fake_mode:
        return known.new_empty(known.shape)
