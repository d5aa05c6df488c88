"""Read a graph with marks: which stage each operation is in, what it reads, and what any stage may compute again.

embed  MARK  block  MARK  head        -->        stage_of = {embed: 0, block: 1, head: 2}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fpipe.graphs.tracing.draws import draws
from fpipe.meaning.purity.own_memory import is_check, mutated_by
from fpipe.models.tracing.boundary import MARK
from fpipe.models.tracing.contexts import contexts_of, switches_context
from fpipe.models.tracing.net_graph import NetGraph
from fpipe.models.tracing.places import place_of
from fpipe.torch_internals import OpOverload, arguments_of, returns_of


class MarkedGraph:
    """A traced function with marks between its stages. Nothing here knows of losses or of batches.

    Attributes:
        marked: for each output of a mark the value that was marked.
        stage_of: the stage of each operation, and `stages`, how many there are.
        contexts: whether gradients are on and autocast is, for each operation.
        mutators: for each value whose storage is mutated, the operation that does it last.
        replicated: the values that each stage which reads them computes again.
    """

    def __init__(self, net: NetGraph) -> None:
        self.net, self.module, self.graph = net, net.module, net.module.graph
        self.marked = _marked_values(self.graph)
        self.stage_of = _stages(self.graph, self.marked, net.who)
        self.stages = 1 + max(self.stage_of.values())
        self.contexts = contexts_of(self.graph)
        self.mutators = {
            value: node for node in self.stage_of for written in mutated_by(node) for value in self.viewed_by(written)
        }
        self.replicated = self._replicated()

    def value(self, node: fx.Node) -> fx.Node:
        """A node, or the value that was marked where it is an output of a mark."""
        return self.marked.get(node, node)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The values that an operation reads, seen through the marks."""
        return [self.value(node) for node in node.all_input_nodes]

    def computed_from(self, values: Collection[fx.Node], but: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
        """The operations that read these values, or what is computed from them, `but` some."""
        users: dict[fx.Node, None] = {}
        for node in self.stage_of:
            if node not in but and any(value in users or value in values for value in self.reads(node)):
                users[node] = None
        return users

    def viewed_by(self, node: fx.Node) -> list[fx.Node]:
        """A value, and all that it is a view of."""
        bases = [self.value(node)]
        for base in bases:  # it grows
            bases += map(self.value, _viewed(base))
        return bases

    def _replicated(self) -> set[fx.Node]:
        """Sizes, masks, literals: what is computed from no tensor that was given, is not mutated and not random."""
        replicated: set[fx.Node] = set()
        for node in self.graph.nodes:
            literal = node.op == "get_attr" or node in self.net.constants
            size = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | int)
            computed = node in self.stage_of and replicated.issuperset(self.reads(node))
            if (literal or size or computed) and node not in self.mutators and not has_effect(node):
                replicated.add(node)
        return replicated


def has_effect(node: fx.Node) -> bool:
    """Whether an operation mutates a tensor, draws random numbers, so that those drawn later are others without, or
    raises where data are not as they should be."""
    return bool(mutated_by(node)) or draws_random(node) or is_check(node.target)


def draws_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return draws(node.target, node.args, dict(node.kwargs))


def _marked_values(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each output of a mark the value that was marked, be it by several marks in a row."""
    values: dict[fx.Node, fx.Node] = {}
    for mark in graph.find_nodes(op="call_function", target=MARK):
        marked = [values.get(node, node) for node in mark.args[0]]
        values |= {output: marked[output.args[1]] for output in mark.users}
    return values


def _stages(graph: fx.Graph, marked: dict[fx.Node, fx.Node], who: str) -> dict[fx.Node, int]:
    """The stage of each operation: how many marks stand before it."""
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        if node.target is MARK:
            if stage not in stage_of.values():
                words = f"boundary {stage + 1} has nothing to compute before it; leave it out."
                raise ValueError(words + place_of(node))
            stage += 1
        elif node.op == "call_function" and node not in marked and not switches_context(node):
            stage_of[node] = stage
    if not stage_of:
        raise ValueError(f"{who} computes nothing, so there is no stage to cut it into.")
    if stage not in stage_of.values():
        last = graph.find_nodes(op="call_function", target=MARK)[-1]
        raise ValueError(f"boundary {stage} has nothing to compute behind it; leave it out.{place_of(last)}")
    return stage_of


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation returns a view of, or as they are, by its schema."""
    if not isinstance(node.target, OpOverload) or all(result.alias_info is None for result in returns_of(node.target)):
        return []
    schema = arguments_of(node.target)
    arguments = [*zip((argument.name for argument in schema), node.args, strict=False), *node.kwargs.items()]
    aliased = {argument.name for argument in schema if argument.alias_info is not None}
    values = [value if isinstance(value, list | tuple) else (value,) for name, value in arguments if name in aliased]
    return [value for several in values for value in several if isinstance(value, fx.Node)]


def written_by(marked: MarkedGraph, names: Mapping[fx.Node, str], buffers: Collection[str]) -> list[dict[fx.Node, str]]:
    """Return the buffers that each stage writes, by placeholder.

    Args:
        marked: the whole graph.
        names: what is no parameter and no input, by placeholder, and `buffers`, which of these are buffers.

    Raises:
        ValueError: something is written that is no buffer, or two stages have to do with one.
    """
    buffers_by_stage: list[dict[fx.Node, str]] = [{} for _ in range(marked.stages)]
    for node, mutator in marked.mutators.items():
        if node.op != "placeholder":
            continue
        if names.get(node) not in buffers:
            raise ValueError(
                f"the net writes {names.get(node, node.name)!r} in place ({mutator.target}), which is no "
                f"buffer of its own; a stage is a pure function. Work on a copy.{place_of(mutator)}"
            )
        viewing = (
            op for op in marked.computed_from([node]) if any(node in marked.viewed_by(x) for x in marked.reads(op))
        )
        homes = {marked.stage_of[op]: op for op in (*viewing, *node.users) if op in marked.stage_of}
        if len(homes) > 1:
            raise ValueError(
                f"buffer {names[node]!r} is written in a net that reads or writes it in stages {min(homes)} and "
                f"{max(homes)}; choose cuts= that keep it in one."
                f"{''.join(place_of(homes[stage]) for stage in (min(homes), max(homes)))}"
            )
        buffers_by_stage[min(homes)][node] = names[node]
    return buffers_by_stage


_NORMS: Any = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_TRAINING = 5  # the place of that argument


def is_read(buffers: Iterable[fx.Node]) -> bool:
    """Whether an output may be computed from buffers that are written: more reads them than what writes them."""
    return any(
        not (user.target in _NORMS and user.args[_TRAINING]) and (node not in mutated_by(user) or bool(user.users))
        for node in buffers
        for user in node.users
    )
