"""Infer the shape, dtype, strides and memory of every value of a program, before anything runs.

    params[0]: float32[512, 512]   x[0,0]: float32[8, 512]        -->        y[0,0]: float32[8, 512]   res[0,0]: ...

The walk visits the ops in their order and keeps an `AbstractTree` for each value. It tells the bytes of each value and
which tensors share memory, and it traces and cuts each stage on the way. A forward needs only an outline of its stage.
The trace itself waits for the backward, since it depends on the cotangents that arrive: so residuals are known late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Fact, Name, fact_in_own_storage, fact_of_tensor, fresh_storage
from fpipe.graphs.language.labels import is_cotangent, label_of, reads_by_label
from fpipe.graphs.tracing.fake_tensors import fake_mode
from fpipe.graphs.tracing.open_sizes import SizeNumbers
from fpipe.graphs.tracing.stage_call import StageCall
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.meaning import RULES
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.step import StepOptions
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.in_place import nested_indices_by_leaf
from fpipe.runtimes.lowering.lowered import (
    AbstractTree,
    StorageMap,
    aval_of_leaf,
    avals_and_specs,
    is_dense_fact,
    unflatten_value,
)
from fpipe.runtimes.lowering.shard_shapes import gather_shapes, shard_of
from fpipe.runtimes.lowering.stage_calls import (
    TRANSFERS,
    Coordinates,
    Shapes,
    StageCalls,
    StageRun,
    UntracedStages,
    copies_of,
)
from fpipe.runtimes.lowering.untraced_stages import DryRuns, sparse_gradients
from fpipe.torch_internals import storage_of


def abstract_eval(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """Return the abstract values that an op writes if it reads `trees`, by running its rule on tensors without data.

    `fake` is the mode that makes fake tensors.
    """
    # Torch's optimizers look at numbers, and do not run on shapes alone.
    if op.kind == "UPDATE":
        return _infer_update(*trees[:3])
    # An ADD of equal leaves needs no run, which takes 0.1 ms a leaf under the fake mode.
    if op.kind == "ADD" and _have_equal_avals(trees):
        leaves = (leaf if leaf is None else fact_in_own_storage(leaf.aval) for leaf in trees[0].leaves)
        return [trees[0]._replace(leaves=tuple(leaves))]
    # A SPLIT makes only views, and views of plain meta tensors are fast. They forget the device, which is put back.
    devices = {leaf.aval.device for abstract in trees for leaf in abstract.leaves if isinstance(leaf, Fact)}
    on_meta = op.kind == "SPLIT" and len(devices) == 1
    # Storages of the fake arguments get the numbers that the trees have, so that results which are views of arguments
    # come out in their storages.
    number_by_storage: dict[int, int] = {}
    with nullcontext() if on_meta else fake:
        args = [
            unflatten_value(abstract, [_fake_leaf(leaf, number_by_storage, on_meta) for leaf in abstract.leaves])
            for abstract in trees
        ]
        try:
            results = RULES[op.kind](op, args, context)
        except Exception as error:
            raise Untraceable(f"{op.cell} cannot run on shapes alone ({type(error).__name__}: {error})") from error
    abstracts: list[AbstractTree] = []
    for result in results:
        leaves, spec = tree.flatten(result)
        leaf_facts = [fact_of_tensor(leaf, number_by_storage) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if on_meta:
            leaf_facts = [_on_device(leaf, *devices) for leaf in leaf_facts]
        abstracts.append(AbstractTree(tuple(leaf_facts), None if is_list(op, result) else spec))
    return abstracts


def _have_equal_avals(trees: Sequence[AbstractTree]) -> bool:
    first_avals, *other_avals = (tuple(map(aval_of_leaf, abstract.leaves)) for abstract in trees)
    are_dense = all(leaf is None or is_dense_fact(leaf) for leaf in trees[0].leaves)
    return are_dense and all(avals == first_avals for avals in other_avals)


def _infer_update(params: AbstractTree, state: AbstractTree, grads: AbstractTree) -> list[AbstractTree]:
    """Return the next parameters and state of an UPDATE: like the old ones, in new memory where there is a gradient."""
    next_params, next_state = [*params.leaves], [*state.leaves]
    for param_index, state_indices in enumerate(nested_indices_by_leaf(params, state)):
        if grads.leaves[param_index] is not None:
            next_params[param_index] = _dense_copy(next_params[param_index])
            for state_index in state_indices:
                next_state[state_index] = _dense_copy(next_state[state_index])
    return [AbstractTree(tuple(next_params), params.spec), AbstractTree(tuple(next_state), state.spec)]


def _dense_copy(leaf: Any) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    meta_copy = torch.empty_like(torch.empty_strided(leaf.aval.shape, leaf.aval.stride, device="meta"))
    return fact_in_own_storage(leaf.aval._replace(stride=meta_copy.stride()))


def _on_device(leaf: Any, device: torch.device) -> Any:
    return leaf._replace(aval=leaf.aval._replace(device=device)) if isinstance(leaf, Fact) else leaf


def _fake_leaf(leaf: Any, number_by_storage: dict[int, int], on_meta: bool) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    tensor = leaf.aval.empty("meta" if on_meta else None)
    number_by_storage[storage_of(tensor)] = leaf.storage
    return tensor.requires_grad_(leaf.aval.wants_grad)


def is_list(op: Op, result: Any) -> bool:
    """Whether a result of a rule is a list of leaves (gradients), rather than a user's container that is a list."""
    return isinstance(result, list) and op.kind not in _CONTAINERS


