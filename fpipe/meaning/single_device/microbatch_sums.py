"""Sum losses and gradients over microbatches, and slices of their sequences, in the order that fixes their bits.

    microbatches (x0, t0) (x1, t1)        -->        loss0 n0/n + loss1 n1/n,   g0 + g1

Parameter gradients are summed over microbatches in ascending order, and within each from the last slice of the
sequence to the first. Then the uses of a tied leaf are summed, by stage; and last the replicas, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import refuse_unsupported_modes
from fpipe.meaning.single_device.microbatch import cut_sequence, join, join_gradients, join_slices
from fpipe.meaning.single_device.microbatch_graph import (
    MicrobatchGraph,
    Observer,
    add_optional,
    as_graph_leaf,
    detach_leaf,
    leaves_of_inputs,
    param_leaves,
    run_stages,
    take_gradients,
)
from fpipe.meaning.single_device.params_and_state import add_tied_leaves
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model
from fpipe.program import Value
from fpipe.transforms.specs import Chunk


@dataclass(frozen=True)
class SequenceSlicing:
    """How the sequences of a microbatch are cut into slices.

    Attributes:
        slices: how many slices.
        sizes: how many positions each has; None: equally many.
        dim: the dimension of the sequence in each leaf that has rows.
        specs, row_specs: for inputs and target, the leaves whose sequence or rows are elsewhere.
    """

    slices: int = 1
    sizes: tuple[int, ...] | None = None
    dim: int = 1
    specs: tuple[Any, Any] = (None, None)
    row_specs: tuple[Any, Any] = (None, None)

    def cut(self, microbatch: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], float]]:
        """Return the slices of a microbatch, each with its share of the target's length."""
        if self.slices == 1:
            return [(microbatch, 1.0)]
        slices: list[tuple[tuple[Any, Any], float]] = []
        sides = [*zip(microbatch, self.specs, self.row_specs, ("inputs", "target"), strict=True)]
        for k in range(self.slices):
            (x, _), (target, share) = (
                cut_sequence(pytree, k, self.slices, self.dim, spec, sizes=self.sizes, row_spec=row_spec, label=label)
                for pytree, spec, row_spec, label in sides
            )
            slices.append(((x, target), share))
        return slices

    def join_gradients(self, inputs: Any, grads_by_slice: list[list[Any]]) -> list[Any]:
        """Join the gradients of a microbatch's inputs from its slices; [] if there are none."""
        if not any(grads_by_slice):
            return []
        return join_slices(inputs, grads_by_slice, self.dim, self.specs[0], row_spec=self.row_specs[0])


@dataclass(frozen=True)
class JoinSpecs:
    """How the results of microbatches are joined; "stream" leaves them as a tuple of one for each microbatch.

    Attributes:
        outputs, aux: specs of the outputs and of the auxiliary results.
        inputs_to_differentiate: the whole inputs, if their gradients are asked for.
        input_spec: how those were cut.
    """

    outputs: Any = None
    aux: Any = None
    inputs_to_differentiate: Any = None
    input_spec: Any = None


@dataclass(frozen=True)
class ReplicaOrder:
    """The order in which gradients are added over replicas; additions of floats in another order give other bits.

    Attributes:
        microbatch_first: whether the replicas add up after each microbatch, and not once after the last.
        cast_grad: the cast of each leaf before it is added to another replica's.
        inner_replicas: how many neighbouring replicas add up first among themselves; 0: all in one sum.
    """

    microbatch_first: bool = False
    cast_grad: Callable[[Any], Any] = detach_leaf
    inner_replicas: int = 0


Sums = list[list["Tensor | None"]]
"""Summed gradients of each leaf that a stage reads, by stage."""


class SliceResult(NamedTuple):
    """The contribution of the forward of a slice, or of a microbatch, to the result of the batch.

    Attributes:
        loss: its loss.
        weighted_loss: its term of the loss of the batch.
        weight: its share of the rows of the batch.
        count: its divisor of totals.
        aux: its auxiliary results.
    """

    loss: Tensor
    weighted_loss: Tensor
    weight: float
    count: Any
    aux: Any


