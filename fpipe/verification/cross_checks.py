"""Check the reference itself: against the undivided batch in one go, and against a loss function without its trace.

loss = sum of squares, reduction="mean", 4 microbatches        -->        the undivided batch's loss is 4 x this one

A wrong reduction shows in the undivided batch only. A trace may differ from what its function does now, or does for
other batches. Program and reference both run the trace, so they agree with each other, but not with the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import ambient_eps, outside_autocast
from fpipe.meaning.purity.attributes import AttributeSnapshot, CallCounter
from fpipe.meaning.purity.outputs import split_loss
from fpipe.meaning.single_device.label_means import describe_padding
from fpipe.meaning.single_device.microbatch import join
from fpipe.meaning.single_device.microbatch_graph import add_optional
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import trainable_leaves
from fpipe.meaning.single_device.result import Result
from fpipe.model import LossFunction, Model, Stage
from fpipe.verification.reference_settings import StepArguments
from fpipe.verification.report import (
    GradientMismatch,
    PrecisionWatch,
    Report,
    agree_to_rounding,
    are_negligible,
    joint_norm,
    largest_difference,
    means_agree_to_rounding,
    relative_distance,
    rounding_tolerance,
    to_dense,
)

_COUNT_ADVICE = 'where some rows do not count, return (total, count) and say reduction="count".'


def compare_undivided(
    report: Report,
    model: Model,
    arguments: StepArguments,
    sizes: Sequence[int],
    microbatch_result: Result,
    *,
    outputs: Any = None,
) -> Report:
    """Run the undivided batch under plain autograd, and report whether loss and gradients are the same.

    They may differ for known reasons, such as batch norms. If none is known, the report gets a note.

    Args:
        report: on the microbatches.
        model, arguments: as for `reference`.
        sizes: how many rows each microbatch has.
        microbatch_result: the result of the reference for the microbatches, with the loss of each.
        outputs: how it joined the outputs of the microbatches: along their rows, "stream" (not at all), or otherwise.
    """

    def report_with(sentence: str, differs: bool = False) -> Report:
        return replace(report, undivided=sentence, notes=(*report.notes, *[sentence] * differs))

    # 1. Run it. A stage may require the microbatches' shape, or memory may be short: then nothing is compared.
    try:
        with PrecisionWatch() as precision:
            undivided_result = _run_undivided(model, arguments, sum(sizes))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        return report_with(f"The undivided batch was not compared: it ends in {type(error).__name__}: {reason}")
    grads = zip(tree.leaves(microbatch_result.grads), tree.leaves(undivided_result.grads), strict=True)
    pairs = [(a, b) for a, b in grads if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if agree_to_rounding([*pairs, (microbatch_result.loss, undivided_result.loss)], precision.eps):
        return report_with("The undivided batch gives the same loss and gradients, to rounding.")
    # 2. They differ. Stages may keep state or draw numbers per microbatch, but a loss that is computed from the outputs
    # of the microbatches has no such reason: then a wrong reduction still shows.
    reasons = _reasons_to_differ(model)
    if arguments.key is not None and _draws_random_numbers(model, arguments, sum(sizes), undivided_result):
        reasons.append("random numbers are drawn for each microbatch")
    loss_of_outputs = _loss_of_outputs(model, sizes, microbatch_result, outputs, arguments.batch[1])
    loss = loss_of_outputs if reasons and loss_of_outputs is not None else undivided_result.loss
    cause = _explain_by_loss(model, sizes, microbatch_result, loss, precision.eps)
    if cause:
        return report_with(cause, differs=True)
    # 3. Say what differs, and the likeliest cause.
    losses_agree = means_agree_to_rounding(microbatch_result.loss, loss, precision.eps)
    padding = describe_padding(model.labels, arguments.batch) if model.labels and model.reduction == "mean" else ""
    if reasons and loss_of_outputs is None and padding:
        return report_with(padding, differs=True)
    if reasons and (loss_of_outputs is None or losses_agree):
        return report_with(f"The undivided batch gives others, as it may: {', '.join(reasons)}.")
    if losses_agree:
        return report_with(
            "The undivided batch gives the same loss, but other gradients: a stage or the loss computes with rows that "
            "are in other microbatches, or has a backward of its own.",
            differs=True,
        )
    numbers = f"The undivided batch's loss is {float(loss):.6g}, here {float(microbatch_result.loss):.6g}"
    if loss_of_outputs is not None and means_agree_to_rounding(microbatch_result.loss, loss_of_outputs, precision.eps):
        return report_with(
            f"{numbers}, and that of these outputs in one is the same: a stage computes with rows that are in other "
            "microbatches, as a batch norm does.",
            differs=True,
        )
    return report_with(
        f"{numbers}: reduction? {_COUNT_ADVICE.capitalize()} If the loss compares rows with each other, as a "
        "contrastive one does, a microbatch has fewer to compare.",
        differs=True,
    )


def _reasons_to_differ(model: Model) -> list[str]:
    """Return the reasons why microbatches may give other results than their whole batch."""
    stages = [(model.label_of(index), stage) for index, stage in enumerate(model.stages)]
    state_reason = "keeps state, as a batch norm does, which sees one microbatch at a time"
    reasons = [f"{label} {state_reason}" for label, stage in stages if "state" in stage.keywords]
    reasons += [f"{label} reads which microbatch it is" for label, stage in stages if "microbatch" in stage.keywords]
    loss_reason = "has a loss of its own, which may be no mean over rows"
    return reasons + [f"{label} {loss_reason}" for label, stage in stages[:-1] if stage.aux_loss]


def _run_undivided(model: Model, arguments: StepArguments, rows: int) -> Result:
    parts = [(arguments.batch, rows)]
    return sum_over_microbatches(model, arguments.params, parts, state=arguments.state, key=arguments.key)


def _draws_random_numbers(model: Model, arguments: StepArguments, rows: int, result: Result) -> bool:
    """Return whether the model draws random numbers, which another key shows."""
    try:
        other_result = _run_undivided(model, replace(arguments, key=arguments.key + 1), rows)
    except Exception:
        return True
    leaves, other_leaves = (tree.leaves((run.loss, run.grads)) for run in (result, other_result))
    leaf_pairs = zip(leaves, other_leaves, strict=True)
    return not all(torch.equal(*leaf_pair) for leaf_pair in leaf_pairs if isinstance(leaf_pair[0], Tensor))


def _loss_of_outputs(
    model: Model, sizes: Sequence[int], microbatch_result: Result, outputs: Any, target: Any
) -> Tensor | None:
    """Return the loss of all microbatches' outputs in one; None if it is not computed from these alone."""
    # The outputs were computed with the microbatches' state and random numbers, so those are no reason to differ.
    if outputs not in (None, "stream") or model.loss is None or any(stage.aux_loss for stage in model.stages):
        return None
    loss_model = Model((Stage(_return_input),), model.loss, ("batch",), reduction=model.reduction, aux=model.aux)
    try:
        y = join(microbatch_result.outputs, sizes) if outputs == "stream" else microbatch_result.outputs
        return sum_over_microbatches(loss_model, ({},), [((y, target), 1)]).loss
    # The outputs do not join, or the loss draws random numbers.
    except Exception:
        return None


