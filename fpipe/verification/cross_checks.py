"""Check what the reference itself may have wrong: the undivided batch in one go, and a loss function without its trace.

loss = sum of squares, reduction="mean", 4 microbatches        -->        the undivided batch's loss is 4 x this one

A wrong reduction shows in the undivided batch only. A trace may stand for something else than its function does now, or
for other batches: then a program and the reference, which both run the trace, agree with each other and not with what
was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.single_device.microbatch import join
from fpipe.meaning.single_device.microbatch_graph import added
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import padding_words, train
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.stages.outputs import split_loss
from fpipe.model import LossFunction, Model, Stage
from fpipe.verification.reference_settings import StepArguments
from fpipe.verification.report import (
    Coarsest,
    GradientMismatch,
    Report,
    distance,
    is_mean_to_rounding,
    largest,
    norm,
    to_rounding,
    tolerance,
    vanish,
)

_COUNT = 'where some rows do not count, return (total, count) and say reduction="count".'


def undivided(
    report: Report,
    model: Model,
    arguments: StepArguments,
    sizes: Sequence[int],
    divided: Result,
    *,
    outputs: Any = None,
) -> Report:
    """Run the undivided batch under plain autograd, and say in the report whether loss and gradients are the same; in a
    note, where they are not and no reason is known.

    Args:
        report: on the microbatches.
        model, arguments: as for `reference`.
        sizes: how many rows each microbatch has.
        divided: what the reference gives for the microbatches, with the loss of each.
        outputs: how it joined the outputs of the microbatches: along their rows, "stream" (not at all), or otherwise.
    """

    def said(sentence: str, differs: bool = False) -> Report:
        return replace(report, undivided=sentence, notes=(*report.notes, *[sentence] * differs))

    try:
        with Coarsest() as seen:
            whole = _in_one(model, arguments, sum(sizes))
    except Exception as error:  # a stage may want the microbatches' shape, or memory may be short
        why = str(error).partition("\n")[0]
        return said(f"The undivided batch was not compared: it ends in {type(error).__name__}: {why}")
    grads = zip(tree.leaves(divided.grads), tree.leaves(whole.grads), strict=True)
    pairs = [(a, b) for a, b in grads if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if to_rounding([*pairs, (divided.loss, whole.loss)], seen.eps):
        return said("The undivided batch gives the same loss and gradients, to rounding.")
    reasons = _reasons(model)
    if arguments.key is not None and _draws(model, arguments, sum(sizes), whole):
        reasons.append("random numbers are drawn for each microbatch")
    alone = _loss_of_outputs(model, sizes, divided, outputs, arguments.batch[1])
    loss = alone if reasons and alone is not None else whole.loss
    cause = _cause(model, sizes, divided, loss, seen.eps)
    if cause:
        return said(cause, differs=True)
    same = is_mean_to_rounding(divided.loss, loss, seen.eps)
    padding = padding_words(model.loss, arguments.batch) if model.reduction == "mean" else ""
    if reasons and alone is None and padding:
        return said(padding, differs=True)
    if reasons and (alone is None or same):
        return said(f"The undivided batch gives others, as it may: {', '.join(reasons)}.")
    if same:
        return said(
            "The undivided batch gives the same loss, but other gradients: a stage or the loss computes with rows that "
            "are in other microbatches, or has a backward of its own.",
            differs=True,
        )
    figures = f"The undivided batch's loss is {float(loss):.6g}, here {float(divided.loss):.6g}"
    if alone is not None and is_mean_to_rounding(divided.loss, alone, seen.eps):
        return said(
            f"{figures}, and that of these outputs in one is the same: a stage computes with rows that are in other "
            "microbatches, as a batch norm does.",
            differs=True,
        )
    return said(
        f"{figures}: reduction? {_COUNT.capitalize()} If the loss compares rows with each other, as a contrastive one "
        "does, a microbatch has fewer to compare.",
        differs=True,
    )


def _reasons(model: Model) -> list[str]:
    """Why microbatches may give something else than the batch they are of."""
    kept = [n for n, stage in enumerate(model.stages) if "state" in stage.asks]
    told = [n for n, stage in enumerate(model.stages) if "microbatch" in stage.asks]
    found = [f"{model.who(n)} keeps state, as a batch norm does, which sees one microbatch at a time" for n in kept]
    found += [f"{model.who(n)} reads which microbatch it is" for n in told]
    own = [n for n, stage in enumerate(model.stages) if stage.aux_loss]
    return found + [f"{model.who(n)} has a loss of its own, which may be no mean over rows" for n in own]


def _in_one(model: Model, arguments: StepArguments, rows: int) -> Result:
    parts = [(arguments.batch, rows)]
    return over_parts(model, arguments.params, parts, state=arguments.state, key=arguments.key)


def _draws(model: Model, arguments: StepArguments, rows: int, whole: Result) -> bool:
    """Whether another key gives another result: a key alone says nothing of whether numbers are drawn."""
    try:
        other = _in_one(model, replace(arguments, key=arguments.key + 1), rows)
    except Exception:
        return True
    both = zip(tree.leaves((whole.loss, whole.grads)), tree.leaves((other.loss, other.grads)), strict=True)
    return not all(torch.equal(a, b) for a, b in both if isinstance(a, Tensor))


def _loss_of_outputs(model: Model, sizes: Sequence[int], divided: Result, outputs: Any, target: Any) -> Tensor | None:
    """The loss of the outputs of the microbatches in one, in which state and random numbers are the same; None where
    there is none of them alone."""
    if outputs not in (None, "stream") or model.loss is None or any(stage.aux_loss for stage in model.stages):
        return None
    of_loss = Model((Stage(_taken),), model.loss, ("batch",), reduction=model.reduction, aux=model.aux)
    try:
        y = join(divided.outputs, sizes) if outputs == "stream" else divided.outputs
        return over_parts(of_loss, ({},), [((y, target), 1)]).loss
    except Exception:  # outputs that do not join, or a loss that draws
        return None


def _taken(params: Any, y: Any) -> Any:
    return y


def _cause(model: Model, sizes: Sequence[int], divided: Result, whole: Tensor, eps: float) -> str:
    """A cause that the loss itself tells: it is not finite, or the other reduction would agree."""
    each: Sequence[Tensor] = divided.losses
    unit = "microbatch" if len(each) == len(sizes) else "slice"
    odd = [index for index, loss in enumerate(each) if not bool(torch.isfinite(loss))]
    of_whole, here = float(whole), float(divided.loss)
    if odd:
        named = ", ".join(f"{unit} {index} is {float(each[index])}" for index in odd[:5])
        return f"The loss of {named}; that of the undivided batch is {of_whole:.6g}: {_COUNT}"
    other = {"mean": ("sums", "sum"), "sum": ("averages", "mean")}.get(model.reduction)
    shares = [1.0] * len(each) if model.reduction == "mean" else [size / sum(sizes) for size in sizes]
    by_other = reduce(torch.add, [loss * share for loss, share in zip(each, shares, strict=False)])
    if other is None or not to_rounding([(by_other, whole)], eps):
        return ""
    times = f"{of_whole / here:.4g} x this one" if here else "another one"
    return (
        f"The undivided batch's loss is {times} ({of_whole:.6g}, here {here:.6g}): the loss {other[0]} over its rows, "
        f'so say reduction="{other[1]}".'
    )


_WHY = (
    "it has changed since {} traced it, or does what a trace does not capture. Make the model again, or compute the "
    "same for all batches."
)


def check_function(
    model: Model,
    params: Sequence[Any],
    parts: Sequence[tuple[tuple[Any, Any], int]],
    result: Result,
    key: int | None,
    state: Sequence[Any] | None = None,
) -> None:
    """Compare what the stages give with what the function gives, microbatch after microbatch, to rounding: it may add
    up in another order.

    Args:
        model, params, key, state: as for `reference`; a net writes into copies of its state.
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
        # A net takes its buffers by name, too.
        buffers = {name: leaf.clone() for stage in state or () for name, leaf in (stage or {}).items()}
        whole = tree.unflatten(model.whole[1], leaves.values()) if model.whole else leaves | buffers
        with torch.enable_grad():
            made = model.function.call(whole, part, key, index)
            loss, count, _ = split_loss(made, model.reduction, model.aux, f"what {who} returns")
            weighted = loss * (size / rows if model.reduction == "mean" else 1.0)
        here = result.losses[index]
        if not _agrees(here, loss.detach(), model.function):
            figures = f"{float(here):.6g} by the stages and {float(loss.detach()):.6g} by {who}"
            raise GradientMismatch(f"The loss of microbatch {index} is {figures}: {why}")
        total = [*map(added, total, _gradients(weighted, [*leaves.values()]))]
        divisor += count if model.reduction == "count" else 0
    divisor = divisor if divisor != 0 else 1
    by_stages = {name: grad for stage in result.grads for name, grad in stage.items()}
    named = zip(names, total, strict=True)
    right = {  # no gradient on one side is compared as zeros
        name: torch.zeros_like(own[name]) if grad is None else grad / divisor for name, grad in named if trains[name]
    }
    all_of_it = norm(right.values())
    for name, grad in right.items():
        found = torch.zeros_like(grad) if by_stages[name] is None else by_stages[name]
        if not _agrees(found, grad, model.function) and not vanish(found, grad, all_of_it):
            off = largest(found, grad)
            raise GradientMismatch(
                f"The gradient of {name} by the stages is off by up to {off:.3g} from {who}'s: {why}"
            )


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient for each leaf, None where it has none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with outside_autocast():
        found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted and loss.requires_grad else ()
    by_leaf = dict(zip(map(id, wanted), found, strict=False))
    return [by_leaf.get(id(leaf)) for leaf in leaves]


def _agrees(found: Tensor, right: Tensor, function: LossFunction) -> bool:
    return distance(found, right) <= max(tolerance(found, right), function.eps**0.5) or bool(
        torch.isnan(found).any() and torch.isnan(right).any()
    )