_CONTAINERS = frozenset(("F", "R", "SPLIT", "MERGE", "UPDATE"))


def infer_shapes(
    ops: Sequence[Op],
    context: StepContext,
    inputs: Mapping[Value, AbstractTree],
    untraced: UntracedStages,
    options: StepOptions,
    integers: Mapping[int, Tensor],
) -> Shapes:
    """Return all that can be known of a program before it runs; `integers` are as of `DryRuns`.

    Raises:
        Untraceable: a shape depends on data.
    """
    walk = _AbstractWalk(ops, context, inputs, untraced, options, integers)
    for op in ops:
        walk.infer_writes(op)
    walk.cut_remaining()
    return walk.shapes()


class _AbstractWalk:
    """The values, storages, traces and cuts that are known after the ops that it has visited."""

    def __init__(
        self,
        ops: Sequence[Op],
        context: StepContext,
        inputs: Mapping[Value, AbstractTree],
        untraced: UntracedStages,
        options: StepOptions,
        integers: Mapping[int, Tensor],
    ) -> None:
        self._context, self._model, self._untraced, self._fake = context, context.model, untraced, fake_mode()
        self._copies = copies_of(ops, context.moves)
        self._calls = StageCalls(context, untraced.existing_traces_only, options)
        allows_sparse = bool(sparse_gradients(ops, untraced.stages))
        self._trees, self._dry_runs = {**inputs}, DryRuns(context, allows_sparse, integers)
        self._runs: dict[Coordinates, StageRun] = {}
        self._cuts: dict[Coordinates, Cut] = {}
        self._numbers: dict[Coordinates, SizeNumbers] = {}
        self._storage_maps: dict[Op, StorageMap] = {}
        self._loss_storage = fresh_storage()

    def shapes(self) -> Shapes:
        walk_results = self._trees, self._runs, self._cuts, self._numbers, self._loss_storage
        return Shapes(self._context, self._untraced, self._copies, self._calls, *walk_results)

    def infer_writes(self, op: Op) -> None:
        """Infer the abstract tree of each value that an op writes."""
        if self._untraced.runs(op):
            self._trees.update(zip(op.writes, self._dry_runs.infer_writes(op, self._trees), strict=True))
        elif op.kind in "FRBI":
            try:
                (self._forward if op.kind in "FR" else self._backward)(op)
            except Untraceable as error:
                raise error.for_stage(op.stage or 0, self._model.label_of(op.stage or 0)) from error
        elif op.kind == "GATHER":
            shared = self._context.shared.get(shard_of(op))
            operand = self._trees[op.reads[0]] if shared is None else shared.whole
            self._trees[op.writes[0]] = gather_shapes(op, operand, shared)
        elif op.kind == "SCATTER" and shard_of(op) in self._context.shared:
            self._trees[op.writes[0]] = self._context.shared[shard_of(op)].scatter_shapes(op, self._trees[op.reads[0]])
        elif op.kind in TRANSFERS:
            for transferred, received in zip(op.reads, op.writes, strict=True):
                # Residuals are not known yet: `_backward` fills in them and their copies.
                if transferred in self._trees:
                    abstract = self._trees[transferred]
                    # A transfer that casts puts each leaf into new memory.
                    if op.options:
                        (cast,) = abstract_eval(op, [abstract], self._context, self._fake)
                        abstract = cast._replace(spec=abstract.spec)
                    self._trees[received] = self._copies.as_received(received, abstract)
        elif op.kind != "W":
            results = abstract_eval(op, [self._trees[value] for value in op.reads], self._context, self._fake)
            self._trees.update(zip(op.writes, results, strict=True))

    def _labelled_inputs(self, op: Op) -> dict[str, AbstractTree]:
        tree_by_label = {label: self._trees[value] for label, value in reads_by_label(op).items()}
        constants = self._trees.get(Value("const", op.stage))
        return tree_by_label if constants is None else tree_by_label | {"const": constants}

    def _forward(self, op: Op) -> None:
        """Infer the results of a stage's forward, and of the loss behind it, from their outlines."""
        coordinates, inputs = op[1:4], self._labelled_inputs(op)
        call = self._calls.call(op, reads_by_label(op), inputs)
        result_by_label = self._calls.outline_results(call, inputs)
        if "state" in result_by_label and isinstance(self._model.stages[op.stage or 0].forward, PositionalStage):
            # Stages that share a trace may have buffers of different names: the containers are those of this stage.
            result_by_label["state"] = result_by_label["state"]._replace(spec=inputs["state"].spec)
        loss = None
        if "target" in inputs and not self._model.stages[op.stage or 0].aux_loss:
            loss_inputs = {"x": result_by_label["y"], "target": inputs["target"]}
            loss = self._calls.canonical(StageCall(None, *avals_and_specs(loss_inputs)))
            result_by_label |= self._calls.outline_results(loss, loss_inputs)
            # F.mse_loss and its like leave the loss in memory as large as their input: `generate_code` copies it out.
            leaves = tuple(fact_in_own_storage(leaf.aval) for leaf in result_by_label["loss"].leaves)
            result_by_label["loss"] = AbstractTree(leaves, result_by_label["loss"].spec)
        # Of an F and an R of one microbatch either may come first in the program.
        is_first = coordinates not in self._runs
        forward = op if op.kind == "F" or is_first else self._runs[coordinates].forward_op
        self._runs[coordinates] = StageRun(call, loss, op, forward)
        self._trees.update({value: result_by_label[label_of(value)] for value in op.writes if value.name != "res"})

    def _backward(self, op: Op) -> None:
        """Trace and cut a stage, now that its cotangents are known: gradients and residuals follow from the cut."""
        coordinates, labels = op[1:4], reads_by_label(op)
        run = self._runs[coordinates]
        cut, numbers = self._calls.cut(op, run, labels, self._trees)
        self._cuts[coordinates], self._numbers[coordinates] = cut, numbers
        storages = self._storage_map(run.residual_op, cut, labels)
        # An I hands the gradients of its W over: they are known with it, before the W is visited.
        gradients = [Value("g", *coordinates, port=k) for k in range(len(op.reads))]
        gradients = [value for value in gradients if label_of(value) in cut.graph.writes]
        written_labels = {label_of(value) for value in (*op.writes, *gradients)} - {"wres"}
        leaves_by_label = {label: cut.leaves_under(label) for label in cut.graph.writes if label in written_labels}
        leaves_by_label |= {"res": cut.residuals} | ({"wres": cut.weight_residuals} if op.kind == "I" else {})
        residuals = self._copies.all_copies(next(value for value in op.reads if value.name == "res"))
        trees = {label: _in_step_memory(leaves, cut, numbers, storages) for label, leaves in leaves_by_label.items()}
        for value in (*residuals, *op.writes, *gradients):
            self._trees[value] = self._copies.as_received(value, trees[label_of(value)])

    def cut_remaining(self) -> None:
        """Cut the stages that no backward follows, as in evaluation."""
        for run in self._runs.values():
            coordinates = run.residual_op[1:4]
            if coordinates not in self._cuts:
                self._cuts[coordinates], self._numbers[coordinates] = self._calls.forward_cut(run)

    def _storage_map(self, op: Op, cut: Cut, labels: Mapping[str, Value]) -> StorageMap:
        """Map storage numbers of a trace to numbers of this microbatch, for all ops that run its graph.

        `op` is the forward that leaves the residuals; `labels` name the values that the backward reads.
        """
        # A trace is shared by microbatches, which live in different memory. What the graph reads is where the
        # microbatch's values are; constants are the same for all; other storages get fresh numbers on demand.
        if op in self._storage_maps:
            return self._storage_maps[op]
        graph, facts = cut.graph, cut.graph.facts
        constants = [facts[name].storage for name in graph.constants]
        storages = self._storage_maps[op] = StorageMap(zip(constants, constants, strict=True))
        inputs = self._labelled_inputs(op)
        inputs |= {label: self._trees[value] for label, value in labels.items() if is_cotangent(label)}
        # One cotangent of the loss serves all microbatches of a weight.
        for name in graph.reads.get("dloss", ()):
            storages[facts[name].storage] = self._loss_storage
        for label, leaves in graph.reads.items():
            for name, leaf in zip(leaves, inputs[label].leaves if label in inputs else (), strict=False):
                if name is not None and isinstance(leaf, Fact):
                    storages[facts[name].storage] = leaf.storage
        # A result of the forward may be a residual too, as the output of a relu: both are in one storage.
        for value in op.writes:
            is_unknown = value.name == "res" or value not in self._trees
            names = () if is_unknown else graph.writes.get(label_of(value), ())
            for name, leaf in zip(names, self._trees[value].leaves if names else (), strict=True):
                if isinstance(name, Name):
                    storages.setdefault(facts[name].storage, leaf.storage)
        return storages


def _in_step_memory(leaves: Sequence[Any], cut: Cut, numbers: SizeNumbers, storages: StorageMap) -> AbstractTree:
    """Return the facts of a graph's leaves, in the sizes and storages of the step."""

    def fact_of(name: Name) -> Fact:
        return storages.translate(numbers.fact_of(cut.graph, name))

    return AbstractTree(tuple(fact_of(leaf) if isinstance(leaf, Name) else leaf for leaf in leaves))
