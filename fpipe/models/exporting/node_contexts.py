"""Keep each op of a graph in the contexts in which it was traced, gradients on or off and autocast, after a cut.

autocast: [a  MARK  b]        -->        autocast: [a]    autocast: [b]

A context that spans a cut is entered and left again in each stage: a stage begins and ends outside of all contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.traceback import get_current_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fpipe.torch_private.fx import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD


class Context(NamedTuple):
    """Whether gradients are on, and the ops that entered the open autocast contexts, outermost first."""

    grad: bool
    autocasts: tuple[fx.Node, ...]


OUTSIDE = Context(True, ())
"""The context where every stage and every loss begins and ends: gradients on, no autocast."""


def contexts_of(graph: fx.Graph) -> dict[fx.Node, Context]:
    """Return the context of each op of a graph."""
    context, contexts = OUTSIDE, dict[fx.Node, Context]()
    for node in graph.nodes:
        if node.target is SET_GRAD:
            context = context._replace(grad=bool(node.args[0]))
        elif node.target is ENTER_AUTOCAST:
            context = context._replace(autocasts=(*context.autocasts, node))
        elif node.target is EXIT_AUTOCAST:
            context = context._replace(autocasts=tuple(op for op in context.autocasts if op is not node.args[0]))
        elif node.op == "call_function":
            contexts[node] = context
    return contexts


def switches_context(node: fx.Node) -> bool:
    """Whether a node enters or leaves a context and computes nothing."""
    return node.target in (SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST)


def autocast_eps(graph: fx.Graph) -> float:
    """Return the machine epsilon of the least precise autocast context of a graph; 0 without autocast.

    Inside autocast torch casts a weight once for all its uses, so it adds their gradients in lower precision. Stages
    add them in the weight's own precision, so gradients may differ by this much.
    """
    blocks = graph.find_nodes(op="call_function", target=ENTER_AUTOCAST)
    dtypes = (block.args[1] for block in blocks if block.args[2])
    return max((torch.finfo(dtype).eps for dtype in dtypes if isinstance(dtype, torch.dtype)), default=0.0)


def copy_nodes(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    contexts: Mapping[fx.Node, Context],
    copy_by_node: dict[fx.Node, Any],
    copy_of: Callable[[fx.Node], Any],
) -> None:
    """Append copies of nodes to a graph, and enter and leave contexts between them as needed.

    The copies are added to `copy_by_node`. `copy_of` maps a node that is read to its node in the new graph.
    """
    current, open_autocasts = OUTSIDE, list[fx.Node]()

    def switch(context: Context) -> Context:
        pairs = zip(current.autocasts, context.autocasts, strict=False)
        # Autocast contexts nest: keep the common outermost ones, leave the others from the inside, enter the new ones.
        common = len([*takewhile(lambda pair: pair[0] is pair[1], pairs)])
        while len(open_autocasts) > common:
            graph.call_function(EXIT_AUTOCAST, (open_autocasts.pop(),))
        open_autocasts.extend(graph.node_copy(enter_node) for enter_node in context.autocasts[common:])
        if context.grad != current.grad:
            graph.call_function(SET_GRAD, (context.grad,))
        return context

    for node in nodes:
        if node not in copy_by_node:
            current = switch(contexts.get(node, current))
            copy_by_node[node] = graph.node_copy(node, copy_of)
    switch(OUTSIDE)


_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int[] backends) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _attend(*args: Any, backends: Sequence[int], **kwargs: Any) -> torch.Tensor:
    with sdpa_kernel([*map(SDPBackend, backends)], set_priority=True):
        return scaled_dot_product_attention(*args, **kwargs)


_LIBRARY.impl("attention", _attend, "CompositeImplicitAutograd")
_ATTENTION: Any = torch.ops.fpipe.attention.default
_BACKENDS_KEY = "fpipe_attention"


def note_attention_backends(backends: Sequence[int]) -> None:
    """Note the enabled kernels of attention, as numbers of `SDPBackend`, in the nodes of the current call of torch."""
    get_current_meta().setdefault("custom", {})[_BACKENDS_KEY] = [*backends]


def keep_attention_backends(graph: fx.Graph) -> None:
    """Let each attention enable the kernels that were enabled where it was traced, inside `sdpa_kernel`.

    with sdpa_kernel(MATH): scaled_dot_product_attention(q, k, v)     -->     attention(q, k, v, backends=[MATH])
    """
    for node in graph.nodes:
        backends = node.meta.get("custom", {}).get(_BACKENDS_KEY)
        if backends is not None and node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target, node.kwargs = _ATTENTION, {**node.kwargs, "backends": backends}


@contextmanager
def restored_on_error() -> Generator[None]:
    """Restore gradients and autocast when an error leaves a graph, which enters contexts by plain ops."""
    devices = ("cpu", "cuda")
    autocast_states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices]
    cache_is_enabled, grad_is_enabled = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    depth = _autocast_depth()
    try:
        yield
    except BaseException:
        for device, is_enabled, dtype in autocast_states:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache_is_enabled)
        torch.set_grad_enabled(grad_is_enabled)
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()
        raise


def _autocast_depth() -> int:
    """Return how many autocast contexts are open, which torch tells only when the number changes."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth
