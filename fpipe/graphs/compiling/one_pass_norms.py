"""Let a batch norm update its running statistics as it normalises, as eager does: one pass over its input, not two.

y = batch_norm(x, w, b)                      --> fuse_statistics -->        mean', var' = clone(mean), clone(var)
mean', var' = running_statistics(x, mean, var)                              y = batch_norm(x, w, b, mean', var')

A trace splits the update off, since torch's op mutates statistics though its schema denies it. If the step owns mean
and var and nobody reads them again, the norm writes them in place, without the clones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from operator import getitem
from typing import Any

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Node, rewire_node, substitute_names
from fpipe.graphs.tracing.running_statistics import RUNNING_STATISTICS
from fpipe.meaning.purity.ambient import kernel_settings, raw_ops
from fpipe.meaning.purity.write_guard import BATCH_NORMS

_CLONE: Any = torch.ops.aten.clone.default


def fuse_statistics(graph: Graph, owned: Collection[int]) -> Graph:
    """Rewrite a forward so that its batch norms update the state; `owned` are the leaves of it that may be overwritten.

    A norm stays as it is where the two ops give other bits together, or somebody reads the statistics in between.
    """
    writers = {node.name: node for node in graph.nodes}
    index_by_name = {name: index for index, name in enumerate(writers)}
    readers = Counter(name for node in graph.nodes for name in node.reads)
    results = [leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)]
    readers.update(results)
    storages = Counter(fact.storage for fact in graph.facts.values())
    leaves = {name: index for index, name in enumerate(graph.reads.get("state", ())) if name is not None}
    clones = {node.name: node.args[0] for node in graph.nodes if node.op is _CLONE and node.args[0] in leaves}
    # Nodes that are left out, by name, and the tensor that takes their place.
    replacements: dict[Name, Name] = {}
    norms: dict[Name, Node] = {}

    def memory_of(statistic: Name) -> Name | None:
        """Return the name of the tensor that the norm may write instead of a statistic, if there is one."""
        if readers[statistic] > 1:
            return None
        # In order: the leaf of the state itself, if the step owns it; the memory that the norm before this one wrote
        # (two calls of one module); the clone that the trace made.
        leaf, writer = clones.get(statistic), writers.get(statistic)
        if leaf is not None and leaves[leaf] in owned and readers[leaf] == 1:
            return leaf
        if writer is not None and writer.op is getitem and writer.args[0] in replacements:
            return replacements[statistic]
        return statistic if writer is not None and storages[graph.facts[statistic].storage] == 1 else None

    # 1. For each update find the norm of the same input, and put the update into its arguments.
    for update in (node for node in graph.nodes if node.op is RUNNING_STATISTICS):
        x, *statistics, momentum, _ = update.args
        parts = [node for node in graph.nodes if node.op is getitem and node.args[0] == update.name]
        norm = next((node for node in graph.nodes if _normalises(node, x) and node.name not in norms), None)
        memories = [memory_of(statistic) for statistic in statistics]
        if norm is None or momentum is None or None in memories or len(parts) < len(statistics):
            continue
        # The norm writes the statistics only when it runs: nobody may read them before.
        earlier_nodes = graph.nodes[: index_by_name[norm.name]]
        if any(not {part.name for part in parts}.isdisjoint(node.reads) for node in earlier_nodes):
            continue
        avals = [None if name is None else graph.facts[name].aval for name in (*norm.args[:3], *statistics)]
        is_open = any(aval is not None and aval.is_open for aval in avals)
        if is_open or not _same_bits(norm.op, tuple(avals), norm.args[7:], kernel_settings()):
            continue
        norms[norm.name] = norm._replace(args=(*norm.args[:3], *memories, True, momentum, *norm.args[7:]))
        replacements |= {update.name: update.name, **{part.name: memories[part.args[1]] for part in parts}}
        # The norm writes the leaf itself: its clone is not needed.
        replacements |= {name: leaf for name in statistics if (leaf := clones.get(name)) in memories}
    # 2. Leave out clones that nobody writes into or returns: the leaf has the same numbers, in the same order.
    memories_in_use = {name for node in norms.values() for name in node.args[3:5]}
    for clone, leaf in clones.items():
        has_same_strides = graph.facts[clone].aval.stride == graph.facts[leaf].aval.stride
        is_written = not memories_in_use.isdisjoint((clone, leaf))
        if has_same_strides and clone not in replacements and not is_written and clone not in results:
            replacements[clone] = leaf
    nodes = (rewire_node(norms.get(op.name, op), replacements) for op in graph.nodes if op.name not in replacements)
    writes = {label: substitute_names(leaves_written, replacements) for label, leaves_written in graph.writes.items()}
    return replace(graph, nodes=tuple(nodes), writes=writes)


def overwritten_state(graph: Graph) -> dict[int, int]:
    """Return, for each leaf of the next state that is written over a leaf of the old one, both indices."""
    index_by_name = {name: index for index, name in enumerate(graph.reads.get("state", ())) if name is not None}
    return {i: index_by_name[name] for i, name in enumerate(graph.writes.get("state", ())) if name in index_by_name}


def _normalises(node: Node, x: Any) -> bool:
    """Whether an op is a batch norm of x that keeps no statistics."""
    return node.op in BATCH_NORMS and not node.kwargs and node.args[0] == x and node.args[3:6] == (None, None, True)


@cache
def _same_bits(op: Any, avals: Sequence[Aval | None], settings: Any, flags: Any) -> bool:
    """Whether one op gives the bits of two, by trial on these shapes, strides and threads."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(aval: Aval | None) -> Any:
        if aval is None:
            return None
        return aval.empty().copy_(torch.rand(aval.shape, generator=generator, dtype=aval.dtype, device="cpu"))

    *tensors, mean, var = map(draw, avals)
    joint = mean.clone(), var.clone()
    with raw_ops():
        split = op(*tensors, None, None, True, 0.1, *settings)
        torch.batch_norm_update_stats(tensors[0], mean, var, 0.1)
        joined = op(*tensors, *joint, True, 0.1, *settings)
    return all(map(torch.equal, (*split, mean, var), (*joined, *joint)))
