"""Split each batch norm of a trace into a norm without running statistics and an op that computes the next ones.

y = batch_norm(x, w, b, mean, var)        -->        y = batch_norm(x, w, b)
                                                     mean', var' = running_statistics(x, mean, var)

Then the trace mutates nothing, and a recomputation, which needs only y, skips the statistics. A forward that needs both
computes them in one pass (`compiling/one_pass_norms.py`). The backward of a batch norm in training reads neither.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from fpipe.meaning.purity.write_guard import BATCH_NORMS, storage_key, tensors_in
from fpipe.torch_internals import direct_members, is_batch_norm, is_norm
from fpipe.torch_private.modules import has_torch_forward, without_statistics

_aten: Any = torch.ops.aten
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "running_statistics(Tensor x, Tensor mean, Tensor var, float? momentum, Tensor? batches) -> (Tensor, Tensor)"
)


def _next_statistics(
    x: Tensor, mean: Tensor, var: Tensor, momentum: float | None, batches: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the next running statistics, with the bits of the norm."""
    # Without a momentum, they are the mean over all batches so far, of which `batches` is the number.
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
RUNNING_STATISTICS: Any = torch.ops.fpipe.running_statistics.default
# Backwards that serve training and evaluation, by an argument; the others serve training alone. The running statistics
# are the fourth and fifth arguments of all.
_EITHER_MODE_BACKWARDS = (_aten.native_batch_norm_backward.default,)
_NORM_BACKWARDS = (
    *_EITHER_MODE_BACKWARDS,
    _aten.cudnn_batch_norm_backward.default,
    _aten.miopen_batch_norm_backward.default,
)
_TRAINING_INDEX = 7  # the index of that argument


def split_statistics(traced: fx.GraphModule) -> None:
    """Rewrite the batch norms of a trace and their counts of batches as functional ops.

    torch's functionalization would do it too, but traces the graph anew, which takes half as long again. A tensor of
    which an earlier view is read later is left to it.
    """
    graph = traced.graph
    position_by_node = {node: position for position, node in enumerate(graph.nodes)}
    for node, position in position_by_node.items():
        if _is_count_update(node) and not _is_viewed(node.args[0], position, position_by_node):
            with graph.inserting_before(node):
                count = graph.call_function(_aten.add.Tensor, node.args, node.kwargs)
            count.meta["val"] = _empty_copy_of(node)
            _replace_after(position, node.args[0], count, position_by_node)
            node.replace_all_uses_with(count)
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in BATCH_NORMS:
            _split_norm(node, position, position_by_node)
    for node in position_by_node:
        if node.target in _NORM_BACKWARDS and (node.target not in _EITHER_MODE_BACKWARDS or node.args[_TRAINING_INDEX]):
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _split_norm(norm: fx.Node, position: int, position_by_node: Mapping[fx.Node, int]) -> None:
    """Take the running statistics from a norm, and insert an op behind it that computes the next ones."""
    x, weight, bias, *arguments, training, momentum, eps = norm.args
    statistics = [statistic for statistic in arguments if isinstance(statistic, fx.Node)]
    if not training or len(statistics) < len(arguments):
        return
    if any(_is_viewed(statistic, position, position_by_node) for statistic in statistics):
        return
    norm.args = (x, weight, bias, None, None, training, momentum, eps)
    with norm.graph.inserting_after(norm):
        update = norm.graph.call_function(RUNNING_STATISTICS, (x, *statistics, momentum, None))
    update.meta["val"] = tuple(map(_empty_copy_of, statistics))
    # Reversed, since each node is inserted directly behind the update: the mean comes first in the end.
    for index, statistic in reversed([*enumerate(statistics)]):
        with norm.graph.inserting_after(update):
            next_statistic = norm.graph.call_function(getitem, (update, index))
        next_statistic.meta["val"] = update.meta["val"][index]
        _replace_after(position, statistic, next_statistic, position_by_node)


def _replace_after(position: int, old: Any, new: fx.Node, position_by_node: Mapping[fx.Node, int]) -> None:
    def comes_after(user: fx.Node) -> bool:
        return position_by_node.get(user, -1) > position

    old.replace_all_uses_with(new, comes_after)


def _is_count_update(node: fx.Node) -> bool:
    """Whether a node adds to an integer scalar in place, as a norm counts its batches."""
    if node.op != "call_function" or node.target is not _aten.add_.Tensor:
        return False
    count: Any = node.meta.get("val")
    return not count.shape and not count.is_floating_point() and [type(argument) for argument in node.args[1:]] == [int]


def _is_viewed(statistic: Any, position: int, position_by_node: Mapping[fx.Node, int]) -> bool:
    """Whether a view of a statistic exists before a position and is read after it."""
    storage = storage_key(statistic.meta["val"])
    return any(
        storage_key(tensor) == storage and any(position_by_node.get(user, -1) > position for user in node.users)
        for node in position_by_node
        if node is not statistic and position_by_node[node] < position
        for tensor in tensors_in((node.meta.get("val"),))
    )


def _empty_copy_of(node: fx.Node) -> Tensor:
    """Return a fake tensor for the next value of a running statistic."""
    statistic: Any = node.meta["val"]
    with statistic.fake_mode:
        return statistic.new_empty(statistic.shape)


Norms = Sequence[tuple[str, Any]]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics."""
    return is_norm(module) and module.running_mean is not None


def updates_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm that updates its running statistics in its present mode."""
    return module.training and has_statistics(module)


@contextmanager
def without_norm_mutation(norms: Norms) -> Generator[None]:
    """Let torch's batch norms bind new running statistics instead of mutating them, so that a trace mutates nothing.

    A norm with momentum=None weighs all batches alike, by a number that it reads from a buffer: no trace can.
    """
    with ExitStack() as stack:
        # Only torch's own forward calls `_check_input_dim`, the hook at which `without_statistics` sees the input.
        # Instance norms and norms with a forward of their own run as they are written.
        for _, norm in norms:
            if is_batch_norm(norm) and has_torch_forward(norm):
                stack.enter_context(without_statistics(norm, partial(_bind_new_statistics, norm)))
        yield


def _bind_new_statistics(norm: Any, x: Tensor) -> None:
    # The dict of buffers itself is assigned to: under functional_call it is the dict of the swapped tensors, from which
    # the stage reads its new state afterwards.
    buffers = direct_members(norm).buffers
    batches = buffers["num_batches_tracked"]
    batches = buffers["num_batches_tracked"] = None if batches is None else batches + 1
    statistics = RUNNING_STATISTICS(x.detach(), buffers["running_mean"], buffers["running_var"], norm.momentum, batches)
    buffers["running_mean"], buffers["running_var"] = statistics


def refuse_other_channels(module_path: str, norm: Any, state: Mapping[str, Any]) -> None:
    """Raise ValueError for running statistics of other channels than the norm has."""
    for name in (f"{module_path}.running_mean", f"{module_path}.running_var"):
        statistic = state.get(name)
        if name in state and (not isinstance(statistic, Tensor) or statistic.shape != (norm.num_features,)):
            actual = f"shape {tuple(statistic.shape)}" if isinstance(statistic, Tensor) else type(statistic).__name__
            raise ValueError(
                f"state {name!r} has a number for each of the {norm.num_features} channels, found {actual}. "
                "Hand in the state of from_sequential, or Result.state."
            )
