"""Trace a stage piece by piece, so that equal pieces, such as the blocks of a net, share one trace.

    stage: embed  h.0  h.1  h.2        -->        trace(embed), trace(h.0)        three copies of it, renamed

A piece is a function of leaves, as a stage is. A value with a gradient is read by only one piece besides its writer, so
gradients are added in the order in which autograd adds them for the whole stage: the bits are the same.
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
    fact_in_own_storage,
    forward_end,
    fresh_storage,
    rewire_node,
    substitute_names,
    without_repeated_views,
)
from fpipe.graphs.language.labels import GENERATORS, cotangent_of, gradient_of, is_input, label_at, variable_name
from fpipe.graphs.tracing.stage_call import Spec, StageCall, param_slots_of
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.outputs import outputs_of
from fpipe.meaning.purity.write_guard import alias
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage

PieceValue = Hashable
"""The identity of a value of a stage."""

Slots = Mapping[PieceValue, tuple[str, int]]
"""The slot of each input value of a stage or piece: its label, and its index among the leaves under that label."""


class TracedPiece(NamedTuple):
    """The joint graph of a piece, with the slots of its inputs and its outputs in the order of `y`."""

    slots: Slots
    outputs: Sequence[PieceValue]
    graph: Graph


class FactMover:
    """Translates facts of a piece, which was traced alone, to the storages of its stage.

    Attributes:
        base_by_storage: facts of the piece's inputs in the stage, by their storage in the piece.
        new_storages: storages of the stage for tensors that the piece allocates, by their storage in the piece.
    """

    def __init__(self) -> None:
        self.base_by_storage: dict[int, Fact] = {}
        self.new_storages: dict[int, int] = {}

    def __call__(self, fact: Fact) -> Fact:
        """Return a tensor's fact in the stage's storages."""
        base = self.base_by_storage.get(fact.storage)
        if base is None:
            return fact._replace(storage=self.new_storages.setdefault(fact.storage, fresh_storage()))
        # Offsets count elements. A view may have another dtype than its base (`view(torch.int32)`): go through bytes.
        base_offset = base.offset * base.aval.dtype.itemsize // fact.aval.dtype.itemsize
        return fact._replace(storage=base.storage, offset=base_offset + fact.offset, bytes=base.bytes)


def _as_fact(leaf: Any) -> Any:
    return fact_in_own_storage(leaf) if isinstance(leaf, Aval) else leaf


def join_pieces(
    traced_pieces: Sequence[TracedPiece],
    slots: Slots,
    reads: Mapping[str, Sequence[Any]],
    writes: Mapping[str, Sequence[Any]],
    cotangents: Mapping[str, Sequence[Any]],
) -> Graph:
    """Join the graphs of pieces to the graph of their stage: forwards in order, then gradients from the last one back.

    The names of a piece get its number as a prefix. A tensor that one piece hands to another has one storage in both.
    """
    stage_graph = _StageGraphBuilder({**reads, **cotangents})
    name_by_value: dict[PieceValue, Any] = {value: stage_graph.reads[label][i] for value, (label, i) in slots.items()}
    # No gradient is ever summed here: the cotangents or one piece alone contribute the gradient of a value.
    gradient_by_value: dict[PieceValue, Name] = {
        value: cotangent
        for label, outputs in writes.items()
        for value, cotangent in zip(outputs, stage_graph.reads.get(cotangent_of(label), ()), strict=False)
        if cotangent is not None
    }
    pieces = [_RenamedPiece(stage_graph, piece_index, traced) for piece_index, traced in enumerate(traced_pieces)]
    for piece in pieces:
        piece.add_forward(name_by_value)
    for piece in reversed(pieces):
        piece.add_backward(gradient_by_value)
    results = {label: tuple(name_by_value.get(leaf, leaf) for leaf in leaves) for label, leaves in writes.items()}
    value_by_slot = {slot: value for value, slot in slots.items()}
    for label, leaves in reads.items():
        gradient = gradient_of(label)
        if gradient is not None:
            results[gradient] = tuple(gradient_by_value.get(value_by_slot.get((label, i))) for i in range(len(leaves)))
    return stage_graph.build(results)


class _StageGraphBuilder:
    """A stage's graph under construction."""

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self.reads = {
            label: tuple(Name(variable_name(label, i)) if isinstance(x, Aval) else None for i, x in enumerate(leaves))
            for label, leaves in inputs.items()
        }
        self.facts: dict[Name, Fact] = {
            name: fact_in_own_storage(leaf._replace(wants_grad=False))
            for label, leaves in inputs.items()
            for name, leaf in zip(self.reads[label], leaves, strict=True)
            if name is not None
        }
        self.nodes: list[Node] = []
        self.constants: dict[Name, Any] = {}
        self.generators: dict[str, Name] = {}
        self.ran: list[str] = []

    def build(self, writes: Mapping[str, tuple[Any, ...]]) -> Graph:
        generators = {GENERATORS: tuple(self.generators.values())} if self.generators else {}
        reads, ran, devices = {**self.reads, **generators}, tuple(self.ran), tuple(self.generators)
        return without_repeated_views(Graph(tuple(self.nodes), self.facts, self.constants, reads, writes, ran, devices))


