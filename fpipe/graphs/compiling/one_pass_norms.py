"""Let a batch norm write its running statistics as it normalises, as eager does: one pass over its input, not two.

y = batch_norm(x, w, b)                      --> in_one_pass -->        mean', var' = clone(mean), clone(var)
mean', var' = running_statistics(x, mean, var)                          y = batch_norm(x, w, b, mean', var')

Where the step owns mean and var and nobody reads them again, it writes them in place, without the clones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from operator import getitem
from typing import Any

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Node, renamed, rewritten
from fpipe.graphs.tracing.running_statistics import RUNNING
from fpipe.meaning.purity.ambient import kernels, raw_ops
from fpipe.meaning.purity.own_memory import BATCH_NORMS

_CLONE: Any = torch.ops.aten.clone.default


def in_one_pass(graph: Graph, owned: Collection[int]) -> Graph:
    """Rewrite a forward so that its batch norms update the state; `owned` are the leaves of it that may be overwritten.

    A norm stays as it is where the two ops give other bits together, or somebody reads the statistics in between.
    """
    writers = {node.name: node for node in graph.nodes}
    order = {name: place for place, name in enumerate(writers)}
    readers = Counter(name for node in graph.nodes for name in node.reads)
    results = [leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)]
    readers.update(results)
    storages = Counter(known.storage for known in graph.facts.values())
    leaves = {name: place for place, name in enumerate(graph.reads.get("state", ())) if name is not None}
    clones = {node.name: node.args[0] for node in graph.nodes if node.op is _CLONE and node.args[0] in leaves}
    names: dict[Name, Name] = {}  # what is left out, and what stands for it
    norms: dict[Name, Node] = {}

    def memory_of(statistic: Name) -> Name | None:
        """Return the name of the tensor that may be written in the place of a statistic, if there is one."""
        if readers[statistic] > 1:
            return None
        leaf, writer = clones.get(statistic), writers.get(statistic)
        if leaf is not None and leaves[leaf] in owned and readers[leaf] == 1:
            return leaf
        if writer is not None and writer.op is getitem and writer.args[0] in names:
            return names[statistic]
        return statistic if writer is not None and storages[graph.facts[statistic].storage] == 1 else None

    for update in (node for node in graph.nodes if node.op is RUNNING):
        x, *statistics, momentum, _ = update.args
        parts = [node for node in graph.nodes if node.op is getitem and node.args[0] == update.name]
        norm = next((node for node in graph.nodes if _normalises(node, x) and node.name not in norms), None)
        memories = [memory_of(statistic) for statistic in statistics]
        if norm is None or momentum is None or None in memories or len(parts) < len(statistics):
            continue
        first = graph.nodes[: order[norm.name]]
        if any(not {part.name for part in parts}.isdisjoint(node.reads) for node in first):
            continue
        avals = [None if name is None else graph.facts[name].aval for name in (*norm.args[:3], *statistics)]
        if not _same_bits(norm.op, tuple(avals), norm.args[7:], kernels()):
            continue
        norms[norm.name] = norm._replace(args=(*norm.args[:3], *memories, True, momentum, *norm.args[7:]))
        names |= {update.name: update.name, **{part.name: memories[part.args[1]] for part in parts}}
        names |= {name: leaf for name in statistics if (leaf := clones.get(name)) in memories}  # not needed any more
    used = {name for node in norms.values() for name in node.args[3:5]}
    for clone, leaf in clones.items():  # a copy that nobody writes, and that lies in memory as what it is a copy of
        alike = graph.facts[clone].aval.stride == graph.facts[leaf].aval.stride
        if alike and clone not in names and used.isdisjoint((clone, leaf)) and clone not in results:
            names[clone] = leaf
    nodes = (rewritten(norms.get(node.name, node), names) for node in graph.nodes if node.name not in names)
    writes = {label: renamed(written, names) for label, written in graph.writes.items()}
    return replace(graph, nodes=tuple(nodes), writes=writes)


def overwritten(graph: Graph) -> dict[int, int]:
    """Return for each leaf of the next state that lies in memory of the old one the place of the old leaf."""
    places = {name: place for place, name in enumerate(graph.reads.get("state", ())) if name is not None}
    return {at: places[name] for at, name in enumerate(graph.writes.get("state", ())) if name in places}


def _normalises(node: Node, x: Any) -> bool:
    """Whether an op is a batch norm of x that keeps no statistics."""
    return node.op in BATCH_NORMS and not node.kwargs and node.args[0] == x and node.args[3:6] == (None, None, True)


@cache
def _same_bits(op: Any, avals: Sequence[Aval | None], rest: Any, flags: Any) -> bool:
    """Try whether one op does what two do, on these shapes, orders in memory and threads."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(known: Aval | None) -> Any:
        if known is None:
            return None
        return known.empty().copy_(torch.rand(known.shape, generator=generator, dtype=known.dtype, device="cpu"))

    *tensors, mean, var = map(draw, avals)
    joint = mean.clone(), var.clone()
    with raw_ops():
        split = op(*tensors, None, None, True, 0.1, *rest)
        torch.batch_norm_update_stats(tensors[0], mean, var, 0.1)
        joined = op(*tensors, *joint, True, 0.1, *rest)
    return all(map(torch.equal, (*split, mean, var), (*joined, *joint)))
