"""The answer to compare with: plain autograd, one microbatch after the other, no program anywhere.

It shares no code with the runtimes, so that an error in one of them is not in both. Three rules fix its bits. Every
stage reads an alias of what another stage wrote, and its own alias of each parameter, so that what one stage adds up
inside is added up before it meets other stages. Parameter gradients are summed over microbatches in ascending order,
within each from the last slice of the sequence back. The uses of a tied leaf are summed after that, by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.keys import drawing, seed_of
from fpipe.microbatch import (
    check_batch,
    cut,
    cut_sequence,
    join,
    join_gradients,
    join_slices,
    rows_of_each,
    streams,
)
from fpipe.models import (
    Model,
    loss_of,
    outputs_of,
    refuse_inference_mode,
    taken_apart,
    unchanged,
    who_draws,
    with_ties,
)
from fpipe.result import Result
from fpipe.specs import Chunk


def reference(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any] | list[tuple[Any, Any]],
    *,
    microbatches: int = 1,
    slices: int = 1,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    input_grads: bool = False,
) -> Result:
    """Loss, gradients and outputs of a model by plain autograd.

    Args:
        model: stages and a loss.
        params: one pytree of tensors per stage.
        batch: (inputs, target), pytrees whose leaves have rows in dim 0; or a list of them, cut already.
        microbatches: how many parts the batch is cut into; losses and gradients are added in their order.
        slices: how many slices the sequences (dim 1) of each part are cut into; each stage hands its carry from one to
            the next, and a backward goes from the last slice back.
        state: one pytree per stage, for models with module state.
        key: an int, for models with random numbers.
        input_grads: whether the gradients of the inputs are wanted too.

    Returns:
        A `Result` with loss, grads, outputs, losses and state, aux and input_grads.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> result = fpipe.reference(model, ({"w": torch.tensor(3.0)},), batch, microbatches=2)
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    for word, given in (("microbatches", microbatches), ("slices", slices)):
        if type(given) is not int or given < 1:
            raise ValueError(f"{word} is a whole number, at least 1; found {given!r}.")
    presplit = isinstance(batch, list)
    if isinstance(batch, list):
        batch = streams(batch, len(batch))
        cuts = [*zip(zip(*batch, strict=True), rows_of_each(batch), strict=True)]
    else:
        check_batch(batch)
        cuts = [cut(batch, index, microbatches) for index in range(microbatches)]
    joined = Joined(inputs=batch[0] if input_grads else None, cut="stream" if presplit else None)
    return over_parts(model, params, cuts, state=state, key=key, sliced=Sliced(slices), joined=joined)


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


def over_parts(
    model: Model,
    params: Sequence[Any],
    parts: Sequence[tuple[tuple[Any, Any], int]],
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    sliced: Sliced | None = None,
    joined: Joined | None = None,
) -> Result:
    """The same for a batch that is cut already: `parts` are the microbatches, each with rows."""
    sliced, joined = sliced or Sliced(), joined or Joined()
    refuse_inference_mode()
    whole = sum(size for _, size in parts)
    states = list(state) if state is not None else [None] * len(model.stages)
    losses: list[Tensor] = []
    counts: list[Any] = []
    outputs: list[Any] = []
    extras: list[Any] = []
    shares: list[float] = []
    of_inputs: list[list[Any]] = []  # of each microbatch, the gradients of its inputs
    sums: list[list[Tensor | None]] = []  # per stage, for each leaf it reads, its gradient over the microbatches so far
    loss = torch.tensor(0.0)
    for index, (part, size) in enumerate(parts):
        carries: list[Any] = [None] * len(model.stages)
        graphs: list[_Graph] = []
        weights: list[float] = []
        found: list[Any] = []
        for k, (piece, share) in enumerate(sliced.of(part)):
            own = [_aliases(model, number, full) for number, full in enumerate(with_ties(model, params))]
            readers = _readers(model, piece[0]) if joined.inputs is not None else {}
            weights.append(size / whole * share if sliced.slices > 1 else size / whole)
            taken = tree.tree_map(_leaf, carries)
            place = (index, k if sliced.slices > 1 else None)
            with torch.enable_grad(), unchanged(piece, "a stage"):
                made = _forward(model, own, readers, piece, states, taken, place, len(parts), key)
                each, count, aux, output, carries = made
                weighted = each * (weights[-1] if model.reduction == "mean" else 1.0)
            graphs.append(_Graph(own, taken, weighted, carries, readers))
            loss = loss + weighted.detach() if losses else weighted.detach()
            losses.append(each.detach())
            counts.append(count)
            extras.append(tree.tree_map(_detached, aux))
            shares.append(weights[-1] * whole)
            found.append(tree.tree_map(_detached, output))
        seeds: list[Tensor | None] = []  # what the slice after has for the leaves of the carries
        of_slices: list[list[Any]] = []
        for graph in reversed(graphs):
            grads, seeds, inputs = _gradients(model, graph, seeds)
            of_slices.insert(0, inputs)
            sums = [list(map(_added, *pair)) for pair in zip(sums, grads, strict=True)] if sums else grads
        outputs.append(join(found, weights, Chunk(sliced.dim)) if len(found) > 1 else found[0])
        of_inputs.append(of_slices[0] if len(found) == 1 else sliced.joined(part[0], of_slices))
    grads = _handed_back(model, params, sums)
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
        state=None if state is None else tuple(states),
    )


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


