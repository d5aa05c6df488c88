"""Walk down a program with abstract values: what every value will be, before anything runs.

    params[0]: float32[512, 512]   x[0,0]: float32[8, 512]        -->        y[0,0]: float32[8, 512]   res[0,0]: ...

So the bytes of each value are known, and which tensors share their memory; and how each stage is traced and cut. The
stages are traced with the cotangents that come, so from the last one back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Aval, Fact, Graph, Name, fresh_storage, in_own_storage
from fpipe.graphs.language.labels import is_cotangent, label_of, reads_of
from fpipe.graphs.language.listing import Heard
from fpipe.graphs.purity.ambient import Untraceable
from fpipe.graphs.tracing.fake import fake_mode
from fpipe.graphs.tracing.outputs import copied
from fpipe.graphs.tracing.stage_call import StageCall
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Program, Value
from fpipe.runtimes.definition.by_autograd import StepContext
from fpipe.runtimes.definition.device_moves import Moves
from fpipe.runtimes.lowering.abstract_eval import abstract_eval, by_rule, rounded
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree, StorageMap, aval_of, described
from fpipe.runtimes.lowering.dry_run import DryRuns
from fpipe.runtimes.lowering.shards import gathered, shard_of
from fpipe.runtimes.lowering.stage_calls import StageCalls, StageRun, update_only
from fpipe.runtimes.lowering.untraced import Untraced

Coordinates = tuple[int | None, int | None, int | None]
"""Stage, microbatch and slice of an op."""
TRANSFERS = ("SEND", "RECV", "OFFLOAD", "LOAD")


class Copies(NamedTuple):
    """The copies of a program's values.

    Attributes:
        origin: of a copy, the value that it is a copy of.
        of: of a value, its copies.
        moves: of a copy on another device, from which to which.
    """

    origin: Mapping[Value, Value]
    of: Mapping[Value, Sequence[Value]]
    moves: Moves

    def landed(self, value: Value, known: AbstractTree) -> AbstractTree:
        """The abstract tree of a value as it arrives: on another device it is in memory of its own."""
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

    def each(self, value: Value) -> list[Value]:
        """The value that one is a copy of, and all its copies."""
        source = self.origin.get(value, value)
        return [source, *self.of.get(source, ())]


def copies_of(ops: Iterable[Op], moves: Moves) -> Copies:
    """The copies that transfers make, where `moves` has those between two devices."""
    origin, of = dict[Value, Value](), dict[Value, list[Value]]()
    landing = dict[Value, tuple[torch.device, torch.device]]()
    for op in ops:
        for read, written in zip(op.reads, op.writes, strict=True) if op.kind in TRANSFERS else ():
            source = origin[written] = origin.get(read, read)
            of.setdefault(source, []).append(written)
            if op.kind == "RECV" and read in moves:
                landing[written] = moves[read]
    return Copies(origin, of, landing)


class Shapes:
    """A program as it is known before it runs: `shapes_of` walks down it, and fills this in.

    Attributes:
        context, untraced: of the step.
        trees: the abstract tree of every value.
        copies: what travels.
        runs: each stage on each microbatch, and `cuts` how it is cut for that.
        updates: of each stage the ops of its updates, each once.
    """

    def __init__(
        self, ops: Sequence[Op], context: StepContext, given: Mapping[Value, AbstractTree], untraced: Untraced
    ) -> None:
        self.context, self.model, self.untraced, self._fake = context, context.model, untraced, fake_mode()
        self._labels = {id(op): reads_of(op) for op in ops if op.kind in "FRBIW"}
        self.copies = copies_of(ops, context.moves)
        self._calls = StageCalls(context, untraced.known_only)
        self.trees, self._dry_runs = {**given}, DryRuns(context)
        self.runs: dict[Coordinates, StageRun] = {}
        self.cuts: dict[Coordinates, Cut] = {}
        self._storage_maps: dict[Op, StorageMap] = {}
        self.updates: dict[int, dict[tuple[str, ...], None]] = {}
        self._loss_cotangent = fresh_storage()

    def is_untraced(self, op: Op) -> bool:
        """Whether an op is of a stage that runs under autograd; its U then runs the forward once more, if it is no
        norm's."""
        again = op.kind == "U" and bool(update_only(self.model, op.stage))
        return op.stage in self.untraced.stages and (op.kind in "FRBIW" or again)

    def labels(self, op: Op) -> Mapping[str, Value]:
        """The values an op of a stage reads by the label that graphs have for them."""
        return self._labels[id(op)]

    def cut_of(self, op: Op) -> Cut:
        """The cut of an op's stage for its microbatch."""
        return self.cuts[op[1:4]]

    def loss_aval(self, op: Op) -> Aval:
        """The aval of the loss that an op's stage writes."""
        return self._calls.loss_aval(self.runs[op[1:4]])

    def notes_spec(self, op: Op) -> Any:
        """The containers of what norms note in a forward."""
        return self._calls.traces.outline(self.runs[op[1:4]].call).specs["seen"]

    def graphs(self) -> Mapping[int | None, Sequence[Graph]]:
        """The graphs of each stage, and of the loss under None."""
        return self._calls.traces.graphs()

    def follow(self, op: Op) -> None:
        """Find out what an op writes."""
        if self.is_untraced(op):
            self.trees.update(zip(op.writes, self._dry_runs.written(op, self.trees), strict=True))
        elif op.kind in "FRBI":
            try:
                (self._forward if op.kind in "FR" else self._backward)(op)
            except Untraceable as error:
                raise error.of(op.stage or 0, self.model.who(op.stage or 0)) from error
        elif op.kind == "GATHER":
            shared = self.context.shared.get(shard_of(op))
            self.trees[op.writes[0]] = gathered(op, self.trees[op.reads[0]] if shared is None else shared.whole, shared)
        elif op.kind == "SCATTER" and shard_of(op) in self.context.shared:
            self.trees[op.writes[0]] = self.context.shared[shard_of(op)].scattered(op, self.trees[op.reads[0]])
        elif op.kind in TRANSFERS:
            for read, written in zip(op.reads, op.writes, strict=True):
                if read in self.trees:  # what a forward leaves is known when its backward is
                    known = rounded(op, self.trees[read], self._fake) if op.how else self.trees[read]
                    self.trees[written] = self.copies.landed(written, known)
        elif op.kind == "U":
            self._update(op)
        elif op.kind != "W":
            made = abstract_eval(op, [self.trees[value] for value in op.reads], self.context, self._fake)
            self.trees.update(zip(op.writes, made, strict=True))

    def _given(self, op: Op) -> dict[str, AbstractTree]:
        """The abstract trees of what an op reads, by label, and of the constants of its stage."""
        found = {label: self.trees[value] for label, value in self.labels(op).items()}
        constants = self.trees.get(Value("const", op.stage))
        return found if constants is None else found | {"const": constants}

    def _forward(self, op: Op) -> None:
        """The results of a stage, and of the loss behind it."""
        place, given = op[1:4], self._given(op)
        call = self._calls.call(op, self.labels(op), given)
        made = self._calls.outlined(call, given)
        if "state" in made and isinstance(self.model.stages[op.stage or 0].forward, PositionalStage):
            made["state"] = made["state"]._replace(spec=given["state"].spec)  # stages that share a trace name it apart
        loss = None
        if "target" in given:
            pair = {"x": made["y"], "target": given["target"]}
            loss = self._calls.known(StageCall(None, *described(pair)))
            made |= self._calls.outlined(loss, pair)
            leaves = tuple(in_own_storage(leaf.aval) for leaf in made["loss"].leaves)
            made["loss"] = AbstractTree(leaves, made["loss"].spec)
        notes = made["seen"] if update_only(self.model, op.stage) else None
        forward = op if op.kind == "F" or place not in self.runs else self.runs[place].forward  # R may come first
        self.runs[place] = StageRun(call, loss, op, forward, notes)
        later = ("res",) if notes is None else ("res", "seen")
        self.trees.update({value: made[label_of(value)] for value in op.writes if value.name not in later})

    def _backward(self, op: Op) -> None:
        """Trace the stage and its gradient, now that the cotangents are known, and see what comes out: what a backward
        (and its W) writes, and the residuals between."""
        place, labels = op[1:4], self.labels(op)
        run = self.runs[place]
        cut = self.cuts[place] = self._calls.cut(op, run, labels, self.trees)
        storages = self._storage_map(run.first, cut, labels)
        gradients = [Value("g", *place, port=k) for k in range(len(op.reads))]
        gradients = [value for value in gradients if label_of(value) in cut.graph.writes]
        written = {label_of(value) for value in (*op.writes, *gradients)} - {"wres"}
        made = {label: cut.written(label) for label in cut.graph.writes if label in written}
        made |= {"res": cut.residuals} | ({"wres": cut.weight_residuals} if op.kind == "I" else {})
        residuals = self.copies.each(next(value for value in op.reads if value.name == "res"))
        trees = {label: _in_memory(leaves, cut, storages) for label, leaves in made.items()}
        for value in (*residuals, *op.writes, *gradients):
            self.trees[value] = self.copies.landed(value, trees[label_of(value)])

    def _update(self, op: Op) -> None:
        """The state after a U: by its rule, whose ops are noted. An update that reads more of its forward than notes
        gives tensors like those before; what it reads is known when that is cut."""
        places, heard = update_only(self.model, op.stage), Heard()
        if places:
            before, run = self.trees[op.reads[0]], self.runs[op[1:4]]
            assert run.notes is not None
            self._refuse_changed(op, before, places, run)
            made = by_rule(op, [before, run.notes], self.context, self._fake, _with_copies, heard)
        else:
            made = by_rule(op, [self.trees[value] for value in op.reads], self.context, self._fake, list, heard)
        self.updates.setdefault(op.stage or 0, {})[tuple(heard.lines)] = None
        self.trees.update(zip(op.writes, made, strict=True))

    def _refuse_changed(self, op: Op, before: AbstractTree, places: Sequence[int], run: StageRun) -> None:
        """An Untraceable for a buffer that is another kind of tensor after its update."""
        stage: Any = self.model.stages[op.stage or 0].forward
        names: Mapping[str, int] = tree.unflatten(before.spec, range(len(before.leaves)))
        known = self.trees[Value("const", op.stage)].leaves
        after = self._calls.traces.outline(run.call).avals("update")
        for name, at, new in zip(stage.update_only, places, after, strict=True):
            if {aval_of(before.leaves[names[name]]), new} != {known[at].aval}:
                raise Untraceable(f"buffer {name!r} changes its shape, dtype or strides").of(op.stage or 0, stage.who)

    def constant_storages(self) -> set[int]:
        """The storages of tensors that stages hold on to, and of the loss's cotangent."""
        held = {cut.graph.facts[name].storage for cut in self.cuts.values() for name in cut.graph.constants}
        return held | {self._loss_cotangent}

    def complete(self) -> None:
        """Cut what no backward follows, and find what forwards leave for updates."""
        for (stage, *_), run in self.runs.items():
            place = run.first[1:4]
            if place not in self.cuts:
                self.cuts[place] = self._calls.forward_cut(stage or 0, run)
            seen = next((value for value in run.forward.writes if value.name == "seen"), None)
            if run.notes is not None and seen is not None:
                cut = self.cuts[place]
                storages = self._storage_map(run.forward, cut, self.labels(run.forward))
                left = _in_memory((*cut.graph.writes["seen"], *cut.seen()), cut, storages)
                self.trees |= {value: self.copies.landed(value, left) for value in self.copies.each(seen)}

    def _storage_map(self, first: Op, cut: Cut, labels: Mapping[str, Value]) -> StorageMap:
        """Which storages of a microbatch those of a graph stand for; `first` is the F or R that runs it, `labels` name
        what is read by its backward, or by itself."""
        if first in self._storage_maps:
            return self._storage_maps[first]
        graph, facts = cut.graph, cut.graph.facts
        constants = [facts[name].storage for name in graph.constants]
        storages = self._storage_maps[first] = StorageMap(zip(constants, constants, strict=True))
        given = self._given(first)
        given |= {label: self.trees[value] for label, value in labels.items() if is_cotangent(label)}
        for name in graph.reads.get("dloss", ()):  # one for all microbatches of a weight
            storages[facts[name].storage] = self._loss_cotangent
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
        return storages


