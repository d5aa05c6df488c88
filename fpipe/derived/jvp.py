"""Differentiate a model in a direction: the model whose loss is the directional derivative of its loss.

    y = f(params, x)        --> jvp -->        (y, dy) = f'((params, dparams), (x, dx))

Each stage runs on dual numbers, and the cotangents that travel are those of forward-over-reverse. So every program,
runtime and reading is as it was, and nothing else is needed for a Hessian-vector product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fpipe.derived.custom_stage import refuse_rules
from fpipe.derived.dual import Dual, pushed_forward
from fpipe.meaning.stages.outputs import copied, split_loss, split_output
from fpipe.model import Model, Stage, the_model
from fpipe.torch_private.modules import load_forward_mode


def jvp(model: Model) -> Model:
    """The model of a directional derivative: each of its stages on dual numbers.

    Its loss is the derivative of the model's loss in the direction of the tangents, as `torch.func.jvp` of the whole
    gives it, and `aux` has the loss itself. In a program with backwards the gradient of a leaf `Dual(p, v)` is
    `Dual(Hv, g)`: the gradient g of the model's loss, and the Hessian's product with the direction v.

    Args:
        model: it stays as it is.

    Returns:
        Another model. Its params are `make_dual(params, tangents)`. Inputs, outputs and what passes between stages are
        duals where there is a tangent; inputs that come without are constants. Result.aux is a dict: "loss" is the
        model's loss, joined as `aux` is (`merge(aux=fpipe.Sum())` where it is a sum, not a mean), without those of
        stages; and "aux" is what it had, if it had some.

    Raises:
        ValueError: a stage has hand-written rules. When it runs, a stage whose derivative torch.func does not know
            raises torch's error, and it is named.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: p["w"] ** 3 * x], loss=lambda y, t: (y - t).sum())
    >>> tangent = fpipe.jvp(model)
    >>> step = fpipe.build(fpipe.program(tangent), tangent)
    >>> params = fpipe.make_dual(({"w": torch.tensor(2.0)},), ({"w": torch.tensor(1.0)},))
    >>> result = step(params, (torch.tensor([1.0]), torch.tensor([0.0])))
    >>> result.aux["loss"], result.loss
    (tensor(8.), tensor(12.))
    >>> fpipe.unpack_dual(result.grads)
    (({'w': tensor(12.)},), ({'w': tensor(12.)},))
    """
    the_model(model)
    refuse_rules(model, "jvp")
    load_forward_mode()
    on_duals = {stage: _on_duals(stage) for stage in model.stages}  # equal stages share their traces
    stages = tuple(on_duals[stage] for stage in model.stages)
    report = model.made("jvp: on dual numbers, so a tangent beside each parameter and what depends on it")
    return replace(model, stages=stages, loss=_derivative(model), aux=True, function=None, report=report)


def _on_duals(stage: Stage) -> Stage:
    """A stage on dual numbers. Its module state comes without tangents."""
    forward = stage.forward

    @wraps(forward)
    def on_duals(params: Any, x: Any, **said: Any) -> Any:
        order: list[str] = []

        def call(params: Any, x: Any, said: Any) -> tuple[Any, Any]:
            own = {**said, "state": copied(said["state"])} if "state" in said else said  # it is run twice
            y, beside = split_output(stage, forward(params, x, **own))
            order[:] = beside
            follows = {word: beside.pop(word) for word in ("carry", "loss") if word in beside}
            return (y, follows), beside

        (y, follows), rest = pushed_forward(call, params, x, said)
        if "loss" in follows:
            follows["loss"] = _tangent(follows["loss"])
        return (y, *((follows | rest)[word] for word in order)) if order else y

    return replace(stage, forward=on_duals, within=None)


def _derivative(model: Model) -> Callable[[Any, Any], Any]:
    """The derivative of a model's loss, what it counts, and the loss itself with its auxiliary results."""
    loss, reduction, with_aux = model.loss, model.reduction, model.aux

    def derivative(y: Any, target: Any) -> Any:
        def call(y: Any, target: Any) -> tuple[Tensor, Any]:
            made, count, aux = split_loss(y if loss is None else loss(y, target), reduction, with_aux)
            return made, (count, aux)

        made, (count, aux) = pushed_forward(call, y, target)
        beside = {"loss": made.primal if isinstance(made, Dual) else made} | ({"aux": aux} if with_aux else {})
        return (_tangent(made), count) if reduction == "count" else _tangent(made), beside

    return derivative if loss is None else wraps(loss)(derivative)


def _tangent(leaf: Any) -> Tensor:
    """The tangent of a loss, zero if it has none."""
    return leaf.tangent if isinstance(leaf, Dual) else torch.zeros_like(leaf)
