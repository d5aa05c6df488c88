"""A stage with rules of its own: the user says what its gradients are, in two halves.

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
from fpipe.graphs.language.graph import Aval, aval
from fpipe.model import Model

Rules = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def custom_stage(
    forward: Callable[[Any, Any], tuple[Any, Any]],
    backward_input: Callable[[Any, Any, Any], tuple[Any, Any]],
    backward_weight: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    """A stage function `f(params, x) -> y` whose gradients are what its rules say.

    Args:
        forward: `forward(params, x) -> (y, res)`: the output, and a pytree of what the backward needs.
        backward_input: `backward_input(params, res, dy) -> (dx, wres)`: the input's gradient, with a leaf for each of
            x (None for none), and a pytree of what `backward_weight` needs. `dy` is like y.
        backward_weight: `backward_weight(params, wres) -> dparams`, with a leaf for each of params (None for none).

    Returns:
        A function for `from_functions`, `Stage` or `linearize`.

    Raises:
        ValueError: when it runs, for rules that return something else.

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
    for rule in rules:
        if not callable(rule):
            raise TypeError(f"custom_stage takes three functions, found {type(rule).__name__}.")

    def stage(params: Any, x: Any) -> Any:
        groups = tree.flatten(params), tree.flatten(x)
        leaves = [leaf for found, _ in groups for leaf in found]
        shown: list[Any] = []
        tensors = _Custom.apply(rules, [spec for _, spec in groups], len(groups[0][0]), shown, *leaves)
        assert tensors is not None
        found = iter(tensors)
        spec, rest = shown
        return tree.unflatten(spec, [next(found) if leaf is _TENSOR else leaf for leaf in rest])

    stage.__name__ = getattr(forward, "__name__", "custom")
    _WITH_RULES.add(stage)
    return stage


def refuse_rules(model: Model, what: str) -> None:
    """A ValueError for a model with such a stage: its rules say nothing of what else is to be differentiated."""
    for number, stage in enumerate(model.stages):
        if isinstance(stage.forward, FunctionType) and stage.forward in _WITH_RULES:
            raise ValueError(
                f"{model.who(number)} has hand-written rules (custom_stage), and {what} would need another: write it "
                "as a plain function, or as a torch.autograd.Function with setup_context, jvp and vmap."
            )


_WITH_RULES: WeakSet[FunctionType] = WeakSet()

_TENSOR = object()


class _Custom(torch.autograd.Function):
    """The rules as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, rules: Rules, specs: Sequence[Any], count: int, shown: list[Any], *leaves: Any) -> Any:
        params, x = tree.unflatten(specs[0], leaves[:count]), tree.unflatten(specs[1], leaves[count:])
        made = rules[0](params, x)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"forward of a custom_stage returns (y, res), found {type(made).__name__}.")
        found, spec = tree.flatten(made[0])
        kept, ctx.res = tree.flatten(made[1])
        shown += [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found]]
        held = [*leaves[:count], *kept]
        ctx.rules, ctx.specs, ctx.count, ctx.shown = rules, specs, count, shown
        ctx.given = [aval(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in held]
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in held))
        return tuple(leaf for leaf in found if isinstance(leaf, Tensor))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        held = [other if saved is None else saved for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        params, res = tree.unflatten(ctx.specs[0], held[: ctx.count]), tree.unflatten(ctx.res, held[ctx.count :])
        spec, rest = ctx.shown
        each = iter(cotangents)
        dy = tree.unflatten(spec, [next(each) if leaf is _TENSOR else None for leaf in rest])
        made = ctx.rules[1](params, res, dy)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"backward_input of a custom_stage returns (dx, wres), found {type(made).__name__}.")
        who = f"custom_stage {getattr(ctx.rules[0], '__name__', 'custom')}"
        dx = _like(ctx.specs[1], ctx.given[ctx.count :], made[0], f"backward_input of {who}", "x")
        dparams = ctx.rules[2](params, made[1])
        dparams = _like(ctx.specs[0], ctx.given[: ctx.count], dparams, f"backward_weight of {who}", "params")
        return (None, None, None, None, *dparams, *dx)


def _like(spec: Any, given: Sequence[Aval | None], gradient: Any, rule: str, what: str) -> list[Any]:
    """The leaves of a gradient, each like its own; autograd would sum up a larger shape, and cast another dtype."""
    leaves, found = tree.flatten(gradient)
    if found != spec:
        raise ValueError(f"{rule} returns a gradient in the containers of {what}, found {found}.")
    for (place, leaf), known in zip(tree.paths(gradient), given, strict=True):
        if leaf is None or known is None:
            continue
        if not isinstance(leaf, Tensor) or (*leaf.shape, leaf.dtype) != (*known.shape, known.dtype):
            shown = aval(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            raise ValueError(f"{rule} returns {shown} as the gradient of {what}{place}, which is {known}.")
    return leaves
