"""Trace a loss function into one graph of torch's operations, with a mark where each stage ends.

loss_fn(params, batch)      -->      embed  MARK  block  MARK  head  loss

The function is called once on fake tensors; the number of rows stays symbolic. Refused is what no graph can represent:
branches on data, gradients taken inside, sizes that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fpipe import tree
from fpipe.graphs.tracing.fake import watched_memory
from fpipe.graphs.tracing.keep import written_down
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.stages.keys import seeded
from fpipe.meaning.stages.outputs import in_words, symbols_in
from fpipe.models.tracing.boundary import KEY, marking
from fpipe.models.tracing.net_graph import NetGraph, OnlyTraceable, make_literals_pure, without_checkpoints
from fpipe.models.tracing.places import noting_places, place_of, place_of_error
from fpipe.torch_internals import is_fake
from fpipe.torch_private.fx import (
    expression,
    fake_like,
    guards_of,
    open_mode,
    traced_above_autograd,
    undecided_branch,
)


def trace_loss(
    loss_fn: Callable[[Any, Any], Any],
    params: Any,
    names: Sequence[str],
    batch: tuple[Any, Any],
    modules: Mapping[nn.Module, str],
    called: dict[nn.Module, str],
) -> NetGraph:
    """The function as a graph of torch's operations, above autograd, on fake tensors with a symbolic number of rows.

    torch.export would take half as much time again, and a vmap inside without a word; of derivatives taken inside and
    of rows that do not fit, its errors do not say where.

    Args:
        names: of the leaves of `params`.
        modules: those that errors name, with their paths.
        called: takes the modules that it calls, wherever it has them from, each with its class's name.
    """
    mode = open_mode()
    single = all(len(leaf) == 1 for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)

    def fake(leaf: Any, rows: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if rows and leaf.ndim and len(leaf) == 1 and single:  # of one row a trace takes 1 for the rows of all others
            leaf = leaf.new_empty((2, *leaf.shape[1:]))
        made = fake_like(mode, leaf, rows and leaf.ndim > 0 and len(leaf) > 1)
        return made.requires_grad_(not rows and (leaf.is_floating_point() or leaf.is_complex()))

    given = tree.tree_map(partial(fake, rows=False), params), tree.tree_map(partial(fake, rows=True), batch)
    leaves, containers = tree.flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    only_traceable = OnlyTraceable("loss_fn", True)

    def flat(*tensors: Tensor) -> Any:
        proxies = iter(tensors)
        args = tree.unflatten(containers, [next(proxies) if isinstance(x, Tensor) else x for x in leaves])
        with only_traceable, marking(), noting_places(modules, called), without_checkpoints():
            return only_traceable.returned(loss_fn(*args))

    explained = _explained(given[1], modules)
    with seeded(KEY, "loss_fn"), torch.enable_grad(), mode, written_down(), explained, watched_memory():
        module = traced_above_autograd(flat, tensors)
    only_traceable.warn(4)
    make_literals_pure(module.graph)
    _refuse_untraced(module)
    # One leaf may have so many rows for another reason, as a mask of the sequence's length that goes whole to each.
    sizes = [leaf.shape[0] for leaf in tree.leaves(given[1]) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = [size for size in sizes if isinstance(size, torch.SymInt)]
    if rows and not any(expression(size).free_symbols for size in rows):
        raise ValueError(
            "loss_fn can be traced for one number of rows only, that of the example: it compares or fixes it, as "
            "len(x), int(n / 4) and functions of torch.jit do; x.shape[0] and n // 4 keep it symbolic."
        )
    nodes: Iterator[fx.Node] = (node for node in module.graph.nodes if node.op == "placeholder")
    named = tree.unflatten(containers, [next(nodes) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    own, result = dict(zip(tree.leaves(named[0]), names, strict=True)), module.graph.output_node().args[0]
    return NetGraph(module, own, {}, named[1], result, guards_of(mode.shape_env), "loss_fn", "from_loss")


def _refuse_untraced(module: fx.GraphModule) -> None:
    """Raise ValueError for a fake tensor that no operation in the graph computes."""
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target))
        if is_fake(held):
            raise ValueError(
                f"a tensor of shape {in_words(tuple(held.shape))} is computed where no trace sees it: by "
                "torch.autograd.grad, torch.func or torch.vmap inside loss_fn, or in an earlier call. "
                f"Stages of from_functions may do that.{next((place_of(user) for user in node.users), '')}"
            )


@contextmanager
def _explained(batch: tuple[Any, Any], modules: Mapping[nn.Module, str]) -> Generator[None]:
    """Let errors of torch say that it traces, where, and which rows its symbols stand for."""
    named = [(path, module) for module, path in modules.items()]
    try:
        yield
    except undecided_branch() as error:
        raise ValueError(
            "loss_fn branches on a number that it computes (if loss > 0, say), which is not known while it is traced. "
            f"Use torch.where, or from_functions.{place_of_error(error, named)}"
        ) from error
    except Untraceable as error:
        words = f"loss_fn cannot be cut: {error}. Compute a new tensor in its place."
        raise ValueError(words + place_of_error(error, named)) from error
    except Exception as error:
        note = "loss_fn was called on fake tensors, which have no data, as from_loss does to cut it."
        error.add_note(note + place_of_error(error, named))
        halves = zip(("inputs", "target"), batch, strict=True)
        leaves = [(word + place, leaf) for word, half in halves for place, leaf in tree.paths(half)]
        rows = {str(leaf.shape[0]): place for place, leaf in reversed(leaves) if isinstance(leaf, Tensor) and leaf.ndim}
        for symbol in sorted(symbols_in(str(error)) & rows.keys()):
            error.add_note(f"{symbol} is the number of rows of {rows[symbol]}, which from_loss keeps symbolic.")
        raise
