"""What has been traced of a model: its stages as graphs, once for each way they are called, whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fpipe import tree
from fpipe.by_place import ByPlace
from fpipe.graphs.alike import alike
from fpipe.graphs.ambient import Untraceable, ambient
from fpipe.graphs.graph import Aval, Fact, Graph, Name, alias, apart, aval, inlined, same
from fpipe.graphs.recent import Recent
from fpipe.graphs.trace import Around, outline, trace
from fpipe.kept import listening
from fpipe.keys import TracedKey, fold_in, unseeding
from fpipe.models import Model
from fpipe.params import same_keys
from fpipe.returned import loss_of, outputs_of, refuse_odd_output, taken_apart

Spec = Any


@dataclass(frozen=True, eq=False)
class Call:
    """One way to call a stage (or, if `stage` is None, the loss): what it reads, in which containers.

    Attributes:
        stage: its number.
        reads: by label (`params`, `params:1`, `x`, `x:1`, `carry`, `state`, `target`, `const`) avals of the tensors,
            and leaves that are no tensors as they are.
        specs: the containers around them.
        microbatch: its number, if the stage asks for it.
        starts: the labels of inputs at which the gradient ends, as it does at parameters; all others come from a stage.
    """

    stage: int | None
    reads: tuple[tuple[str, tuple[Any, ...]], ...]
    specs: tuple[tuple[str, Spec], ...]
    microbatch: int | None = None
    starts: tuple[str, ...] = ()

    @cached_property
    def _parts(self) -> Any:
        """What is compared. 1 and True are equal, and so are 0.0 and -0.0, as leaves and as keys of containers."""
        leaves = (leaf for _, leaves in self.reads for leaf in leaves if not isinstance(leaf, Aval))
        kinds = tuple((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else None) for leaf in leaves)
        keys = tuple(None if spec is None else tree.odd_keys(spec) for _, spec in self.specs)
        return self.stage, self.reads, self.specs, self.microbatch, self.starts, kinds, keys

    @property
    def odd(self) -> Any:
        """What tells it apart from calls that Python takes to be equal."""
        return self._parts[-2:]

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Call) and self._parts == other._parts)

    def differentiable(self) -> Call:
        """The same call as if a gradient of every input that can have one were wanted."""
        reads = tuple(
            (label, tuple(map(_wanting, leaves)) if label.split(":")[0] in ("x", "carry") else leaves)
            for label, leaves in self.reads
        )
        return replace(self, reads=reads)


@dataclass(frozen=True)
class Outline:
    """What a call reads and writes: a fact for each tensor leaf, the containers around what it writes, its ops, and
    whether its gradient is partly Python."""

    reads: Mapping[str, Sequence[Any]]
    writes: Mapping[str, Sequence[Any]]
    specs: Mapping[str, Spec]
    ran: tuple[str, ...]
    python: bool

    def avals(self, label: str) -> tuple[Any, ...]:
        """The avals of what is written under a label, other leaves as they are."""
        return tuple(leaf.aval if isinstance(leaf, Fact) else leaf for leaf in self.writes[label])


class Store:
    """What has been traced of one function, by the way it was called; what was not used for long is forgotten."""

    def __init__(self) -> None:
        self.outlines: Recent[Any, Outline] = Recent(_MOST)
        self.graphs: Recent[Any, Graph] = Recent(_MOST)
        self._versions: Recent[Any, int] = Recent(_MOST)

    def version(self, function: Any) -> int:
        """A number for a function as it is: its code, its defaults and what it reaches may change in place."""
        now = alike(function)
        if now not in self._versions:
            self._versions[now] = next(_NUMBERS)
        return self._versions[now]


_MOST = 512
_NUMBERS = count()


# A function that is gone takes its traces with it. Those of modules go with the model, and those of a callable that
# nothing can refer to weakly.
_OF_FUNCTIONS: WeakKeyDictionary[Any, Store] = WeakKeyDictionary()
_OF_MODELS: WeakKeyDictionary[Model, Store] = WeakKeyDictionary()


class Traces:
    """A model's stages as graphs, each traced once for each way it is called, whoever asks.

    Stages that compute the same function share their traces: those of one Python function, modules that are equal in
    class, plain attributes, mode and shapes of their leaves, recursively, and graphs that are equal op by op.
    """

    def __init__(self, model: Model, known_only: bool = False) -> None:
        self.model, self.known_only = model, known_only
        self._places: dict[Call, tuple[Store, Any]] = {}
        self._outlines: dict[Call, Outline] = {}
        self._graphs: dict[Any, Graph] = {}
        self._shared: dict[Call, Call] = {}
        self._twins: dict[int, Any] = {}
        self._stores: dict[int, tuple[Store, int]] = {}

    def outline(self, call: Call) -> Outline:
        """What a call writes, by running it once on tensors without data."""
        if call not in self._outlines:
            store, key = self._place(call)
            made = store.outlines.get(key)
            if made is None:
                self._refuse_new()
                specs: dict[str, Spec] = {}
                root = TracedKey(0)
                reads, writes, ran, python = outline(self._flat(call, specs, root), dict(call.reads), root.known)
                made = store.outlines[key] = Outline(reads, writes, specs, ran, python)
            self._outlines[call] = made
        return self._outlines[call]

    def graph(self, call: Call, seeds: Mapping[str, tuple[Any, ...]]) -> Graph:
        """A call and its gradient as a graph, for cotangents with these avals (None where there is none)."""
        known = (call, *seeds.items())
        if known not in self._graphs:
            self._graphs[known] = self._traced(call, seeds)
        return self._graphs[known]

    def _traced(self, call: Call, seeds: Mapping[str, tuple[Any, ...]]) -> Graph:
        if call.stage is None and self.model.loss is None and self.model.reduction != "count":
            return _the_loss_itself(call, seeds)
        store, own = self._place(call)
        key = (own, *seeds.items())
        found = store.graphs.get(key)
        if found is None:
            self._refuse_new()
            found = self._written_down(call, seeds)
            ran = self.outline(call).ran
            if found.ran[: len(ran)] != ran:
                raise Untraceable("torch runs other ops for it while it is traced")
            store.graphs[key] = found
        return found

    def _written_down(self, call: Call, seeds: Mapping[str, tuple[Any, ...]]) -> Graph:
        """The trace. That of a stage that asks for its key must be the same for two keys: numbers that Python code made
        of one are others for the next."""
        if call.stage is None or "key" not in self.model.stages[call.stage].asks:
            return trace(self._flat(call, {}), dict(call.reads), seeds, None, self._around(call))
        keys = [TracedKey(fold_in(0, which)) for which in range(2)]
        with unseeding():
            one, other = (trace(self._flat(call, {}, key), dict(call.reads), seeds, key.known) for key in keys)
        if not same(one, other):
            raise Untraceable("it does something else with its key than seed a torch.Generator")
        return one

    def _refuse_new(self) -> None:
        if self.known_only:
            raise Untraceable("it is not traced yet")

    def shared(self, call: Call) -> Call:
        """The call to trace for this one: as if all its inputs wanted a gradient, if that runs the same ops.

        So the stages that take the batch share the traces of those that do not; what nobody wants is left out later.
        A gradient written in Python may do another thing if its input's is not wanted (`ctx.needs_input_grad`).
        """
        if call not in self._shared:
            self._shared[call] = call
            other = call.differentiable()
            with suppress(Untraceable):  # what autograd would keep may be changed in place while nobody wants it
                same_ops = not self.outline(call).python and self.outline(other).ran == self.outline(call).ran
                self._shared[call] = other if same_ops else call
        return self._shared[call]

    def with_loss(self, call: Call, seeds: Mapping[str, tuple[Any, ...]], loss: Call, weight: Aval) -> Graph:
        """The last stage and the loss, each traced apart, as one graph."""
        top = self.graph(loss, {"dloss": (weight,)})
        dy = tuple(top.facts[dx].aval if isinstance(dx, Name) else None for dx in top.writes["dx"])
        stage = self.graph(call, {**seeds, "dy": dy})
        return stage.once(("with loss", top), lambda: inlined(stage, top))

    def _place(self, call: Call) -> tuple[Store, Any]:
        """Where the traces of a call are, and under which key."""
        try:
            if call not in self._places:
                self._places[call] = self._found(call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error
        return self._places[call]

    def _found(self, call: Call) -> tuple[Store, Any]:
        odd = next((leaf for leaf in _leaves(call) if not isinstance(leaf, Aval | _PLAIN)), None)
        if odd is not None:
            raise Untraceable(f"it is handed a {type(odd).__name__}, which may change and stay the same object")
        around = (call.odd, call.reads, call.starts, ambient())
        if call.stage is None:
            store, own = self._store(self.model.loss)
            return store, (own, "loss", self.model.reduction, self.model.aux, call.specs, *around)
        stage = self.model.stages[call.stage]
        by_place = isinstance(stage.forward, ByPlace)
        names = tuple("" if by_place else leaf for _, _, leaf in self.model.tied(call.stage))
        how = (
            frozenset(stage.asks),
            stage.aux_loss,
            names,
            self.model.ports(call.stage),
            isinstance(self.model.inputs[call.stage], tuple),
            call.microbatch,
        )
        if isinstance(stage.forward, ByPlace):
            specs = tuple((label, spec) for label, spec in call.specs if label not in ("params", "state"))
            if call.stage not in self._twins:
                self._twins[call.stage] = stage.forward.twin()
            order = _positions(self.model, stage.forward, call), _buffers(stage.forward, call)
            twin = self._twins[call.stage], order
            return _OF_MODELS.setdefault(self.model, Store()), (twin, how, specs, *around)
        store, own = self._store(stage.forward)
        return store, (own, how, call.specs, *around)

    def _store(self, function: Any) -> tuple[Store, int]:
        """The traces of a function, and which of those are of the function as it is."""
        if id(function) not in self._stores:
            store = None
            if type(function).__eq__ is object.__eq__:
                with suppress(TypeError):
                    store = _OF_FUNCTIONS.setdefault(function, Store())
            store = _OF_MODELS.setdefault(self.model, Store()) if store is None else store
            self._stores[id(function)] = store, store.version(function)
        return self._stores[id(function)]

    def _around(self, call: Call) -> Around | None:
        """What keeps the parameters of a module in their places: torch.utils.checkpoint calls modules again."""
        module = None if call.stage is None else self.model.stages[call.stage].forward
        if not isinstance(module, ByPlace):
            return None
        order = _positions(self.model, module, call)

        def around(given: Mapping[str, list[Any]], what: Callable[[], Any]) -> Any:
            return module.during([given[label][at] for label, at in order], given.get("const", []), what)

        return around

    def _flat(
        self, call: Call, specs: dict[str, Spec], key: int = 0
    ) -> Callable[[Mapping[str, list[Any]]], dict[str, list[Any]]]:
        """The call as a function of leaves; it notes the containers of what it writes."""
        model, containers = self.model, dict(call.specs)

        def whole(given: Mapping[str, list[Any]], label: str) -> Any:
            came = label.split(":")[0] == "x" and label not in call.starts
            return tree.unflatten(containers[label], map(alias, given[label]) if came else given[label])

        def loss(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            made, total, aux = loss_of(model, whole(given, "x"), whole(given, "target"))
            beside = {"count": total} if model.reduction == "count" else {}
            return written({"loss": made} | beside | ({"aux": aux} if model.aux else {}))

        def stage(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            assert call.stage is not None
            one = model.stages[call.stage]
            taken = [whole(given, label) for label in given if label.split(":")[0] == "x"]
            x = tuple(taken) if isinstance(model.inputs[call.stage], tuple) else taken[0]
            if isinstance(one.forward, ByPlace):
                order = _positions(model, one.forward, call)
                params = [given[label][at] for label, at in order]
                places = _buffers(one.forward, call)
                with listening() as kept:
                    made = one.forward.pure(params, given.get("const", []), x, [given["state"][at] for at in places])
                y, beside = taken_apart(one, made)
                if places:  # in the order that they came in
                    beside["state"] = [beside["state"][places.index(at)] for at in range(len(places))]
                return outputs(call.stage, y, beside, kept)
            own = whole(given, "params")
            ties = [leaf for _, _, leaf in model.tied(call.stage)]
            more = {leaf: whole(given, f"params:{port}") for port, leaf in enumerate(ties, 1)}
            said: dict[str, Any] = {"microbatch": call.microbatch, "carry": None, "key": key}
            said |= {word: whole(given, word) for word in ("state", "carry") if word in containers}
            with listening() as kept:
                made = one.forward({**own, **more} if more else own, x, **{word: said[word] for word in one.asks})
            return outputs(call.stage, *taken_apart(one, made), kept)

        def outputs(stage: int, y: Any, beside: Mapping[str, Any], kept: list[Tensor]) -> dict[str, list[Any]]:
            ports = {f"y:{port}" if port else "y": one for port, one in enumerate(outputs_of(model, stage, y))}
            for one in ports.values():
                refuse_odd_output(one, "it")
            return written({**ports, **beside, "kept": kept})

        def written(made: Mapping[str, Any]) -> dict[str, list[Any]]:
            leaves: dict[str, list[Any]] = {}
            for label, value in made.items():
                leaves[label], specs[label] = tree.flatten(value)
            return leaves

        return loss if call.stage is None else stage


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | Enum | None


def _leaves(call: Call) -> list[Any]:
    return [leaf for _, leaves in call.reads for leaf in leaves]


def _positions(model: Model, module: ByPlace, call: Call) -> tuple[tuple[str, int], ...]:
    """Where each of the module's parameters stands among the leaves handed in: tied ones are bundles of their own."""
    places = tree.unflatten(dict(call.specs)["params"], range(len(dict(call.reads)["params"])))
    given: dict[str, tuple[str, int]] = {name: ("params", at) for name, at in places.items()}
    given |= {leaf: (f"params:{port}", 0) for port, (_, _, leaf) in enumerate(model.tied(module.number), 1)}
    same_keys(given, [leaf[0] for leaf in module.names], f"params of stage {module.number}")
    return tuple(given[leaf[0]] for leaf in module.names)


