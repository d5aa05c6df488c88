"""Add up losses and gradients over microbatches, and slices of their sequences, in the order that fixes their bits.

    parts (x0, t0) (x1, t1)        -->        loss0 n0/n + loss1 n1/n,   g0 + g1

Parameter gradients are summed over microbatches in ascending order, within each from the last slice of the sequence
back. The uses of a tied leaf are summed after that, by stage; what replicas have last, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import refuse_odd_modes
from fpipe.meaning.single_device.microbatch import cut_sequence, join, join_gradients, join_slices
from fpipe.meaning.single_device.microbatch_graph import (
    MicrobatchGraph,
    See,
    added,
    aliases,
    detached,
    forward,
    gradients,
    leaf_of,
    readers_of,
)
from fpipe.meaning.single_device.params_and_state import with_ties
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model
from fpipe.program import Value
from fpipe.transforms.specs import Chunk


@dataclass(frozen=True)
class Sliced:
    """How sequences are cut: into how many slices, along which dim, and which leaves otherwise (`specs`, a pair)."""

    slices: int = 1
    dim: int = 1
    specs: tuple[Any, Any] = (None, None)
    row_specs: tuple[Any, Any] = (None, None)

    def of(self, part: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], float]]:
        """The slices of a microbatch, each with its share of the target's length."""
        if self.slices == 1:
            return [(part, 1.0)]
        found: list[tuple[tuple[Any, Any], float]] = []
        for k in range(self.slices):
            (x, _), (target, share) = (
                cut_sequence(half, k, self.slices, self.dim, spec, row_spec=rows, what=what)
                for half, spec, rows, what in zip(part, self.specs, self.row_specs, ("inputs", "target"), strict=True)
            )
            found.append(((x, target), share))
        return found

    def joined(self, inputs: Any, parts: list[list[Any]]) -> list[Any]:
        """The gradients of a microbatch's inputs from those of its slices."""
        if not any(parts):
            return []
        return join_slices(inputs, parts, self.dim, self.specs[0], row_spec=self.row_specs[0])


@dataclass(frozen=True)
class Joined:
    """How what the microbatches gave is joined: outputs and auxiliary results by specs, or not ("stream"); gradients of
    the inputs if these are given, whole, with how they were cut ("stream": they came so)."""

    outputs: Any = None
    aux: Any = None
    inputs: Any = None
    cut: Any = None


@dataclass(frozen=True)
class OverReplicas:
    """How gradients are added over replicas: those of each microbatch before those of the next, or of all at once, and
    after which cast of each leaf; and how many replicas add up first, among themselves, if not all do."""

    by_microbatch: bool = False
    cast: Callable[[Any], Any] = detached
    within: int = 0


def over_parts(
    model: Model,
    params: Sequence[Any],
    parts: Sequence[tuple[tuple[Any, Any], int]],
    replicas: int = 1,
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    sliced: Sliced | None = None,
    joined: Joined | None = None,
    see: See | None = None,
    added_by: OverReplicas | None = None,
    scale: Tensor | None = None,
) -> Result:
    """Loss, gradients and outputs for a batch that is cut already: `parts` are the microbatches, each with rows, those
    of one replica after those of the other. A parameter that the loss does not depend on gets None. `see`
    is handed what passes between stages, and each microbatch's gradients, by their names in a program. With a `scale`
    gradients, and they alone, are those of the loss times it."""
    sliced, joined, added_by = sliced or Sliced(), joined or Joined(), added_by or OverReplicas()
    refuse_odd_modes()
    whole = sum(size for _, size in parts)
    states: list[Any] = []
    kept: list[Any] = []  # of the first replica
    losses: list[Tensor] = []
    counts: list[Any] = []
    outputs: list[Any] = []
    extras: list[Any] = []
    shares: list[float] = []
    of_inputs: list[list[Any]] = []  # of each microbatch, the gradients of its inputs
    sums: list[Sums] = []
    each_loss: list[Tensor] = []
    many = len(parts) // replicas
    for index, (part, size) in enumerate(parts):
        if index % many == 0:
            kept = kept or states
            states = list(state) if state is not None else [None] * len(model.stages)
        carries: list[Any] = [None] * len(model.stages)
        graphs: list[MicrobatchGraph] = []
        weights: list[float] = []
        found: list[Any] = []
        for k, (piece, share) in enumerate(sliced.of(part)):
            own = [aliases(model, number, full, piece[0]) for number, full in enumerate(with_ties(model, params))]
            readers = readers_of(model, piece[0]) if joined.inputs is not None else {}
            weights.append(size / whole * share)
            taken = tree.tree_map(leaf_of, carries)
            place = (index, k if sliced.slices > 1 else None)
            between: dict[Value, list[Any]] = {}
            turn = (index % many, k) == (0, 0), (index % many, k) == (many - 1, sliced.slices - 1)
            with torch.enable_grad():
                made = forward(model, own, readers, piece, states, taken, place, turn, key, see, between)
                each, count, aux, output, carries = made
                weighted = each * (weights[-1] if model.reduction == "mean" else 1.0)
                end = weighted if scale is None else weighted * scale
                graphs.append(MicrobatchGraph(own, taken, end, carries, readers, place, between))
            if see is not None:  # what SPLIT writes, for each stage that takes it
                for number in range(len(model.stages)):
                    see(Value("x", number, *place), piece[0])
                    see(Value("t", number, *place), piece[1])
            if index % many or k:
                each_loss[-1] = each_loss[-1] + weighted.detach()
            else:
                each_loss.append(weighted.detach())
            losses.append(each.detach())
            counts.append(count)
            extras.append(tree.tree_map(detached, aux))
            shares.append(weights[-1] * whole)
            found.append(tree.tree_map(detached, output))
        seeds: list[Tensor | None] = []  # what the slice after has for the leaves of the carries
        of_slices: list[list[Any]] = []
        if added_by.by_microbatch or index % many == 0:
            sums.append([])
        for graph in reversed(graphs):
            grads, seeds, inputs = gradients(model, graph, seeds, see)
            of_slices.insert(0, inputs)
            sums[-1] = _add(model, sums[-1], grads) if sums[-1] else grads
        outputs.append(join(found, weights, Chunk(sliced.dim)) if len(found) > 1 else found[0])
        of_inputs.append(of_slices[0] if len(found) == 1 else sliced.joined(part[0], of_slices))
    within = added_by.within or replicas
    loss = reduce(torch.add, [reduce(torch.add, each_loss[at : at + within]) for at in range(0, replicas, within)])
    first = within * (many if added_by.by_microbatch else 1)
    groups = [_over_replicas(model, params, sums[at : at + first], many, added_by) for at in range(0, len(sums), first)]
    grads = reduce(partial(tree.tree_map, added), groups)
    input_grads = None if joined.inputs is None else _of_inputs(joined, of_inputs)
    if model.reduction == "count":
        total = sum(counts[1:], counts[0])
        divisor = total if total != 0 else 1
        loss = loss / divisor
        grads, input_grads = tree.tree_map(partial(_divided, divisor), (grads, input_grads))
    return Result(
        loss=loss,
        grads=grads,
        outputs=_whole(outputs, [size for _, size in parts], joined.outputs, "outputs"),
        aux=_whole(extras, shares, joined.aux, "aux") if model.aux else None,
        input_grads=input_grads,
        losses=tuple(losses),
        state=None if state is None else tuple(kept or states),
    )


