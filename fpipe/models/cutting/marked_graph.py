"""Read a graph with marks: which stage each operation is in, what it reads, and what any stage may compute again.

embed  MARK  block  MARK  head        -->        stage_of = {embed: 0, block: 1, head: 2}
"""

from __future__ import annotations

from collections.abc import Collection

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
            value: node for node in self.stage_of for one in mutated_by(node) for value in self.viewed_by(one)
        }
        self.replicated = self._replicated()

    def value(self, node: fx.Node) -> fx.Node:
        """A node, or the value that was marked where it is an output of a mark."""
        return self.marked.get(node, node)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The values that an operation reads, seen through the marks."""
        return [self.value(one) for one in node.all_input_nodes]

    def computed_from(self, values: Collection[fx.Node], but: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
        """The operations that read these values, or what is computed from them, `but` some."""
        found: dict[fx.Node, None] = {}
        for node in self.stage_of:
            if node not in but and any(one in found or one in values for one in self.reads(node)):
                found[node] = None
        return found

    def viewed_by(self, node: fx.Node) -> list[fx.Node]:
        """A value, and all that it is a view of."""
        found = [self.value(node)]
        for one in found:  # it grows
            found += map(self.value, _viewed(one))
        return found

    def _replicated(self) -> set[fx.Node]:
        """Sizes, masks, literals: what is computed from no tensor that was given, is not mutated and not random."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            literal = node.op == "get_attr" or node in self.net.constants
            size = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | int)
            computed = node in self.stage_of and all(one in found for one in self.reads(node))
            if (literal or size or computed) and node not in self.mutators and not has_effect(node):
                found.add(node)
        return found


def has_effect(node: fx.Node) -> bool:
    """Whether an operation mutates a tensor, draws random numbers, so that those drawn later are others without, or
    raises where data are not as they should be."""
    return bool(mutated_by(node)) or draws_random(node) or is_check(node.target)


def draws_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return draws(node.target, node.args, dict(node.kwargs))


def _marked_values(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each output of a mark the value that was marked, be it by several marks in a row."""
    found: dict[fx.Node, fx.Node] = {}
    for mark in graph.find_nodes(op="call_function", target=MARK):
        values = [found.get(one, one) for one in mark.args[0]]
        found |= {output: values[output.args[1]] for output in mark.users}
    return found


def _stages(graph: fx.Graph, marked: dict[fx.Node, fx.Node], who: str) -> dict[fx.Node, int]:
    """The stage of each operation: how many marks stand before it."""
    found: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        if node.target is MARK:
            if stage not in found.values():
                words = f"boundary {stage + 1} has nothing to compute before it; leave it out."
                raise ValueError(words + place_of(node))
            stage += 1
        elif node.op == "call_function" and node not in marked and not switches_context(node):
            found[node] = stage
    if not found:
        raise ValueError(f"{who} computes nothing, so there is no stage to cut it into.")
    if stage not in found.values():
        last = graph.find_nodes(op="call_function", target=MARK)[-1]
        raise ValueError(f"boundary {stage} has nothing to compute behind it; leave it out.{place_of(last)}")
    return found


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation returns a view of, or as they are, by its schema."""
    if not isinstance(node.target, OpOverload) or all(one.alias_info is None for one in returns_of(node.target)):
        return []
    arguments = arguments_of(node.target)
    given = [*zip((one.name for one in arguments), node.args, strict=False), *node.kwargs.items()]
    aliased = {one.name for one in arguments if one.alias_info is not None}
    values = [arg if isinstance(arg, list | tuple) else (arg,) for name, arg in given if name in aliased]
    return [one for many in values for one in many if isinstance(one, fx.Node)]