def _return_input(params: Any, y: Any) -> Any:
    return y


def _explain_by_loss(
    model: Model, sizes: Sequence[int], microbatch_result: Result, undivided_loss: Tensor, eps: float
) -> str:
    """Return a cause that the losses show: a loss that is not finite, or a wrong reduction; empty if none."""
    losses: Sequence[Tensor] = microbatch_result.losses
    unit = "microbatch" if len(losses) == len(sizes) else "slice"
    nonfinite = [index for index, loss in enumerate(losses) if not bool(torch.isfinite(loss))]
    undivided_number, divided_number = float(undivided_loss), float(microbatch_result.loss)
    if nonfinite:
        named = ", ".join(f"{unit} {index} is {float(losses[index])}" for index in nonfinite[:5])
        return f"The loss of {named}; that of the undivided batch is {undivided_number:.6g}: {_COUNT_ADVICE}"
    # Redo the reduction the other way: sum the losses of a "mean", or weigh those of a "sum" by their rows.
    other_reduction = {"mean": ("sums", "sum"), "sum": ("averages", "mean")}.get(model.reduction)
    shares = [1.0] * len(losses) if model.reduction == "mean" else [size / sum(sizes) for size in sizes]
    other_loss = reduce(torch.add, [loss * share for loss, share in zip(losses, shares, strict=False)])
    if other_reduction is None or not agree_to_rounding([(other_loss, undivided_loss)], eps):
        return ""
    times = f"{undivided_number / divided_number:.4g} x this one" if divided_number else "another one"
    return (
        f"The undivided batch's loss is {times} ({undivided_number:.6g}, here {divided_number:.6g}): the loss "
        f'{other_reduction[0]} over its rows, so say reduction="{other_reduction[1]}".'
    )