class _RenamedPiece:
    """Adds the ops of one traced piece to the graph of its stage, renamed."""

    def __init__(self, stage_graph: _StageGraphBuilder, piece_index: int, traced: TracedPiece) -> None:
        self.stage_graph, self.traced, self.move = stage_graph, traced, FactMover()
        graph = traced.graph
        defined = (*(node.name for node in graph.nodes), *graph.constants)
        self.names: dict[Name, Any] = {name: Name(f"p{piece_index}_{name}") for name in defined}
        self.forward_end = forward_end(graph)

    def add_forward(self, name_by_value: dict[PieceValue, Any]) -> None:
        graph = self.traced.graph
        for value, (label, index) in self.traced.slots.items():
            self._bind_input(graph.reads[label][index], name_by_value[value])
        self._add_facts(graph.constants)
        self._add_nodes(graph.nodes[: self.forward_end])
        self.stage_graph.constants |= {self.names[name]: tensor for name, tensor in graph.constants.items()}
        self.stage_graph.generators |= dict(zip(graph.generator_devices, graph.reads.get(GENERATORS, ()), strict=True))
        self.stage_graph.ran += graph.ran
        name_by_value.update(zip(self.traced.outputs, substitute_names(graph.writes["y"], self.names), strict=True))

    def add_backward(self, gradient_by_value: dict[PieceValue, Any]) -> None:
        graph = self.traced.graph
        for value, cotangent_name in zip(self.traced.outputs, graph.reads["dy"], strict=True):
            self._bind_input(cotangent_name, gradient_by_value.get(value))
        self._add_nodes(graph.nodes[self.forward_end :])
        for value, (label, index) in self.traced.slots.items():
            label = gradient_of(label) or ""
            if label and graph.writes[label][index] is not None:
                gradient_by_value[value] = substitute_names(graph.writes[label][index], self.names)

    def _bind_input(self, name: Name | None, stage_name: Any) -> None:
        """Let an input of the piece be a tensor of the stage, in the memory that it has there."""
        if name is not None:
            self.names[name] = stage_name
            self.move.base_by_storage[self.traced.graph.facts[name].storage] = self.stage_graph.facts[stage_name]

    def _add_nodes(self, nodes: Sequence[Node]) -> None:
        self._add_facts(node.name for node in nodes)
        self.stage_graph.nodes += (rewire_node(node, self.names, self.names[node.name]) for node in nodes)

    def _add_facts(self, names: Iterable[Name]) -> None:
        facts = self.traced.graph.facts
        self.stage_graph.facts |= {self.names[name]: self.move(facts[name]) for name in names if name in facts}


