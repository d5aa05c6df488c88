"""Compare what the microbatches give with the undivided batch in one go: a wrong reduction shows there only.

loss = sum of squares, reduction="mean", 4 microbatches        -->        the undivided batch's loss is 4 x this one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Model, Stage
from fpipe.single_device.joining import join
from fpipe.single_device.over_parts import over_parts
from fpipe.single_device.result import Result
from fpipe.verification.report import Report
from fpipe.verification.rounding import Coarsest, is_mean_to_rounding, to_rounding

_COUNT = 'where some rows do not count, return (total, count) and say reduction="count".'


@dataclass(frozen=True)
class Undivided:
    """The sentence on the undivided batch, and whether it is worth a look: it differs and no reason is known."""

    sentence: str
    differs: bool = False

    def noted(self, report: Report) -> Report:
        """A report that says so."""
        return replace(report, undivided=self.sentence, notes=(*report.notes, *[self.sentence] * self.differs))


def undivided(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    sizes: Sequence[int],
    divided: Result,
    *,
    outputs: Any = None,
    state: Sequence[Any] | None,
    key: int | None,
) -> Undivided:
    """Run the undivided batch under plain autograd, and compare loss and gradients.

    Args:
        model, params, batch, state, key: as for `reference`.
        sizes: how many rows each microbatch has.
        divided: what the reference gives for the microbatches, with the loss of each.
        outputs: how it joined the outputs of the microbatches: along their rows, "stream" (not at all), or otherwise.
    """
    try:
        with Coarsest() as seen:
            whole = over_parts(model, params, [(batch, sum(sizes))], state=state, key=key)
    except Exception as error:  # a stage may want the microbatches' shape, or memory may be short
        why = str(error).partition("\n")[0]
        return Undivided(f"The undivided batch was not compared: it ends in {type(error).__name__}: {why}")
    grads = zip(tree.leaves(divided.grads), tree.leaves(whole.grads), strict=True)
    pairs = [(a, b) for a, b in grads if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if to_rounding([*pairs, (divided.loss, whole.loss)], seen.eps):
        return Undivided("The undivided batch gives the same loss and gradients, to rounding.")
    reasons = _reasons(model)
    if key is not None and _draws(model, params, (batch, sum(sizes)), whole, state, key):
        reasons.append("random numbers are drawn for each microbatch")
    y = _outputs(model, sizes, divided, outputs)
    alone = None if y is None or not reasons else _loss_of(model, y, batch[1])
    loss = whole.loss if alone is None else alone
    cause = _cause(model, sizes, divided, loss, seen.eps) or _padding(
        model, y, batch[1], sizes, divided, loss, seen.eps
    )
    if cause:
        return Undivided(cause, differs=True)
    if reasons and (alone is None or is_mean_to_rounding(divided.loss, alone, seen.eps)):
        return Undivided(f"The undivided batch gives others, as it may: {', '.join(reasons)}.")
    if is_mean_to_rounding(divided.loss, loss, seen.eps):
        return Undivided(
            "The undivided batch gives the same loss, but other gradients: a stage or the loss computes with rows that "
            "are in other microbatches, or has a backward of its own.",
            differs=True,
        )
    figures = f"{float(loss):.6g}, here {float(divided.loss):.6g}"
    alone = None if y is None else _loss_of(model, y, batch[1])
    if alone is not None and is_mean_to_rounding(divided.loss, alone, seen.eps):
        return Undivided(
            f"The undivided batch's loss is {figures}, and that of these outputs in one is the same: a stage computes "
            "with rows that are in other microbatches, as a batch norm does.",
            differs=True,
        )
    return Undivided(
        f"The undivided batch's loss is {figures}: reduction? {_COUNT.capitalize()} If the loss compares rows "
        "with each other, as a contrastive one does, a microbatch has fewer to compare.",
        differs=True,
    )


def _reasons(model: Model) -> list[str]:
    """Why microbatches may give something else than the batch they are of."""
    kept = [n for n, stage in enumerate(model.stages) if stage.update is not None or "state" in stage.asks]
    told = [n for n, stage in enumerate(model.stages) if "microbatch" in stage.asks]
    found = [f"{model.who(n)} keeps state, as a batch norm does, which sees one microbatch at a time" for n in kept]
    found += [f"{model.who(n)} reads which microbatch it is" for n in told]
    own = [n for n, stage in enumerate(model.stages) if stage.aux_loss]
    return found + [f"{model.who(n)} has a loss of its own, which may be no mean over rows" for n in own]


def _draws(model: Model, params: Any, part: tuple[Any, int], whole: Result, state: Any, key: int) -> bool:
    """Whether another key gives another result: a key alone says nothing of whether numbers are drawn."""
    try:
        other = over_parts(model, params, [part], state=state, key=key + 1)
    except Exception:
        return True
    both = zip(tree.leaves((whole.loss, whole.grads)), tree.leaves((other.loss, other.grads)), strict=True)
    return not all(torch.equal(a, b) for a, b in both if isinstance(a, Tensor))


def _outputs(model: Model, sizes: Sequence[int], divided: Result, outputs: Any) -> Any:
    """Outputs of the microbatches, put together; None where there is no loss of them alone."""
    if outputs not in (None, "stream") or model.loss is None or any(stage.aux_loss for stage in model.stages):
        return None
    try:
        return join(divided.outputs, sizes) if outputs == "stream" else divided.outputs
    except Exception:  # outputs that do not join
        return None


def _loss_of(model: Model, y: Any, target: Any) -> Tensor | None:
    """The loss of these outputs: state and random numbers are the same in it. None where it draws or fails."""
    of_loss = Model((Stage(_taken),), model.loss, ("batch",), reduction=model.reduction, aux=model.aux)
    try:
        return over_parts(of_loss, ({},), [((y, target), 1)]).loss
    except Exception:
        return None


def _padding(
    model: Model, y: Any, target: Any, sizes: Sequence[int], divided: Result, whole: Tensor, eps: float
) -> str:
    """The sentence for rows or tokens that do not count: weighted by how many do, the losses of the microbatches make
    the undivided one. Those that the loss has no gradient for do not."""
    losses: Sequence[Tensor] = divided.losses
    if model.reduction != "mean" or len(losses) != len(sizes) or not isinstance(y, Tensor) or y.ndim < 2:
        return ""
    try:
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            found: Any = model.loss and model.loss(leaf, target)
            (grad,) = torch.autograd.grad(found[0] if model.aux else found, leaf)
    except Exception:  # a loss that wants the rows of a microbatch, or no floating numbers
        return ""
    counts = [int(part.flatten(0, -2).any(-1).sum()) for part in (grad != 0).split([*sizes])]
    weighed = sum(loss.detach() * count for loss, count in zip(losses, counts, strict=True)) / max(sum(counts), 1)
    shares = {count / size for count, size in zip(counts, sizes, strict=True)}
    if len(shares) == 1 or not isinstance(weighed, Tensor) or not is_mean_to_rounding(weighed, whole, eps):
        return ""
    figures = f"{float(whole):.6g}, here {float(divided.loss):.6g}"
    return (
        f"The undivided batch's loss is {figures}, which is the mean over the {sum(counts)} rows or tokens that count, "
        f"{', '.join(map(str, counts))} in each microbatch: {_COUNT}"
    )


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
    figures = f"{_times(of_whole, here)} ({of_whole:.6g}, here {here:.6g})"
    return (
        f'The undivided batch\'s loss is {figures}: the loss {other[0]} over its rows, so say reduction="{other[1]}".'
    )


def _times(one: float, other: float) -> str:
    return f"{one / other:.4g} x this one" if other else "another one"
