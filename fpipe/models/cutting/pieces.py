"""Take a stage's graph apart into its blocks and what is between them, each a piece that can be traced alone.

sizes, masks | wte | h.0 | h.1 | h.2        where a later piece than the next reads a value too, pieces are one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.meaning.purity.attributes import Same, value_key
from fpipe.meaning.purity.own_memory import mutated_by
from fpipe.models.cutting.marked_graph import draws_random
from fpipe.models.tracing.contexts import Context, contexts_of, copy_nodes, restored_on_error

BLOCK = "fpipe_block"
"""Where a node's meta says which of the repeated blocks of the net it is in."""


class GraphPiece:
    """Some operations of a stage, as a graph of their own.

    Attributes:
        takes: the values of the stage's graph that it reads, each with its label.
        makes: those that it hands on.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        makes: Sequence[fx.Node],
        labels: Mapping[fx.Node, str],
        contexts: Mapping[fx.Node, Context],
    ) -> None:
        own = {*nodes}
        read = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in own)
        self.takes = {node: labels.get(node, "x") for node in read}
        self.nodes, self.makes, self.contexts = nodes, makes, contexts

    @cached_property
    def graph(self) -> fx.Graph:
        """Its operations, in their contexts."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in self.takes}
        copy_nodes(graph, self.nodes, self.contexts, copies, copies.__getitem__)
        graph.output([copies[node] for node in self.makes])
        return graph

    @cached_property
    def twin(self) -> Any:
        """Equal for pieces of the same operations."""
        odd: list[Any] = []
        found = operations(self.graph, odd)
        return found, Same(self) if odd else None

    @cached_property
    def module(self) -> fx.GraphModule:
        """Its operations as a function."""
        return fx.GraphModule({}, self.graph)

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run its operations on the leaves that it takes."""
        with restored_on_error():
            return self.module.forward(*leaves)


def pieces_of(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> list[GraphPiece]:
    """The pieces of a stage, whose placeholders are labelled `params`, `const` or `x`; none where there are no blocks,
    or something is mutated, or returned as it came."""
    contexts = contexts_of(graph)
    nodes = [*contexts]
    results = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    odd = any(node.op == "get_attr" for node in graph.nodes) or any(node.op == "placeholder" for node in results)
    if odd or not any(BLOCK in node.meta for node in nodes) or any(mutated_by(node) for node in nodes):
        return []
    trained = _differentiable(graph, labels)
    first = _before_all(nodes, trained)
    runs = groupby((node for node in nodes if node not in first), lambda node: node.meta.get(BLOCK))
    home = dict.fromkeys(first, 0) | {node: at for at, (_, run) in enumerate(runs, 1) for node in run}
    while merged := next(_torn(home, trained, results), None):
        low, high = merged
        home = {node: low if low <= at <= high else at for node, at in home.items()}
    for node in (one for one in reversed(nodes) if one in first):  # a block's own mask is there while the block runs
        readers = {home[user] for user in node.users if user in home}
        of_batch = node in results or any(one in trained for one in node.all_input_nodes)
        of_many = any(isinstance(one.meta.get("val"), tuple | list) for one in node.all_input_nodes)
        if (
            len(readers) == 1
            and not of_batch
            and not of_many
            and (isinstance(node.meta.get("val"), Tensor) or node.target is getattr)
        ):
            (home[node],) = readers
    found: list[GraphPiece] = []
    for number in sorted({*home.values()}):
        own = [node for node in nodes if home[node] == number]
        made = [one for one in own if one in results or any(home.get(user, number) != number for user in one.users)]
        found.append(GraphPiece(own, made, labels, contexts))
    return found


def _differentiable(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> set[fx.Node]:
    """The values that may have a gradient: floats that follow from parameters or from floats that came."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        one = isinstance(value, Tensor)
        floats = value.is_floating_point() or value.is_complex() if one else isinstance(value, tuple | list)
        came = node.op == "placeholder" and labels[node] != "const"
        if floats and (came or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _before_all(nodes: Iterable[fx.Node], trained: set[fx.Node]) -> set[fx.Node]:
    """Sizes, masks, tables: what needs no value with a gradient and draws nothing, and so may come first."""
    found: set[fx.Node] = set()
    for node in nodes:
        early = all(one.op == "placeholder" or one in found for one in node.all_input_nodes)
        if early and node not in trained and not draws_random(node):
            found.add(node)
    return found


def _torn(home: Mapping[fx.Node, int], trained: set[fx.Node], results: set[fx.Node]) -> Iterator[tuple[int, int]]:
    """The first and the last of pieces that are one: they read one value with a gradient, or parts of one op's."""
    for value in trained:
        many = isinstance(value.meta["val"], tuple | list)
        readers = {home[user] for user in value.users if many or user in trained} - {home.get(value)}
        if readers and len(readers) + (value in results) + many > 1:
            yield min(home.get(value, min(readers)), *readers), max(readers)


def operations(graph: fx.Graph, odd: list[Any], attributes: Any = None) -> Any:
    """The operations of a graph as a value to compare: equal for the same operations on the same constants, which
    `attributes` has. `odd` takes what may change and stay the same object."""
    place = {node: at for at, node in enumerate(graph.nodes)}

    def seen(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return "node", place[arg]
        if isinstance(arg, list | tuple):
            return type(arg), tuple(map(seen, arg))
        return value_key(arg, odd if not isinstance(arg, _NAMED) else [])

    def target(node: fx.Node) -> Any:
        """The function that a node calls, or the constant that it is; of placeholders only the order counts."""
        if node.op == "get_attr":
            return Same(getattr(attributes, str(node.target)))
        return None if node.op in ("placeholder", "output") else node.target

    return tuple(
        (node.op, target(node), seen(node.args), tuple((word, seen(arg)) for word, arg in node.kwargs.items()))
        for node in graph.nodes
    )


_NAMED = torch.memory_format | torch.layout