@dataclass(frozen=True)
class MicrobatchRunner:
    """The forward and the backward of microbatches under the options of `sum_over_microbatches`."""

    model: Model
    params: Sequence[Any]
    key: int | None
    slicing: SequenceSlicing
    needs_input_grads: bool
    observe: Observer | None
    scale: Tensor | None

    def forward(
        self, microbatch: tuple[Any, Any], index: int, weight: float, states: list[Any], turn: tuple[bool, bool]
    ) -> tuple[list[MicrobatchGraph], list[SliceResult], Any]:
        """Run a microbatch slice by slice, and return the graphs and the results of its slices, and its output.

        Args:
            microbatch: inputs and target.
            index: its number in the batch.
            weight: its share of the rows of the batch.
            states: the module state of each stage, replaced by what the forward leaves.
            turn: whether it is the first, and the last, microbatch of its replica.
        """
        graphs: list[MicrobatchGraph] = []
        results: list[SliceResult] = []
        outputs: list[Any] = []
        # A slice reads the carries that the slice before it hands on.
        carries: list[Any] = [None] * len(self.model.stages)
        slices = self.slicing.cut(microbatch)
        for k, (inputs_and_target, share) in enumerate(slices):
            coordinates = (index, k if len(slices) > 1 else None)
            graph = self._new_graph(inputs_and_target[0], carries, coordinates)
            slice_turn = turn[0] and k == 0, turn[1] and k == len(slices) - 1
            with torch.enable_grad():
                loss, count, aux, output = run_stages(
                    self.model, graph, inputs_and_target, states, slice_turn, self.key, self.observe
                )
                # Totals ("count") are added unweighted, and divided by the count of the whole batch at the end.
                weighted_loss = loss * (weight * share if self.model.reduction == "mean" else 1.0)
                graph.loss = weighted_loss if self.scale is None else weighted_loss * self.scale
            if self.observe is not None:
                # A program has a SPLIT for each stage that reads the batch, which writes these values.
                for stage in range(len(self.model.stages)):
                    self.observe(Value("x", stage, *coordinates), inputs_and_target[0])
                    self.observe(Value("t", stage, *coordinates), inputs_and_target[1])
            carries = graph.carries_out
            graphs.append(graph)
            detached_aux = tree.tree_map(detach_leaf, aux)
            results.append(SliceResult(loss.detach(), weighted_loss.detach(), weight * share, count, detached_aux))
            outputs.append(tree.tree_map(detach_leaf, output))
        if len(slices) == 1:
            return graphs, results, outputs[0]
        return graphs, results, join(outputs, [result.weight for result in results], Chunk(self.slicing.dim))

    def backward(self, inputs: Any, graphs: list[MicrobatchGraph], sums: list[Sums]) -> list[Any]:
        """Add the gradients of a microbatch to the newest sums, and return its input gradients.

        It goes from the last slice to the first, and removes the graphs from the list.
        """
        # Each slice hands on the gradients of the carries that it read.
        carry_grads: list[Tensor | None] = []
        input_grads_by_slice: list[list[Any]] = []
        while graphs:
            grads, carry_grads, input_grads = take_gradients(self.model, graphs.pop(), carry_grads, self.observe)
            input_grads_by_slice.insert(0, input_grads)
            sums[-1] = _add_sums(self.model, sums[-1], grads) if sums[-1] else grads
        if len(input_grads_by_slice) == 1:
            return input_grads_by_slice[0]
        return self.slicing.join_gradients(inputs, input_grads_by_slice)

    def _new_graph(self, inputs: Any, carries: list[Any], coordinates: tuple[int, int | None]) -> MicrobatchGraph:
        """Return a graph whose leaves are the parameters, the carries and, if asked for, the inputs."""
        full_params = add_tied_leaves(self.model, self.params)
        stage_params = [param_leaves(self.model, stage, full, inputs) for stage, full in enumerate(full_params)]
        input_leaves = leaves_of_inputs(self.model, inputs) if self.needs_input_grads else {}
        return MicrobatchGraph(stage_params, input_leaves, tree.tree_map(as_graph_leaf, carries), coordinates)


