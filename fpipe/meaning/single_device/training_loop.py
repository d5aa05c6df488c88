"""Train by plain autograd and torch.optim, step after step: the answer for programs that update their parameters.

It shares with the runtimes the words of an UPDATE and the names of parameters. Each tensor has an optimizer of its own,
made anew for each step, and torch clips, and scales the loss where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import UpdateWords, names_of
from fpipe.meaning.optimizers.rules import RULES, STEP, UNCOUNTED, numbers_of, one_by_one, with_numbers
from fpipe.meaning.single_device.params_and_state import (
    net_order,
)
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model

Gradients = Callable[[Sequence[Any], Any, "Sequence[Any] | None", "int | None", "Tensor | None"], Result]
"""Loss and gradients for params, a batch, a module state, a key and a loss scale; None of a leaf that the loss does not
depend on."""


Norm = Callable[[Sequence[Tensor]], Tensor]
"""Function that takes the norm of all gradients, which it is handed in the net's order."""


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Take the norm of gradients as `torch.nn.utils.clip_grad_norm_` does."""
    return torch.nn.utils.get_total_norm([*grads], foreach=False)


def training_loop(
    model: Model,
    params: Sequence[Any],
    batches: Sequence[Any],
    gradients: Gradients,
    words: UpdateWords,
    *,
    rates: Sequence[Any],
    keys: Sequence[int | None],
    opt: Sequence[Any],
    state: Sequence[Any] | None,
    behind: Callable[[int, int], int],
    norm: Norm = total_norm,
    scaler: torch.amp.GradScaler | None = None,
) -> Result:
    """The results of some training steps, each a tuple with one for each step, and what is left after the last.

    Args:
        model: what is trained; a clip stacks the norms of gradients in its net's order.
        params, opt, state: before the first step.
        batches, rates, keys: one for each step.
        gradients: what computes those of a step.
        words: how to update.
        behind: by how many steps the parameters of a stage are behind in a step: `f(step, stage)`.
        norm: what a clip compares with.
        scaler: torch's own of the loss, which skips a step whose gradients are not finite, where there is one.
    """
    past, results, norms, valid = [tuple(params)], list[Result](), list[Tensor](), list[Tensor]()
    for step, (batch, rate, key) in enumerate(zip(batches, rates, keys, strict=True)):
        read = tuple(past[max(step - behind(step, stage), 0)][stage] for stage in range(len(params)))
        made = gradients(read, batch, state, key, None if scaler is None else scaler.scale(torch.ones(())))
        state = made.state
        made = made if scaler is None else replace(made, grads=_unscaled(scaler, made.grads))
        grads = tree.leaves(tuple(made.grads))
        in_order = [grads[index] for index in net_order(model, made.grads) if grads[index] is not None]
        norms.append(norm(in_order))
        valid.append(torch.tensor(all(bool(grad.isfinite().all()) for grad in in_order)))
        if scaler is None or valid[-1]:
            params, opt = _updated(words, past[-1], opt, grads, norms[-1], rate)
        past.append(tuple(params))
        results.append(made)
    each = {name: tuple(getattr(made, name) for made in results) for name in _EACH}
    trained = Result(**each, state=state, params=params, opt=opt, norm=tuple(norms))
    if scaler is None:
        return trained
    good = torch.tensor(scaler.state_dict()["_growth_tracker"], dtype=torch.int32)
    return replace(trained, valid=tuple(valid), scale=(torch.tensor(scaler.get_scale()), good))


def of_one(result: Result) -> Result:
    """The result of one training step, without tuples."""
    several = [name for name in (*_EACH, "norm", "valid") if getattr(result, name) is not None]
    return replace(result, **{name: getattr(result, name)[0] for name in several})


_EACH = ("loss", "grads", "outputs", "aux", "losses")


def scaler_of(scale: tuple[Tensor, Tensor], how: Mapping[str, Any]) -> torch.amp.GradScaler:
    """Torch's scaler, with a scale and how many steps have been finite under it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=float(scale[0]))
    scaler.load_state_dict({**scaler.state_dict(), **how, "_growth_tracker": int(scale[1])})
    return scaler


def _unscaled(scaler: torch.amp.GradScaler, grads: Sequence[Any]) -> tuple[Any, ...]:
    """Gradients without the loss scale, which goes on by whether they are finite."""
    leaves, spec = tree.flatten(tuple(grads))
    there = [k for k, grad in enumerate(leaves) if grad is not None]
    held = [torch.zeros_like(leaves[k]) for k in there]
    for one, k in zip(held, there, strict=True):
        one.grad = leaves[k].clone()
    if held:
        scaler.unscale_(torch.optim.SGD(held, lr=1.0))
        scaler.update()
    for one, k in zip(held, there, strict=True):
        leaves[k] = one.grad
    return tree.unflatten(spec, leaves)


def _updated(
    words: UpdateWords,
    params: Sequence[Any],
    opt: Sequence[Any],
    grads: Sequence[Any],
    norm: Tensor,
    rate: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Parameters and optimizer state after one update."""
    leaves, spec = tree.flatten(tuple(params))
    names = [name for stage in params for name in names_of(tree.flatten(stage)[1])]
    deeper: Any = tuple(opt)
    states: list[Any] = spec.flatten_up_to(deeper)
    now = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    trained = [k for k, grad in enumerate(grads) if grad is not None]
    for k in trained:
        now[k].grad = grads[k].clone()
    if words.clip is not None:
        torch.nn.utils.clip_grads_with_norm_([now[k] for k in trained], words.clip, norm, foreach=False)
    for k, settings in zip(trained, words.of([names[k] for k in trained]), strict=True):
        now[k], states[k] = _after(words.by, with_numbers(settings, numbers_of(rate)), now[k], states[k])
    return tree.unflatten(spec, now), tree.unflatten(spec, states)


def _after(by: str, settings: dict[str, Any], param: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """A parameter that has its gradient, and its state, after one step of an optimizer."""
    if by in RULES:
        assert param.grad is not None
        return RULES[by].apply(param.detach(), param.grad, state, **settings)
    optimizer = getattr(torch.optim, by)([param], **one_by_one(by, settings))
    if STEP in state and state[STEP] > 0:
        counts = by not in UNCOUNTED
        optimizer.state[param] = {word: leaf.clone() for word, leaf in state.items() if counts or word != STEP}
    optimizer.step()
    param.grad, left = None, optimizer.state[param]
    return param, {word: left[word] if word in left else leaf + 1 for word, leaf in state.items()}
