"""Run each operation of a graph that is cut in the contexts it was traced in: gradients on or off, autocast.

autocast: [a  MARK  b]        -->        autocast: [a]    autocast: [b]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import fx

from fpipe.torch_private.fx import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD


class Context(NamedTuple):
    """Whether gradients are on, and which autocast contexts are open, from the outermost in."""

    grad: bool
    autocasts: tuple[fx.Node, ...]


OUTSIDE = Context(True, ())
"""Gradients on, no autocast: where every stage and every loss begins and ends."""


def contexts_of(graph: fx.Graph) -> dict[fx.Node, Context]:
    """The context of each operation, wherever that began or ends."""
    context, contexts = OUTSIDE, dict[fx.Node, Context]()
    for node in graph.nodes:
        if node.target is SET_GRAD:
            context = context._replace(grad=bool(node.args[0]))
        elif node.target is ENTER_AUTOCAST:
            context = context._replace(autocasts=(*context.autocasts, node))
        elif node.target is EXIT_AUTOCAST:
            context = context._replace(autocasts=tuple(one for one in context.autocasts if one is not node.args[0]))
        elif node.op == "call_function":
            contexts[node] = context
    return contexts


def switches_context(node: fx.Node) -> bool:
    """Whether a node only enters or leaves a context."""
    return node.target in (SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST)


def autocast_eps(graph: fx.Graph) -> float:
    """The machine epsilon of the least precise autocast context: torch casts a weight that it uses twice in one only
    once, and so adds its gradients in that precision, where stages add them in the weight's own."""
    blocks = graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    found = (block.args[1] for block in blocks if block.args[2])
    return max((torch.finfo(dtype).eps for dtype in found if isinstance(dtype, torch.dtype)), default=0.0)


def copy_nodes(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    contexts: Mapping[fx.Node, Context],
    own: dict[fx.Node, Any],
    copied: Callable[[fx.Node], Any],
) -> None:
    """Copy nodes behind those of a graph, each in its context: nodes that switch stand where one's is not that of the
    one before. The new nodes join `own`, by the old ones; `copied` gives the new node for what an operation reads."""
    now, entered = OUTSIDE, list[fx.Node]()

    def switch(context: Context) -> Context:
        both = zip(now.autocasts, context.autocasts, strict=False)
        common = len([*takewhile(lambda pair: pair[0] is pair[1], both)])
        while len(entered) > common:
            graph.call_function(EXIT_AUTOCAST, (entered.pop(),))
        entered.extend(graph.node_copy(enter) for enter in context.autocasts[common:])
        if context.grad != now.grad:
            graph.call_function(SET_GRAD, (context.grad,))
        return context

    for node in nodes:
        if node not in own:
            now = switch(contexts.get(node, now))
            own[node] = graph.node_copy(node, copied)
    switch(OUTSIDE)


@contextmanager
def restored_on_error() -> Generator[None]:
    """Leave the contexts that a graph opens when an error ends it."""
    devices = ("cpu", "cuda")
    before = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    cached, grad, depth = torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), _depth()
    try:
        yield
    except BaseException:
        for device, on, dtype in before:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.set_grad_enabled(grad)
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        raise


def _depth() -> int:
    """How many autocast contexts are open."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth
