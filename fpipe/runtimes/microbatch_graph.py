"""Run one microbatch (or a slice of it) through all stages as one graph of autograd's, and take its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.graph import is_strided
from fpipe.graphs.keys import seed_of, seeded
from fpipe.graphs.outputs import call_stage, copied, loss_of, outputs_of, split_output
from fpipe.graphs.pure import pure
from fpipe.model import Model, who_draws


def aliases(model: Model, stage: int, full: Any) -> Any:
    """A stage's parameters as leaves of a graph of their own, on the caller's storage."""
    leaves, containers = tree.flatten(full)
    pairs = zip(leaves, train(model, stage, full), strict=True)
    return tree.unflatten(containers, [leaf.detach().requires_grad_() if one else leaf for leaf, one in pairs])


def train(model: Model, stage: int, full: Any) -> list[bool]:
    """For each leaf of a stage, tied ones too, whether it has a gradient: floating, and not frozen where it lives."""
    homes: dict[Any, tuple[int, str]] = {leaf.name: (leaf.owner, leaf.owner_name) for leaf in model.tied(stage)}
    names: Any = full if isinstance(full, Mapping) and (homes or model.frozen) else {None: full}
    found: list[bool] = []
    for name, own in names.items():
        owner, leaf = homes.get(name, (stage, name))
        frozen = not model.frozen.isdisjoint({(owner, leaf), (owner, None)})
        found += [_trains(one) and not frozen for one in tree.leaves(own)]
    return found


def readers_of(model: Model, inputs: Any) -> dict[tuple[int, int], Any]:
    """The inputs as each stage takes them, by stage and which of its inputs: leaves of the graph."""
    places = [(s, k) for s in range(len(model.stages)) for k, one in enumerate(model.sources(s)) if one == "batch"]

    def alias(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if _trains(leaf) else leaf

    return {place: tree.tree_map(alias, inputs) for place in places}


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclass
class MicrobatchGraph:
    """One graph over all stages: from parameters and carries of its own to a loss and the carries it hands on."""

    own: list[Any]
    taken: list[Any]
    loss: Tensor
    carries: list[Any]
    readers: dict[tuple[int, int], Any]


def forward(
    model: Model,
    own: list[Any],
    readers: dict[tuple[int, int], Any],
    part: tuple[Any, Any],
    states: list[Any],
    carries: list[Any],
    place: tuple[int, int | None],
    turn: tuple[int, int],
    key: int | None,
) -> tuple[Tensor, Any, Any, Any, list[Any]]:
    """Loss, count, auxiliary results, output and what is handed on, of one microbatch (or slice), as one graph over all
    stages. `turn`: which of them it is of how many, for updates that count."""
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
        with seeded(seed, who_draws(model, number)):
            with pure(stage.forward, model.who(number), (x, own[number], carries[number])):
                made = call_stage(stage, own[number], x, said)
            y, beside = split_output(stage, made)
            with pure(model.loss if number == last else None, "the loss", (y, target)):
                lost = loss_of(model, y, target) if number == last else None
        values.append(outputs_of(model, number, y))
        carried.append(beside.get("carry"))
        losses += [beside["loss"]] if "loss" in beside else []
        if "state" in stage.asks:
            states[number] = tree.tree_map(detached, beside["state"])
        if stage.update is not None:
            counted = dict(zip(("index", "count"), turn, strict=True)) if stage.counts else {}
            seen = tree.tree_map(detached, beside.get("seen", x))
            with pure(stage.update, f"the update of stage {number}", seen):
                states[number] = stage.update(copied(states[number]), seen, **counted)
    loss, counted, aux = lost
    return sum(losses, loss), counted, aux, values[-1][0], carried


def _of(values: list[Any], source: Any) -> Any:
    """What a stage takes of those before it."""
    stage, port = source if isinstance(source, tuple) else (source, 0)
    return values[stage][port]


def _alias(leaf: Any) -> Any:
    """The same tensor once more. A view of it would not do: where there is one of something, as one row, it has other
    strides, by which torch picks other kernels. A sparse or nested one has no alias."""
    return torch.ops.aten.alias.default(leaf) if isinstance(leaf, Tensor) and is_strided(leaf) else leaf


def leaf_of(leaf: Any) -> Any:
    """The start of a graph of its own; it wants a gradient if what it was computed from does."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def detached(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def gradients(
    model: Model, graph: MicrobatchGraph, seeds: Sequence[Tensor | None]
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
        backward: Callable[[], Any] = partial(torch.autograd.grad, *_unzipped(ends, wanted), allow_unused=True)
        for stage, params in zip(model.stages, graph.own, strict=True):
            backward = backward if stage.within is None else partial(stage.within, params, backward)
        found = iter(backward())
    grads = [[next(found) if _wants(leaf) else None for leaf in group] for group in groups]
    count = len(leaves)
    summed = [reduce(added, each) for each in zip(*grads[count + 1 :], strict=True)]
    return grads[:count], grads[count], summed


def _unzipped(
    ends: list[tuple[Tensor, Tensor]], wanted: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [end for end, _ in ends], wanted, [seed for _, seed in ends]


def _wants(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """A sum of gradients, None where there is none."""
    if total is None or more is None:
        return more if total is None else total
    return total + more
