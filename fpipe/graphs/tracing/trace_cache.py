"""Cache the traces of a model: one outline and one graph for each way that a stage is called.

    call of a stage --> key --> outline: what it reads and writes --> graph: cached, or joined from pieces, or traced

The key of a stage is its function and how it is called, with its state, key and ties. The key of a piece, which has
none of these, is its operations. Both are in one store, which all steps of a model share.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Outline, fact_in_own_storage, inline_loss
from fpipe.graphs.language.labels import variable_name
from fpipe.graphs.tracing.fake_tensors import LeakedTensor
from fpipe.graphs.tracing.open_sizes import (
    Opening,
    OpenSizes,
    SizedGraph,
    SizeNumbers,
    Symbols,
    TensorLayout,
    current_open_sizes,
    split_layouts,
    with_open_layouts,
)
from fpipe.graphs.tracing.piece_chain import Chain, PieceCall, split_into_pieces
from fpipe.graphs.tracing.stage_call import Spec, StageCall, as_flat_function, buffer_indices, param_slots_of
from fpipe.graphs.tracing.trace import BackwardRunner, outline, trace
from fpipe.meaning.purity.ambient import Untraceable, ambient_key
from fpipe.meaning.purity.attributes import IdentityKey
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage, net_stage_of

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
T = TypeVar("T", Graph, Outline)


class LRUCache(Generic[K, V]):
    """A dict with a maximal size, which drops the least recently used value.

    >>> cache = LRUCache(2)
    >>> cache["a"], cache["b"] = 1, 2
    >>> cache.get("a")
    1
    >>> cache["c"] = 3
    >>> cache.get("b", "gone")
    'gone'
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, default: D = None) -> V | D:
        """Return the value of a key, or the default."""
        value = self._values.get(key, default)
        # No lock: the key may be absent, or another thread may have dropped it since.
        with suppress(KeyError):
            self._values.move_to_end(key)
        return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; call `make` for it if there is none."""
        value = self.get(key)
        if value is None:
            value = self[key] = make()
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self._values[key] = value
        with suppress(KeyError):
            self._values.move_to_end(key)
        if len(self._values) > self.max_size:
            self._values.popitem(last=False)


Cotangents = Mapping[str, tuple[Any, ...]]
"""The avals of the cotangents of a call, by label; None where there is none."""


class TraceStore:
    """The outlines and graphs of one model, by the key of the call."""

    def __init__(self) -> None:
        self.outlines: LRUCache[Any, Outline] = LRUCache(_MAX_TRACES)
        self.graphs: LRUCache[Any, Graph] = LRUCache(_MAX_TRACES)
        self.outline_openings: LRUCache[Any, Opening[Outline]] = LRUCache(_MAX_TRACES)
        self.graph_openings: LRUCache[Any, Opening[Graph]] = LRUCache(_MAX_TRACES)


_MAX_TRACES = 512
_STORE_BY_MODEL_ID: dict[int, TraceStore] = {}
"""Stores by the id of their model. Equality does not do: an equal model may have been built after something changed
that the comparison does not see, so it is traced again."""


class Traces:
    """The stages of a model as graphs, each traced once for each way that it is called.

    Stages that compute the same function share their traces: those of one Python function, modules that are equal in
    class, plain attributes, mode and shapes of their leaves, recursively, and graphs that are equal op by op. So do
    blocks inside of such graphs.

    Args:
        model: the model.
        cached_only: whether a new trace is Untraceable.
        store: where the traces are; None for the store of the model.
        fills: whether open graphs are returned with numbers in place of their symbols.
    """

    def __init__(
        self, model: Model, cached_only: bool = False, store: TraceStore | None = None, fills: bool = False
    ) -> None:
        self.model, self.cached_only, self.fills = model, cached_only, fills
        if store is None and id(model) not in _STORE_BY_MODEL_ID:
            weakref.finalize(model, _STORE_BY_MODEL_ID.pop, id(model))
        self._store = _STORE_BY_MODEL_ID.setdefault(id(model), TraceStore()) if store is None else store
        self.fill_count = self.trace_count = 0
        self.is_closed = False  # whether a trace could not be opened
        # Open traces are kept apart from closed ones: a symbol means nothing beyond the traces that share it.
        self._symbols, self._open_store = Symbols(), TraceStore()
        self._keys: dict[StageCall, Any] = {}
        self._outlines: dict[StageCall, Outline] = {}
        self._graphs: dict[Any, SizedGraph] = {}
        self._joint_graphs: dict[tuple[SizedGraph, SizedGraph], SizedGraph] = {}
        self._shareable_calls: dict[StageCall, StageCall] = {}
        self._chains: dict[StageCall, Chain | None] = {}
        self._twin_by_stage: dict[int, Any] = {}

    def outline(self, call: StageCall) -> Outline:
        """Return the facts of the inputs and outputs of a call, found by one run on fake tensors."""
        if call not in self._outlines:
            key = self._key(call)
            self._outlines[call] = self._store.outlines.get(key) or self._opened_outline(call)
        return self._outlines[call]

    def _opened_outline(self, call: StageCall) -> Outline:
        """Return the outline of a new call: filled into an open one, or traced."""
        template, layouts = split_layouts(call.reads)
        if not self._may_open(call):
            self.is_closed = True
            return self._store.outlines.get_or_make(self._key(call), lambda: self._new_outline(call))
        key = self._key(replace(call, reads=template))
        opening = self._store.outline_openings.get_or_make(key, Opening)

        def outline_open(sizes: OpenSizes) -> Outline:
            open_call = replace(call, reads=with_open_layouts(call.reads, sizes.layouts))
            return self._with_open_chain(call, open_call)._new_outline(open_call)

        def outline_closed() -> Outline:
            return self._store.outlines.get_or_make(self._key(call), lambda: self._new_outline(call))

        open_outline, numbers = self._find_or_trace(opening, layouts, outline_closed, outline_open)
        return numbers.trace(open_outline)

    def _find_or_trace(
        self,
        opening: Opening[T],
        layouts: list[TensorLayout],
        close: Callable[[], T],
        open_up: Callable[[OpenSizes], T],
    ) -> tuple[T, SizeNumbers]:
        covering = opening.find(layouts)
        if covering is not None:
            self.fill_count += 1
            return covering
        if self.cached_only:
            return close(), SizeNumbers()
        self.trace_count += 1
        count = len(opening.open_traces)
        trace = opening.trace(self._symbols, layouts, close, open_up)
        self.is_closed = self.is_closed or opening.is_closed
        if len(opening.open_traces) == count:
            # A trace that was given up may have fixed symbols.
            self._symbols, self._open_store = Symbols(), TraceStore()
        return trace

    def _may_open(self, call: StageCall) -> bool:
        """Whether a call's sizes may become symbols: not sizes of shards, or of rows with their own parameters."""
        has_shards = any(getattr(leaf, "sharding", None) for leaf in _leaves_of(call))
        # A net that was exported compares sizes with numbers, as in `ids.shape[1] > 8`. An open trace of its blocks
        # would not meet these comparisons, which its stage makes in each trace of its own.
        function: Any = None if call.stage is None else self.model.stages[call.stage].forward
        if getattr(getattr(function, "guard", None), "guards", ()):
            return False
        return not (has_shards or self.model.per_example or current_open_sizes())

    def _with_open_chain(self, call: StageCall, open_call: StageCall) -> Traces:
        """Return the traces for an open call, which all open calls of a lowering share."""
        traces = Traces(self.model, store=self._open_store)
        chain = self._chain(call)
        traces._chains[open_call] = None if chain is None else replace(chain, reads=dict(open_call.reads))
        return traces

    def _new_outline(self, call: StageCall) -> Outline:
        chain = self._chain(call)
        if chain is not None:
            return chain.outline(self._piece_outline)
        self._refuse_uncached()
        specs = dict[str, Spec]()
        function = as_flat_function(self.model, call, specs)
        return replace(outline(function, dict(call.reads), self._has_params_per_row(call), self.model), specs=specs)

    def graph(self, call: StageCall, cotangents: Cotangents) -> SizedGraph:
        """Return the graph of a call and its gradient, for cotangents with these avals."""
        call_key = (call, *cotangents.items())
        if call_key not in self._graphs:
            graph = self._cached_graph(call, cotangents)
            self._graphs[call_key] = SizedGraph(graph.filled()) if self.fills else graph
        return self._graphs[call_key]

    def graphs(self) -> dict[int | None, list[SizedGraph]]:
        """Return the graphs that were used so far, by stage; None is the loss."""
        graphs: dict[int | None, list[SizedGraph]] = {}
        for (call, *_), graph in self._graphs.items():
            graphs.setdefault(call.stage, []).append(graph)
        return graphs

    def _cached_graph(self, call: StageCall, cotangents: Cotangents) -> SizedGraph:
        key = (self._key(call), *cotangents.items())

        def trace_closed() -> Graph:
            return self._store.graphs.get_or_make(key, lambda: self._new_graph(call, cotangents))

        if self._store.graphs.get(key) is not None or not self._may_open(call):
            return SizedGraph(trace_closed())
        count, groups = len(call.reads), (*call.reads, *cotangents.items())
        template, layouts = split_layouts(groups)
        opening_key = self._key(replace(call, reads=template[:count])), template[count:]
        opening = self._store.graph_openings.get_or_make(opening_key, Opening)

        def trace_open(sizes: OpenSizes) -> Graph:
            open_groups = with_open_layouts(groups, sizes.layouts)
            open_call = replace(call, reads=open_groups[:count])
            return self._with_open_chain(call, open_call)._new_graph(open_call, dict(open_groups[count:]))

        return SizedGraph(*self._find_or_trace(opening, layouts, trace_closed, trace_open))

    def _new_graph(self, call: StageCall, cotangents: Cotangents) -> Graph:
        if call.stage is None and self.model.loss is None and self.model.reduction != "count":
            return _identity_loss(call, cotangents)
        chain = self._chain(call)
        if chain is not None:
            return chain.graph(self._piece_outline, self._piece_graph, cotangents)
        self._refuse_uncached()
        function = as_flat_function(self.model, call, {})
        graph = trace(
            function, dict(call.reads), cotangents, self._backward_runner(call), self._has_params_per_row(call)
        )
        # A data-dependent function may run other ops here than in its outline. With DTensors the two always differ: an
        # outline logs ops on whole tensors, a trace ops on shards.
        if not any(getattr(leaf, "sharding", None) for leaf in _leaves_of(call)):
            _refuse_other_ops(graph, self.outline(call))
        return graph

    def _piece_outline(self, call: PieceCall) -> Outline:
        def outlined() -> Outline:
            self._refuse_uncached()
            return outline(call, call.reads)

        return self._store.outlines.get_or_make((call.key, ambient_key()), outlined)

    def _piece_graph(self, call: PieceCall, cotangents: Cotangents) -> Graph:
        def traced() -> Graph:
            self._refuse_uncached()
            graph = trace(call, call.reads, cotangents)
            _refuse_other_ops(graph, self._piece_outline(call))
            return graph

        return self._store.graphs.get_or_make((call.key, *cotangents.items(), ambient_key()), traced)

    def _chain(self, call: StageCall) -> Chain | None:
        if call not in self._chains:
            self._chains[call] = split_into_pieces(self.model, call)
        return self._chains[call]

    def _has_params_per_row(self, call: StageCall) -> bool:
        """Whether each row has parameters of its own; the loss has no parameters."""
        return self.model.per_example and call.stage is not None

    def _refuse_uncached(self) -> None:
        if self.cached_only:
            raise Untraceable("it is not traced yet")

    def shared(self, call: StageCall) -> StageCall:
        """Return the call whose trace serves this one: with gradients of all inputs, if that runs the same ops."""
        # The first stages, whose inputs need no gradient, then share the traces of the later ones, and gradients that
        # nobody reads are cut off afterwards. A gradient written in Python may compute something else when its input
        # needs none (`ctx.needs_input_grad`), so such a stage keeps its own trace.
        if call not in self._shareable_calls:
            self._shareable_calls[call] = call
            differentiable = call.differentiable()
            # Untraceable: a stage may change an input in place, which autograd would refuse if it needed a gradient.
            with suppress(Untraceable, LeakedTensor):
                outline, with_all = self.outline(call), self.outline(differentiable)
                runs_same_ops = (outline.ran, outline.numbers) == (with_all.ran, with_all.numbers)
                if runs_same_ops and not outline.has_python_gradient:
                    self._shareable_calls[call] = differentiable
        return self._shareable_calls[call]

    def graph_with_loss(self, call: StageCall, cotangents: Cotangents, loss: StageCall, weight: Aval) -> SizedGraph:
        """Return the graph of the last stage followed by the loss, which are traced separately."""
        sized_loss = self.graph(loss, {"dloss": (weight,)})
        loss_graph, loss_numbers = sized_loss
        dx = loss_graph.writes["dx"]
        dy = tuple(loss_numbers.fact_of(loss_graph, name).aval if isinstance(name, Name) else None for name in dx)
        sized_stage = self.graph(call, {**cotangents, "dy": dy})
        stage_graph, stage_numbers = sized_stage
        if (sized_stage, sized_loss) not in self._joint_graphs:
            # A closed graph may serve one length alone, and an open one all: the joint graph lives with the former.
            graphs = (loss_graph, stage_graph) if stage_numbers.number_by_symbol else (stage_graph, loss_graph)
            joint_graph = graphs[0].compute_once(("with loss", graphs[1]), lambda: inline_loss(stage_graph, loss_graph))
            self._joint_graphs[sized_stage, sized_loss] = SizedGraph(joint_graph, stage_numbers | loss_numbers)
        return self._joint_graphs[sized_stage, sized_loss]

    def _key(self, call: StageCall) -> Any:
        try:
            if call not in self._keys:
                self._keys[call] = self._new_key(call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error
        return self._keys[call]

    def _new_key(self, call: StageCall) -> Any:
        mutable_leaf = next((leaf for leaf in _leaves_of(call) if not isinstance(leaf, Aval | _IMMUTABLE)), None)
        if mutable_leaf is not None:
            raise Untraceable(
                f"it is handed a {type(mutable_leaf).__name__}, which may change and stay the same object"
            )
        context_key = (call.type_key, call.reads, call.autograd_leaves, ambient_key())
        if call.stage is None:
            options = "loss", self.model.reduction, self.model.aux, call.specs
            # A net that computes its loss has no function here, and None has no identity to be equal by.
            function_key = None if self.model.loss is None else self._function_key(self.model.loss)
            return function_key, *options, *context_key
        stage = self.model.stages[call.stage]
        if "key" in stage.keywords:
            raise Untraceable("it asks for its key, and a trace would repeat what Python computes from the first one")
        # A net's stage reads parameters by position, so equal blocks under other names share a trace.
        is_positional = isinstance(stage.forward, PositionalStage)
        tied_names = tuple("" if is_positional else leaf.name for leaf in self.model.tied(call.stage))
        ports, has_several_inputs = self.model.ports(call.stage), isinstance(self.model.inputs[call.stage], tuple)
        stage_key = (frozenset(stage.keywords), stage.aux_loss, tied_names, ports, has_several_inputs)
        call_key = (*stage_key, call.microbatch, call.turn)
        if isinstance(stage.forward, PositionalStage):
            specs = tuple((label, spec) for label, spec in call.specs if label not in ("params", "state"))
            if call.stage not in self._twin_by_stage:
                self._twin_by_stage[call.stage] = stage.forward.sharing_key()
            param_slots = param_slots_of(self.model, call.stage, stage.forward)
            twin = (self._twin_by_stage[call.stage], *param_slots, buffer_indices(stage.forward, call))
            return twin, call_key, specs, *context_key
        # A function around a net bakes the net's constants into its trace: they belong to the key, by identity.
        wrapped = net_stage_of(stage.forward)
        wrapped_key = () if wrapped is None else (wrapped.sharing_key(), *map(id, wrapped.constants()))
        return self._function_key(stage.forward), call_key, wrapped_key, call.specs, *context_key

    def _function_key(self, function: Any) -> Any:
        """Return the key of a function: its identity, as under `jax.jit`, and the training modes of the net it uses."""
        return IdentityKey(function), () if self.model.fingerprint is None else self.model.fingerprint.modes()

    def _backward_runner(self, call: StageCall) -> BackwardRunner | None:
        """Return how to run a module's backward: with its parameters bound, since a checkpoint calls modules again."""
        module = None if call.stage is None else self.model.stages[call.stage].forward
        if call.stage is None or not isinstance(module, PositionalStage):
            return None
        param_slots = param_slots_of(self.model, call.stage, module)

        def run_backward(arguments: Mapping[str, list[Any]], function: Callable[[], Any]) -> Any:
            return module.with_tensors_bound(
                [arguments[label][index] for label, index in param_slots], arguments.get("const", []), function
            )

        return run_backward


_IMMUTABLE = bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum | None


def _refuse_other_ops(graph: Graph, outline: Outline) -> None:
    if graph.ran[: len(outline.ran)] != outline.ran:
        raise Untraceable("torch runs other ops for it during the trace")


def _leaves_of(call: StageCall) -> list[Any]:
    return [leaf for _, leaves in call.reads for leaf in leaves]


def _identity_loss(call: StageCall, cotangents: Cotangents) -> Graph:
    """Return the empty graph of a model without a loss function: its last stage's output is the loss."""
    reads = {label: tuple(Name(variable_name(label, i)) for i in range(len(leaves))) for label, leaves in call.reads}
    cotangent, leaf = Name("dloss_0"), dict(call.reads)["x"][0]
    avals = {name: aval for label, leaves in call.reads for name, aval in zip(reads[label], leaves, strict=True)}
    avals[cotangent] = cotangents["dloss"][0]
    facts = {name: fact_in_own_storage(leaf_aval) for name, leaf_aval in avals.items() if isinstance(leaf_aval, Aval)}
    name_by_label = {label: tuple(name if name in facts else None for name in names) for label, names in reads.items()}
    writes = {"loss": name_by_label["x"], "dx": (cotangent if leaf.wants_grad else None,)}
    return Graph((), facts, {}, {**name_by_label, "dloss": (cotangent,)}, writes)
