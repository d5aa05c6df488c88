"""The answer to compare with: plain autograd, one microbatch after the other, no program anywhere.

It shares no code with the runtimes, so that an error in one of them is not in both. Three rules fix its bits. Every
stage reads an alias of what another stage wrote, and its own alias of each parameter, so that what one stage adds up
inside is added up before it meets other stages. Parameter gradients are summed over microbatches in ascending order.
The uses of a tied leaf are summed after that, by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.microbatch import check_batch, cut, join
from fpipe.models import Model, loss_of, refuse_inference_mode, taken_apart, unchanged, with_ties, without_random
from fpipe.result import Result


def reference(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    microbatches: int = 1,
    state: Sequence[Any] | None = None,
    key: int | None = None,
) -> Result:
    """Loss, gradients and outputs of a model by plain autograd.

    Args:
        model: stages and a loss.
        params: one pytree of tensors per stage.
        batch: (inputs, target), pytrees whose leaves have rows in dim 0.
        microbatches: how many parts the batch is cut into; losses and gradients are added in their order.
        state: one pytree per stage, for models with module state.
        key: an int, for models with random numbers.

    Returns:
        A `Result` with loss, grads, outputs, losses and state.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> result = fpipe.reference(model, ({"w": torch.tensor(3.0)},), batch, microbatches=2)
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    check_batch(batch)
    if type(microbatches) is not int or microbatches < 1:
        raise ValueError(f"microbatches is a whole number, at least 1; found {microbatches!r}.")
    cuts = [cut(batch, index, microbatches) for index in range(microbatches)]
    return over_parts(model, params, cuts, state=state, key=key)


def over_parts(
    model: Model,
    params: Sequence[Any],
    parts: Sequence[tuple[tuple[Any, Any], int]],
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    spec: Any = None,
) -> Result:
    """The same for a batch that is cut already: `parts` are the microbatches, each with rows; `spec` joins outputs."""
    refuse_inference_mode()
    whole = sum(size for _, size in parts)
    states = list(state) if state is not None else [None] * len(model.stages)
    losses: list[Tensor] = []
    counts: list[Any] = []
    outputs: list[Any] = []
    sums: list[list[Tensor | None]] = []  # per stage, for each leaf it reads, its gradient over the microbatches so far
    loss = torch.tensor(0.0)
    for index, (part, size) in enumerate(parts):
        own = [_aliases(full) for full in with_ties(model, params)]
        with torch.enable_grad(), unchanged(part, "a stage"), without_random("a stage"):
            each, count, output = _forward(model, own, part, states, index, key)
            weighted = each * (size / whole if model.reduction == "mean" else 1.0)
        found = _gradients(model, weighted, own)
        sums = [list(map(_added, *pair)) for pair in zip(sums, found, strict=True)] if index else found
        loss = loss + weighted.detach() if index else weighted.detach()
        losses.append(each.detach())
        counts.append(count)
        outputs.append(tree.tree_map(_detached, output))
    grads = _handed_back(model, params, sums)
    if model.reduction == "count":
        total = sum(counts[1:], counts[0])
        divisor = total if total != 0 else 1
        loss = loss / divisor
        grads = tree.tree_map(partial(_divided, divisor), grads)
    return Result(
        loss=loss,
        grads=grads,
        outputs=join(outputs, [size for _, size in parts], spec),
        losses=tuple(losses),
        state=None if state is None else tuple(states),
    )


def _divided(divisor: Any, grad: Tensor | None) -> Tensor | None:
    return grad if grad is None else grad / divisor


def _aliases(full: Any) -> Any:
    """A stage's parameters as leaves of a graph of their own, on the caller's storage."""

    def alias(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if _trains(leaf) else leaf

    return tree.tree_map(alias, full)


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _forward(
    model: Model, own: list[Any], part: tuple[Any, Any], states: list[Any], index: int, key: int | None
) -> tuple[Tensor, Any, Any]:
    """Loss, count and output of one microbatch, as one graph over all stages."""
    inputs, target = part
    values: list[Any] = []
    for number, stage in enumerate(model.stages):
        taken = [
            inputs if source == "batch" else tree.tree_map(_alias, values[source]) for source in model.sources(number)
        ]
        x = tuple(taken) if isinstance(model.inputs[number], tuple) else taken[0]
        said = {"state": states[number], "key": key, "microbatch": index, "carry": None}  # the whole sequence at once
        made = stage.forward(own[number], x, **{word: said[word] for word in stage.asks})
        y, state, _ = taken_apart(stage, made)
        values.append(y)
        if "state" in stage.asks:
            states[number] = tree.tree_map(_detached, state)
        if stage.update is not None:
            states[number] = stage.update(states[number], tree.tree_map(_detached, x))
    output = values[-1]
    return (*loss_of(model, output, target), output)


def _alias(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _gradients(model: Model, loss: Tensor, own: list[Any]) -> list[list[Tensor | None]]:
    """The gradient for each leaf of each stage; None where the loss does not depend on it."""
    leaves = [tree.leaves(stage) for stage in own]
    wanted = [leaf for stage in leaves for leaf in stage if _trains(leaf)]
    found: Iterator[Tensor | None] = iter([None] * len(wanted))
    if loss.requires_grad and wanted:
        backward: Callable[[], Any] = partial(torch.autograd.grad, loss, wanted, allow_unused=True)
        for stage, params in zip(model.stages, own, strict=True):
            backward = backward if stage.within is None else partial(stage.within, params, backward)
        found = iter(backward())
    return [[next(found) if _trains(leaf) else None for leaf in stage] for stage in leaves]


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
    return tuple(tree.tree_map(_or_zeros, own, tree.like(own, grads)) for own, grads in zip(params, full, strict=True))


def _or_zeros(leaf: Any, grad: Tensor | None) -> Tensor | None:
    return torch.zeros_like(leaf) if grad is None and _trains(leaf) else grad
