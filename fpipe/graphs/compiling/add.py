"""Let a backward add its gradients in place to a sum of the step, instead of writing them for an ADD.

g_0 = mm(a, b)    --> add_into_sums -->    g_0 = mm(a, b); sum_0 += g_0        or        sum_0 += a @ b, in one op

A gradient of a weight is mostly a product. `addmm` multiplies and adds in one op, without memory for the product. It
may round otherwise than two ops do, so a trial on the very shapes decides whether the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Node
from fpipe.graphs.language.labels import total_of, variable_name
from fpipe.meaning.purity.ambient import raw_ops

_aten: Any = torch.ops.aten


def copy_results(graph: Graph, copied: Sequence[tuple[str, int]]) -> Graph:
    """Copy results of a graph, each given by label and leaf index, into storages that nothing else uses."""
    nodes: list[Node] = []
    facts, writes = dict(graph.facts), {label: list(leaves) for label, leaves in graph.writes.items()}
    for label, leaf_index in copied:
        leaf = writes[label][leaf_index]
        copy = writes[label][leaf_index] = Name(f"{leaf}_copy{len(nodes)}")
        nodes.append(Node(copy, _aten.clone.default, (leaf,), {}))
        facts[copy] = facts[leaf]
    tuples = {label: tuple(leaves) for label, leaves in writes.items()}
    return replace(graph, nodes=(*graph.nodes, *nodes), facts=facts, writes=tuples)


def add_into_sums(graph: Graph, labels: Sequence[str], flags: Any, *, exact: bool = True) -> Graph:
    """Make a graph read sums (`total` for `g`, `total:1` for `g:1`) and add its gradients to them in place.

    Args:
        graph: a backward.
        labels: the labels of the gradients that are added.
        flags: the settings that choose kernels; None for a graph that never runs, whose sums are not tried.
        exact: whether a sum must have the bits of a product followed by an addition.
    """
    # Each gradient gets an op that adds it, right behind the op that writes it, so that its memory is free again soon:
    # `nodes_after` has these ops by the index of that writer. A product that is added in one op is dropped itself, and
    # so is the transpose of it.
    uses = _ValueUses(graph)
    index_by_name = uses.index_by_name
    nodes_after: dict[int, list[Node]] = {}
    dropped: set[int] = set()
    facts, reads, writes = dict(graph.facts), dict(graph.reads), {}
    leading_nodes: list[Node] = []
    # 1. Name the sum of each gradient, and make the op that adds to it.
    for label, leaves in graph.writes.items():
        if label not in labels:
            writes[label] = leaves
            continue
        sums = total_of(label)
        totals: list[Name | None] = []
        for leaf_index, leaf in enumerate(leaves):
            if leaf is None:
                totals.append(None)
                continue
            total = Name(variable_name(sums, leaf_index))
            totals.append(total)
            facts[total] = facts[leaf]
            product = _find_product(uses, leaf, flags, exact)
            if product is not None:
                names, is_transposed, anchor = product
                dropped |= {index_by_name[name] for name in names}
                node = graph.nodes[index_by_name[names[0]]]
                target: Name = total
                # The gradient is (a @ b).t(): add a @ b to the transposed view of the sum.
                if is_transposed:
                    target = Name(f"{total}_t")
                    nodes_after.setdefault(anchor, []).append(Node(target, _aten.t.default, (total,), {}))
                    facts[target] = facts[names[0]]
                add = Node(Name(f"{leaf}_added"), _aten.addmm.out, (target, *node.args), {"out": target})
            else:
                # A gradient that the graph reads, such as a cotangent handed on, has no writer: add it first of all.
                anchor = index_by_name.get(leaf, -1)
                add = Node(Name(f"{leaf}_added"), _aten.add_.Tensor, (total, leaf), {})
            facts[add.name] = facts[add.args[0]]
            (nodes_after.setdefault(anchor, []) if anchor >= 0 else leading_nodes).append(add)
        reads[sums] = tuple(totals)
        writes[sums] = tuple(totals)
    # 2. Put these ops into the list, and leave out the products that they compute.
    nodes = [*leading_nodes]
    for index, node in enumerate(graph.nodes):
        nodes += [] if index in dropped else [node]
        nodes += nodes_after.get(index, [])
    return replace(graph, nodes=tuple(nodes), facts=facts, reads=reads, writes=writes)


class _ValueUses:
    """The index of the writer, and the number of readers, of each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index_by_name = {node.name: index for index, node in enumerate(graph.nodes)}
        self.read_counts = Counter(name for node in graph.nodes for name in node.reads)
        self.result_counts = Counter(x for leaves in graph.writes.values() for x in leaves if isinstance(x, Name))

    def writer(self, name: Name) -> Node | None:
        """Return the op that writes a value; None for an input of the graph."""
        return self.graph.nodes[self.index_by_name[name]] if name in self.index_by_name else None


def _find_product(uses: _ValueUses, leaf: Name, flags: Any, exact: bool) -> tuple[list[Name], bool, int] | None:
    """Return the product that a gradient is, if one op can multiply and add: (names to drop, is transposed, index)."""
    # The names are the product and, where there is one, its transpose; the index is that of the product among the
    # nodes.
    product, is_transposed = leaf, False
    node = uses.writer(leaf)
    if node is not None and node.op is _aten.t.default:
        product, is_transposed = node.args[0], True
        node = uses.writer(product)
    # Nobody else may read the product: it is read by its transpose alone, or not at all, and is a result once.
    if node is None or node.op is not _aten.mm.default or uses.read_counts[product] != is_transposed:
        return None
    if uses.result_counts[leaf] + is_transposed * uses.result_counts[product] != 1:
        return None
    lhs, rhs, total = (uses.graph.facts[name].aval for name in (*node.args, product))
    if exact and (flags is None or not _same_bits(total, lhs, rhs, flags)):
        return None
    return [product, leaf] if is_transposed else [product], is_transposed, uses.index_by_name[product]


@cache
def _same_bits(total: Aval, lhs: Aval, rhs: Aval, flags: Any) -> bool:
    """Whether one call that multiplies and adds gives the bits of two calls, by trial on these shapes and flags."""
    # It does where the product is summed up in one go before the old sum is added: in float32 from width 64 and up to
    # 128 rows on the machine this was tried on, and nowhere in float64, bfloat16 or float16.
    if total.device.type == "meta" or any(0 in aval.stride for aval in (total, lhs, rhs)):
        return False
    # Each length would need trials of its own, which take longer than a step saves.
    if lhs.is_open or rhs.is_open:
        return False
    # With more rows a trial takes as long as the op, and fails.
    if total.device.type == "cpu" and lhs.shape[1] > _MOST_ROWS:
        return False

    generator = torch.Generator("cpu").manual_seed(0)

    def draw(aval: Aval) -> torch.Tensor:
        # Drawn in the dtype itself: products of float32 numbers are exact in float64, and would show no difference.
        return aval.empty().copy_(torch.randn(aval.shape, generator=generator, dtype=aval.dtype, device="cpu"))

    for _ in range(_PROBES):
        a, b, c = draw(total), draw(lhs), draw(rhs)
        with raw_ops():
            if not torch.equal(a + b @ c, torch.addmm(a, b, c, out=a)):
                return False
    return True


_PROBES = 8
_MOST_ROWS = 1024
