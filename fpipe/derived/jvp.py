"""Differentiate a model in a direction: the model whose loss is the directional derivative of its loss.

    y = f(params, x)        --> jvp -->        (y, dy) = f'((params, dparams), (x, dx))

Each stage runs on dual numbers, and the cotangents that travel are those of forward-over-reverse. So every program,
runtime and reading is as it was, and nothing else is needed for a Hessian-vector product.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe import tree
from fpipe.derived.custom_stage import refuse_rules
from fpipe.graphs.language.graph import aval
from fpipe.graphs.tracing.keep import collecting_marks
from fpipe.meaning.purity.ambient import in_fake_mode
from fpipe.meaning.stages.keys import random_states, replaying
from fpipe.meaning.stages.outputs import copied, split_loss, split_output
from fpipe.model import Model, Stage, the_model
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
    """Params, or inputs, with a tangent beside each leaf that has one: what a step of `jvp(model)` takes.

    Args:
        primals: any pytree.
        tangents: the same with a tensor of the same shape and dtype for each leaf, or None for a leaf that stays as it
            is, whose tangent is zero.

    Raises:
        ValueError: another structure, shape or dtype; the place is named.

    >>> make_dual(({"w": torch.tensor(2.0), "b": torch.tensor(0.0)},), ({"w": torch.tensor(1.0), "b": None},))
    ({'w': Dual(primal=tensor(2.), tangent=tensor(1.)), 'b': tensor(0.)},)
    """
    place = tree.difference(primals, tangents)
    if place is not None:
        raise ValueError(
            f"tangents are like what they are for: only one of the two has a leaf at {place or 'the top'}."
        )
    leaves, containers = tree.flatten(primals)
    made: list[Any] = []
    for (place, tangent), primal in zip(tree.paths(tree.like(primals, tangents)), leaves, strict=True):
        if tangent is not None and (_kind(tangent) != _kind(primal) or not _is_float(primal)):
            wanted = _kind(primal) if _is_float(primal) else f"None: {_kind(primal)} has no derivative"
            raise ValueError(f"the tangent at {place or 'the top'} is {wanted}; found {_kind(tangent)}.")
        made.append(primal if tangent is None else Dual(primal, tangent))
    return tree.unflatten(containers, made)


def unpack_dual(duals: Any) -> tuple[Any, Any]:
    """The primals of a pytree, and its tangents, None where there is none; the inverse of `make_dual`.

    Of the gradients of `jvp(model)`, the first is the Hessian times the direction, the second the gradient.

    >>> unpack_dual({"w": Dual(2.0, 1.0), "b": 0.0})
    ({'w': 2.0, 'b': 0.0}, {'w': 1.0, 'b': None})
    """
    leaves, containers = tree.flatten(duals, _is_dual)
    pairs = [leaf if isinstance(leaf, Dual) else Dual(leaf, None) for leaf in leaves]
    return tree.unflatten(containers, [p.primal for p in pairs]), tree.unflatten(containers, [p.tangent for p in pairs])


def pushed_forward(call: Callable[..., tuple[Any, Any]], *given: Any) -> tuple[Any, Any]:
    """Call a function of pytrees on dual numbers: its first result comes with tangents, its second has no gradient."""
    leaves, containers = tree.flatten(given, _is_dual)
    duals = {at: leaf for at, leaf in enumerate(leaves) if _is_dual(leaf)}
    if not duals:
        return call(*given)
    plain = {at: leaf for at, leaf in enumerate(leaves) if _is_float(leaf)}
    others = [None if at in duals or at in plain else leaf for at, leaf in enumerate(leaves)]
    function = _OfFloats(call, containers, others, [*duals], [*plain])
    primals, tangents = unpack_dual([*duals.values()])
    made: Any = _ForwardOverReverse.apply(function, *primals, *plain.values(), *tangents)
    return function.whole(made)


_FLOAT, _OTHER = object(), object()


@dataclass
class _OfFloats:
    """A function of pytrees as one of the tensors of floats in them: those with a tangent first, then the others.

    `made` is what it gave when it ran last, without tensors: for each of its two results leaves and containers.
    """

    call: Callable[..., tuple[Any, Any]]
    containers: tree.Spec
    leaves: list[Any]
    duals: list[int]
    floats: list[int]
    made: list[tuple[list[Any], tree.Spec]] = field(default_factory=list[tuple[list[Any], tree.Spec]])

    def __call__(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The floats of its first result, and all its other tensors."""
        leaves = [*self.leaves]
        for at, tensor in zip((*self.duals, *self.floats), tensors, strict=True):
            leaves[at] = tensor
        (first, of), (second, of_second) = map(tree.flatten, self.call(*tree.unflatten(self.containers, leaves)))
        floats = tuple(leaf for leaf in first if _is_float(leaf))
        first = [_FLOAT if _is_float(leaf) else leaf for leaf in first]
        others = tuple(leaf for leaf in (*first, *second) if isinstance(leaf, Tensor))
        both = (first, of), (second, of_second)
        self.made = [([_OTHER if isinstance(leaf, Tensor) else leaf for leaf in found], of) for found, of in both]
        return floats, others

    def whole(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Its two results, of the floats with their tangents, one after the other, and then the other tensors."""
        rest = iter(tensors)
        (one, of), (other, of_other) = self.made
        one = [Dual(next(rest), next(rest)) if leaf is _FLOAT else leaf for leaf in one]
        first = tree.unflatten(of, [next(rest) if leaf is _OTHER else leaf for leaf in one])
        return first, tree.unflatten(of_other, [next(rest) if leaf is _OTHER else leaf for leaf in other])


class _ForwardOverReverse(torch.autograd.Function):
    """A function on dual numbers as one node of autograd's graph, whose backward is on dual numbers too.

    What has no tangent is given zeros: some of torch's rules (of mse_loss_backward, of group_norm) need one there.
    """

    @staticmethod
    def forward(ctx: Any, function: _OfFloats, *tensors: Tensor) -> Any:
        count = len(function.duals)
        end = count + len(function.floats)
        primals, plain, tangents = tensors[:count], tensors[count:end], tensors[end:]
        ctx.function, ctx.states = function, [] if in_fake_mode() else random_states()
        ctx.save_for_backward(*tensors)
        tensors = tuple(tensor.detach() for tensor in tensors)
        still = map(torch.zeros_like, plain)
        with _traced_through():
            made: Any = torch.func.jvp(function, (*primals, *plain), (*tangents, *still), has_aux=True)
        found, derivatives, others = made
        ctx.mark_non_differentiable(*others)
        return (*(leaf for pair in zip(found, derivatives, strict=True) for leaf in pair), *others)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        function: _OfFloats = ctx.function
        count = len(function.duals)
        end = count + len(function.floats)
        tensors: list[Tensor] = [tensor.detach() for tensor in ctx.saved_tensors]
        primals, plain, tangents = tensors[:count], tensors[count:end], tensors[end:]
        needed: Sequence[bool] = ctx.needs_input_grad[1:]
        wanted = [at for at in range(end) if needed[at] or (at < count and needed[end + at])]
        pairs = 2 * sum(leaf is _FLOAT for leaf in function.made[0][0])
        changes, starts = cotangents[:pairs:2], cotangents[1:pairs:2]
        still = map(torch.zeros_like, plain)

        def gradients(*given: Tensor) -> tuple[Tensor, ...]:
            whole = given[:end]

            def of_wanted(*some: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
                return function(*(dict(zip(wanted, some, strict=True)).get(at, one) for at, one in enumerate(whole)))

            return torch.func.vjp(of_wanted, *(whole[at] for at in wanted), has_aux=True)[1](given[end:])

        with _traced_through(), replaying(ctx.states) if ctx.states else nullcontext():
            made: Any = torch.func.jvp(gradients, (*primals, *plain, *starts), (*tangents, *still, *changes))
        found, derivatives = made
        own = dict(zip(wanted, found, strict=True)), dict(zip(wanted, derivatives, strict=True))
        return (None, *(own[1].get(at) for at in range(end)), *(own[0].get(at) for at in range(count)))


@contextmanager
def _traced_through() -> Generator[None]:
    """Take ops that torch.func has derivatives of: attention's fused kernels have none in forward mode, and with
    gradients off a backward picks ops that are not differentiated again. A mark of a stage is no tensor outside."""
    with sdpa_kernel(SDPBackend.MATH), collecting_marks(), torch.enable_grad():
        yield


def _is_dual(leaf: Any) -> bool:
    return isinstance(leaf, Dual)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _kind(leaf: Any) -> str:
    return str(aval(leaf)) if isinstance(leaf, Tensor) else "None" if leaf is None else type(leaf).__name__


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