_FUNCTION_DIFFERS = (
    "it has changed since {} traced it, or does what a trace does not capture. Make the model again, or compute the "
    "same for all batches."
)


def check_function(
    model: Model,
    params: Sequence[Any],
    microbatches: Sequence[tuple[tuple[Any, Any], int]],
    result: Result,
    key: int | None,
    state: Sequence[Any] | None = None,
) -> list[CallCounter]:
    """Compare the results of the stages with the model's own function, microbatch by microbatch, to rounding.

    Args:
        model, params, key, state: as for `reference`.
        microbatches: the microbatches, each with its count of rows.
        result: the result of the stages.

    Returns:
        The numbers among the attributes of modules that the function changed; they are put back.

    Raises:
        GradientMismatch: another loss, gradient or state; the microbatch or the leaf is named.
    """
    if model.function is None:
        return []
    attributes = AttributeSnapshot([] if model.fingerprint is None else model.fingerprint.modules, with_containers=True)
    try:
        return _check_function(model, model.function, params, microbatches, result, key, state, attributes)
    finally:
        attributes.restore()


def _check_function(
    model: Model,
    function: LossFunction,
    params: Sequence[Any],
    microbatches: Sequence[tuple[tuple[Any, Any], int]],
    result: Result,
    key: int | None,
    state: Sequence[Any] | None,
    attributes: AttributeSnapshot,
) -> list[CallCounter]:
    # 1. Parameters by name, as the function takes them, whatever their stages.
    name_of_function, explanation = function.who, _FUNCTION_DIFFERS.format(function.door)
    is_trainable_by_name = dict[str, bool]()
    for stage, stage_params in enumerate(params):
        is_trainable_by_name |= zip(stage_params, trainable_leaves(model, stage, stage_params), strict=True)
    leaf_by_name = {name: leaf for stage_params in params for name, leaf in stage_params.items()}
    leaf_names = model.params_spec[0] if model.params_spec else [*leaf_by_name]
    total_rows = sum(size for _, size in microbatches)
    total: list[Tensor | None] = [None] * len(leaf_by_name)
    divisor: Any = 0
    counters = list[CallCounter]()
    # Autocast casts a weight once for all its uses, and adds their gradients in the lower precision. So are those of an
    # activation that several stages read, in another order.
    has_several_readers = bool(model.ties) or any(isinstance(sources, tuple) for sources in model.inputs)
    gradient_eps = max(function.eps, ambient_eps() if has_several_readers else 0.0)
    # A net takes its buffers by name, too, and replaces them by their next values.
    buffers = {name: leaf.clone() for stage in state or () for name, leaf in (stage or {}).items()}
    # 2. Run the function on each microbatch, compare its loss, and add its gradients up.
    for index, (part, size) in enumerate(microbatches):
        leaves = {name: leaf_by_name[name].detach().requires_grad_(is_trainable_by_name[name]) for name in leaf_names}
        arguments = tree.unflatten(model.params_spec[1], leaves.values()) if model.params_spec else leaves | buffers
        with torch.enable_grad():
            function_result = function.call(arguments, part, key, index)
            loss, count, _ = split_loss(function_result, model.reduction, model.aux, f"what {name_of_function} returns")
            weighted = loss * (size / total_rows if model.reduction == "mean" else 1.0)
        buffers = {name: arguments[name].detach() for name in buffers}
        stage_loss = result.losses[index]
        if not _agree_to_rounding(stage_loss, loss.detach(), function.eps):
            numbers = f"{float(stage_loss):.6g} by the stages and {float(loss.detach()):.6g} by {name_of_function}"
            raise GradientMismatch(f"The loss of microbatch {index} is {numbers}: {explanation}")
        total = [*map(add_optional, total, _grads_of_leaves(weighted, [*leaves.values()]))]
        divisor += count if model.reduction == "count" else 0
        # Each microbatch meets the modules as they were: one that a run renamed hides its tied parameters from torch.
        counters = counters or attributes.counters()
        attributes.restore()
    # The statistics of batch norms follow from a momentum that changes no loss and no gradient.
    for name, leaf in ((name, leaf) for stage in result.state or () for name, leaf in (stage or {}).items()):
        if name in buffers and not _agree_to_rounding(_as_floating(leaf), _as_floating(buffers[name]), function.eps):
            error = largest_difference(leaf, buffers[name])
            raise GradientMismatch(
                f"The state {name} by the stages is off by up to {error:.3g} from {name_of_function}'s: {explanation}"
            )
    divisor = divisor if divisor != 0 else 1
    grad_by_name = {name: grad for stage in result.grads for name, grad in stage.items()}
    named_totals = zip(leaf_names, total, strict=True)
    # 3. Compare the gradients. One that is None on one side counts as zeros.
    expected_by_name = {
        name: torch.zeros_like(leaf_by_name[name]) if grad is None else grad / divisor
        for name, grad in named_totals
        if is_trainable_by_name[name]
    }
    total_norm = joint_norm(expected_by_name.values())
    for name, grad in expected_by_name.items():
        stage_grad = torch.zeros_like(grad) if grad_by_name[name] is None else grad_by_name[name]
        agrees = _agree_to_rounding(stage_grad, grad, gradient_eps)
        if not agrees and not are_negligible(stage_grad, grad, total_norm):
            error = largest_difference(stage_grad, grad)
            raise GradientMismatch(
                f"The gradient of {name} by the stages is off by up to {error:.3g} from {name_of_function}'s: "
                f"{explanation}"
            )
    return counters


def _as_floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _grads_of_leaves(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    trainable = [leaf for leaf in leaves if leaf.requires_grad]
    with outside_autocast():
        grads = torch.autograd.grad(loss, trainable, allow_unused=True) if trainable and loss.requires_grad else ()
    grad_by_leaf = dict(zip(map(id, trainable), grads, strict=False))
    return [grad_by_leaf.get(id(leaf)) for leaf in leaves]


def _agree_to_rounding(actual: Tensor, expected: Tensor, eps: float) -> bool:
    """Return whether the same numbers of two tensors are finite, and agree but for rounding."""
    actual, expected = to_dense(actual), to_dense(expected)
    is_finite = actual.isfinite()
    distance = relative_distance(actual[is_finite], expected[is_finite])
    is_close = distance <= max(rounding_tolerance(actual, expected), eps**0.5)
    return is_close and torch.equal(is_finite, expected.isfinite())
