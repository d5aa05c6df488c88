"""Differentiate a model in a direction: the model whose loss is the directional derivative of its loss.

    y = f(params, x)        --> jvp -->        (y, dy) = f'((params, dparams), (x, dx))

Each stage runs on dual numbers, and the cotangents between stages are those of forward-over-reverse. Programs, runtimes
and readings stay the same, and a step with backwards gives Hessian-vector products.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe import tree
from fpipe.derived.custom_stage import refuse_rules
from fpipe.derived.per_example import with_loss_as_output
from fpipe.graphs.language.graph import aval_of_tensor
from fpipe.graphs.tracing.marks import collect_marks
from fpipe.meaning.purity.ambient import in_fake_mode
from fpipe.meaning.purity.keys import random_states, replay_from
from fpipe.meaning.purity.outputs import copy_state, split_loss, split_output
from fpipe.model import Model, Stage, require_loss
from fpipe.torch_private.modules import load_forward_mode

# Run a function of pytrees on dual numbers: tensors with a tangent next to them, in forward mode over reverse mode. The
# gradient of this is `torch.func.vjp` differentiated in the direction of the tangents. In autograd over forward
# mode torch leaves out, without a word, what goes by way of the mean that a layer norm hands to its own derivative.


class Dual(NamedTuple):
    """A tensor and its tangent, as one container of pytrees.

    >>> Dual(torch.tensor(2.0), torch.tensor(1.0))
    Dual(primal=tensor(2.), tangent=tensor(1.))
    """

    primal: Any
    tangent: Any


def make_dual(primals: Any, tangents: Any) -> Any:
    """Pair each leaf of params or inputs with its tangent, as a step of `jvp(model)` takes them.

    Args:
        primals: any pytree.
        tangents: the same pytree with a tensor of the same shape and dtype for each leaf, or None for a leaf whose
            tangent is zero.

    Raises:
        ValueError: another structure, shape or dtype; the place is named.

    >>> make_dual(({"w": torch.tensor(2.0), "b": torch.tensor(0.0)},), ({"w": torch.tensor(1.0), "b": None},))
    ({'w': Dual(primal=tensor(2.), tangent=tensor(1.)), 'b': tensor(0.)},)
    """
    path = tree.first_difference(primals, tangents)
    if path is not None:
        raise ValueError(
            f"tangents have the structure of the primals; only one of the two has a leaf at {path or 'the top'}."
        )
    leaves, containers = tree.flatten(primals)
    duals: list[Any] = []
    for (path, tangent), primal in zip(tree.paths(tree.in_order_of(primals, tangents)), leaves, strict=True):
        if tangent is not None and (_kind(tangent) != _kind(primal) or not _is_float(primal)):
            expected = _kind(primal) if _is_float(primal) else f"None: {_kind(primal)} has no derivative"
            raise ValueError(f"the tangent at {path or 'the top'} is {expected}; found {_kind(tangent)}.")
        duals.append(primal if tangent is None else Dual(primal, tangent))
    return tree.unflatten(containers, duals)


def unpack_dual(duals: Any) -> tuple[Any, Any]:
    """Split a pytree into its primals and its tangents, None for a leaf without; the inverse of `make_dual`.

    Of the gradients of `jvp(model)`, the first is the Hessian times the direction, the second the gradient.

    >>> unpack_dual({"w": Dual(2.0, 1.0), "b": 0.0})
    ({'w': 2.0, 'b': 0.0}, {'w': 1.0, 'b': None})
    """
    leaves, containers = tree.flatten(duals, _is_dual)
    pairs = [leaf if isinstance(leaf, Dual) else Dual(leaf, None) for leaf in leaves]
    return tree.unflatten(containers, [p.primal for p in pairs]), tree.unflatten(containers, [p.tangent for p in pairs])


def pushed_forward(call: Callable[..., tuple[Any, Any]], *arguments: Any) -> tuple[Any, Any]:
    """Call a function of pytrees on dual numbers: its first result gets tangents, its second has no gradient."""
    # Three kinds of leaves: duals; floats without a tangent, which may still need a gradient; and constants.
    leaves, containers = tree.flatten(arguments, _is_dual)
    dual_by_index = {index: leaf for index, leaf in enumerate(leaves) if _is_dual(leaf)}
    if not dual_by_index:
        return call(*arguments)
    float_by_index = {index: leaf for index, leaf in enumerate(leaves) if _is_float(leaf)}
    constants = [None if i in dual_by_index or i in float_by_index else leaf for i, leaf in enumerate(leaves)]
    function = _FloatFunction(call, containers, constants, [*dual_by_index], [*float_by_index])
    primals, tangents = unpack_dual([*dual_by_index.values()])
    flat_results: Any = _ForwardOverReverse.apply(function, *primals, *float_by_index.values(), *tangents)
    return function.rebuild_results(flat_results)


_FLOAT, _TENSOR = object(), object()


@dataclass
class _FloatFunction:
    """A function of pytrees as a function of the float tensors in them, as torch.func takes it.

    Attributes:
        call: the function of pytrees, with two results.
        containers, leaves: its arguments, with None for the leaves that are float tensors.
        duals, floats: the indices of leaves with a tangent, and of the float tensors without.
        result_forms: of the last call, for each of its two results the leaves, with marks for tensors, and containers.
    """

    call: Callable[..., tuple[Any, Any]]
    containers: tree.Spec
    leaves: list[Any]
    duals: list[int]
    floats: list[int]
    result_forms: list[tuple[list[Any], tree.Spec]] = field(default_factory=list[tuple[list[Any], tree.Spec]])

    def __call__(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the floats of the first result, and all other tensors of both."""
        leaves = [*self.leaves]
        for index, tensor in zip((*self.duals, *self.floats), tensors, strict=True):
            leaves[index] = tensor
        results = self.call(*tree.unflatten(self.containers, leaves))
        (first_leaves, first_spec), (second_leaves, second_spec) = map(tree.flatten, results)
        floats = tuple(leaf for leaf in first_leaves if _is_float(leaf))
        first_leaves = [_FLOAT if _is_float(leaf) else leaf for leaf in first_leaves]
        other_tensors = tuple(leaf for leaf in (*first_leaves, *second_leaves) if isinstance(leaf, Tensor))
        self.result_forms = [
            ([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in result_leaves], spec)
            for result_leaves, spec in ((first_leaves, first_spec), (second_leaves, second_spec))
        ]
        return floats, other_tensors

    def split(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split a list with one member per tensor into primals, floats without a tangent, and tangents."""
        dual_count, float_count = len(self.duals), len(self.duals) + len(self.floats)
        return tuple(tensors[:dual_count]), tuple(tensors[dual_count:float_count]), tuple(tensors[float_count:])

    def gradients(
        self, indices: Sequence[int], floats: Sequence[Tensor], cotangents: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the floats at these indices; all remaining floats are constants."""

        def call_with(*differentiated: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            all_floats = [*floats]
            for index, tensor in zip(indices, differentiated, strict=True):
                all_floats[index] = tensor
            return self(*all_floats)

        vjp_function = torch.func.vjp(call_with, *(floats[index] for index in indices), has_aux=True)[1]
        return vjp_function(cotangents)

    def rebuild_results(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Rebuild the two results from pairs of primal and tangent, followed by tensors without a tangent."""
        remaining = iter(tensors)
        (first_leaves, first_spec), (second_leaves, second_spec) = self.result_forms
        # All duals first, then the other tensors, in the order in which `__call__` has returned them.
        first_leaves = [Dual(next(remaining), next(remaining)) if leaf is _FLOAT else leaf for leaf in first_leaves]
        first_leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in first_leaves]
        second_leaves = [next(remaining) if leaf is _TENSOR else leaf for leaf in second_leaves]
        return tree.unflatten(first_spec, first_leaves), tree.unflatten(second_spec, second_leaves)


class _ForwardOverReverse(torch.autograd.Function):
    """A function on dual numbers as one node of autograd's graph, whose backward is on dual numbers too.

    With J the Jacobian of f at p, and v the tangent of p:

        forward     (p, v)          ->  (f(p), J v)
        backward    (dy, d(J v))    ->  J^T dy + the derivative of J^T d(J v) along v,  and J^T d(J v)

    Floats without a tangent get zeros: some of torch's rules (of mse_loss_backward, of group_norm) need a tangent.
    """

    @staticmethod
    def forward(ctx: Any, function: _FloatFunction, *tensors: Tensor) -> Any:
        primals, plain, tangents = function.split(tensors)
        ctx.function, ctx.states = function, [] if in_fake_mode() else random_states()
        ctx.save_for_backward(*tensors)
        zeros = map(torch.zeros_like, plain)
        with _differentiable_ops():
            results_and_derivatives: Any = torch.func.jvp(
                function, (*primals, *plain), (*tangents, *zeros), has_aux=True
            )
        results, derivatives, other_tensors = results_and_derivatives
        ctx.mark_non_differentiable(*other_tensors)
        return (*(leaf for pair in zip(results, derivatives, strict=True) for leaf in pair), *other_tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        function: _FloatFunction = ctx.function
        primals, plain, tangents = function.split([tensor.detach() for tensor in ctx.saved_tensors])
        floats, float_tangents = (*primals, *plain), (*tangents, *map(torch.zeros_like, plain))
        # A float is differentiated if its own gradient is needed, or that of its tangent.
        needs_primals, needs_plain, needs_tangents = function.split(ctx.needs_input_grad[1:])
        needs_duals = map(any, zip(needs_primals, needs_tangents, strict=True))
        grad_indices = [index for index, is_needed in enumerate((*needs_duals, *needs_plain)) if is_needed]
        # Results come as pairs of primal and tangent, followed by tensors that have no gradient.
        pair_count = sum(leaf is _FLOAT for leaf in function.result_forms[0][0])
        result_cotangents = cotangents[: 2 * pair_count : 2]
        derivative_cotangents = cotangents[1 : 2 * pair_count : 2]
        # Forward over reverse: J^T d(J v) is a vjp, and its derivative along v, with dy as the tangent of d(J v), has
        # the term J^T dy in it. The forward runs again in it, so it draws the same random numbers.
        with _differentiable_ops(), replay_from(ctx.states) if ctx.states else nullcontext():
            grads_and_derivatives: Any = torch.func.jvp(
                partial(function.gradients, grad_indices),
                (floats, derivative_cotangents),
                (float_tangents, result_cotangents),
            )
        grads, derivatives = grads_and_derivatives
        tangent_grads = dict(zip(grad_indices, grads, strict=True))
        float_grads = dict(zip(grad_indices, derivatives, strict=True))
        return None, *map(float_grads.get, range(len(floats))), *map(tangent_grads.get, range(len(tangents)))


@contextmanager
def _differentiable_ops() -> Generator[None]:
    """Let torch choose ops that torch.func can differentiate twice."""
    # Attention's fused kernels have no derivative in forward mode, and with gradients off a backward picks ops that are
    # not differentiated again. Marks of `fpipe.keep` are collected, since their tensors are of no use outside.
    with sdpa_kernel(SDPBackend.MATH), collect_marks(), torch.enable_grad():
        yield


def _is_dual(leaf: Any) -> bool:
    return isinstance(leaf, Dual)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _kind(leaf: Any) -> str:
    return str(aval_of_tensor(leaf)) if isinstance(leaf, Tensor) else "None" if leaf is None else type(leaf).__name__


def jvp(model: Model) -> Model:
    """Make the model of a directional derivative, which runs each stage on dual numbers.

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
    refuse_rules(model, "jvp")
    require_loss(model, "it has no derivative")
    model = with_loss_as_output(model)
    load_forward_mode()
    # One wrapper for equal stages, so that they share a trace.
    on_duals = {stage: _run_on_duals(stage) for stage in model.stages}
    stages = tuple(on_duals[stage] for stage in model.stages)
    report = model.derived_report("jvp: on dual numbers, so a tangent beside each parameter and what depends on it")
    return replace(model, stages=stages, loss=_derivative_loss(model), aux=True, function=None, report=report)


def _run_on_duals(stage: Stage) -> Stage:
    """Return a stage that runs on dual numbers. Its module state has no tangents."""
    forward = stage.forward

    @wraps(forward)
    def on_duals(params: Any, x: Any, **extra_arguments: Any) -> Any:
        order: list[str] = []

        def call(params: Any, x: Any, extra_arguments: Any) -> tuple[Any, Any]:
            # The backward runs the stage again, on the state from before.
            if "state" in extra_arguments:
                extra_arguments = {**extra_arguments, "state": copy_state(extra_arguments["state"])}
            y, extra_outputs = split_output(stage, forward(params, x, **extra_arguments))
            order[:] = extra_outputs
            differentiable_outputs = {key: extra_outputs.pop(key) for key in ("carry", "loss") if key in extra_outputs}
            return (y, differentiable_outputs), extra_outputs

        (y, differentiable_outputs), constant_outputs = pushed_forward(call, params, x, extra_arguments)
        if "loss" in differentiable_outputs:
            differentiable_outputs["loss"] = _tangent(differentiable_outputs["loss"])
        return (y, *((differentiable_outputs | constant_outputs)[name] for name in order)) if order else y

    return replace(stage, forward=on_duals, with_params_bound=None)


def _derivative_loss(model: Model) -> Callable[[Any, Any], Any]:
    """Return a loss function that gives the derivative of a model's loss, and the loss itself in its `aux`."""
    loss, reduction, with_aux = model.loss, model.reduction, model.aux

    def derivative(y: Any, target: Any) -> Any:
        """Return the tangent of the loss as the loss, and the loss itself among the auxiliary results."""

        def loss_and_rest(y: Any, target: Any) -> tuple[Tensor, Any]:
            total, count, aux = split_loss(y if loss is None else loss(y, target), reduction, with_aux)
            return total, (count, aux)

        dual_loss, (count, aux) = pushed_forward(loss_and_rest, y, target)
        aux_results = {"loss": dual_loss.primal if isinstance(dual_loss, Dual) else dual_loss} | (
            {"aux": aux} if with_aux else {}
        )
        return (_tangent(dual_loss), count) if reduction == "count" else _tangent(dual_loss), aux_results

    return derivative if loss is None else wraps(loss)(derivative)


def _tangent(leaf: Any) -> Tensor:
    return leaf.tangent if isinstance(leaf, Dual) else torch.zeros_like(leaf)
