"""Compute per-row gradients: a model that treats every row as a batch of one.

    g: float32[4, 8], summed over 32 rows        --> per_example -->        g: float32[32, 4, 8], one for each row

Each row gets parameters of its own, views of the same memory, and each stage becomes `torch.func.vmap` of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe import tree
from fpipe.derived.custom_stage import refuse_rules
from fpipe.graphs.tracing.marks import collect_marks
from fpipe.meaning.purity.outputs import split_loss, split_output
from fpipe.model import Model, Stage, require_loss


def per_example(model: Model) -> Model:
    """Make a model with per-row gradients, as DP-SGD needs them: each equals the gradient of the row as a batch of one.

    On one device `torch.func.vmap` of `torch.func.grad` gives the same. Programs, under any schedule, end in
    `merge(grads="rows")`, or in no merge for one tuple of gradients for each microbatch.

    Args:
        model: it stays as it is.

    Returns:
        Another model for the same params and batches. Its gradients have a dimension of rows in front, and are None
        where the loss does not depend on a leaf. Its loss is the sum over rows; Result.aux is a dict: "loss" has the
        loss of each row, and "aux" what it had, if it had some, stacked. Outputs are those of batches of one row,
        stacked: [rows, 1, ...].

    Raises:
        ValueError: a stage has hand-written rules, module state, a key or a carry: none of it is one row's alone. When
            it runs, a stage that draws random numbers, or that torch.func cannot map over rows, raises torch's error,
            and is named.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> rows = fpipe.per_example(model)
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1), fpipe.merge(grads="rows"))(fpipe.program(rows))
    >>> batch = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    >>> result = fpipe.build(program, rows)(({"w": torch.tensor(3.0)},), batch)
    >>> result.grads[0]["w"], result.aux["loss"]
    (tensor([ 6., 24., 54.]), tensor([ 9., 36., 81.]))
    """
    if model.per_example:
        raise ValueError("this model is per_example already.")
    refuse_rules(model, "per_example")
    require_loss(model, "its rows have no gradients")
    model = with_loss_as_output(model)
    for number, stage in enumerate(model.stages):
        _refuse_shared(stage, model.label_of(number))
    # One wrapper for equal stages with equal sources, so that they share a trace.
    stage_keys = [
        (stage, tuple(source == "batch" for source in sources) if isinstance(sources, tuple) else sources == "batch")
        for stage, sources in zip(model.stages, model.inputs, strict=True)
    ]
    stage_by_key = {stage_key: _over_rows(*stage_key) for stage_key in stage_keys}
    stages, loss = tuple(stage_by_key[stage_key] for stage_key in stage_keys), _sum_over_rows(model)
    report = model.derived_report("per_example: gradients row by row, of parameters that each row is handed")
    return replace(
        model, stages=stages, loss=loss, reduction="sum", aux=True, function=None, per_example=True, report=report
    )


def with_loss_as_output(model: Model) -> Model:
    """Return the model whose last stage returns the loss alone, where it returns an output and its loss."""
    last_stage = model.stages[-1]
    if not last_stage.aux_loss:
        return model

    # Derivatives are taken of what the loss function reads, which is the output of the last stage.
    @wraps(last_stage.forward)
    def forward(params: Any, x: Any, **extra_arguments: Any) -> Any:
        _, *state, loss = last_stage.forward(params, x, **extra_arguments)
        return (loss, *state) if state else loss

    return replace(model, stages=(*model.stages[:-1], replace(last_stage, forward=forward, aux_loss=False)))


def _refuse_shared(stage: Stage, stage_name: str) -> None:
    """Raise ValueError if a stage has state, a key or a carry, which all rows of a microbatch share."""
    description_by_kind = {"state": "module state", "key": "a key", "carry": "a carry"}
    for description in (description for kind, description in description_by_kind.items() if kind in stage.keywords):
        raise ValueError(
            f"{stage_name} has {description}, which is no single row's. Of norms take those that look at one row, such "
            "as LayerNorm, or eval mode."
        )


def _over_rows(stage: Stage, is_from_batch: bool | tuple[bool, ...]) -> Stage:
    """Map a stage over rows."""
    # An activation of an earlier stage has the dimension of rows in front already, as [rows, 1, ...]. An input that
    # `is_from_batch` is cut into such rows here.
    forward = stage.forward

    @wraps(forward)
    def run_rows(params: Any, x: Any, **extra_arguments: Any) -> Any:
        if isinstance(is_from_batch, tuple):
            x = tuple(_as_single_rows(value) if cut else value for value, cut in zip(x, is_from_batch, strict=True))
        elif is_from_batch:
            x = _as_single_rows(x)

        def run_row(params: Any, x: Any) -> tuple[Any, Any]:
            return split_output(stage, forward(params, x, **extra_arguments))

        y, extra_outputs = map_over_rows(run_row, params, x)
        return (y, extra_outputs["loss"].sum()) if stage.aux_loss else y

    return replace(stage, forward=run_rows, with_params_bound=None)


def _sum_over_rows(model: Model) -> Callable[[Any, Any], Any]:
    """Return a loss function that sums the losses of rows, and has the loss and `aux` of each row in its own `aux`."""
    loss, reduction, with_aux = model.loss, model.reduction, model.aux

    def over_rows(y: Any, target: Any) -> Any:
        def loss_of_row(y: Any, target: Any) -> dict[str, Any]:
            row_loss, count, aux = split_loss(y if loss is None else loss(y, target), reduction, with_aux)
            # A row without a count, such as one whose labels are all ignored, has the loss 0 and not NaN.
            if reduction == "count":
                row_loss = row_loss / (torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1)
            return {"loss": row_loss} | ({"aux": aux} if with_aux else {})

        rows = map_over_rows(loss_of_row, y, _as_single_rows(target))
        return rows["loss"].sum(), rows

    return over_rows if loss is None else wraps(loss)(over_rows)


def _as_single_rows(batch: Any) -> Any:
    """Reshape a batch to batches of one row, stacked: [rows, ...] to [rows, 1, ...]; scalars go whole to each."""

    def add_row_dim(leaf: Any) -> Any:
        return leaf.unsqueeze(1) if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return tree.tree_map(add_row_dim, batch)


def map_over_rows(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of pytrees for each row of their tensors, by `torch.func.vmap`; scalars go whole to each."""
    leaves, containers = tree.flatten(arguments)
    tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
    output_form: list[Any] = []

    def function(*rows: Tensor) -> tuple[Tensor, ...]:
        row_leaves = [*leaves]
        for index, row in zip(tensor_indices, rows, strict=True):
            row_leaves[index] = row
        output_form[:] = tree.flatten(call(*tree.unflatten(containers, row_leaves)))
        return tuple(leaf for leaf in output_form[0] if isinstance(leaf, Tensor))

    # vmap has no rule for attention's fused kernels. Marks of `fpipe.keep` inside it are on its own tensors, of no use
    # outside.
    with sdpa_kernel(SDPBackend.MATH), collect_marks():
        tensors = iter(torch.func.vmap(function)(*(leaves[index] for index in tensor_indices)))
    return tree.unflatten(
        output_form[1], [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in output_form[0]]
    )
