"""Put the graphs of a stage's pieces together into that of the stage: forwards in order, then gradients backwards.

    y1 = p0(x);  y = p1(y1)        then        dy1, g1 = p1'(dy);  dx, g0 = p0'(dy1)

The names of a piece get its number in front, and a tensor that one piece hands to another has one storage in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fpipe.graphs.language.graph import (
    Aval,
    Fact,
    Graph,
    Name,
    Node,
    forward_end,
    fresh_storage,
    in_own_storage,
    renamed,
    rewritten,
    without_repeated_views,
)
from fpipe.graphs.language.labels import GENERATORS, cotangent_of, gradient_of, variable

PieceValue = Hashable
"""The identity of a value of a stage."""

Places = Mapping[PieceValue, tuple[str, int]]
"""Of values that a stage, or a piece, is handed, the label and the place under it."""


class TracedPiece(NamedTuple):
    """A piece that is traced: what it reads, what it writes as `y`, in order, and its graph with gradients."""

    takes: Places
    makes: Sequence[PieceValue]
    graph: Graph


class Moved:
    """Facts of a piece as those of its stage; `bases` are those of what it is handed, by the storage in the piece."""

    def __init__(self) -> None:
        self.bases: dict[int, Fact] = {}
        self.fresh: dict[int, int] = {}

    def __call__(self, fact: Fact) -> Fact:
        """Move a tensor's fact to the stage's storages."""
        base = self.bases.get(fact.storage)
        if base is None:
            return fact._replace(storage=self.fresh.setdefault(fact.storage, fresh_storage()))
        before = base.offset * base.aval.dtype.itemsize // fact.aval.dtype.itemsize
        return fact._replace(storage=base.storage, offset=before + fact.offset, bytes=base.bytes)


def fact_of(leaf: Any) -> Any:
    """The fact of a tensor in a storage of its own, from its aval; other leaves as they are."""
    return in_own_storage(leaf) if isinstance(leaf, Aval) else leaf


def joined(
    parts: Sequence[TracedPiece],
    takes: Places,
    reads: Mapping[str, Sequence[Any]],
    writes: Mapping[str, Sequence[Any]],
    cotangents: Mapping[str, Sequence[Any]],
) -> Graph:
    """The graph of a stage that is handed `reads` and `cotangents`, and writes values, and leaves that are none.

    Of each value at most one of its pieces, or the cotangents, have a gradient.
    """
    whole = _Whole({**reads, **cotangents})
    made: dict[PieceValue, Any] = {value: whole.reads[label][at] for value, (label, at) in takes.items()}
    back: dict[PieceValue, Name] = {
        value: seed
        for label, values in writes.items()
        for value, seed in zip(values, whole.reads.get(cotangent_of(label), ()), strict=False)
        if seed is not None
    }
    pieces = [_Renamed(whole, number, part) for number, part in enumerate(parts)]
    for piece in pieces:
        piece.forward(made)
    for piece in reversed(pieces):
        piece.backward(back)
    found = {label: tuple(made.get(leaf, leaf) for leaf in leaves) for label, leaves in writes.items()}
    values = {place: value for value, place in takes.items()}
    for label, leaves in reads.items():
        gradient = gradient_of(label)
        if gradient is not None:
            found[gradient] = tuple(back.get(values.get((label, at))) for at in range(len(leaves)))
    return whole.graph(found)


class _Whole:
    """A stage's graph, as far as its pieces are joined."""

    def __init__(self, given: Mapping[str, Sequence[Any]]) -> None:
        self.reads = {
            label: tuple(
                Name(variable(label, at)) if isinstance(leaf, Aval) else None for at, leaf in enumerate(leaves)
            )
            for label, leaves in given.items()
        }
        self.facts: dict[Name, Fact] = {
            name: in_own_storage(leaf._replace(wants=False))
            for label, leaves in given.items()
            for name, leaf in zip(self.reads[label], leaves, strict=True)
            if name is not None
        }
        self.nodes: list[Node] = []
        self.constants: dict[Name, Any] = {}
        self.generators: dict[str, Name] = {}
        self.ran: list[str] = []

    def graph(self, writes: Mapping[str, tuple[Any, ...]]) -> Graph:
        generators = {GENERATORS: tuple(self.generators.values())} if self.generators else {}
        reads, ran, on = {**self.reads, **generators}, tuple(self.ran), tuple(self.generators)
        return without_repeated_views(Graph(tuple(self.nodes), self.facts, self.constants, reads, writes, ran, on))


class _Renamed:
    """A piece under its names in the stage."""

    def __init__(self, whole: _Whole, number: int, part: TracedPiece) -> None:
        self.whole, self.part, self.moved = whole, part, Moved()
        graph = part.graph
        own = (*(node.name for node in graph.nodes), *graph.constants)
        self.names: dict[Name, Any] = {name: Name(f"p{number}_{name}") for name in own}
        self.end = forward_end(graph)

    def forward(self, made: dict[PieceValue, Any]) -> None:
        """Put in what it computes before any gradient comes; `made` are the names of values so far."""
        graph = self.part.graph
        for value, (label, at) in self.part.takes.items():
            self._hand(graph.reads[label][at], made[value])
        self._add(graph.constants)
        self._add_nodes(graph.nodes[: self.end])
        self.whole.constants |= {self.names[name]: tensor for name, tensor in graph.constants.items()}
        self.whole.generators |= dict(zip(graph.drawn_on, graph.reads.get(GENERATORS, ()), strict=True))
        self.whole.ran += graph.ran
        made.update(zip(self.part.makes, renamed(graph.writes["y"], self.names), strict=True))

    def backward(self, back: dict[PieceValue, Any]) -> None:
        """Put in what it computes of gradients; `back` are the names of those so far, by the value that has it."""
        graph = self.part.graph
        for value, seed in zip(self.part.makes, graph.reads["dy"], strict=True):
            self._hand(seed, back.get(value))
        self._add_nodes(graph.nodes[self.end :])
        for value, (label, at) in self.part.takes.items():
            gradient = gradient_of(label)
            found = None if gradient is None else graph.writes[gradient][at]
            if found is not None:
                back[value] = renamed(found, self.names)

    def _hand(self, name: Name | None, given: Any) -> None:
        """Name a tensor that the piece is handed."""
        if name is not None:
            self.names[name] = given
            self.moved.bases[self.part.graph.facts[name].storage] = self.whole.facts[given]

    def _add_nodes(self, nodes: Sequence[Node]) -> None:
        self._add(node.name for node in nodes)
        self.whole.nodes += (rewritten(node, self.names, self.names[node.name]) for node in nodes)

    def _add(self, names: Iterable[Name]) -> None:
        facts = self.part.graph.facts
        self.whole.facts |= {self.names[name]: self.moved(facts[name]) for name in names if name in facts}