def sum_over_microbatches(
    model: Model,
    params: Sequence[Any],
    microbatch_rows: Sequence[tuple[tuple[Any, Any], int]],
    replicas: int = 1,
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    slicing: SequenceSlicing | None = None,
    join_specs: JoinSpecs | None = None,
    observe: Observer | None = None,
    replica_order: ReplicaOrder | None = None,
    scale: Tensor | None = None,
) -> Result:
    """Return loss, gradients and outputs for a batch that is cut already.

    Args:
        model, params, state, key: as for `reference`.
        microbatch_rows: microbatches with their numbers of rows, replica after replica.
        replicas: how many replicas share the microbatches.
        slicing, join_specs, replica_order: how to slice sequences, join results and add gradients.
        observe: called with name and value of all that passes between stages, and of each microbatch's gradients.
        scale: a factor of the loss that gradients are taken of; the returned loss is without it.

    Returns:
        A `Result` whose grads have None for a parameter that the loss does not depend on.
    """
    slicing, join_specs = slicing or SequenceSlicing(), join_specs or JoinSpecs()
    replica_order = replica_order or ReplicaOrder()
    refuse_unsupported_modes()
    needs_input_grads = join_specs.inputs_to_differentiate is not None
    runner = MicrobatchRunner(model, params, key, slicing, needs_input_grads, observe, scale)
    total_rows = sum(row_count for _, row_count in microbatch_rows)
    per_replica = len(microbatch_rows) // replicas
    states: list[Any] = []
    first_replica_states: list[Any] = []
    outputs: list[Any] = []
    input_grads_by_microbatch: list[list[Any]] = []
    slice_results: list[SliceResult] = []
    sums: list[Sums] = []  # one for each term of the sum over replicas
    for index, (microbatch, row_count) in enumerate(microbatch_rows):
        is_first, is_last = index % per_replica == 0, index % per_replica == per_replica - 1
        if is_first:
            # Each replica starts from the given state. The first one's is returned.
            states = list(state) if state is not None else [None] * len(model.stages)
            first_replica_states = first_replica_states or states
        # 1. Forward, from the first slice of the sequence to the last, with one graph for each slice.
        graphs, results, output = runner.forward(microbatch, index, row_count / total_rows, states, (is_first, is_last))
        slice_results += results
        outputs.append(output)
        # 2. Backward, from the last slice to the first, which frees the graphs.
        if is_first or replica_order.microbatch_first:
            sums.append([])
        input_grads_by_microbatch.append(runner.backward(microbatch[0], graphs, sums))
    # 3. Over replicas: inner groups add up first, and then their sums, in ascending order.
    group_size = replica_order.inner_replicas or replicas
    loss_by_replica = _add_groups([result.weighted_loss for result in slice_results], per_replica * slicing.slices)
    loss = reduce(torch.add, _add_groups(loss_by_replica, group_size))
    sums_per_group = group_size * (per_replica if replica_order.microbatch_first else 1)
    group_grads = [
        _sum_over_replicas(model, params, sums[start : start + sums_per_group], per_replica, replica_order)
        for start in range(0, len(sums), sums_per_group)
    ]
    grads = reduce(partial(tree.tree_map, add_optional), group_grads)
    input_grads = _join_input_grads(join_specs, input_grads_by_microbatch) if needs_input_grads else None
    # 4. Divide totals by the count of the whole batch.
    if model.reduction == "count":
        counts = [result.count for result in slice_results]
        total = sum(counts[1:], counts[0])
        divisor = total if total != 0 else 1
        loss = loss / divisor
        grads, input_grads = tree.tree_map(partial(_divide, divisor), (grads, input_grads))
    row_counts = [row_count for _, row_count in microbatch_rows]
    auxiliaries = [result.aux for result in slice_results]
    row_shares = [result.weight * total_rows for result in slice_results]
    return Result(
        loss=loss if model.has_loss else None,
        grads=grads,
        outputs=_join_unless_streamed(outputs, row_counts, join_specs.outputs, "outputs"),
        aux=_join_unless_streamed(auxiliaries, row_shares, join_specs.aux, "aux") if model.aux else None,
        input_grads=input_grads,
        losses=tuple(result.loss for result in slice_results) if model.has_loss else None,
        state=None if state is None else tuple(first_replica_states or states),
    )


