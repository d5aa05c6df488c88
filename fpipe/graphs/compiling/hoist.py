"""Take out of the parts of a stage what depends on parameters and constants alone, so that a step computes it once.

    F: params, x -> y      B: params, dy, res -> g, dx      -->      params -> hoisted      F: hoisted, x -> y      ..

Such values are the casts of weights under autocast, transposes that copy, weight norms and masks, and at no cost the
parameters themselves and their views. Graphs are functional, so the bits stay. Three kinds of op stay in their part:
draws and checks, which run as often as eager runs them, and collectives, whose order all processes share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import getitem

from fpipe.graphs.language.graph import Graph, Name
from fpipe.graphs.language.labels import hoisted_label, is_parameter
from fpipe.graphs.tracing.random_ops import random_nodes_of
from fpipe.graphs.tracing.running_statistics import RUNNING_STATISTICS
from fpipe.meaning.purity.sharded import is_collective
from fpipe.meaning.purity.write_guard import is_check


def views_of_params(graph: Graph) -> set[Name]:
    """Return the views of parameters and buffers, and the views of such views."""
    params, storages = _params_of(graph), param_storages(graph)
    views: set[Name] = set()
    for node in graph.nodes:
        fact = graph.facts.get(node.name)
        if fact is not None and fact.storage in storages and {*node.reads} <= params | views:
            views.add(node.name)
    return views


def values_of_params(graph: Graph) -> set[Name]:
    """Return all values that are computed from parameters, buffers and constants alone, and may be shared."""
    sources, pinned, values = {*_params_of(graph), *graph.constants}, _pinned_names(graph), set[Name]()
    for node in graph.nodes:
        stays = node.name in pinned or is_check(node.op) or is_collective(node.op)
        if not stays and all(name in sources or name in values for name in node.reads):
            values.add(node.name)
    return values


def _pinned_names(graph: Graph) -> set[Name]:
    """Return the values that no two calls may share: random ones, and tensors that an op may write."""
    # 1. A draw may fill what it reads, and a batch norm writes its statistics (`fuse_statistics`).
    random_nodes = random_nodes_of(graph)
    writers = [*random_nodes, *(node for node in graph.nodes if node.op is RUNNING_STATISTICS)]
    pinned = {node.name for node in random_nodes} | {name for node in writers for name in node.reads}
    # 2. Results, since sums are added to them in place, and whatever shares their memory; views of parameters do not
    #    count, since nobody writes those.
    results = [leaf for label, leaves in graph.writes.items() if label != "kept" for leaf in leaves]
    storages = {graph.facts[leaf].storage for leaf in results if isinstance(leaf, Name)} - param_storages(graph)
    pinned |= {name for name, fact in graph.facts.items() if fact.storage in storages}
    # 3. The op of a tuple with such a tensor.
    return pinned | {node.args[0] for node in graph.nodes if node.op is getitem and node.name in pinned}


def _params_of(graph: Graph) -> set[Name]:
    return {name for label in graph.reads if is_parameter(label) for name in graph.reads[label] if name is not None}


def param_storages(graph: Graph) -> set[int]:
    """Return the storages of the parameters, and of buffers that no op writes."""
    return {graph.facts[name].storage for name in _params_of(graph)}


def hoisted_reads(part: Graph, values: Collection[Name]) -> list[Name]:
    """Return the names of parameters and of their `values` that the remaining ops of a part read or return."""
    read_names = {name for node in part.nodes if node.name not in values for name in node.reads}
    read_names |= {leaf for leaves in part.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    params = [name for label in part.reads if is_parameter(label) for name in part.reads[label]]
    return [name for name in (*params, *(n.name for n in part.nodes if n.name in values)) if name in read_names]


def without_hoisted(part: Graph, values: Collection[Name], groups: Sequence[Sequence[Name]]) -> Graph:
    """Return a part that reads `groups` of hoisted values instead of parameters."""
    read_names = {*hoisted_reads(part, values)}
    leaves_by_label = {
        hoisted_label(number): tuple(name if name in read_names else None for name in group)
        for number, group in enumerate(groups)
        if not read_names.isdisjoint(group)
    }
    other_reads = {label: leaves for label, leaves in part.reads.items() if not is_parameter(label)}
    nodes = tuple(node for node in part.nodes if node.name not in values)
    return replace(part, nodes=nodes, reads={**leaves_by_label, **other_reads})


def hoisting_graph(graph: Graph, groups: Sequence[Sequence[Name]]) -> Graph:
    """Return the graph that computes groups of values from parameters; it reads None for unneeded ones."""
    needed = graph.ops_needed_by(name for group in groups for name in group)
    nodes = tuple(node for node in graph.nodes if node.name in needed)
    read_names = {name for node in nodes for name in node.reads}.union(*groups)
    reads = {
        label: tuple(name if name in read_names else None for name in leaves)
        for label, leaves in graph.reads.items()
        if is_parameter(label)
    }
    writes = {hoisted_label(number): tuple(group) for number, group in enumerate(groups)}
    return replace(graph, nodes=nodes, reads=reads, writes=writes)
