"""Add gradients up where they are made, into a sum that the caller owns, instead of writing each and adding it later.

g_0 = mm(a, b)        --> adding -->        g_0 = mm(a, b); sum_0 += g_0        or        sum_0 += a @ b, in one op
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Node
from fpipe.graphs.language.labels import total_of, variable
from fpipe.meaning.purity.ambient import raw_ops

_aten: Any = torch.ops.aten


def owned(graph: Graph, copied: Sequence[tuple[str, int]]) -> Graph:
    """Copy these results of a graph, each a label and a place under it, into storages that nothing else uses."""
    nodes: list[Node] = []
    facts, writes = dict(graph.facts), {label: list(leaves) for label, leaves in graph.writes.items()}
    for label, place in copied:
        leaf = writes[label][place]
        copy = writes[label][place] = Name(f"{leaf}_copy{len(nodes)}")
        nodes.append(Node(copy, _aten.clone.default, (leaf,), {}))
        facts[copy] = facts[leaf]
    tuples = {label: tuple(leaves) for label, leaves in writes.items()}
    return replace(graph, nodes=(*graph.nodes, *nodes), facts=facts, writes=tuples)


def adding(graph: Graph, labels: Sequence[str], flags: Any, *, exact: bool = True) -> Graph:
    """Let a graph also read sums (`total` for `g`, `total:1` for `g:1`) and add its gradients to them.

    Unless `exact`, a sum takes every product in by one call, whose bits may be others than those of two. `flags` choose
    kernels (`ambient.kernels`); None of what never runs.
    """
    uses = _Uses(graph)
    written = uses.positions
    behind: dict[int, list[Node]] = {}
    dropped: set[int] = set()
    facts, reads, writes = dict(graph.facts), dict(graph.reads), {}
    first: list[Node] = []
    for label, leaves in graph.writes.items():
        if label not in labels:
            writes[label] = leaves
            continue
        sums = total_of(label)
        totals: list[Name | None] = []
        for at, leaf in enumerate(leaves):
            if leaf is None:
                totals.append(None)
                continue
            total = Name(variable(sums, at))
            totals.append(total)
            facts[total] = facts[leaf]
            product = _product(uses, leaf, flags, exact)
            if product is not None:
                names, is_transposed, here = product
                dropped |= {written[name] for name in names}
                node = graph.nodes[written[names[0]]]
                target: Name = total
                if is_transposed:
                    target = Name(f"{total}_t")
                    behind.setdefault(here, []).append(Node(target, _aten.t.default, (total,), {}))
                    facts[target] = facts[names[0]]
                add = Node(Name(f"{leaf}_added"), _aten.addmm.out, (target, *node.args), {"out": target})
            else:
                here = written.get(leaf, -1)
                add = Node(Name(f"{leaf}_added"), _aten.add_.Tensor, (total, leaf), {})
            facts[add.name] = facts[add.args[0]]
            (behind.setdefault(here, []) if here >= 0 else first).append(add)
        reads[sums] = tuple(totals)
        writes[sums] = tuple(totals)
    nodes = [*first]
    for at, node in enumerate(graph.nodes):
        nodes += [] if at in dropped else [node]
        nodes += behind.get(at, [])
    return replace(graph, nodes=tuple(nodes), facts=facts, reads=reads, writes=writes)


class _Uses:
    """The writer and the number of readers of each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.positions = {node.name: at for at, node in enumerate(graph.nodes)}
        self.read_counts = Counter(name for node in graph.nodes for name in node.reads)
        self.result_counts = Counter(
            leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)
        )

    def writer(self, name: Name) -> Node | None:
        """Return the op that writes a value; None if the graph is handed it."""
        return self.graph.nodes[self.positions[name]] if name in self.positions else None


def _product(uses: _Uses, leaf: Name, flags: Any, exact: bool) -> tuple[list[Name], bool, int] | None:
    """Return the names of the product, perhaps transposed, that a gradient is, if the sum can take it in in one op.

    With it come whether it is transposed, and its place among the ops. Nobody else may read it.
    """
    product, is_transposed = leaf, False
    node = uses.writer(leaf)
    if node is not None and node.op is _aten.t.default:
        product, is_transposed = node.args[0], True
        node = uses.writer(product)
    if node is None or node.op is not _aten.mm.default or uses.read_counts[product] != is_transposed:
        return None
    if uses.result_counts[leaf] + is_transposed * uses.result_counts[product] != 1:
        return None
    left, right, total = (uses.graph.facts[name].aval for name in (*node.args, product))
    if exact and (flags is None or not _same_bits(total, left, right, flags)):
        return None
    return [product, leaf] if is_transposed else [product], is_transposed, uses.positions[product]


@cache
def _same_bits(total: Aval, left: Aval, right: Aval, flags: Any) -> bool:
    """Whether one call that multiplies and adds gives the bits of two calls, seen on these shapes, threads and flags.

    It does where the product is summed up in one go before the old sum is added: in float32 from width 64 and up to
    128 rows on the machine this was tried on, and nowhere in float64, bfloat16 or float16.
    """
    if total.device.type == "meta" or any(0 in known.stride for known in (total, left, right)):
        return False
    if total.device.type == "cpu" and left.shape[1] > _MOST_ROWS:  # a trial would take as long as the op, and fail
        return False

    generator = torch.Generator("cpu").manual_seed(0)

    def draw(known: Aval) -> torch.Tensor:
        # Drawn in the dtype itself: products of float32 numbers are exact in float64, and would show no difference.
        return known.empty().copy_(torch.randn(known.shape, generator=generator, dtype=known.dtype, device="cpu"))

    for _ in range(_PROBES):
        a, b, c = draw(total), draw(left), draw(right)
        with raw_ops():
            if not torch.equal(a + b @ c, torch.addmm(a, b, c, out=a)):
                return False
    return True


_PROBES = 8
_MOST_ROWS = 1024
