"""Keep the gradient of each row apart: the model of which every row is a batch of its own.

    g: float32[4, 8], summed over 32 rows        --> per_example -->        g: float32[32, 4, 8], one for each row

Each row is handed parameters of its own, views of the same memory, and each stage is `torch.func.vmap` of what it was.
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
from fpipe.graphs.tracing.keep import collecting_marks
from fpipe.meaning.stages.outputs import split_loss, split_output
from fpipe.model import Model, Stage, the_model


def per_example(model: Model) -> Model:
    """The model whose gradients come row by row, as for DP-SGD: each is what the row would give as a batch of one.

    That is what `torch.func.vmap` of `torch.func.grad` gives on one device. Programs, under any schedule, end in
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
    the_model(model)
    if model.per_example:
        raise ValueError("this model is per_example already.")
    refuse_rules(model, "per_example")
    for number, stage in enumerate(model.stages):
        _refuse_shared(stage, model.who(number))
    taken = [*zip(model.stages, model.inputs, strict=True)]
    ones = [(stage, tuple(one == "batch" for one in x) if isinstance(x, tuple) else x == "batch") for stage, x in taken]
    of_rows = {one: _of_rows(*one) for one in ones}  # equal stages share their traces
    stages, loss = tuple(of_rows[one] for one in ones), _sum_over_rows(model)
    report = model.made("per_example: gradients row by row, of parameters that each row is handed")
    return replace(
        model, stages=stages, loss=loss, reduction="sum", aux=True, function=None, per_example=True, report=report
    )


def _refuse_shared(stage: Stage, who: str) -> None:
    """A ValueError for a stage with something that is no single row's."""
    asked = {"state": "module state", "key": "a key", "carry": "a carry"}
    for found in (what for word, what in asked.items() if word in stage.asks):
        raise ValueError(
            f"{who} has {found}, which is no single row's: per_example takes stages that each row passes alone. Of "
            "norms take those that look at one row, such as LayerNorm or GroupNorm, or eval mode."
        )


def _of_rows(stage: Stage, batch: bool | tuple[bool, ...]) -> Stage:
    """A stage for each row. What comes from the batch, as `batch` says of its inputs, is cut into single rows."""
    forward = stage.forward

    @wraps(forward)
    def of_rows(params: Any, x: Any, **said: Any) -> Any:
        if isinstance(batch, tuple):
            x = tuple(_ones(one) if cut else one for one, cut in zip(x, batch, strict=True))
        elif batch:
            x = _ones(x)

        def of_row(params: Any, x: Any) -> tuple[Any, Any]:
            return split_output(stage, forward(params, x, **said))

        y, beside = mapped(of_row, params, x)
        return (y, beside["loss"].sum()) if stage.aux_loss else y

    return replace(stage, forward=of_rows, within=None)


def _sum_over_rows(model: Model) -> Callable[[Any, Any], Any]:
    """The losses of the rows, summed, and each of them with its auxiliary results."""
    loss, reduction, with_aux = model.loss, model.reduction, model.aux

    def over_rows(y: Any, target: Any) -> Any:
        def of_row(y: Any, target: Any) -> dict[str, Any]:
            made, count, aux = split_loss(y if loss is None else loss(y, target), reduction, with_aux)
            if reduction == "count":
                made = made / (torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1)
            return {"loss": made} | ({"aux": aux} if with_aux else {})

        rows = mapped(of_row, y, _ones(target))
        return rows["loss"].sum(), rows

    return over_rows if loss is None else wraps(loss)(over_rows)


def _ones(batch: Any) -> Any:
    """A batch as batches of one row, stacked; scalars go whole to each."""

    def ones(leaf: Any) -> Any:
        return leaf.unsqueeze(1) if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return tree.tree_map(ones, batch)


def mapped(call: Callable[..., Any], *given: Any) -> Any:
    """A function of pytrees for each row of their tensors, by `torch.func.vmap`; scalars go whole to each."""
    leaves, containers = tree.flatten(given)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
    shown: list[Any] = []

    def function(*rows: Tensor) -> tuple[Tensor, ...]:
        full = [*leaves]
        for at, row in zip(places, rows, strict=True):
            full[at] = row
        shown[:] = tree.flatten(call(*tree.unflatten(containers, full)))
        return tuple(leaf for leaf in shown[0] if isinstance(leaf, Tensor))

    # There is no rule to map attention's fused kernels. What is marked inside is no tensor outside.
    with sdpa_kernel(SDPBackend.MATH), collecting_marks():
        found = iter(torch.func.vmap(function)(*(leaves[at] for at in places)))
    return tree.unflatten(shown[1], [next(found) if isinstance(leaf, Tensor) else leaf for leaf in shown[0]])
