"""Run one microbatch (or a slice of it) through all stages as one graph of autograd's, and take its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.own_memory import alias, of_each_row, rows_of
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.sharded import placed_as
from fpipe.meaning.single_device.params_and_state import is_differentiable, train, wants_grad
from fpipe.meaning.stages.keys import seeded, seeder
from fpipe.meaning.stages.outputs import call_stage, loss_of, outputs_of, refuse_missing_gradients, split_output
from fpipe.model import Model, Turn, who_draws
from fpipe.program import Value

See = Callable[[Value, Any], None]
"""Who wants to see each value by the name that it has in a program, as the leaves of a tree."""


def aliases(model: Model, stage: int, full: Any, inputs: Any) -> Any:
    """A stage's parameters as leaves of a graph of their own, on the caller's storage; for each row of the inputs
    apart, if the model says so."""
    leaves, containers = tree.flatten(full)
    own = of_each_row(leaves, rows_of(tree.leaves(inputs))) if model.per_example else leaves
    pairs = zip(own, train(model, stage, full), strict=True)
    return tree.unflatten(containers, [leaf.detach().requires_grad_() if one else leaf for leaf, one in pairs])


def readers_of(model: Model, inputs: Any) -> dict[tuple[int, int], Any]:
    """The inputs as each stage takes them, by stage and which of its inputs: leaves of the graph."""
    places = [(s, k) for s in range(len(model.stages)) for k, one in enumerate(model.sources(s)) if one == "batch"]

    def alias(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if is_differentiable(leaf) else leaf

    return {place: tree.tree_map(alias, inputs) for place in places}


@dataclass
class MicrobatchGraph:
    """One graph over all stages: from parameters and carries of its own to a loss and the carries it hands on; for
    somebody who wants to see them, the values between stages by the names of their cotangents."""

    own: list[Any]
    taken: list[Any]
    loss: Tensor
    carries: list[Any]
    readers: dict[tuple[int, int], Any]
    place: tuple[int, int | None]
    between: dict[Value, list[Any]] = field(default_factory=dict[Value, list[Any]])


def forward(
    model: Model,
    own: list[Any],
    readers: dict[tuple[int, int], Any],
    part: tuple[Any, Any],
    states: list[Any],
    carries: list[Any],
    place: tuple[int, int | None],
    turn: Turn,
    key: int | None,
    see: See | None = None,
    between: dict[Value, list[Any]] | None = None,
) -> tuple[Tensor, Any, Any, Any, list[Any]]:
    """Loss, count, auxiliary results, output and what is handed on, of one microbatch (or slice), as one graph over all
    stages. `turn`: whether it is the first and the last of its replica. With `see` the values between stages are put
    into `between`."""
    inputs, target = part
    index, last = place[0], len(model.stages) - 1
    lost: Any = None
    values: list[Any] = []
    losses: list[Tensor] = []
    carried: list[Any] = []
    for number, stage in enumerate(model.stages):
        taken = [
            readers.get((number, k), inputs) if source == "batch" else tree.tree_map(alias, _output(values, source))
            for k, source in enumerate(model.sources(number))
        ]
        x = tuple(taken) if isinstance(model.inputs[number], tuple) else taken[0]
        seed = None if key is None else seeder(number, *place)(key)
        said = {"state": states[number], "key": seed, "microbatch": index, "carry": carries[number], "turn": turn}
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
        if see is not None and between is not None:
            for port, output in enumerate(values[-1]):
                between[Value("dy", number, *place, port)] = tree.leaves(output)
                see(Value("y", number, *place, port), output)
            between |= {Value("dx", number, *place, k): tree.leaves(source) for k, source in enumerate(taken)}
            shown = {word: made for word, made in beside.items() if word in ("loss", "carry")}
            shown |= {"state": states[number]} if states[number] is not None else {}
            shown |= dict(zip(("loss", "count", "aux"), lost, strict=True)) if lost else {}
            for word, made in shown.items():
                see(Value(word, number, *place), made)
    loss, counted, aux = lost
    if not model.per_example:
        refuse_missing_gradients(
            model, [loss, *losses], tree.leaves((own, list(readers.values()), carries, inputs, target))
        )
    return sum(losses, loss), counted, aux, values[-1][0], carried


def _output(values: list[Any], source: Any) -> Any:
    stage, port = source if isinstance(source, tuple) else (source, 0)
    return values[stage][port]


def leaf_of(leaf: Any) -> Any:
    """The start of a separate graph; it wants a gradient if what it was computed from does."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def detached(leaf: Any) -> Any:
    """A leaf without its graph."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def gradients(
    model: Model, graph: MicrobatchGraph, seeds: Sequence[Tensor | None], see: See | None = None
) -> tuple[list[list[Tensor | None]], list[Tensor | None], list[Tensor | None]]:
    """The gradient for each leaf of each stage, for each leaf of the carries it took, and of the inputs; None where
    nothing depends on it. `seeds` are those of the carries it hands on."""
    leaves = [tree.leaves(stage) for stage in graph.own]
    taken = tree.leaves(graph.taken)
    inputs = [tree.leaves(graph.readers[place]) for place in sorted(graph.readers, reverse=True)]
    groups = (*leaves, taken, *inputs, *graph.between.values())
    wanted = [leaf for group in groups for leaf in group if wants_grad(leaf)]
    ends = [(leaf, seed) for leaf, seed in zip(tree.leaves(graph.carries), seeds, strict=False) if seed is not None]
    ends += [(graph.loss, torch.ones_like(graph.loss))] if graph.loss.requires_grad else []
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if ends and wanted:
        roots, given = zip(*ends, strict=True)
        backward: Callable[[], Any] = partial(torch.autograd.grad, roots, wanted, given, allow_unused=True)
        for stage, params in zip(model.stages, graph.own, strict=True):
            backward = backward if stage.within is None else partial(stage.within, params, backward)
        with outside_autocast():
            found = iter(backward())
    grads = [[placed_as(leaf, next(found)) if wants_grad(leaf) else None for leaf in group] for group in groups]
    count = len(leaves)
    summed = [reduce(added, each) for each in zip(*grads[count + 1 : count + 1 + len(inputs)], strict=True)]
    if see is not None:
        for value, each in zip(graph.between, grads[count + 1 + len(inputs) :], strict=True):
            see(value, each)
        _show_gradients(see, model, graph, grads)
    accumulated = [[*map(_accumulated, *pair)] for pair in zip(leaves, grads[:count], strict=True)]
    return accumulated, grads[count], summed


def _accumulated(param: Any, grad: Tensor | None) -> Tensor | None:
    """The gradient as torch leaves it in `.grad` of its parameter, which has a say in its strides."""
    if grad is None:
        return None
    param.backward(grad)
    grad, param.grad = param.grad, None
    return grad


def _show_gradients(see: See, model: Model, graph: MicrobatchGraph, grads: list[list[Tensor | None]]) -> None:
    """The gradients of parameters and carries by their names: those of tied leaves are bundles of their own."""
    carried = iter(grads[len(graph.own)])
    for number, (own, found) in enumerate(zip(graph.own, grads, strict=False)):
        bundles = {leaf.name: leaf.bundle for leaf in model.tied(number)}
        named = tree.unflatten(tree.flatten(own)[1], found)
        for name, bundle in bundles.items():
            see(Value("g", number, *graph.place, bundle), tree.leaves(named.pop(name)))
        see(Value("g", number, *graph.place), tree.leaves(named))
        see(Value("dcarry", number, *graph.place), [next(carried) for _ in tree.leaves(graph.taken[number])])


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """A sum of gradients, None where there is none."""
    if total is None or more is None:
        return more if total is None else total
    return total + more
