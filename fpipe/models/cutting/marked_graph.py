"""Analyse a graph with marks: the stage of each operation, its reads, and the values that stages may recompute.

embed  MARK  block  MARK  head        -->        stage_of = {embed: 0, block: 1, head: 2}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fpipe.graphs.tracing.marks import MARK
from fpipe.graphs.tracing.random_ops import draws_random_numbers
from fpipe.meaning.purity.write_guard import is_check, mutated_nodes
from fpipe.models.exporting.net_graph import NetGraph
from fpipe.models.exporting.node_contexts import contexts_of, switches_context
from fpipe.models.exporting.source_locations import location_of
from fpipe.torch_internals import OpOverload, returns_of, schema_arguments


class MarkedGraph:
    """A traced function with marks between its stages. It knows neither losses nor batches.

    Attributes:
        value_by_mark_output: for each output of a mark the value that was marked.
        stage_of: the stage of each operation.
        stage_count: the number of stages.
        contexts: the grad mode and autocast of each operation.
        mutators: for each value whose storage is mutated, the operation that does it last.
        replicated: the values that every stage which reads them computes again.
    """

    def __init__(self, net: NetGraph) -> None:
        self.net, self.module, self.graph = net, net.module, net.module.graph
        self.value_by_mark_output = _marked_values(self.graph)
        self.stage_of = _stage_by_node(self.graph, self.value_by_mark_output, net.who)
        self.stage_count = 1 + max(self.stage_of.values())
        self.contexts = contexts_of(self.graph)
        self.mutators = {value: op for op in self.stage_of for x in mutated_nodes(op) for value in self.with_bases(x)}
        self.replicated = self._find_replicated()

    def value(self, node: fx.Node) -> fx.Node:
        """Return the node itself, or the marked value if it is an output of a mark."""
        return self.value_by_mark_output.get(node, node)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the values that an operation reads, seen through the marks."""
        return [self.value(node) for node in node.all_input_nodes]

    def dependents_of(self, values: Collection[fx.Node], excluded: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
        """Return the operations that depend on these values, in order, without the excluded ones."""
        users: dict[fx.Node, None] = {}
        for node in self.stage_of:
            if node not in excluded and any(value in users or value in values for value in self.reads(node)):
                users[node] = None
        return users

    def with_bases(self, node: fx.Node) -> list[fx.Node]:
        """Return a value and all values that it is a view of."""
        bases = [self.value(node)]
        # The list grows while it is walked: bases of bases are found too.
        for base in bases:
            bases += map(self.value, _aliased_arguments(base))
        return bases

    def _find_replicated(self) -> set[fx.Node]:
        """Find sizes, masks and literals: values that depend on no tensor of the caller, unmutated and not random."""
        # To compute them again in each stage is cheaper than to send them, and a size is no tensor that could be sent.
        replicated: set[fx.Node] = set()
        for node in self.graph.nodes:
            is_literal = node.op == "get_attr" or node in self.net.constants
            is_size = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | int)
            is_computed = node in self.stage_of and replicated.issuperset(self.reads(node))
            if (is_literal or is_size or is_computed) and node not in self.mutators and not has_effect(node):
                replicated.add(node)
        return replicated


def has_effect(node: fx.Node) -> bool:
    """Whether an operation must run though nobody reads it.

    It mutates a tensor, raises an error by its data, or draws random numbers, without which later draws would differ.
    """
    return bool(mutated_nodes(node)) or node_draws_random(node) or is_check(node.target)


def node_draws_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return draws_random_numbers(node.target, node.args, dict(node.kwargs))


def _marked_values(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the marked value of each output of a mark, also behind several marks in a row."""
    value_by_output: dict[fx.Node, fx.Node] = {}
    for mark in graph.find_nodes(op="call_function", target=MARK):
        values_in = [value_by_output.get(node, node) for node in mark.args[0]]
        value_by_output |= {output: values_in[output.args[1]] for output in mark.users}
    return value_by_output


def _stage_by_node(graph: fx.Graph, value_by_mark_output: dict[fx.Node, fx.Node], label: str) -> dict[fx.Node, int]:
    """Return the stage of each operation: the number of marks before it."""
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        if node.target is MARK:
            if stage not in stage_of.values():
                message = f"boundary {stage + 1} has nothing to compute before it; leave it out."
                raise ValueError(message + location_of(node))
            stage += 1
        elif node.op == "call_function" and node not in value_by_mark_output and not switches_context(node):
            stage_of[node] = stage
    if not stage_of:
        raise ValueError(f"{label} computes nothing: there is no stage to cut.")
    if stage not in stage_of.values():
        last_mark = graph.find_nodes(op="call_function", target=MARK)[-1]
        raise ValueError(f"boundary {stage} has nothing to compute behind it; leave it out.{location_of(last_mark)}")
    return stage_of


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation returns, or returns views of, by its schema."""
    if not isinstance(node.target, OpOverload) or all(result.alias_info is None for result in returns_of(node.target)):
        return []
    schema = schema_arguments(node.target)
    arguments = [*zip((argument.name for argument in schema), node.args, strict=False), *node.kwargs.items()]
    aliased = {argument.name for argument in schema if argument.alias_info is not None}
    values = [value if isinstance(value, list | tuple) else (value,) for name, value in arguments if name in aliased]
    return [value for argument_values in values for value in argument_values if isinstance(value, fx.Node)]


def buffers_written_by_stage(
    marked: MarkedGraph, names: Mapping[fx.Node, str], buffers: Collection[str]
) -> list[dict[fx.Node, str]]:
    """Return the buffers that each stage writes, by placeholder.

    Args:
        marked: the whole graph.
        names: the names of constants by placeholder.
        buffers: the names of those that are buffers.

    Raises:
        ValueError: a tensor is written that is no buffer, or two stages read or write one buffer.
    """
    buffers_by_stage: list[dict[fx.Node, str]] = [{} for _ in range(marked.stage_count)]
    for node, mutator in marked.mutators.items():
        if node.op != "placeholder":
            continue
        if names.get(node) not in buffers:
            raise ValueError(
                f"the net writes {names.get(node, node.name)!r} in place ({mutator.target}), which is no "
                f"buffer of its own. Work on a copy.{location_of(mutator)}"
            )
        # The stages of the buffer are those of its users, and of users of its views.
        dependents = marked.dependents_of([node])
        ops_on_views = [op for op in dependents if any(node in marked.with_bases(x) for x in marked.reads(op))]
        op_by_stage = {marked.stage_of[op]: op for op in (*ops_on_views, *node.users) if op in marked.stage_of}
        if len(op_by_stage) > 1:
            raise ValueError(
                f"buffer {names[node]!r} is written, and stages {min(op_by_stage)} and {max(op_by_stage)} use it; "
                "choose cuts= that keep it in one."
                f"{''.join(location_of(op_by_stage[stage]) for stage in (min(op_by_stage), max(op_by_stage)))}"
            )
        buffers_by_stage[min(op_by_stage)][node] = names[node]
    return buffers_by_stage


_NORMS: Any = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_TRAINING = 5  # the index of their argument `training` (2.13)


def reads_written_buffer(buffers: Iterable[fx.Node]) -> bool:
    """Whether an output may depend on written buffers: an op reads them besides the ops that update them.

    A norm in training writes its running statistics and does not read them for its output.
    """
    return any(
        not (user.target in _NORMS and user.args[_TRAINING]) and (node not in mutated_nodes(user) or bool(user.users))
        for node in buffers
        for user in node.users
    )
