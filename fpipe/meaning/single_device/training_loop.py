"""Train by plain autograd and torch.optim: the reference for programs that update their parameters.

It shares with the runtimes the settings of an UPDATE and the names of parameters. Each tensor has its own torch
optimizer, made for each step, and torch itself clips gradients and scales the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import UpdateSettings, names_of_leaves
from fpipe.meaning.optimizers.rules import (
    RULES,
    RULES_WITHOUT_STEP,
    STEP,
    as_number_by_name,
    rule_of,
    with_numbers,
    without_foreach,
)
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.single_device.params_and_state import net_order
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model

TakeGradients = Callable[[Sequence[Any], Any, "Sequence[Any] | None", "int | None", "Tensor | None"], Result]
"""Function of params, batch, module state, key and loss scale that returns a `Result` with loss and gradients."""

TakeNorm = Callable[[Sequence[Tensor]], Tensor]
"""Function that returns the norm of all gradients, given in the net's order."""


@outside_autocast()
def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients as `torch.nn.utils.clip_grad_norm_` computes it."""
    return torch.nn.utils.get_total_norm([*grads], foreach=False)


def training_loop(
    model: Model,
    params: Sequence[Any],
    batches: Sequence[Any],
    gradients: TakeGradients,
    update: UpdateSettings,
    *,
    rates: Sequence[Any],
    keys: Sequence[int | None],
    opt: Sequence[Any],
    state: Sequence[Any] | None,
    delay: Callable[[int, int], int],
    norm: TakeNorm = total_norm,
    scaler: torch.amp.GradScaler | None = None,
) -> Result:
    """Run training steps; return tuples with a result for each step, and params, opt and state after the last.

    Args:
        model: what is trained; a clip stacks the norms of gradients in its net's order.
        params, opt, state: parameters, optimizer state and module state before the first step.
        batches, rates, keys: one for each step.
        gradients: computes loss and gradients of a step.
        update: the rule and settings of the update.
        delay: `delay(step, stage)` is by how many steps the parameters that gradients are taken of are old.
        norm: computes the norm that a clip compares with.
        scaler: torch's loss scaler, if the loss is scaled; a step whose gradients are not finite is skipped.
    """
    params_by_step, results, norms, valid = [tuple(params)], list[Result](), list[Tensor](), list[Tensor]()
    for step, (batch, rate, key) in enumerate(zip(batches, rates, keys, strict=True)):
        params_read = tuple(params_by_step[max(step - delay(step, stage), 0)][stage] for stage in range(len(params)))
        result = gradients(params_read, batch, state, key, None if scaler is None else scaler.scale(torch.ones(())))
        state = result.state
        result = result if scaler is None else replace(result, grads=_unscale(scaler, result.grads))
        grads = tree.leaves(tuple(result.grads))
        # Norms are stacked in the net's order, as torch's own loop does, whatever the cut: the order changes the bits.
        ordered_grads = [grads[index] for index in net_order(model, result.grads) if grads[index] is not None]
        norms.append(norm(ordered_grads))
        valid.append(torch.tensor(all(bool(grad.isfinite().all()) for grad in ordered_grads)))
        if scaler is None or valid[-1]:
            params, opt = _update_params(update, params_by_step[-1], opt, grads, norms[-1], rate)
        params_by_step.append(tuple(params))
        results.append(result)
    results_by_field = {name: tuple(getattr(step_result, name) for step_result in results) for name in _PER_STEP_FIELDS}
    merged = Result(**results_by_field, state=state, params=params, opt=opt, norm=tuple(norms))
    if scaler is None:
        return merged
    finite_steps = torch.tensor(scaler.state_dict()["_growth_tracker"], dtype=torch.int32)
    return replace(merged, valid=tuple(valid), scale=(torch.tensor(scaler.get_scale()), finite_steps))


def unwrap_single_step(result: Result) -> Result:
    """Return the result of a single training step without the tuples over steps."""
    present_fields = [name for name in (*_PER_STEP_FIELDS, "norm", "valid") if getattr(result, name) is not None]
    return replace(result, **{name: getattr(result, name)[0] for name in present_fields})


_PER_STEP_FIELDS = ("loss", "grads", "outputs", "aux", "losses")


def make_scaler(scale: tuple[Tensor, Tensor], settings: Mapping[str, Any]) -> torch.amp.GradScaler:
    """Return a GradScaler with a given scale and number of finite steps since it last grew."""
    scaler = torch.amp.GradScaler("cpu", init_scale=float(scale[0]))
    scaler.load_state_dict({**scaler.state_dict(), **settings, "_growth_tracker": int(scale[1])})
    return scaler


def _unscale(scaler: torch.amp.GradScaler, grads: Sequence[Any]) -> tuple[Any, ...]:
    """Divide gradients by the loss scale, and let the scaler update the scale by whether they are finite."""
    # A GradScaler unscales the gradients of an optimizer's parameters only: zeros carry them, and SGD never steps.
    leaves, spec = tree.flatten(tuple(grads))
    indices = [index for index, grad in enumerate(leaves) if grad is not None]
    holders = [torch.zeros_like(leaves[index]) for index in indices]
    for holder, index in zip(holders, indices, strict=True):
        holder.grad = leaves[index].clone()
    if holders:
        scaler.unscale_(torch.optim.SGD(holders, lr=1.0))
        scaler.update()
    for holder, index in zip(holders, indices, strict=True):
        leaves[index] = holder.grad
    return tree.unflatten(spec, leaves)


def _update_params(
    update: UpdateSettings, params: Sequence[Any], opt: Sequence[Any], grads: Sequence[Any], norm: Tensor, rate: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, spec = tree.flatten(tuple(params))
    names = [name for stage in params for name in names_of_leaves(tree.flatten(stage)[1])]
    opt_tuple: Any = tuple(opt)
    states: list[Any] = spec.flatten_up_to(opt_tuple)
    # Copies, because torch's optimizers and clip update in place.
    new_params = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    indices = [index for index, grad in enumerate(grads) if grad is not None]
    for index in indices:
        new_params[index].grad = grads[index].clone()
    if update.clip is not None:
        torch.nn.utils.clip_grads_with_norm_([new_params[index] for index in indices], update.clip, norm, foreach=False)
    settings_by_leaf = update.of([names[index] for index in indices], [new_params[index] for index in indices])
    for index, leaf_settings in zip(indices, settings_by_leaf, strict=True):
        rule, settings = rule_of(update.rule, leaf_settings)
        new_params[index], states[index] = _step_optimizer(
            rule, with_numbers(settings, as_number_by_name(rate)), new_params[index], states[index]
        )
    return tree.unflatten(spec, new_params), tree.unflatten(spec, states)


def _step_optimizer(rule: str, settings: dict[str, Any], param: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Any]:
    if rule in RULES:
        assert param.grad is not None
        return RULES[rule].apply(param.detach(), param.grad, state, **settings)
    # A new optimizer for one tensor and one step, with its state put in: the plainest use of torch.optim there is.
    optimizer = getattr(torch.optim, rule)([param], **without_foreach(rule, settings))
    if STEP in state and state[STEP] > 0:
        is_counted = rule not in RULES_WITHOUT_STEP
        optimizer.state[param] = {name: leaf.clone() for name, leaf in state.items() if is_counted or name != STEP}
    optimizer.step()
    # Rules without a step count in torch get one here, since fpipe's state has it for all.
    param.grad, new_state = None, optimizer.state[param]
    return param, {name: new_state[name] if name in new_state else leaf + 1 for name, leaf in state.items()}