def _buffers(module: ByPlace, call: Call) -> tuple[int, ...]:
    """Where each of the buffers that the module writes stands among the leaves handed in as its state."""
    if not module.holds:
        return ()
    given: dict[str, int] = tree.unflatten(dict(call.specs)["state"], range(len(dict(call.reads)["state"])))
    same_keys(given, module.holds, f"state of stage {module.number}", "a buffer that it writes")
    return tuple(given[name] for name in module.holds)


def _the_loss_itself(call: Call, seeds: Mapping[str, tuple[Any, ...]]) -> Graph:
    """Without a loss function the last stage's output is the loss, and the loss's cotangent is its own."""
    reads = {label: tuple(Name(f"{label}_{at}") for at in range(len(leaves))) for label, leaves in call.reads}
    seed, leaf = Name("dloss_0"), dict(call.reads)["x"][0]
    avals = {name: known for label, leaves in call.reads for name, known in zip(reads[label], leaves, strict=True)}
    avals[seed] = seeds["dloss"][0]
    facts = {name: apart(known) for name, known in avals.items() if isinstance(known, Aval)}
    named = {label: tuple(name if name in facts else None for name in names) for label, names in reads.items()}
    writes = {"loss": named["x"], "dx": (seed if leaf.wants else None,)}
    return Graph((), facts, {}, {**named, "dloss": (seed,)}, writes)


def _wanting(leaf: Any) -> Any:
    able = isinstance(leaf, Aval) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf._replace(wants=True) if able else leaf


def wanting(leaf: Any) -> Any:
    """The aval of a tensor whose gradient is wanted, if it can have one; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    return aval(leaf)._replace(wants=leaf.is_floating_point() or leaf.is_complex())


def wants(leaf: Any) -> bool:
    """Whether a leaf is a tensor's aval with a gradient."""
    return isinstance(leaf, Aval) and leaf.wants
