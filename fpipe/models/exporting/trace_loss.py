"""Trace a loss function into one graph of torch ops, with a mark where each stage ends.

loss_fn(params, batch)      -->      embed  MARK  block  MARK  head  loss

The function is called once on fake tensors, and the number of rows stays symbolic. What no graph can represent is
refused: branches on data, gradients taken inside, comparisons of symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fpipe import tree
from fpipe.graphs.tracing.fake_tensors import refuse_data_assignment
from fpipe.graphs.tracing.marks import KEY, record_marks
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.keys import with_seed
from fpipe.meaning.purity.outputs import symbols_in, with_rows_named
from fpipe.models.exporting.net_graph import NetGraph, OnlyTraceable, make_literals_pure, without_checkpoints
from fpipe.models.exporting.node_contexts import keep_attention_backends
from fpipe.models.exporting.opaque_ops import CALLS_KEY
from fpipe.models.exporting.source_locations import location_of, location_of_error, record_locations
from fpipe.torch_internals import is_fake
from fpipe.torch_private.fx import (
    guards_of,
    make_fake,
    open_fake_mode,
    sympy_expression,
    trace_above_autograd,
    undecided_branch_error,
)


def trace_loss(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    names: Sequence[str],
    batch: tuple[Any, Any],
    modules: Mapping[nn.Module, str],
    called_modules: dict[nn.Module, str],
) -> NetGraph:
    """Trace a loss function above autograd, on fake tensors with a symbolic number of rows.

    make_fx, not torch.export: that takes half as much time again, accepts a vmap inside silently, and its errors do not
    say where derivatives are taken or rows do not fit.

    Args:
        names: the names of the leaves of `params`.
        modules: modules that errors name, with their paths.
        called_modules: is filled with each module that the function calls, and the name of its class.
    """
    # 1. Make parameters and batch fake tensors, with a symbolic number of rows.
    mode = open_fake_mode()
    has_single_row = all(len(leaf) == 1 for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)

    def as_fake(leaf: Any, is_batch: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_batch and leaf.ndim and len(leaf) == 1 and has_single_row:
            # torch specializes a trace to a size of 1, so it would hold for one row only: trace two rows.
            leaf = leaf.new_empty((2, *leaf.shape[1:]))
        fake_leaf = make_fake(mode, leaf, is_batch and leaf.ndim > 0 and len(leaf) > 1)
        return fake_leaf.requires_grad_(not is_batch and (leaf.is_floating_point() or leaf.is_complex()))

    fake_args = (
        tree.tree_map(partial(as_fake, is_batch=False), params),
        tree.tree_map(partial(as_fake, is_batch=True), batch),
    )
    leaves, containers = tree.flatten(fake_args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    # 2. Trace.
    only_traceable = OnlyTraceable("loss_fn", True)

    def run_flat(*tensors: Tensor) -> Any:
        proxies = iter(tensors)
        args = tree.unflatten(containers, [next(proxies) if isinstance(x, Tensor) else x for x in leaves])
        with only_traceable, record_locations(modules, called_modules), without_checkpoints():
            return only_traceable.run(loss_fn, *args)

    error_notes = _explain_errors(fake_args[1], modules)
    with (
        with_seed(KEY, "loss_fn"),
        torch.enable_grad(),
        mode,
        record_marks(keeps=True),
        error_notes,
        refuse_data_assignment(),
    ):
        module = trace_above_autograd(run_flat, tensors)
    # 3. Refuse a graph that is not the function: with foreign fake tensors, or a fixed number of rows.
    only_traceable.warn(4)
    module.meta[CALLS_KEY] = only_traceable.calls
    make_literals_pure(module.graph)
    keep_attention_backends(module.graph)
    _refuse_untraced(module)
    # One leaf may have so many rows for another reason, as a mask of the sequence's length that goes whole to each.
    sizes = [leaf.shape[0] for leaf in tree.leaves(fake_args[1]) if isinstance(leaf, Tensor) and leaf.ndim]
    row_counts = [size for size in sizes if isinstance(size, torch.SymInt)]
    if row_counts and not any(sympy_expression(size).free_symbols for size in row_counts):
        raise ValueError(
            "loss_fn fixes the number of rows, as len(x), int(n / 4) and torch.jit do. x.shape[0] and n // 4 keep "
            "it symbolic."
        )
    # 4. Name the placeholders, which come in the order of the leaves.
    nodes: Iterator[fx.Node] = (node for node in module.graph.nodes if node.op == "placeholder")
    placeholder_args = tree.unflatten(containers, [next(nodes) if isinstance(x, Tensor) else x for x in leaves])
    name_by_placeholder = dict(zip(tree.leaves(placeholder_args[0]), names, strict=True))
    result = module.graph.output_node().args[0]
    return NetGraph(
        module, name_by_placeholder, {}, placeholder_args[1], result, guards_of(mode.shape_env), "loss_fn", "from_loss"
    )


def _refuse_untraced(module: fx.GraphModule) -> None:
    """Raise ValueError for a fake tensor that no operation in the graph computes."""
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if is_fake(tensor):
            raise ValueError(
                f"a tensor of shape {with_rows_named(tuple(tensor.shape))} is computed where no trace sees it, as by "
                "torch.autograd.grad, torch.func or torch.vmap. "
                f"Use from_functions.{next((location_of(user) for user in node.users), '')}"
            )


@contextmanager
def _explain_errors(batch: tuple[Any, Any], modules: Mapping[nn.Module, str]) -> Generator[None]:
    """Add to errors of torch that it traces, where in the user's code, and which sizes its symbols stand for."""
    named_modules = [(path, module) for module, path in modules.items()]
    try:
        yield
    except undecided_branch_error() as error:
        raise ValueError(
            "loss_fn branches on a number that it computes, as in `if loss > 0`. "
            f"Use torch.where, or from_functions.{location_of_error(error, named_modules)}"
        ) from error
    except Untraceable as error:
        message = f"loss_fn cannot be cut: {error}. Compute a new tensor in its place."
        raise ValueError(message + location_of_error(error, named_modules)) from error
    except Exception as error:
        note = "loss_fn was called on fake tensors, which have no data, as from_loss does to cut it."
        error.add_note(note + location_of_error(error, named_modules))
        parts = zip(("inputs", "target"), batch, strict=True)
        leaves = [(batch_part + path, leaf) for batch_part, part in parts for path, leaf in tree.paths(part)]
        path_by_row_count = {str(x.shape[0]): path for path, x in reversed(leaves) if isinstance(x, Tensor) and x.ndim}
        for symbol in sorted(symbols_in(str(error)) & path_by_row_count.keys()):
            error.add_note(
                f"{symbol} is the number of rows of {path_by_row_count[symbol]}, which from_loss keeps symbolic."
            )
        raise