def ops_of(program: Program, context: StepContext) -> list[Op]:
    """The ops that are lowered: pairs as their parts, without FREEs, and without carries that nobody asks for."""
    ops = [part for op in program.ops for part in op.parts or (op,) if part.kind != "FREE"]
    if program.slices == 1:
        return ops
    return [_without_carry(op) if "carry" not in context.model.stages[op.stage or 0].asks else op for op in ops]


def _without_carry(op: Op) -> Op:
    """An op of a stage that asks for no carry, and so hands on nothing to its next slice."""
    if op.kind not in ("F", "R", "B", "I"):
        return op
    reads, writes = (tuple(v for v in values if v.name not in ("carry", "dcarry")) for values in (op.reads, op.writes))
    return op._replace(reads=reads, writes=writes)


def shapes_of(
    ops: Sequence[Op], context: StepContext, given: Mapping[Value, AbstractTree], untraced: Untraced
) -> Shapes:
    """The shapes of ops whose inputs are as `given`.

    Raises:
        Untraceable: something in them cannot be known before it runs.
    """
    shapes = Shapes(ops, context, given, untraced)
    for op in ops:
        shapes.follow(op)
    shapes.complete()
    return shapes


def _in_memory(leaves: Sequence[Any], cut: Cut, storages: StorageMap) -> AbstractTree:
    """Leaves of a graph in the memory of a microbatch."""
    facts = cut.graph.facts
    return AbstractTree(tuple(storages.moved(facts[leaf]) if isinstance(leaf, Name) else leaf for leaf in leaves))


def _with_copies(args: list[Any]) -> list[Any]:
    """A state and notes, and in place of the rest of the forward, which is not cut yet, copies."""
    return [args[0], (args[1], copied)]
