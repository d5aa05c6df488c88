"""Cache the traces of a model: its stages as graphs, once for each way they are called, whoever asks of that model.

    call of a stage --> key --> outline: what it reads and writes --> graph: as cached, or of its pieces, or traced

A stage is known by its function and how that is called, with its state, key and ties, and a piece, which has none of
these, by its operations: both are in one store, under keys of two kinds.
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

from fpipe.graphs.language.graph import Aval, Graph, Name, Outline, in_own_storage, inlined
from fpipe.graphs.language.labels import variable
from fpipe.graphs.tracing.fake import LeakedTensor
from fpipe.graphs.tracing.piece_chain import Chain, PieceCall, chain_of
from fpipe.graphs.tracing.stage_call import Spec, StageCall, buffers, flat, positions
from fpipe.graphs.tracing.trace import Around, outline, trace
from fpipe.meaning.purity.ambient import Untraceable, ambient
from fpipe.meaning.purity.attributes import Same
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage, of_net

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class LRUCache(Generic[K, V]):
    """A dict of at most so many values, which drops the least recently used.

    >>> known = LRUCache(2)
    >>> known["a"], known["b"] = 1, 2
    >>> known.get("a")
    1
    >>> known["c"] = 3
    >>> known.get("b", "gone")
    'gone'
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, default: D = None) -> V | D:
        """Return the value of a key, or the default."""
        value = self._values.get(key, default)
        with suppress(KeyError):  # it is not there, or another thread has pushed it out since
            self._values.move_to_end(key)
        return value

    def once(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made if there is none yet."""
        value = self.get(key)
        if value is None:
            value = self[key] = make()
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self._values[key] = value
        with suppress(KeyError):
            self._values.move_to_end(key)
        if len(self._values) > self.most:
            self._values.popitem(last=False)


Cotangents = Mapping[str, tuple[Any, ...]]
"""By label the avals of the cotangents of a call, None where there is none."""


class Store:
    """The traces of a model, by what was called and how."""

    def __init__(self) -> None:
        self.outlines: LRUCache[Any, Outline] = LRUCache(_MOST)
        self.graphs: LRUCache[Any, Graph] = LRUCache(_MOST)


_MOST = 512
_STORES: dict[int, Store] = {}
"""Stores by the model's id: an equal model may have been made since something changed, so it is traced anew."""


class Traces:
    """A model's stages as graphs, each traced once for each way it is called, whoever asks of that model.

    Stages that compute the same function share their traces: those of one Python function, modules that are equal in
    class, plain attributes, mode and shapes of their leaves, recursively, and graphs that are equal op by op. So do
    blocks inside of such graphs.
    """

    def __init__(self, model: Model, known_only: bool = False) -> None:
        self.model, self.known_only = model, known_only
        if id(model) not in _STORES:
            weakref.finalize(model, _STORES.pop, id(model))
        self._store = _STORES.setdefault(id(model), Store())
        self._keys: dict[StageCall, Any] = {}
        self._outlines: dict[StageCall, Outline] = {}
        self._graphs: dict[Any, Graph] = {}
        self._shared: dict[StageCall, StageCall] = {}
        self._chains: dict[StageCall, Chain | None] = {}
        self._twins: dict[int, Any] = {}

    def outline(self, call: StageCall) -> Outline:
        """Outline a call, by running it once on fake tensors."""
        if call not in self._outlines:
            self._outlines[call] = self._store.outlines.once(self._key(call), lambda: self._outlined(call))
        return self._outlines[call]

    def _outlined(self, call: StageCall) -> Outline:
        chain = self._chain(call)
        if chain is not None:
            return chain.outline(self._piece_outline)
        self._refuse_new()
        specs = dict[str, Spec]()
        function = flat(self.model, call, specs)
        return replace(outline(function, dict(call.reads), self._per_row(call), self.model), specs=specs)

    def graph(self, call: StageCall, cotangents: Cotangents) -> Graph:
        """Return a call and its gradient as a graph, for cotangents with these avals (None where there is none)."""
        known = (call, *cotangents.items())
        if known not in self._graphs:
            self._graphs[known] = self._traced(call, cotangents)
        return self._graphs[known]

    def graphs(self) -> dict[int | None, list[Graph]]:
        """Return the graphs that were asked for, by the stage (None: the loss)."""
        graphs: dict[int | None, list[Graph]] = {}
        for (call, *_), graph in self._graphs.items():
            graphs.setdefault(call.stage, []).append(graph)
        return graphs

    def _traced(self, call: StageCall, cotangents: Cotangents) -> Graph:
        if call.stage is None and self.model.loss is None and self.model.reduction != "count":
            return _identity_loss(call, cotangents)
        return self._store.graphs.once(
            (self._key(call), *cotangents.items()), lambda: self._new_graph(call, cotangents)
        )

    def _new_graph(self, call: StageCall, cotangents: Cotangents) -> Graph:
        """Return the graph of a call, joined from those of its pieces, or traced as a whole."""
        chain = self._chain(call)
        if chain is not None:
            return chain.graph(self._piece_outline, self._piece_graph, cotangents)
        self._refuse_new()
        function = flat(self.model, call, {})
        graph = trace(function, dict(call.reads), cotangents, self._around(call), self._per_row(call))
        # Of DTensors an outline hears the ops on the whole, and a trace has those on shards.
        if not any(getattr(leaf, "sharding", None) for leaf in _leaves(call)):
            _refuse_others(graph, self.outline(call))
        return graph

    def _piece_outline(self, call: PieceCall) -> Outline:
        def outlined() -> Outline:
            self._refuse_new()
            return outline(call, call.reads)

        return self._store.outlines.once((call.key, ambient()), outlined)

    def _piece_graph(self, call: PieceCall, cotangents: Cotangents) -> Graph:
        def traced() -> Graph:
            self._refuse_new()
            graph = trace(call, call.reads, cotangents)
            _refuse_others(graph, self._piece_outline(call))
            return graph

        return self._store.graphs.once((call.key, *cotangents.items(), ambient()), traced)

    def _chain(self, call: StageCall) -> Chain | None:
        if call not in self._chains:
            self._chains[call] = chain_of(self.model, call)
        return self._chains[call]

    def _per_row(self, call: StageCall) -> bool:
        """Whether each row is handed parameters of its own, of which the loss has none."""
        return self.model.per_example and call.stage is not None

    def _refuse_new(self) -> None:
        if self.known_only:
            raise Untraceable("it is not traced yet")

    def shared(self, call: StageCall) -> StageCall:
        """Return the call to trace for this one: with gradients of all inputs, if that runs the same ops.

        So the stages that take the batch share the traces of those that do not; what nobody wants is left out later.
        A gradient written in Python may do another thing if its input's is not wanted (`ctx.needs_input_grad`).
        """
        if call not in self._shared:
            self._shared[call] = call
            differentiable = call.differentiable()
            # A stage may change in place what autograd would keep if a gradient were wanted.
            with suppress(Untraceable, LeakedTensor):
                outline, with_all = self.outline(call), self.outline(differentiable)
                if not outline.python and (outline.ran, outline.numbers) == (with_all.ran, with_all.numbers):
                    self._shared[call] = differentiable
        return self._shared[call]

    def with_loss(self, call: StageCall, cotangents: Cotangents, loss: StageCall, weight: Aval) -> Graph:
        """Return the last stage and the loss, traced separately, as one graph."""
        top = self.graph(loss, {"dloss": (weight,)})
        dy = tuple(top.facts[dx].aval if isinstance(dx, Name) else None for dx in top.writes["dx"])
        stage = self.graph(call, {**cotangents, "dy": dy})
        return stage.once(("with loss", top), lambda: inlined(stage, top))

    def _key(self, call: StageCall) -> Any:
        try:
            if call not in self._keys:
                self._keys[call] = self._new_key(call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error
        return self._keys[call]

    def _new_key(self, call: StageCall) -> Any:
        mutable = next((leaf for leaf in _leaves(call) if not isinstance(leaf, Aval | _PLAIN)), None)
        if mutable is not None:
            raise Untraceable(f"it is handed a {type(mutable).__name__}, which may change and stay the same object")
        around = (call.odd, call.reads, call.starts, ambient())
        if call.stage is None:
            options = "loss", self.model.reduction, self.model.aux, call.specs
            return self._function_key(self.model.loss), *options, *around
        stage = self.model.stages[call.stage]
        if "key" in stage.asks:
            raise Untraceable(
                "it asks for its key, and a trace would repeat what Python makes of one; what torch draws by itself "
                "follows from the key too"
            )
        by_place = isinstance(stage.forward, PositionalStage)
        names = tuple("" if by_place else leaf.name for leaf in self.model.tied(call.stage))
        how = (
            frozenset(stage.asks),
            stage.aux_loss,
            names,
            self.model.ports(call.stage),
            isinstance(self.model.inputs[call.stage], tuple),
            call.microbatch,
            call.turn,
        )
        if isinstance(stage.forward, PositionalStage):
            specs = tuple((label, spec) for label, spec in call.specs if label not in ("params", "state"))
            if call.stage not in self._twins:
                self._twins[call.stage] = stage.forward.twin()
            twin = self._twins[call.stage], *positions(self.model, stage.forward), buffers(stage.forward, call)
            return twin, how, specs, *around
        wrapped = of_net(stage.forward)  # a trace of a function around it has its constants inside
        held = () if wrapped is None else (wrapped.twin(), *map(id, wrapped.constants()))
        return self._function_key(stage.forward), how, held, call.specs, *around

    def _function_key(self, function: Any) -> Any:
        """Return the key of a function: its Python is that of its first trace, as under `jax.jit`; modes may change."""
        return Same(function), () if self.model.held is None else self.model.held.modes()

    def _around(self, call: StageCall) -> Around | None:
        """Keep a module's parameters in their places in its backward: torch.utils.checkpoint calls modules again."""
        module = None if call.stage is None else self.model.stages[call.stage].forward
        if not isinstance(module, PositionalStage):
            return None
        order = positions(self.model, module)

        def around(given: Mapping[str, list[Any]], what: Callable[[], Any]) -> Any:
            return module.during([given[label][at] for label, at in order], given.get("const", []), what)

        return around


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum | None


def _refuse_others(graph: Graph, outline: Outline) -> None:
    if graph.ran[: len(outline.ran)] != outline.ran:
        raise Untraceable("torch runs other ops for it while it is traced")


def _leaves(call: StageCall) -> list[Any]:
    return [leaf for _, leaves in call.reads for leaf in leaves]


def _identity_loss(call: StageCall, cotangents: Cotangents) -> Graph:
    """Without a loss function the last stage's output is the loss, and the loss's cotangent is its own."""
    reads = {label: tuple(Name(variable(label, at)) for at in range(len(leaves))) for label, leaves in call.reads}
    cotangent, leaf = Name("dloss_0"), dict(call.reads)["x"][0]
    avals = {name: known for label, leaves in call.reads for name, known in zip(reads[label], leaves, strict=True)}
    avals[cotangent] = cotangents["dloss"][0]
    facts = {name: in_own_storage(known) for name, known in avals.items() if isinstance(known, Aval)}
    named = {label: tuple(name if name in facts else None for name in names) for label, names in reads.items()}
    writes = {"loss": named["x"], "dx": (cotangent if leaf.wants else None,)}
    return Graph((), facts, {}, {**named, "dloss": (cotangent,)}, writes)
