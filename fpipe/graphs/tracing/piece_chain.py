"""Trace a stage piece by piece: equal pieces, such as the blocks of a net, share one trace, of which its own is made.

    stage: embed  h.0  h.1  h.2        -->        trace(embed), trace(h.0)        three times over, under other names

A piece is a function of leaves, as a stage is. A value that has a gradient is read by one piece beside the one that
makes it, so gradients are added up in the order in which autograd adds them for the whole stage: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import (
    Aval,
    Fact,
    Graph,
    Name,
    Node,
    Outline,
    forward_end,
    fresh_storage,
    in_own_storage,
    renamed,
    rewritten,
    without_repeated_views,
)
from fpipe.graphs.language.labels import GENERATORS, cotangent_of, gradient_of, is_input, label_at, variable
from fpipe.graphs.tracing.stage_call import Spec, StageCall, positions
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.own_memory import alias
from fpipe.meaning.stages.outputs import outputs_of
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage

PieceValue = Hashable
"""The identity of a value of a stage."""

Places = Mapping[PieceValue, tuple[str, int]]
"""The label, and the place under it, of each value that a stage or a piece is handed."""


class TracedPiece(NamedTuple):
    """A piece that is traced: what it reads, what it writes as `y`, in order, and its graph with gradients."""

    takes: Places
    makes: Sequence[PieceValue]
    graph: Graph


class FactMover:
    """Moves facts of a piece to storages of its stage; `bases` are facts of its inputs, by the storage in the piece."""

    def __init__(self) -> None:
        self.bases: dict[int, Fact] = {}
        self.fresh: dict[int, int] = {}

    def __call__(self, fact: Fact) -> Fact:
        """Return a tensor's fact in the stage's storages."""
        base = self.bases.get(fact.storage)
        if base is None:
            return fact._replace(storage=self.fresh.setdefault(fact.storage, fresh_storage()))
        before = base.offset * base.aval.dtype.itemsize // fact.aval.dtype.itemsize
        return fact._replace(storage=base.storage, offset=before + fact.offset, bytes=base.bytes)


def _fact_of(leaf: Any) -> Any:
    return in_own_storage(leaf) if isinstance(leaf, Aval) else leaf


def joined(
    parts: Sequence[TracedPiece],
    takes: Places,
    reads: Mapping[str, Sequence[Any]],
    writes: Mapping[str, Sequence[Any]],
    cotangents: Mapping[str, Sequence[Any]],
) -> Graph:
    """Join the graphs of pieces to that of their stage: forwards in order, then gradients from the last one back.

    The names of a piece get its number in front, and a tensor that a piece hands to another has one storage in both. Of
    each value at most one of its pieces, or the cotangents, have a gradient.
    """
    whole = _StageGraph({**reads, **cotangents})
    names: dict[PieceValue, Any] = {value: whole.reads[label][at] for value, (label, at) in takes.items()}
    gradients: dict[PieceValue, Name] = {
        value: seed
        for label, values in writes.items()
        for value, seed in zip(values, whole.reads.get(cotangent_of(label), ()), strict=False)
        if seed is not None
    }
    pieces = [_RenamedPiece(whole, number, part) for number, part in enumerate(parts)]
    for piece in pieces:
        piece.add_forward(names)
    for piece in reversed(pieces):
        piece.add_backward(gradients)
    results = {label: tuple(names.get(leaf, leaf) for leaf in leaves) for label, leaves in writes.items()}
    values = {place: value for value, place in takes.items()}
    for label, leaves in reads.items():
        gradient = gradient_of(label)
        if gradient is not None:
            results[gradient] = tuple(gradients.get(values.get((label, at))) for at in range(len(leaves)))
    return whole.graph(results)


class _StageGraph:
    """A stage's graph under construction."""

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self.reads = {
            label: tuple(
                Name(variable(label, at)) if isinstance(leaf, Aval) else None for at, leaf in enumerate(leaves)
            )
            for label, leaves in inputs.items()
        }
        self.facts: dict[Name, Fact] = {
            name: in_own_storage(leaf._replace(wants=False))
            for label, leaves in inputs.items()
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


class _RenamedPiece:
    """A piece under its names in the stage."""

    def __init__(self, whole: _StageGraph, number: int, part: TracedPiece) -> None:
        self.whole, self.part, self.move = whole, part, FactMover()
        graph = part.graph
        defined = (*(node.name for node in graph.nodes), *graph.constants)
        self.names: dict[Name, Any] = {name: Name(f"p{number}_{name}") for name in defined}
        self.end = forward_end(graph)

    def add_forward(self, names: dict[PieceValue, Any]) -> None:
        """Add the ops before any gradient comes, and the names of the values that they make."""
        graph = self.part.graph
        for value, (label, at) in self.part.takes.items():
            self._hand(graph.reads[label][at], names[value])
        self._add(graph.constants)
        self._add_nodes(graph.nodes[: self.end])
        self.whole.constants |= {self.names[name]: tensor for name, tensor in graph.constants.items()}
        self.whole.generators |= dict(zip(graph.drawn_on, graph.reads.get(GENERATORS, ()), strict=True))
        self.whole.ran += graph.ran
        names.update(zip(self.part.makes, renamed(graph.writes["y"], self.names), strict=True))

    def add_backward(self, gradients: dict[PieceValue, Any]) -> None:
        """Add the ops of the gradient, and the names of the gradients that they make."""
        graph = self.part.graph
        for value, seed in zip(self.part.makes, graph.reads["dy"], strict=True):
            self._hand(seed, gradients.get(value))
        self._add_nodes(graph.nodes[self.end :])
        for value, (label, at) in self.part.takes.items():
            label = gradient_of(label) or ""
            if label and graph.writes[label][at] is not None:
                gradients[value] = renamed(graph.writes[label][at], self.names)

    def _hand(self, name: Name | None, stage_name: Any) -> None:
        """Name a tensor that the piece is handed."""
        if name is not None:
            self.names[name] = stage_name
            self.move.bases[self.part.graph.facts[name].storage] = self.whole.facts[stage_name]

    def _add_nodes(self, nodes: Sequence[Node]) -> None:
        self._add(node.name for node in nodes)
        self.whole.nodes += (rewritten(node, self.names, self.names[node.name]) for node in nodes)

    def _add(self, names: Iterable[Name]) -> None:
        facts = self.part.graph.facts
        self.whole.facts |= {self.names[name]: self.move(facts[name]) for name in names if name in facts}


class Piece(Protocol):
    """Some of a stage's operations.

    Attributes:
        takes: the values that it reads, each with a label: `params`, `const` or `x`.
        makes: the values that it hands on.
        twin: equal for pieces that do the same with other values.
    """

    takes: Mapping[PieceValue, str]
    makes: Sequence[PieceValue]
    twin: Any

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run it on the leaves that it takes."""
        ...


class PieceCall:
    """A piece, and by label the avals of the leaves that it is called with; `takes` says of which values they are."""

    def __init__(self, piece: Piece, known: Mapping[PieceValue, Any]) -> None:
        self.piece = piece
        self.reads: dict[str, list[Any]] = {}
        self.takes: dict[PieceValue, tuple[str, int]] = {}
        for value, label in piece.takes.items():
            leaf = known[value]
            if isinstance(leaf, Fact) and any(leaf.lazy):
                raise Untraceable("a block hands on what is to be conjugated by whoever reads it; say .resolve_conj()")
            avals = self.reads.setdefault(label, [])
            self.takes[value] = label, len(avals)
            avals.append(leaf.aval if isinstance(leaf, Fact) else leaf)
        self.labels = tuple(piece.takes.values())
        self.key = "piece", piece.twin, self.labels, repr(self.reads)

    def __call__(self, given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Run it as a function of leaves by label; of what another piece made it is handed an alias."""
        args = [alias(given[label][at]) if label == "x" else given[label][at] for label, at in self.takes.values()]
        return {"y": [*self.piece.run(args)]}


@dataclass(frozen=True)
class Chain:
    """A call of a stage in pieces.

    Attributes:
        pieces: in the order in which they run.
        takes: what they read of what the stage is handed.
        reads: the avals of that, by label.
        writes: what the stage writes, by label: values, each once, and leaves that are none.
        specs: the containers around them.
    """

    pieces: Sequence[Piece]
    takes: Places
    reads: Mapping[str, Sequence[Any]]
    writes: Mapping[str, Sequence[Any]]
    specs: Mapping[str, Spec]

    def outline(self, outline: Callable[[PieceCall], Outline]) -> Outline:
        """Return the outline of the whole stage, from the outlines of its pieces."""
        reads = {label: [*map(_fact_of, leaves)] for label, leaves in self.reads.items()}
        known: dict[PieceValue, Any] = {value: reads[label][at] for value, (label, at) in self.takes.items()}
        outlines = [outlined for _, outlined in self._followed(outline, known)]
        writes = {label: [known.get(leaf, leaf) for leaf in leaves] for label, leaves in self.writes.items()}
        ran = tuple(op for outlined in outlines for op in outlined.ran)
        return Outline(reads, writes, ran, (), any(outlined.python for outlined in outlines), self.specs)

    def graph(
        self,
        outline: Callable[[PieceCall], Outline],
        trace: Callable[[PieceCall, dict[str, tuple[Any, ...]]], Graph],
        cotangents: Mapping[str, tuple[Any, ...]],
    ) -> Graph:
        """Return the trace of the whole stage, from outlines and traces of its pieces."""
        known: dict[PieceValue, Any] = {
            value: _fact_of(self.reads[label][at]) for value, (label, at) in self.takes.items()
        }
        calls = [call for call, _ in self._followed(outline, known)]
        seeds: dict[PieceValue, Aval | None] = {
            value: seed
            for label, values in self.writes.items()
            for value, seed in zip(values, cotangents.get(cotangent_of(label), ()), strict=False)
        }
        parts: list[TracedPiece] = []
        for call in reversed(calls):
            makes = call.piece.makes
            graph = trace(call, {"dy": tuple(map(seeds.get, makes))})
            parts.insert(0, TracedPiece(call.takes, makes, graph))
            for value, (label, at) in call.takes.items():
                gradient = graph.writes["dx"][at] if label == "x" else None
                if gradient is not None:
                    seeds[value] = graph.facts[gradient].aval
        return joined(parts, self.takes, self.reads, self.writes, cotangents)

    def _followed(
        self, outline: Callable[[PieceCall], Outline], known: dict[PieceValue, Any]
    ) -> Iterator[tuple[PieceCall, Outline]]:
        """Yield the call of each piece and its outline, and note in `known` what it makes."""
        for piece in self.pieces:
            call = PieceCall(piece, known)
            outlined, move = outline(call), FactMover()
            for value, (label, at) in call.takes.items():
                if isinstance(known[value], Fact):
                    move.bases[outlined.reads[label][at].storage] = known[value]
            for value, leaf in zip(piece.makes, outlined.writes["y"], strict=True):
                known[value] = move(leaf) if isinstance(leaf, Fact) else leaf
            yield call, outlined


def chain_of(model: Model, call: StageCall) -> Chain | None:
    """Return a call of a stage in pieces, if it is of a net that has some and knows only parameters and inputs."""
    stage = None if call.stage is None else model.stages[call.stage]
    if stage is None or call.stage is None or not isinstance(stage.forward, PositionalStage):
        return None
    leaves = [leaf for _, leaves in call.reads for leaf in leaves]
    knows_more = stage.asks or stage.aux_loss or call.starts or model.per_example
    if knows_more or any(getattr(leaf, "sharding", None) for leaf in leaves) or not stage.forward.pieces:
        return None
    reads = dict(call.reads)
    tokens = {label: [*map(_token, leaves)] for label, leaves in reads.items()}
    x = [tree.unflatten(spec, tokens[label]) for label, spec in call.specs if is_input(label)]
    params = [tokens[label][at] for label, at in positions(model, stage.forward)]
    many = isinstance(model.inputs[call.stage], tuple)
    try:
        in_pieces = stage.forward.in_pieces(params, tokens.get("const", []), tuple(x) if many else x[0])
    except ValueError:  # what is wrong with the batch is said where the stage runs
        return None
    if in_pieces is None:
        return None
    taken, y = in_pieces
    ports = [tree.flatten(output) for output in outputs_of(model, call.stage, y)]
    values = [leaf for leaves, _ in ports for leaf in leaves]
    places = {id(token): (label, at) for label, given in tokens.items() for at, token in enumerate(given)}
    if len({*map(id, values)}) < len(values) or not all(isinstance(token, Tensor) for token in taken.values()):
        return None
    written = {label_at("y", port): flat for port, flat in enumerate(ports)} | {"kept": tree.flatten([])}
    return Chain(
        stage.forward.pieces,
        {value: places[id(token)] for value, token in taken.items()},
        reads,
        {label: leaves for label, (leaves, _) in written.items()},
        {label: spec for label, (_, spec) in written.items()},
    )


def _token(leaf: Any) -> Any:
    return leaf.empty("meta") if isinstance(leaf, Aval) else leaf
