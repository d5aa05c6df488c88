"""Walk down a program with abstract values: what every value will be, before anything runs.

    params[0]: float32[512, 512]   x[0,0]: float32[8, 512]        -->        y[0,0]: float32[8, 512]   res[0,0]: ...

So the bytes of each value are known, and which tensors share their memory; and how each stage is traced and cut. The
stages are traced with the cotangents that come, so from the last one back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Fact, Name, fact, fresh_storage, in_own_storage
from fpipe.graphs.language.labels import is_cotangent, label_of, reads_of
from fpipe.graphs.tracing.fake import fake_mode
from fpipe.graphs.tracing.stage_call import StageCall
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.meaning import RULES
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.in_place import places_by_leaf
from fpipe.runtimes.lowering.lowered import AbstractTree, StorageMap, aval_of, dense, described, whole
from fpipe.runtimes.lowering.shards import gathered, shard_of
from fpipe.runtimes.lowering.stage_calls import (
    TRANSFERS,
    Coordinates,
    Shapes,
    StageCalls,
    StageRun,
    Untraced,
    copies_of,
)
from fpipe.runtimes.lowering.untraced import DryRuns
from fpipe.torch_internals import storage_of


def abstract_eval(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """Return the abstract values that an op writes if it reads these; `fake` is the mode that makes fake tensors."""
    if op.kind == "UPDATE":  # torch's optimizers look at numbers, and do not run on shapes alone
        return _updated(*trees[:3])
    if op.kind == "ADD" and _are_alike(trees):  # its rule takes .1 ms a leaf on shapes
        leaves = (leaf if leaf is None else in_own_storage(leaf.aval) for leaf in trees[0].leaves)
        return [trees[0]._replace(leaves=tuple(leaves))]
    devices = {leaf.aval.device for abstract in trees for leaf in abstract.leaves if isinstance(leaf, Fact)}
    # Slices are views, and those of plain meta tensors are made in no time. They forget the device.
    on_meta = op.kind == "SPLIT" and len(devices) == 1
    numbers: dict[int, int] = {}
    with nullcontext() if on_meta else fake:
        args = [whole(abstract, [_fake(leaf, numbers, on_meta) for leaf in abstract.leaves]) for abstract in trees]
        try:
            results = RULES[op.kind](op, args, context)
        except Exception as error:
            raise Untraceable(f"{op.cell} cannot run on shapes alone ({type(error).__name__}: {error})") from error
    abstracts: list[AbstractTree] = []
    for result in results:
        leaves, spec = tree.flatten(result)
        known = [fact(leaf, numbers) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if on_meta:
            known = [_on_device(leaf, *devices) for leaf in known]
        abstracts.append(AbstractTree(tuple(known), None if is_list(op, result) else spec))
    return abstracts


def _are_alike(trees: Sequence[AbstractTree]) -> bool:
    first, *others = (tuple(map(aval_of, abstract.leaves)) for abstract in trees)
    return all(avals == first for avals in others) and all(leaf is None or dense(leaf) for leaf in trees[0].leaves)


def _updated(params: AbstractTree, state: AbstractTree, grads: AbstractTree) -> list[AbstractTree]:
    """The next parameters and state are as those before, in memory of their own; what has no gradient stays."""
    next_params, next_state = [*params.leaves], [*state.leaves]
    for at, places in enumerate(places_by_leaf(params, state)):
        if grads.leaves[at] is not None:
            next_params[at] = _dense_copy(next_params[at])
            for place in places:
                next_state[place] = _dense_copy(next_state[place])
    return [AbstractTree(tuple(next_params), params.spec), AbstractTree(tuple(next_state), state.spec)]


def _dense_copy(leaf: Any) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    like = torch.empty_like(torch.empty_strided(leaf.aval.shape, leaf.aval.stride, device="meta"))
    return in_own_storage(leaf.aval._replace(stride=like.stride()))


def _on_device(leaf: Any, device: torch.device) -> Any:
    return leaf._replace(aval=leaf.aval._replace(device=device)) if isinstance(leaf, Fact) else leaf


def _fake(leaf: Any, numbers: dict[int, int], on_meta: bool) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    tensor = leaf.aval.empty("meta" if on_meta else None)
    numbers[storage_of(tensor)] = leaf.storage
    return tensor.requires_grad_(leaf.aval.wants)


def is_list(op: Op, made: Any) -> bool:
    """Whether what a rule made is a list over leaves (gradients), and no container that happens to be a list."""
    return isinstance(made, list) and op.kind not in _CONTAINERS


_CONTAINERS = frozenset(("F", "R", "SPLIT", "MERGE", "UPDATE"))


def shapes_of(
    ops: Sequence[Op], context: StepContext, given: Mapping[Value, AbstractTree], untraced: Untraced
) -> Shapes:
    """The shapes of ops whose inputs are as `given`; Untraceable if they cannot be known before these run."""
    walk = _Walk(ops, context, given, untraced)
    for op in ops:
        walk.follow(op)
    walk.complete()
    return walk.shapes()


class _Walk:
    """The values, storages, traces and cuts that are known after some ops."""

    def __init__(
        self, ops: Sequence[Op], context: StepContext, given: Mapping[Value, AbstractTree], untraced: Untraced
    ) -> None:
        self._context, self._model, self._untraced, self._fake = context, context.model, untraced, fake_mode()
        self._copies = copies_of(ops, context.moves)
        self._calls = StageCalls(context, untraced.known_only)
        self._trees, self._dry_runs = {**given}, DryRuns(context)
        self._runs: dict[Coordinates, StageRun] = {}
        self._cuts: dict[Coordinates, Cut] = {}
        self._storage_maps: dict[Op, StorageMap] = {}
        self._loss_storage = fresh_storage()

    def shapes(self) -> Shapes:
        """All that is known, after the last op."""
        found = self._trees, self._runs, self._cuts, self._loss_storage
        return Shapes(self._context, self._untraced, self._copies, self._calls, *found)

    def follow(self, op: Op) -> None:
        """Find out what an op writes."""
        if self._untraced.has(op):
            self._trees.update(zip(op.writes, self._dry_runs.written(op, self._trees), strict=True))
        elif op.kind in "FRBI":
            try:
                (self._forward if op.kind in "FR" else self._backward)(op)
            except Untraceable as error:
                raise error.of(op.stage or 0, self._model.who(op.stage or 0)) from error
        elif op.kind == "GATHER":
            shared = self._context.shared.get(shard_of(op))
            self._trees[op.writes[0]] = gathered(
                op, self._trees[op.reads[0]] if shared is None else shared.whole, shared
            )
        elif op.kind == "SCATTER" and shard_of(op) in self._context.shared:
            self._trees[op.writes[0]] = self._context.shared[shard_of(op)].scattered(op, self._trees[op.reads[0]])
        elif op.kind in TRANSFERS:
            for read, written in zip(op.reads, op.writes, strict=True):
                if read in self._trees:  # what a forward leaves is known when its backward is
                    known = self._trees[read]
                    if op.how:  # a leaf that is rounded on its way lies in memory of its own
                        (cast,) = abstract_eval(op, [known], self._context, self._fake)
                        known = cast._replace(spec=known.spec)
                    self._trees[written] = self._copies.as_received(written, known)
        elif op.kind != "W":
            made = abstract_eval(op, [self._trees[value] for value in op.reads], self._context, self._fake)
            self._trees.update(zip(op.writes, made, strict=True))

    def _given(self, op: Op) -> dict[str, AbstractTree]:
        """The abstract trees of what an op reads, by label, and of the constants of its stage."""
        found = {label: self._trees[value] for label, value in reads_of(op).items()}
        constants = self._trees.get(Value("const", op.stage))
        return found if constants is None else found | {"const": constants}

    def _forward(self, op: Op) -> None:
        """The results of a stage, and of the loss behind it."""
        place, given = op[1:4], self._given(op)
        call = self._calls.call(op, reads_of(op), given)
        made = self._calls.outlined(call, given)
        if "state" in made and isinstance(self._model.stages[op.stage or 0].forward, PositionalStage):
            made["state"] = made["state"]._replace(spec=given["state"].spec)  # stages that share a trace name it apart
        loss = None
        if "target" in given:
            pair = {"x": made["y"], "target": given["target"]}
            loss = self._calls.known(StageCall(None, *described(pair)))
            made |= self._calls.outlined(loss, pair)
            leaves = tuple(in_own_storage(leaf.aval) for leaf in made["loss"].leaves)
            made["loss"] = AbstractTree(leaves, made["loss"].spec)
        forward = op if op.kind == "F" or place not in self._runs else self._runs[place].forward  # R may come first
        self._runs[place] = StageRun(call, loss, op, forward)
        self._trees.update({value: made[label_of(value)] for value in op.writes if value.name != "res"})

    def _backward(self, op: Op) -> None:
        """Trace the stage and its gradient, now that the cotangents are known, and see what comes out: what a backward
        (and its W) writes, and the residuals between."""
        place, labels = op[1:4], reads_of(op)
        run = self._runs[place]
        cut = self._cuts[place] = self._calls.cut(op, run, labels, self._trees)
        storages = self._storage_map(run.first, cut, labels)
        gradients = [Value("g", *place, port=k) for k in range(len(op.reads))]
        gradients = [value for value in gradients if label_of(value) in cut.graph.writes]
        written = {label_of(value) for value in (*op.writes, *gradients)} - {"wres"}
        made = {label: cut.written(label) for label in cut.graph.writes if label in written}
        made |= {"res": cut.residuals} | ({"wres": cut.weight_residuals} if op.kind == "I" else {})
        residuals = self._copies.each(next(value for value in op.reads if value.name == "res"))
        trees = {label: _in_memory(leaves, cut, storages) for label, leaves in made.items()}
        for value in (*residuals, *op.writes, *gradients):
            self._trees[value] = self._copies.as_received(value, trees[label_of(value)])

    def complete(self) -> None:
        """Cut what no backward follows."""
        for (stage, *_), run in self._runs.items():
            place = run.first[1:4]
            if place not in self._cuts:
                self._cuts[place] = self._calls.forward_cut(stage or 0, run)

    def _storage_map(self, first: Op, cut: Cut, labels: Mapping[str, Value]) -> StorageMap:
        """The storages of a microbatch for those of a graph; `labels` name what its `first` op or a backward reads."""
        if first in self._storage_maps:
            return self._storage_maps[first]
        graph, facts = cut.graph, cut.graph.facts
        constants = [facts[name].storage for name in graph.constants]
        storages = self._storage_maps[first] = StorageMap(zip(constants, constants, strict=True))
        given = self._given(first)
        given |= {label: self._trees[value] for label, value in labels.items() if is_cotangent(label)}
        for name in graph.reads.get("dloss", ()):  # one for all microbatches of a weight
            storages[facts[name].storage] = self._loss_storage
        for label, leaves in graph.reads.items():
            for name, leaf in zip(leaves, given[label].leaves if label in given else (), strict=False):
                if name is not None and isinstance(leaf, Fact):
                    storages[facts[name].storage] = leaf.storage
        for value in first.writes:  # what F or R writes, it may keep too
            later = value.name == "res" or value not in self._trees
            names = () if later else graph.writes.get(label_of(value), ())
            for name, leaf in zip(names, self._trees[value].leaves if names else (), strict=True):
                if isinstance(name, Name):
                    storages.setdefault(facts[name].storage, leaf.storage)
        return storages


def _in_memory(leaves: Sequence[Any], cut: Cut, storages: StorageMap) -> AbstractTree:
    """Leaves of a graph in the memory of a microbatch."""
    facts = cut.graph.facts
    return AbstractTree(tuple(storages.moved(facts[leaf]) if isinstance(leaf, Name) else leaf for leaf in leaves))
