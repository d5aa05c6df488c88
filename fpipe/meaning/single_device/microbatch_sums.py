"""Sum losses and gradients over microbatches, and slices of their sequences, in the order that fixes their bits.

    microbatches (x0, t0) (x1, t1)        -->        loss0 n0/n + loss1 n1/n,   g0 + g1

Parameter gradients are summed over microbatches in ascending order, and within each from the last slice of the
sequence to the first. Then the uses of a tied leaf are summed, by stage; and last the replicas, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

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
        dim: the dimension of the sequence in each leaf that has rows.
        specs, row_specs: for inputs and target, the leaves whose sequence or rows are elsewhere.
    """

    slices: int = 1
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
                cut_sequence(pytree, k, self.slices, self.dim, spec, row_spec=row_spec, label=label)
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
    total_rows = sum(row_count for _, row_count in microbatch_rows)
    per_replica = len(microbatch_rows) // replicas
    states: list[Any] = []
    first_replica_states: list[Any] = []
    # One entry for each slice of each microbatch:
    losses: list[Tensor] = []
    counts: list[Any] = []
    auxiliaries: list[Any] = []
    shares: list[float] = []
    # One for each microbatch, one for each term of the sum over replicas, and one for each replica:
    outputs: list[Any] = []
    input_grads_by_microbatch: list[list[Any]] = []
    sums: list[Sums] = []
    loss_by_replica: list[Tensor] = []
    for index, (microbatch, row_count) in enumerate(microbatch_rows):
        is_first_of_replica = index % per_replica == 0
        if is_first_of_replica:
            # Each replica starts from the given state. The first one's is returned.
            first_replica_states = first_replica_states or states
            states = list(state) if state is not None else [None] * len(model.stages)
        carries: list[Any] = [None] * len(model.stages)
        graphs: list[MicrobatchGraph] = []
        weights: list[float] = []
        slice_outputs: list[Any] = []
        # 1. Forward, from the first slice of the sequence to the last: a slice reads the carry of the one before.
        for k, (inputs_and_target, share) in enumerate(slicing.cut(microbatch)):
            stage_params = [
                param_leaves(model, stage, full, inputs_and_target[0])
                for stage, full in enumerate(add_tied_leaves(model, params))
            ]
            needs_input_grads = join_specs.inputs_to_differentiate is not None
            input_leaves = leaves_of_inputs(model, inputs_and_target[0]) if needs_input_grads else {}
            weights.append(row_count / total_rows * share)
            carries_in = tree.tree_map(as_graph_leaf, carries)
            coordinates = (index, k if slicing.slices > 1 else None)
            graph = MicrobatchGraph(stage_params, input_leaves, carries_in, coordinates)
            is_last_of_replica = (index % per_replica, k) == (per_replica - 1, slicing.slices - 1)
            turn = is_first_of_replica and k == 0, is_last_of_replica
            with torch.enable_grad():
                stage_loss, count, aux, output = run_stages(model, graph, inputs_and_target, states, turn, key, observe)
                # Totals ("count") are added unweighted, and divided by the count of the whole batch at the end.
                weighted = stage_loss * (weights[-1] if model.reduction == "mean" else 1.0)
                graph.loss = weighted if scale is None else weighted * scale
            graphs.append(graph)
            carries = graph.carries_out
            if observe is not None:
                # A program has a SPLIT for each stage that reads the batch, which writes these values.
                for stage in range(len(model.stages)):
                    observe(Value("x", stage, *coordinates), inputs_and_target[0])
                    observe(Value("t", stage, *coordinates), inputs_and_target[1])
            if is_first_of_replica and k == 0:
                loss_by_replica.append(weighted.detach())
            else:
                loss_by_replica[-1] = loss_by_replica[-1] + weighted.detach()
            losses.append(stage_loss.detach())
            counts.append(count)
            auxiliaries.append(tree.tree_map(detach_leaf, aux))
            shares.append(weights[-1] * total_rows)
            slice_outputs.append(tree.tree_map(detach_leaf, output))
        # 2. Backward, from the last slice to the first: each hands on the gradients of the carries that it read.
        carry_grads: list[Tensor | None] = []
        input_grads_by_slice: list[list[Any]] = []
        if replica_order.microbatch_first or is_first_of_replica:
            sums.append([])
        for graph in reversed(graphs):
            grads, carry_grads, input_grads = take_gradients(model, graph, carry_grads, observe)
            input_grads_by_slice.insert(0, input_grads)
            sums[-1] = _add_sums(model, sums[-1], grads) if sums[-1] else grads
        is_sliced = len(slice_outputs) > 1
        outputs.append(join(slice_outputs, weights, Chunk(slicing.dim)) if is_sliced else slice_outputs[0])
        input_grads_by_microbatch.append(
            slicing.join_gradients(microbatch[0], input_grads_by_slice) if is_sliced else input_grads_by_slice[0]
        )
    # 3. Over replicas: inner groups add up first, and then their sums, in ascending order.
    group_size = replica_order.inner_replicas or replicas
    group_losses = [
        reduce(torch.add, loss_by_replica[start : start + group_size]) for start in range(0, replicas, group_size)
    ]
    loss = reduce(torch.add, group_losses)
    sums_per_group = group_size * (per_replica if replica_order.microbatch_first else 1)
    group_grads = [
        _sum_over_replicas(model, params, sums[start : start + sums_per_group], per_replica, replica_order)
        for start in range(0, len(sums), sums_per_group)
    ]
    grads = reduce(partial(tree.tree_map, add_optional), group_grads)
    has_input_grads = join_specs.inputs_to_differentiate is not None
    input_grads = _join_input_grads(join_specs, input_grads_by_microbatch) if has_input_grads else None
    # 4. Divide totals by the count of the whole batch.
    if model.reduction == "count":
        total = sum(counts[1:], counts[0])
        divisor = total if total != 0 else 1
        loss = loss / divisor
        grads, input_grads = tree.tree_map(partial(_divide, divisor), (grads, input_grads))
    row_counts = [row_count for _, row_count in microbatch_rows]
    return Result(
        loss=loss,
        grads=grads,
        outputs=_join_unless_streamed(outputs, row_counts, join_specs.outputs, "outputs"),
        aux=_join_unless_streamed(auxiliaries, shares, join_specs.aux, "aux") if model.aux else None,
        input_grads=input_grads,
        losses=tuple(losses),
        state=None if state is None else tuple(first_replica_states or states),
    )


Sums = list[list["Tensor | None"]]
"""Summed gradients of each leaf that a stage reads, by stage."""


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