def _add_groups(losses: Sequence[Tensor], group_size: int) -> list[Tensor]:
    return [reduce(torch.add, losses[start : start + group_size]) for start in range(0, len(losses), group_size)]


def _add_sums(model: Model, sums: Sums, terms: Sums) -> Sums:
    """Add gradients to sums; gradients of single rows are concatenated instead."""
    add_leaf = _join_rows if model.per_example else add_optional
    return [list(map(add_leaf, *pair)) for pair in zip(sums, terms, strict=True)]


def _sum_over_replicas(
    model: Model, params: Sequence[Any], sums: Sequence[Sums], microbatches: int, replica_order: ReplicaOrder
) -> tuple[Any, ...]:
    """Sum gradients over a group of replicas, after summing the uses of tied leaves within each replica."""
    # If replicas add up after each microbatch, sums[r * microbatches + m] is microbatch m of replica r; else sums[r].
    # Tied leaves couple stages: their uses are added within each replica before replicas add up.
    add, cast = partial(_add_sums, model), partial(tree.tree_map, replica_order.cast_grad)
    sums_per_replica = microbatches if replica_order.microbatch_first else 1
    collect = partial(_grads_by_owner, model, params)
    replica_sums = [
        cast(collect(reduce(add, sums[start : start + sums_per_replica])))
        for start in range(0, len(sums), sums_per_replica)
    ]
    grads = reduce(partial(tree.tree_map, add_optional), replica_sums)
    if sums_per_replica == 1:
        return grads
    by_microbatch = collect(
        reduce(add, [reduce(add, map(cast, sums[start::sums_per_replica])) for start in range(sums_per_replica)])
    )
    for leaf in (uses[0] for uses in model.tied_uses):
        by_microbatch[leaf.owner][leaf.name] = grads[leaf.owner][leaf.name]
    return by_microbatch


def _join_rows(rows: Tensor | None, further_rows: Tensor | None) -> Tensor | None:
    return None if rows is None or further_rows is None else torch.cat([rows, further_rows])


def _divide(divisor: Any, grad: Tensor | None) -> Tensor | None:
    return grad if grad is None else grad / divisor


def _join_unless_streamed(parts: list[Any], weights: Sequence[float], spec: Any, label: str) -> Any:
    return tuple(parts) if spec == "stream" else join(parts, weights, spec, label=label)


def _join_input_grads(join_specs: JoinSpecs, parts: list[list[Any]]) -> Any:
    containers = tree.flatten(join_specs.inputs_to_differentiate)[1]
    if join_specs.input_spec == "stream":
        return tree.unflatten(containers, [leaf for part in parts for leaf in part])
    return tree.unflatten(containers, join_gradients(join_specs.inputs_to_differentiate, parts, join_specs.input_spec))


def _grads_by_owner(model: Model, params: Sequence[Any], sums: Sums) -> tuple[Any, ...]:
    """Return gradients in the structure of params; the uses of a tied leaf are summed by stage, for its owner."""
    full_grads = [
        tree.unflatten(tree.flatten(stage)[1], grads)
        for stage, grads in zip(add_tied_leaves(model, params), sums, strict=True)
    ]
    for uses in model.tied_uses:
        uses_grads = [full_grads[leaf.stage].pop(leaf.name) for leaf in sorted(uses)]
        full_grads[uses[0].owner][uses[0].name] = reduce(partial(tree.tree_map, add_optional), uses_grads)
    return tuple(map(tree.in_order_of, params, full_grads))