def _aliases(model: Model, stage: int, full: Any) -> Any:
    """A stage's parameters as leaves of a graph of their own, on the caller's storage."""
    leaves, containers = tree.flatten(full)
    pairs = zip(leaves, _train(model, stage, full), strict=True)
    return tree.unflatten(containers, [leaf.detach().requires_grad_() if one else leaf for leaf, one in pairs])


def _train(model: Model, stage: int, full: Any) -> list[bool]:
    """For each leaf of a stage, tied ones too, whether it has a gradient: floating, and not frozen where it lives."""
    homes: dict[Any, tuple[int, str]] = {leaf: group[0] for group in model.ties for n, leaf in group if n == stage}
    names: Any = full if isinstance(full, Mapping) and (homes or model.frozen) else {None: full}
    found: list[bool] = []
    for name, own in names.items():
        owner, leaf = homes.get(name, (stage, name))
        frozen = not model.frozen.isdisjoint({(owner, leaf), (owner, None)})
        found += [_trains(one) and not frozen for one in tree.leaves(own)]
    return found


def _readers(model: Model, inputs: Any) -> dict[tuple[int, int], Any]:
    """The inputs as each stage takes them, by stage and which of its inputs: leaves of the graph."""
    places = [(s, k) for s in range(len(model.stages)) for k, one in enumerate(model.sources(s)) if one == "batch"]

    def alias(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if _trains(leaf) else leaf

    return {place: tree.tree_map(alias, inputs) for place in places}


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass
class _Graph:
    """One graph over all stages: from parameters and carries of its own to a loss and the carries it hands on."""

    own: list[Any]
    taken: list[Any]
    loss: Tensor
    carries: list[Any]
    readers: dict[tuple[int, int], Any]


def _forward(
    model: Model,
    own: list[Any],
    readers: dict[tuple[int, int], Any],
    part: tuple[Any, Any],
    states: list[Any],
    carries: list[Any],
    place: tuple[int, int | None],
    count: int,
    key: int | None,
) -> tuple[Tensor, Any, Any, Any, list[Any]]:
    """Loss, count, auxiliary results, output and what is handed on, of one microbatch (or slice), as one graph over all
    stages."""
    inputs, target = part
    index, last = place[0], len(model.stages) - 1
    lost: Any = None
    values: list[Any] = []
    losses: list[Tensor] = []
    carried: list[Any] = []
    for number, stage in enumerate(model.stages):
        taken = [
            readers.get((number, k), inputs) if source == "batch" else tree.tree_map(_alias, _of(values, source))
            for k, source in enumerate(model.sources(number))
        ]
        x = tuple(taken) if isinstance(model.inputs[number], tuple) else taken[0]
        seed = None if key is None else seed_of(key, number, *place)
        said = {"state": states[number], "key": seed, "microbatch": index, "carry": carries[number]}
        with drawing(seed, who_draws(model, number)):
            made = stage.forward(own[number], x, **{word: said[word] for word in stage.asks})
            y, beside = taken_apart(stage, made)
            lost = loss_of(model, y, target) if number == last else None
        values.append(outputs_of(model, number, y))
        carried.append(beside.get("carry"))
        losses += [beside["loss"]] if "loss" in beside else []
        if "state" in stage.asks:
            states[number] = tree.tree_map(_detached, beside["state"])
        if stage.update is not None:
            counted = {"index": index, "count": count} if stage.counts else {}
            states[number] = stage.update(states[number], tree.tree_map(_detached, beside.get("seen", x)), **counted)
    loss, counted, aux = lost
    return sum(losses, loss), counted, aux, values[-1][0], carried


def _of(values: list[Any], source: Any) -> Any:
    """What a stage takes of those before it."""
    stage, port = source if isinstance(source, tuple) else (source, 0)
    return values[stage][port]


def _alias(leaf: Any) -> Any:
    """The same tensor once more. A view of it would not do: where there is one of something, as one row, it has other
    strides, by which torch picks other kernels."""
    return torch.ops.aten.alias.default(leaf) if isinstance(leaf, Tensor) else leaf


def _leaf(leaf: Any) -> Any:
    """The start of a graph of its own; it wants a gradient if what it was computed from does."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _gradients(
    model: Model, graph: _Graph, seeds: Sequence[Tensor | None]
) -> tuple[list[list[Tensor | None]], list[Tensor | None], list[Tensor | None]]:
    """The gradient for each leaf of each stage, for each leaf of the carries it took, and of the inputs; None where
    nothing depends on it. `seeds` are those of the carries it hands on."""
    leaves = [tree.leaves(stage) for stage in graph.own]
    taken = tree.leaves(graph.taken)
    inputs = [tree.leaves(graph.readers[place]) for place in sorted(graph.readers, reverse=True)]
    groups = (*leaves, taken, *inputs)
    wanted = [leaf for group in groups for leaf in group if _wants(leaf)]
    ends = [(leaf, seed) for leaf, seed in zip(tree.leaves(graph.carries), seeds, strict=False) if seed is not None]
    ends += [(graph.loss, torch.ones_like(graph.loss))] if graph.loss.requires_grad else []
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if ends and wanted:
        backward: Callable[[], Any] = partial(torch.autograd.grad, *_apart(ends, wanted), allow_unused=True)
        for stage, params in zip(model.stages, graph.own, strict=True):
            backward = backward if stage.within is None else partial(stage.within, params, backward)
        found = iter(backward())
    grads = [[next(found) if _wants(leaf) else None for leaf in group] for group in groups]
    count = len(leaves)
    summed = [reduce(_added, each) for each in zip(*grads[count + 1 :], strict=True)]
    return grads[:count], grads[count], summed


def _apart(ends: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [end for end, _ in ends], wanted, [seed for _, seed in ends]


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more


def _handed_back(model: Model, params: Sequence[Any], sums: list[list[Tensor | None]]) -> tuple[Any, ...]:
    """Gradients in the shape of params: a tied leaf's uses are added by stage and go to its owner."""
    full = [
        tree.unflatten(tree.flatten(stage)[1], grads)
        for stage, grads in zip(with_ties(model, params), sums, strict=True)
    ]
    for group in model.ties:
        owner, name = group[0]
        total: Tensor | None = None
        for stage, leaf in sorted(group):
            total = _added(total, full[stage].pop(leaf))
        full[owner][name] = total
    made: list[Any] = []
    for number, (own, grads) in enumerate(zip(params, full, strict=True)):
        leaves, containers = tree.flatten(own)
        each = zip(leaves, tree.leaves(tree.like(own, grads)), _train(model, number, own), strict=True)
        made.append(tree.unflatten(containers, [torch.zeros_like(a) if b is None and one else b for a, b, one in each]))
    return tuple(made)
