"""Take out of the parts of a stage what depends on parameters and constants alone, so that a step computes it once.

    F: params, x -> y      B: params, dy, res -> g, dx      -->      params -> hoisted      F: hoisted, x -> y      ..

Such values are the casts of weights under autocast, transposes that copy, and weight norms; and at no cost the
parameters themselves and their views. Graphs are functional, so the bits stay. Four kinds of op stay in their part:
draws and checks, which run as often as eager runs them; collectives, whose order all processes share; and ops that make
more than they read for F alone, such as a bias for each pair of positions, which would fill the memory of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from fpipe.graphs.language.graph import Aval, Graph, Name, Node
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


def values_of_params(graph: Graph, residuals: Collection[Name]) -> set[Name]:
    """Return the values that depend on parameters, buffers and constants alone, and that calls may share.

    None is larger than the tensors that it is computed from, so that a step holds at most a few copies of parameters;
    but for `residuals`, such as a float32 copy of a bfloat16 weight, of which each microbatch in flight would hold one.
    """
    constants = {name: graph.facts[name] for name in (*_params_of(graph), *graph.constants)}
    sources: dict[Name, frozenset[Name]] = {name: frozenset((name,)) for name in constants}
    free_storages, unshared = {fact.storage for fact in constants.values()}, _unshared_storages(graph)
    random_names = {node.name for node in random_nodes_of(graph)}
    free_storages |= {graph.facts[name].storage for name in residuals}
    sources_by_storage: dict[int, frozenset[Name]] = {}
    values: set[Name] = set()
    for node in graph.nodes:
        stays = node.name in random_names or is_check(node.op) or is_collective(node.op)
        if stays or not all(name in sources for name in node.reads):
            continue
        sources[node.name] = frozenset[Name]().union(*(sources[name] for name in node.reads))
        # An op that returns a tuple has no fact: only its tensors are shared, each by its `getitem`.
        fact = graph.facts.get(node.name)
        if fact is None or fact.storage in unshared:
            continue
        # A view holds the storage that another op has filled: that op's sources count.
        storage_sources = sources_by_storage.setdefault(fact.storage, sources[node.name])
        excess_bytes = fact.bytes - sum(_bytes_of(constants[name].aval) for name in storage_sources)
        # Of an open size nobody knows whether it is larger.
        if fact.storage in free_storages or (isinstance(excess_bytes, int) and excess_bytes <= 0):
            values.add(node.name)
    return values


def _bytes_of(aval: Aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _unshared_storages(graph: Graph) -> set[int]:
    """Return the storages that an op of a step may write, so that each call needs its own."""
    # Sums are added to results in place. A draw may fill what it reads, and a batch norm writes its statistics
    # (`fuse_statistics`). Nobody writes parameters.
    leaves = [leaf for label, leaves in graph.writes.items() if label != "kept" for leaf in leaves]
    writers = [*random_nodes_of(graph), *(node for node in graph.nodes if node.op is RUNNING_STATISTICS)]
    names = [*(leaf for leaf in leaves if isinstance(leaf, Name)), *(name for node in writers for name in node.reads)]
    return {graph.facts[name].storage for name in names if name in graph.facts} - param_storages(graph)


def _params_of(graph: Graph) -> set[Name]:
    return {name for label in graph.reads if is_parameter(label) for name in graph.reads[label] if name is not None}


def param_storages(graph: Graph) -> set[int]:
    """Return the storages of the parameters, and of buffers that no op writes."""
    return {graph.facts[name].storage for name in _params_of(graph)}


def hoisted_reads(part: Graph, values: Collection[Name]) -> list[Name]:
    """Return the names of parameters and of their `values` that the remaining ops of a part read or return."""
    read_names = {name for node in _remaining_nodes(part, values) for name in node.reads}
    read_names |= {leaf for leaves in part.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    params = [name for label in part.reads if is_parameter(label) for name in part.reads[label]]
    return [name for name in (*params, *(n.name for n in part.nodes if n.name in values)) if name in read_names]


def _remaining_nodes(part: Graph, values: Collection[Name]) -> list[Node]:
    """Return the ops of a part that compute no hoisted value: neither `values` nor ops that only `values` read."""
    operand_names = {name for node in part.nodes for name in node.reads}
    read_names = {leaf for leaves in part.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    remaining: list[Node] = []
    for node in reversed(part.nodes):
        # An op that no other op reads is a result, a draw or a check.
        if node.name not in values and (node.name in read_names or node.name not in operand_names):
            remaining.append(node)
            read_names.update(node.reads)
    return remaining[::-1]


def without_hoisted(part: Graph, values: Collection[Name], groups: Sequence[Sequence[Name]]) -> Graph:
    """Return a part that reads `groups` of hoisted values instead of parameters."""
    read_names = {*hoisted_reads(part, values)}
    leaves_by_label = {
        hoisted_label(number): tuple(name if name in read_names else None for name in group)
        for number, group in enumerate(groups)
        if not read_names.isdisjoint(group)
    }
    other_reads = {label: leaves for label, leaves in part.reads.items() if not is_parameter(label)}
    return replace(part, nodes=tuple(_remaining_nodes(part, values)), reads={**leaves_by_label, **other_reads})


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
