"""Make a stage with hand-written gradients, in two halves as the I and W of a split backward.

forward(params, x) -> y, res        backward_input(params, res, dy) -> dx, wres        backward_weight(params, wres)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, aval_of_tensor
from fpipe.model import Model

Rules = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def custom_stage(
    forward: Callable[[Any, Any], tuple[Any, Any]],
    backward_input: Callable[[Any, Any, Any], tuple[Any, Any]],
    backward_weight: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """Make a stage function `f(params, x) -> y` whose gradients are given by rules.

    Args:
        forward: `forward(params, x) -> (y, res)`: the output, and a pytree of what the backward needs.
        backward_input: `backward_input(params, res, dy) -> (dx, wres)`: the input's gradient, with a leaf for each of
            x (None for none), and a pytree of what `backward_weight` needs. `dy` is like y.
        backward_weight: `backward_weight(params, wres) -> dparams`, with a leaf for each of params (None for none).

    Returns:
        A function for `from_functions`, `Stage` or `linearize`.

    Raises:
        TypeError: a rule is no function.
        ValueError: when it runs, a rule returns another structure, shape or dtype.

    A step that rounds in the forward and lets the gradient through:

    >>> import fpipe, torch
    >>> straight = fpipe.custom_stage(
    ...     lambda params, x: ((params["w"] * x).round(), (x,)),
    ...     lambda params, res, dy: (dy * params["w"], (res[0], dy)),
    ...     lambda params, wres: {"w": (wres[0] * wres[1]).sum()},
    ... )
    >>> model = fpipe.from_functions([straight], loss=lambda y, t: (y - t).sum())
    >>> batch = torch.tensor([0.4, 1.3]), torch.zeros(2)
    >>> result = fpipe.build(fpipe.program(model), model)(({"w": torch.tensor(2.0)},), batch)
    >>> result.outputs, result.grads[0]["w"]
    (tensor([1., 3.]), tensor(1.7000))
    """
    rules: Rules = (forward, backward_input, backward_weight)

    def stage(params: Any, x: Any) -> Any:
        flat_arguments = tree.flatten(params), tree.flatten(x)
        leaves = [leaf for arg_leaves, _ in flat_arguments for leaf in arg_leaves]
        output_form: list[Any] = []
        tensors = _CustomStageFunction.apply(
            rules, [spec for _, spec in flat_arguments], len(flat_arguments[0][0]), output_form, *leaves
        )
        assert tensors is not None
        output_tensors = iter(tensors)
        spec, output_leaves = output_form
        return tree.unflatten(spec, [next(output_tensors) if leaf is _TENSOR else leaf for leaf in output_leaves])

    stage.__name__ = getattr(forward, "__name__", "custom")
    _STAGES_WITH_RULES.add(stage)
    return stage


def refuse_rules(model: Model, transform_name: str) -> None:
    """Raise ValueError if a stage has hand-written rules, which no other transform of derivatives can follow."""
    for number, stage in enumerate(model.stages):
        if isinstance(stage.forward, FunctionType) and stage.forward in _STAGES_WITH_RULES:
            raise ValueError(
                f"{model.label_of(number)} has hand-written rules (custom_stage), and {transform_name} would need "
                "another: write a plain function, or a torch.autograd.Function with setup_context, jvp and vmap."
            )


_STAGES_WITH_RULES: WeakSet[FunctionType] = WeakSet()

_TENSOR = object()


class _CustomStageFunction(torch.autograd.Function):
    """The rules as one node of autograd's graph.

    A node takes and returns flat tensors. `specs` are the containers of params and x; `output_form`, a list that the
    forward fills, has the containers of y and its leaves, with a mark for each tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, rules: Rules, specs: Sequence[Any], param_count: int, output_form: list[Any], *leaves: Any
    ) -> Any:
        params, x = tree.unflatten(specs[0], leaves[:param_count]), tree.unflatten(specs[1], leaves[param_count:])
        result = rules[0](params, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"forward of a custom_stage returns (y, res), found {type(result).__name__}.")
        y_leaves, spec = tree.flatten(result[0])
        res_leaves, ctx.res = tree.flatten(result[1])
        output_form += [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in y_leaves]]
        saved_leaves = [*leaves[:param_count], *res_leaves]
        ctx.rules, ctx.specs, ctx.param_count, ctx.output_form = rules, specs, param_count, output_form
        ctx.avals = [aval_of_tensor(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        # save_for_backward takes tensors alone; other leaves are kept in the same places.
        ctx.non_tensors = [None if isinstance(leaf, Tensor) else leaf for leaf in saved_leaves]
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in saved_leaves))
        return tuple(leaf for leaf in y_leaves if isinstance(leaf, Tensor))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        saved_leaves = [leaf if x is None else x for x, leaf in zip(ctx.saved_tensors, ctx.non_tensors, strict=True)]
        count = ctx.param_count
        params = tree.unflatten(ctx.specs[0], saved_leaves[:count])
        residuals = tree.unflatten(ctx.res, saved_leaves[count:])
        spec, output_leaves = ctx.output_form
        remaining_cotangents = iter(cotangents)
        dy = tree.unflatten(spec, [next(remaining_cotangents) if leaf is _TENSOR else None for leaf in output_leaves])
        result = ctx.rules[1](params, residuals, dy)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"backward_input of a custom_stage returns (dx, wres), found {type(result).__name__}.")
        stage_name = f"custom_stage {getattr(ctx.rules[0], '__name__', 'custom')}"
        dx = _checked_gradient(ctx.specs[1], ctx.avals[count:], result[0], f"backward_input of {stage_name}", "x")
        dparams = ctx.rules[2](params, result[1])
        dparams = _checked_gradient(
            ctx.specs[0], ctx.avals[:count], dparams, f"backward_weight of {stage_name}", "params"
        )
        # No gradient for rules, specs, param_count and output_form.
        return (None, None, None, None, *dparams, *dx)


def _checked_gradient(
    spec: Any, avals: Sequence[Aval | None], gradient: Any, rule: str, argument_name: str
) -> list[Any]:
    """Return the leaves of a gradient; raise ValueError unless each has the shape and dtype of its argument."""
    # Autograd itself would sum up a larger shape and cast another dtype in silence.
    leaves, actual_spec = tree.flatten(gradient)
    if actual_spec != spec:
        raise ValueError(f"{rule} returns gradients in the containers of {argument_name}, found {actual_spec}.")
    for (path, leaf), aval in zip(tree.paths(gradient), avals, strict=True):
        if leaf is None or aval is None:
            continue
        if not isinstance(leaf, Tensor) or (*leaf.shape, leaf.dtype) != (*aval.shape, aval.dtype):
            actual = aval_of_tensor(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(f"{rule} returns {actual} as the gradient of {argument_name}{path}, which is {aval}.")
    return leaves