Sums = list[list["Tensor | None"]]
"""Per stage, for each leaf it reads, its gradient over some microbatches."""


def _add(model: Model, sums: Sums, more: Sums) -> Sums:
    """Add gradients to sums, or put those of single rows behind them."""
    add = _joined_rows if model.per_example else added
    return [list(map(add, *pair)) for pair in zip(sums, more, strict=True)]


def _over_replicas(
    model: Model, params: Sequence[Any], sums: Sequence[Sums], microbatches: int, added_by: OverReplicas
) -> tuple[Any, ...]:
    """Gradients over replicas that add up among themselves. What several stages share is added up in a replica
    first."""
    add, cast = partial(_add, model), partial(tree.tree_map, added_by.cast)
    many = microbatches if added_by.by_microbatch else 1
    collected = partial(_collected, model, params)
    whole = [cast(collected(reduce(add, sums[at : at + many]))) for at in range(0, len(sums), many)]
    grads = reduce(partial(tree.tree_map, added), whole)
    if many == 1:
        return grads
    by_microbatch = collected(reduce(add, [reduce(add, map(cast, sums[at::many])) for at in range(many)]))
    for leaf in (uses[0] for uses in model.tied_uses):
        by_microbatch[leaf.owner][leaf.name] = grads[leaf.owner][leaf.name]
    return by_microbatch


def _joined_rows(rows: Tensor | None, more: Tensor | None) -> Tensor | None:
    return None if rows is None or more is None else torch.cat([rows, more])


def _divided(divisor: Any, grad: Tensor | None) -> Tensor | None:
    return grad if grad is None else grad / divisor


def _whole(parts: list[Any], weights: Sequence[float], spec: Any, what: str) -> Any:
    return tuple(parts) if spec == "stream" else join(parts, weights, spec, what=what)


def _of_inputs(joined: Joined, parts: list[list[Any]]) -> Any:
    """The gradients of the inputs, put together as these were cut."""
    containers = tree.flatten(joined.inputs)[1]
    if joined.cut == "stream":
        return tree.unflatten(containers, [leaf for part in parts for leaf in part])
    return tree.unflatten(containers, join_gradients(joined.inputs, parts, joined.cut))


def _collected(model: Model, params: Sequence[Any], sums: Sums) -> tuple[Any, ...]:
    """Gradients in the shape of params: a tied leaf's uses are added by stage and go to its owner."""
    full = [
        tree.unflatten(tree.flatten(stage)[1], grads)
        for stage, grads in zip(with_ties(model, params), sums, strict=True)
    ]
    for uses in model.tied_uses:
        each = [full[leaf.stage].pop(leaf.name) for leaf in sorted(uses)]
        full[uses[0].owner][uses[0].name] = reduce(partial(tree.tree_map, added), each)
    return tuple(map(tree.like, params, full))
