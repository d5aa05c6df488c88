"""Walk down a program with abstract values: what every value will be, before anything runs.

    params[0]: float32[512, 512]   x[0,0]: float32[8, 512]        -->        y[0,0]: float32[8, 512]   res[0,0]: ...

So the bytes of each value are known, and which tensors share their memory; and how each stage is traced and cut. The
stages are traced with the cotangents that come, so from the last one back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Aval, Fact, Graph, Name, aval, fresh_storage, in_own_storage, is_strided
from fpipe.graphs.language.labels import (
    cotangent_of,
    differentiated,
    is_cotangent,
    is_output,
    label_of,
    port_of,
    reads_of,
)
from fpipe.graphs.language.listing import Heard
from fpipe.graphs.purity.ambient import Untraceable
from fpipe.graphs.purity.pure import Impure, reads_update
from fpipe.graphs.tracing.fake import fake_mode
from fpipe.graphs.tracing.outputs import copied
from fpipe.graphs.tracing.stage_call import StageCall, wants
from fpipe.graphs.tracing.trace_cache import Outline, Traces
from fpipe.model import PositionalStage
from fpipe.program import Op, Value
from fpipe.runtimes.definition.by_autograd import StepContext
from fpipe.runtimes.lowering.abstract_eval import abstract_eval, by_rule, rounded
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree, StorageMap, aval_of, described, wanting_fact

Coordinates = tuple[int | None, int | None, int | None]
"""Stage, microbatch and slice of an op."""


@dataclass
class Untraced:
    """The stages that run under autograd, since they cannot be traced, and what they were seen to write.

    Attributes:
        stages: their numbers, each with the reason.
        trees: of every value that was written in a walk, what is known of it.
        lost: a value that nothing can be known of was among them.
        known_only: whether only traces are used that were made before.
    """

    stages: dict[int, str] = field(default_factory=dict[int, str])
    trees: dict[Value, AbstractTree] = field(default_factory=dict[Value, AbstractTree])
    lost: bool = False
    known_only: bool = False

    def see(self, value: Value, made: Any) -> None:
        """Note what a value was. Its tensors are taken to be each in memory of its own."""
        leaves, containers = ([], None) if value.name in ("res", "wres") else tree.flatten(made)
        if containers is not None and not any(map(callable, leaves)):
            if not all(is_strided(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
                self.lost = True
                return
            known = tuple(in_own_storage(aval(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self.trees[value] = AbstractTree(known, None if value.name in ("g", "dx", "dcarry") else containers)


class Shapes:
    """What each value is, and how each stage of each microbatch is cut."""

    def __init__(self, context: StepContext, trees: dict[Value, AbstractTree], untraced: Untraced) -> None:
        self.model, self.trees, self.context, self.untraced = context.model, trees, context, untraced
        model = context.model
        self.traces = Traces(model, untraced.known_only)
        self.fake = fake_mode()
        self.stage_calls: dict[Coordinates, tuple[StageCall, StageCall | None, Op]] = {}
        self.cuts: dict[Coordinates, Cut] = {}
        self.forwards: dict[Coordinates, Op] = {}
        self.notes: dict[Coordinates, AbstractTree] = {}  # what norms note in a forward that leaves more for its update
        self.noting: dict[Coordinates, Op] = {}  # forwards whose updates read what their graphs say
        self.storage_maps: dict[Op, StorageMap] = {}
        self.first: dict[StageCall, StageCall] = {}
        self._labels: dict[int, tuple[Op, dict[str, Value]]] = {}
        self.updates: dict[int, dict[tuple[str, ...], None]] = {}  # of a stage the ops of its updates, each once
        self.loss_cotangent = fresh_storage()
        self.constant: set[int] = {self.loss_cotangent}  # storages of tensors that stages hold on to
        self.origin: dict[Value, Value] = {}  # of a copy, what it is a copy of
        self.copies: dict[Value, list[Value]] = {}  # the other way round
        self.moves: dict[Value, tuple[torch.device, torch.device]] = {}  # of a copy on another device, from where to it

    def follow(self, op: Op) -> None:
        """Find out what an op writes."""
        if self.is_untraced(op):
            self.trees.update({value: self.untraced.trees.get(value, OPAQUE) for value in op.writes})
        elif op.kind in "FRBI":
            try:
                (self.forward if op.kind in "FR" else self.backward)(op)
            except Untraceable as error:
                raise error.of(op.stage or 0, self.model.who(op.stage or 0)) from error
        elif op.kind in ("SEND", "RECV", "OFFLOAD", "LOAD"):
            for read, written in zip(op.reads, op.writes, strict=True):
                source = self.origin[written] = self.origin.get(read, read)
                self.copies.setdefault(source, []).append(written)
                if op.kind == "RECV" and read in self.context.moves:
                    self.moves[written] = self.context.moves[read]
                if read in self.trees:  # what a forward leaves is known when its backward is
                    known = rounded(op, self.trees[read], self.fake) if op.how else self.trees[read]
                    self.trees[written] = self.landed(written, known)
        elif op.kind == "U" and self.update_only(op):
            self.update(op)
        elif op.kind == "U":
            self.trees.update(zip(op.writes, self.updated(op, [self.trees[value] for value in op.reads]), strict=True))
        elif op.kind != "W":
            made = abstract_eval(op, [self.trees[value] for value in op.reads], self.context, self.fake)
            self.trees.update(zip(op.writes, made, strict=True))

    def landed(self, value: Value, known: AbstractTree) -> AbstractTree:
        """What is known of a value as it arrives: on another device it is in memory of its own."""
        home, there = self.moves.get(value, (None, None))
        if there is None or known is OPAQUE:
            return known
        leaves = (
            in_own_storage(leaf.aval._replace(device=there))
            if isinstance(leaf, Fact) and leaf.aval.device == home
            else leaf
            for leaf in known.leaves
        )
        return known._replace(leaves=tuple(leaves))

    def is_untraced(self, op: Op) -> bool:
        """Whether an op is of a stage that runs under autograd; its U then runs the forward once more, if it is no
        norm's."""
        return op.stage in self.untraced.stages and (
            op.kind in "FRBIW" or (op.kind == "U" and bool(self.update_only(op)))
        )

    def update_only(self, op: Op) -> tuple[int, ...]:
        """The places among the constants of the buffers that only the updates of an op's stage read and write."""
        stage = self.model.stages[op.stage or 0].forward
        return tuple(stage.update_only_positions()) if isinstance(stage, PositionalStage) else ()

    def update(self, op: Op) -> None:
        """What a U writes: tensors like those before. What it reads of its forward is known when that is cut."""
        before = self.trees[op.reads[0]]
        stage: Any = self.model.stages[op.stage or 0].forward
        names: Mapping[str, int] = tree.unflatten(before.spec, range(len(before.leaves)))
        known = self.trees[Value("const", op.stage)].leaves
        after = self.traces.outline(self.stage_calls[op[1:4]][0]).avals("update")
        for name, at, new in zip(stage.update_only, self.update_only(op), after, strict=True):
            if {aval_of(before.leaves[names[name]]), new} != {known[at].aval}:
                raise Untraceable(f"buffer {name!r} changes its shape, dtype or strides").of(op.stage or 0, stage.who)
        notes = self.notes[op[1:4]]

        def shown(args: list[Any]) -> list[Any]:
            return [args[0], (args[1], copied)]

        (self.trees[op.writes[0]],) = self.updated(op, [before, notes], shown)
        self.noting[op[1:4]] = self.forwards[op[1:4]]

    def updated(self, op: Op, trees: Sequence[AbstractTree], shown: Callable[[list[Any]], list[Any]] = list) -> Any:
        """What a U writes that runs by its rule; its ops are noted."""
        heard = Heard()
        made = by_rule(op, trees, self.context, self.fake, shown, heard)
        self.updates.setdefault(op.stage or 0, {})[tuple(heard.lines)] = None
        return made

    def note(self) -> None:
        """What forwards leave for updates, now that all are cut."""
        for op in self.noting.values():
            if not self.is_untraced(op):
                cut = self.cut_of(op)
                graph, facts = cut.graph, cut.graph.facts
                storages = self.storage_map(op, cut, self.labels(op))
                leaves = (*graph.writes["seen"], *cut.seen())
                moved = tuple(storages.moved(facts[leaf]) if isinstance(leaf, Name) else leaf for leaf in leaves)
                seen = next(value for value in op.writes if value.name == "seen")
                self.trees |= {
                    value: self.landed(value, AbstractTree(moved)) for value in (seen, *self.copies.get(seen, ()))
                }

    def forward(self, op: Op) -> None:
        """What a stage writes, the loss behind it too."""
        call = self.call(op)
        named = self.labels(op)
        given = {label: self.trees[value] for label, value in named.items()} | self.constants(op.stage)
        made = self.outlined(call, given)
        if "state" in made and isinstance(self.model.stages[op.stage or 0].forward, PositionalStage):
            made["state"] = made["state"]._replace(spec=given["state"].spec)  # stages that share a trace name it apart
        loss = None
        if "target" in given:
            pair = {"x": made["y"], "target": given["target"]}
            loss = self.known(StageCall(None, *described(pair)))
            made |= self.outlined(loss, pair)
            made["loss"] = AbstractTree(
                tuple(in_own_storage(leaf.aval) for leaf in made["loss"].leaves), made["loss"].spec
            )
        self.stage_calls[op[1:4]] = (call, loss, op)
        if op.kind == "F":
            self.forwards[op[1:4]] = op
        later = ("res", "seen") if self.update_only(op) else ("res",)
        if self.update_only(op):
            self.notes[op[1:4]] = made["seen"]
        self.trees.update({value: made[label_of(value)] for value in op.writes if value.name not in later})

    def outlined(self, call: StageCall, given: Mapping[str, AbstractTree]) -> dict[str, AbstractTree]:
        """What a call writes, each tensor in memory of its own or in that of what is given."""
        outline = self.traces.outline(call)
        storages = StorageMap(
            (known.storage, leaf.storage)
            for label, leaves in outline.reads.items()
            for known, leaf in zip(leaves, given[label].leaves, strict=True)
            if isinstance(leaf, Fact)
        )

        def abstract(leaves: Sequence[Any], spec: Any) -> AbstractTree:
            return AbstractTree(
                tuple(storages.moved(leaf) if isinstance(leaf, Fact) else leaf for leaf in leaves), spec
            )

        return {label: abstract(leaves, outline.specs[label]) for label, leaves in outline.writes.items()}

    def call(self, op: Op) -> StageCall:
        """How an F or R calls its stage."""
        assert op.stage is not None
        stage = self.model.stages[op.stage]
        named = [(label, value) for label, value in self.labels(op).items() if label not in ("target", "key")]
        groups = {label: self.taken(value, label) for label, value in named}
        reads, specs = described(groups | self.constants(op.stage))
        microbatch = self.context.number(op) if "microbatch" in stage.asks else None
        starts = tuple(label for label, value in named if self.starts(value, label))
        return self.known(StageCall(op.stage, reads, specs, microbatch, starts))

    def known(self, call: StageCall) -> StageCall:
        """The first of calls that are equal: what is found by it is found without comparing much."""
        try:
            return self.first.setdefault(call, call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error

    def taken(self, value: Value, label: str) -> AbstractTree:
        """What is known of a value that a forward reads; of inputs whose gradient is wanted, with that."""
        abstract = self.trees[value]
        return (
            AbstractTree(tuple(map(wanting_fact, abstract.leaves)), abstract.spec)
            if self.starts(value, label)
            else abstract
        )

    def starts(self, value: Value, label: str) -> bool:
        """Whether a value that a forward reads is of the batch, and its gradient is wanted."""
        return value.name in ("x", "inputs") and (value.stage, port_of(label)) in self.context.input_grads

    def constants(self, stage: int | None) -> dict[str, AbstractTree]:
        """What a module reads besides its parameters."""
        abstract = self.trees.get(Value("const", stage))
        return {} if abstract is None else {"const": abstract}

    def labels(self, op: Op) -> dict[str, Value]:
        """The values an op reads by the label that graphs have for them."""
        if id(op) not in self._labels:
            self._labels[id(op)] = op, reads_of(op)
        return self._labels[id(op)][1]

    def backward(self, op: Op) -> None:
        """Trace the stage and its gradient, now that the cotangents are known, and see what comes out."""
        place = op[1:4]
        call, loss, first = self.stage_calls[place]
        named = self.labels(op)
        cotangents: dict[str, tuple[Any, ...]] = {}
        outline = self.traces.outline(call)
        if loss is None:
            for label in _outputs(outline):
                value, leaves = named.get(cotangent_of(label)), outline.avals(label)
                cotangents[cotangent_of(label)] = (
                    (None,) * len(leaves) if value is None else self.cotangent_avals(value, leaves)
                )
        if "dcarry" in named:
            cotangents["dcarry"] = self.cotangent_avals(named["dcarry"], outline.avals("carry"))
        if "loss" in outline.writes:  # a loss of the stage's own
            cotangents["dloss"] = (self.loss_of(op),)
        graph = self.traced(call, cotangents, loss)
        wanted = tuple(
            (label_of(value), self.wanting(call, label_of(value)))
            for value in op.writes
            if value.name in ("dx", "dcarry")
        )
        saved = dict(first.how).get("saved")
        cut = self.cuts[place] = self.cut(op, graph, wanted, saved)
        self.write(op, first, cut, named)

    def cut_of(self, op: Op) -> Cut:
        """How the stage of an op is cut for its microbatch; nothing behind the outputs where no backward follows."""
        place = op[1:4]
        if place not in self.cuts:
            call, loss, _ = self.stage_calls[place]
            outline = self.traces.outline(call)
            cotangents = {cotangent_of(label): (None,) * len(outline.writes[label]) for label in _outputs(outline)}
            graph = self.traced(call, cotangents, loss)
            self.cuts[place] = self.cut(op, graph, (), None)
        return self.cuts[place]

    def cut(self, op: Op, graph: Graph, wanted: Any, saved: Any) -> Cut:
        """A graph as it is cut, once for all who ask."""
        update_only = self.update_only(op)
        cut = graph.once(("cut", wanted, saved, update_only), lambda: Cut(graph, wanted, saved, update_only))
        stale = cut.stale() if update_only else None
        if stale is not None:
            stage: Any = self.model.stages[op.stage or 0].forward
            name = stage.update_only[stale]
            raise Impure(reads_update(f"stage {op.stage}", name))
        return cut

    def loss_of(self, op: Op) -> Aval:
        """What is known of the loss that an op's stage writes."""
        call, loss, _ = self.stage_calls[op[1:4]]
        return self.traces.outline(loss or call).avals("loss")[0]._replace(wants=False)

    def traced(self, call: StageCall, cotangents: dict[str, tuple[Any, ...]], loss: StageCall | None) -> Graph:
        """A stage and its gradient, with the loss if it reads the target."""
        if loss is None:
            return self.traces.graph(self.traces.shared(call), cotangents)
        weight = self.traces.outline(loss).avals("loss")[0]._replace(wants=False)
        return self.traces.with_loss(self.traces.shared(call), cotangents, loss, weight)

    def wanting(self, call: StageCall, label: str) -> tuple[int, ...]:
        """The places of leaves that want a cotangent, among those it is the label of."""
        leaves = dict(call.reads)[differentiated(label)]
        return tuple(place for place, leaf in enumerate(leaves) if wants(leaf))

    def cotangent_avals(self, value: Value, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The avals of cotangents, for leaves that want one."""
        given = self.trees[value].leaves
        return tuple(aval_of(known) if wants(leaf) else None for leaf, known in zip(leaves, given, strict=True))

    def write(self, op: Op, first: Op, cut: Cut, named: Mapping[str, Value]) -> None:
        """What a backward (and its W) writes, and the residuals between: which memory each is in."""
        graph, facts = cut.graph, cut.graph.facts
        storages = self.storage_map(first, cut, named)

        def abstract(leaves: Sequence[Any]) -> AbstractTree:
            return AbstractTree(
                tuple(storages.moved(facts[leaf]) if isinstance(leaf, Name) else leaf for leaf in leaves)
            )

        gradients = [Value("g", *op[1:4], port=k) for k in range(len(op.reads))]
        gradients = [value for value in gradients if label_of(value) in graph.writes]
        written = {label_of(value) for value in (*op.writes, *gradients)} - {"wres"}
        made = {label: abstract(cut.written(label)) for label in graph.writes if label in written}
        made |= {"res": abstract(cut.residuals)} | ({"wres": abstract(cut.weight_residuals)} if op.kind == "I" else {})
        read = next(value for value in op.reads if value.name == "res")
        source = self.origin.get(read, read)
        residuals = [source, *self.copies.get(source, ())]
        known = {value: made[label_of(value)] for value in (*residuals, *op.writes, *gradients)}
        self.trees.update({value: self.landed(value, tree) for value, tree in known.items()})

    def storage_map(self, first: Op, cut: Cut, named: Mapping[str, Value]) -> StorageMap:
        """Which storages of a microbatch those of a graph stand for; `first` is the F or R that runs it, `named` what
        is read by its backward, or by itself."""
        if first in self.storage_maps:
            return self.storage_maps[first]
        graph, facts = cut.graph, cut.graph.facts
        constants = [facts[name].storage for name in graph.constants]
        self.constant.update(constants)
        storages = StorageMap(zip(constants, constants, strict=True))
        given = {label: self.trees[value] for label, value in self.labels(first).items()}
        given |= {label: self.trees[value] for label, value in named.items() if is_cotangent(label)}
        given |= self.constants(first.stage)
        for name in graph.reads.get("dloss", ()):  # one for all microbatches of a weight
            storages[facts[name].storage] = self.loss_cotangent
        for label, leaves in graph.reads.items():
            for name, leaf in zip(leaves, given[label].leaves if label in given else (), strict=False):
                if name is not None and isinstance(leaf, Fact):
                    storages[facts[name].storage] = leaf.storage
        for value in first.writes:  # what F or R writes, it may keep too
            later = value.name == "res" or value not in self.trees
            names = () if later else graph.writes.get(label_of(value), ())
            for name, leaf in zip(names, self.trees[value].leaves if names else (), strict=True):
                if isinstance(name, Name):
                    storages.setdefault(facts[name].storage, leaf.storage)
        if self.update_only(first):
            self.storage_maps[first] = storages
        return storages


def _outputs(outline: Outline) -> list[str]:
    """The labels of a stage's outputs."""
    return [label for label in outline.writes if is_output(label)]