class Piece(Protocol):
    """A part of a stage's operations, which runs as a function of leaves.

    Attributes:
        label_by_input: the label of each value that it reads: `params`, `const` or `x`.
        outputs: the values that it writes for later pieces, in order.
        twin: a value that is equal for pieces with the same operations.
    """

    label_by_input: Mapping[PieceValue, str]
    outputs: Sequence[PieceValue]
    twin: Any

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the operations on the leaves that the piece reads."""
        ...


class PieceCall:
    """One call of a piece: the avals of its leaves by label, and the slots of the values that they belong to.

    Calls with equal keys share one trace: twins, on leaves of the same shapes, dtypes, strides and devices.
    """

    def __init__(self, piece: Piece, leaf_by_value: Mapping[PieceValue, Any]) -> None:
        self.piece = piece
        self.reads: dict[str, list[Any]] = {}
        self.slots: dict[PieceValue, tuple[str, int]] = {}
        for value, label in piece.label_by_input.items():
            leaf = leaf_by_value[value]
            if isinstance(leaf, Fact) and any(leaf.lazy):
                raise Untraceable("a block returns a tensor with its conjugation pending; call .resolve_conj() on it")
            avals = self.reads.setdefault(label, [])
            self.slots[value] = label, len(avals)
            avals.append(leaf.aval if isinstance(leaf, Fact) else leaf)
        self.labels = tuple(piece.label_by_input.values())
        self.key = "piece", piece.twin, self.labels, repr(self.reads)

    def __call__(self, leaves_by_label: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Run the piece as a function of leaves by label."""
        # As between stages: an alias keeps a piece that changes its input in place from changing another's output.
        pairs = [(label, leaves_by_label[label][index]) for label, index in self.slots.values()]
        args = [alias(leaf) if label == "x" else leaf for label, leaf in pairs]
        return {"y": [*self.piece.run(args)]}


@dataclass(frozen=True)
class Chain:
    """A call of a stage in pieces.

    Attributes:
        pieces: in the order in which they run.
        slots: the slots of the stage's inputs that pieces read.
        reads: the avals of the stage's inputs, by label.
        writes: what the stage writes, by label: values, each once, and leaves that are no tensors.
        specs: the containers around the leaves that the stage writes.
    """

    pieces: Sequence[Piece]
    slots: Slots
    reads: Mapping[str, Sequence[Any]]
    writes: Mapping[str, Sequence[Any]]
    specs: Mapping[str, Spec]

    def outline(self, outline_piece: Callable[[PieceCall], Outline]) -> Outline:
        """Return the outline of the whole stage, from the outlines of its pieces."""
        reads = {label: [*map(_as_fact, leaves)] for label, leaves in self.reads.items()}
        leaf_by_value: dict[PieceValue, Any] = {value: reads[label][i] for value, (label, i) in self.slots.items()}
        outlines = [piece_outline for _, piece_outline in self._follow_pieces(outline_piece, leaf_by_value)]
        writes = {label: [leaf_by_value.get(leaf, leaf) for leaf in leaves] for label, leaves in self.writes.items()}
        ran = tuple(op for piece_outline in outlines for op in piece_outline.ran)
        return Outline(reads, writes, ran, (), any(outline.has_python_gradient for outline in outlines), self.specs)

    def graph(
        self,
        outline_piece: Callable[[PieceCall], Outline],
        trace_piece: Callable[[PieceCall, dict[str, tuple[Any, ...]]], Graph],
        cotangents: Mapping[str, tuple[Any, ...]],
    ) -> Graph:
        """Return the trace of the whole stage, from outlines and traces of its pieces."""
        leaf_by_value: dict[PieceValue, Any] = {
            value: _as_fact(self.reads[label][index]) for value, (label, index) in self.slots.items()
        }
        calls = [call for call, _ in self._follow_pieces(outline_piece, leaf_by_value)]
        # Walk backwards: the gradients that a piece writes tell the avals of the cotangents of the pieces before it.
        cotangent_by_value: dict[PieceValue, Aval | None] = {
            value: cotangent
            for label, values in self.writes.items()
            for value, cotangent in zip(values, cotangents.get(cotangent_of(label), ()), strict=False)
        }
        traced_pieces: list[TracedPiece] = []
        for call in reversed(calls):
            outputs = call.piece.outputs
            graph = trace_piece(call, {"dy": tuple(map(cotangent_by_value.get, outputs))})
            traced_pieces.insert(0, TracedPiece(call.slots, outputs, graph))
            for value, (label, index) in call.slots.items():
                gradient = graph.writes["dx"][index] if label == "x" else None
                if gradient is not None:
                    cotangent_by_value[value] = graph.facts[gradient].aval
        return join_pieces(traced_pieces, self.slots, self.reads, self.writes, cotangents)

    def _follow_pieces(
        self, outline_piece: Callable[[PieceCall], Outline], leaf_by_value: dict[PieceValue, Any]
    ) -> Iterator[tuple[PieceCall, Outline]]:
        """Yield the call of each piece and its outline, and add its outputs to `leaf_by_value`."""
        for piece in self.pieces:
            call = PieceCall(piece, leaf_by_value)
            piece_outline, mover = outline_piece(call), FactMover()
            for value, (label, index) in call.slots.items():
                if isinstance(leaf_by_value[value], Fact):
                    mover.base_by_storage[piece_outline.reads[label][index].storage] = leaf_by_value[value]
            for value, leaf in zip(piece.outputs, piece_outline.writes["y"], strict=True):
                leaf_by_value[value] = mover(leaf) if isinstance(leaf, Fact) else leaf
            yield call, piece_outline


