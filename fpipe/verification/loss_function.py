"""Compare a model that was cut out of one loss function with the function itself, not only with its trace.

A trace may stand for something else than the function does now, or for other batches: then a program and the reference,
which both run the trace, agree with each other and not with what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.microbatch_graph import added
from fpipe.meaning.single_device.params_and_state import train
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.stages.outputs import split_loss
from fpipe.model import LossFunction, Model
from fpipe.verification.report import GradientMismatch, largest
from fpipe.verification.rounding import distance, norm, tolerance, vanish

_WHY = (
    "it has changed since {} traced it, or does what a trace does not capture. Make the model again, or compute the "
    "same for all batches."
)


def check_function(
    model: Model, params: Sequence[Any], parts: Sequence[tuple[tuple[Any, Any], int]], result: Result, key: int | None
) -> None:
    """Compare what the stages give with what the function gives, microbatch after microbatch, to rounding: it may add
    up in another order.

    Args:
        model, params, key: as for `reference`.
        parts: the microbatches, each with its rows.
        result: what the stages give for them.

    Raises:
        GradientMismatch: another loss or gradient; the microbatch or the parameter is named.
    """
    if model.function is None:
        return
    who, why = model.function.who, _WHY.format(model.function.door)
    trains = dict(pair for n, own in enumerate(params) for pair in zip(own, train(model, n, own), strict=True))
    own = {name: leaf for stage in params for name, leaf in stage.items()}
    names = model.whole[0] if model.whole else [*own]
    rows = sum(size for _, size in parts)
    total: list[Tensor | None] = [None] * len(own)
    divisor: Any = 0
    for index, (part, size) in enumerate(parts):
        leaves = {name: own[name].detach().requires_grad_(trains[name]) for name in names}
        whole = tree.unflatten(model.whole[1], leaves.values()) if model.whole else leaves
        with torch.enable_grad():
            made = model.function.call(whole, part, key, index)
            loss, count, _ = split_loss(made, model.reduction, model.aux, f"what {who} returns")
            weighted = loss * (size / rows if model.reduction == "mean" else 1.0)
        here = result.losses[index]
        if not _close(here, loss.detach(), model.function):
            figures = f"{float(here):.6g} by the stages and {float(loss.detach()):.6g} by {who}"
            raise GradientMismatch(f"The loss of microbatch {index} is {figures}: {why}")
        total = [*map(added, total, _gradients(weighted, [*leaves.values()]))]
        divisor += count if model.reduction == "count" else 0
    divisor = divisor if divisor != 0 else 1
    by_stages = {name: grad for stage in result.grads for name, grad in stage.items()}
    named = zip(names, total, strict=True)
    right = {
        name: torch.zeros_like(own[name]) if grad is None else grad / divisor for name, grad in named if trains[name]
    }
    all_of_it = norm(right.values())
    for name, grad in right.items():
        found = by_stages[name]
        if not _close(found, grad, model.function) and not vanish(found, grad, all_of_it):
            off = largest(found, grad)
            raise GradientMismatch(
                f"The gradient of {name} by the stages is off by up to {off:.3g} from {who}'s: {why}"
            )


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient for each leaf, None where it has none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted and loss.requires_grad else ()
    by_leaf = dict(zip(map(id, wanted), found, strict=False))
    return [by_leaf.get(id(leaf)) for leaf in leaves]


def _close(found: Tensor, right: Tensor, function: LossFunction) -> bool:
    return distance(found, right) <= max(tolerance(found, right), function.eps**0.5) or bool(
        torch.isnan(found).any() and torch.isnan(right).any()
    )