def split_into_pieces(model: Model, call: StageCall) -> Chain | None:
    """Split a call of a stage into pieces; None if its net has none, or it reads more than parameters and inputs."""
    # 1. Refuse what pieces do not cover: other functions than nets, stages that ask for more than inputs, DTensors.
    stage = None if call.stage is None else model.stages[call.stage]
    if stage is None or call.stage is None or not isinstance(stage.forward, PositionalStage):
        return None
    leaves = [leaf for _, leaves in call.reads for leaf in leaves]
    reads_more = stage.keywords or call.autograd_leaves or model.per_example
    if reads_more or any(getattr(leaf, "sharding", None) for leaf in leaves) or not stage.forward.pieces:
        return None
    reads = dict(call.reads)
    # 2. Which leaf is which value is found by identity: hand the net one empty tensor on meta for each leaf, and look
    # where each of them comes out.
    tokens_by_label = {
        label: [leaf.empty("meta") if isinstance(leaf, Aval) else leaf for leaf in leaves]
        for label, leaves in reads.items()
    }
    x = [tree.unflatten(spec, tokens_by_label[label]) for label, spec in call.specs if is_input(label)]
    params = [tokens_by_label[label][index] for label, index in param_slots_of(model, call.stage, stage.forward)]
    has_several_inputs = isinstance(model.inputs[call.stage], tuple)
    try:
        constants = tokens_by_label.get("const", [])
        in_pieces = stage.forward.map_to_pieces(params, constants, tuple(x) if has_several_inputs else x[0])
    except ValueError:
        # The batch does not fit the net: running the stage as a whole raises the same error with its place.
        return None
    if in_pieces is None:
        return None
    token_by_value, y, losses = in_pieces
    # 3. Map values to slots.
    ports = [tree.flatten(output) for output in outputs_of(model, call.stage, y)]
    values = [leaf for leaves, _ in ports for leaf in leaves] + [*losses.values()]
    slot_by_token = {id(x): (label, i) for label, tokens in tokens_by_label.items() for i, x in enumerate(tokens)}
    # A value that is returned twice would get two cotangents, and pieces never add gradients.
    if len({*map(id, values)}) < len(values) or not all(isinstance(token, Tensor) for token in token_by_value.values()):
        return None
    flat_by_label = {label_at("y", port): flat for port, flat in enumerate(ports)}
    flat_by_label |= {label: tree.flatten(loss) for label, loss in losses.items()} | {"kept": tree.flatten([])}
    return Chain(
        stage.forward.pieces,
        {value: slot_by_token[id(token)] for value, token in token_by_value.items()},
        reads,
        {label: leaves for label, (leaves, _) in flat_by_label.items()},
        {label: spec for label, (_, spec) in flat_by_label.items()},
    )
