"""The result of a step, and the table by which gradients are recognised."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor

from fpipe import tree

if TYPE_CHECKING:
    from fpipe.timing.timeline import Timeline


@dataclass(frozen=True)
class Result:
    """The results of a step, by name; None where the program does not give one.

    Attributes:
        loss: 0-d tensor, detached. If the program does not merge, a tuple with one for each microbatch, as for all
            that follow. In a process other than rank 0 and the one that computes it, a false object that says so.
        grads: one pytree per stage, like params; a frozen parameter, and one that the loss does not depend on, gets
            None. With `per_example(model)` each has a leading dimension of rows, or is None.
        outputs: what the last stage returned besides a loss, joined over microbatches.
        state: one pytree per stage, the module state after the step.
        aux: auxiliary results of the loss, detached, joined over microbatches like outputs.
        losses: the loss of each microbatch, where `merge(losses=True)` asked for them.
        input_grads: gradients of the inputs, where `program(model, input_grads=True)` asked for them; None for a leaf
            that has no gradient.
        params, opt: the next parameters and the optimizer's state, one pytree per stage, of a program with an `update`.
        norm: the norm of all gradients before they are scaled, where `update(clip=)` asked for it.
        valid: whether the norm was below the clip, where `update(validate="after")` asked for it; if it was not, the
            step was done again and these are its results. With `update(loss_scale=)`: whether all gradients were
            finite; if not, nothing was updated.
        scale: the loss scale of the next step, and for how many steps all gradients have been finite.
        timeline: when each op ran and the most bytes each rank held, where `build(record=True)` asked for it.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).abs().mean())
    >>> step = fpipe.build(fpipe.program(model), model)
    >>> result = step(({"w": torch.tensor(2.0)},), (torch.ones(3), torch.zeros(3)))
    >>> result.loss, result.outputs, result.grads
    (tensor(2.), tensor([2., 2., 2.]), ({'w': tensor(1.)},))
    >>> result
    <Result: loss 2, grads of 1 leaves, 1 numbers, outputs float32[3]>
    """

    # The union with Any admits None, a tuple over microbatches, and the placeholder for a loss on another rank.
    loss: Tensor | Any = None
    grads: tuple[Any, ...] | Any = None
    outputs: Any = None
    state: tuple[Any, ...] | Any = None
    aux: Any = None
    losses: tuple[Tensor, ...] | Any = None
    input_grads: Any = None
    params: tuple[Any, ...] | Any = None
    opt: tuple[Any, ...] | Any = None
    norm: Tensor | Any = None
    valid: Tensor | Any = None
    scale: tuple[Tensor, Tensor] | Any = None
    timeline: Timeline | Any = None

    def __post_init__(self) -> None:
        leaf = _first_tensor(self.grads)
        if leaf is not None:
            _GRADIENTS[id(leaf)] = leaf

    def __repr__(self) -> str:
        summaries = [
            _summarize(field.name, value) for field in fields(self) if (value := getattr(self, field.name)) is not None
        ]
        return f"<Result: {', '.join(summaries) or 'nothing'}>"


# The first gradient of each living result, by id: a step that is handed gradients for params can say so.
_GRADIENTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def are_gradients(pytree: object) -> bool:
    """Whether a pytree is the `grads` of a result."""
    leaf = _first_tensor(pytree)
    return leaf is not None and _GRADIENTS.get(id(leaf)) is leaf


def _first_tensor(pytree: Any) -> Tensor | None:
    if isinstance(pytree, Tensor):
        return pytree
    parts: Any = pytree.values() if isinstance(pytree, dict) else pytree if isinstance(pytree, list | tuple) else ()
    return next((leaf for part in parts if (leaf := _first_tensor(part)) is not None), None)


def _summarize(name: str, value: Any) -> str:
    if name == "timeline":
        return name
    tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    if name in ("grads", "params", "opt"):
        return f"{name} of {len(tensors)} leaves, {sum(leaf.numel() for leaf in tensors):,} numbers"
    descriptions = [_describe_tensor(leaf) for leaf in tensors[:3]] + ["..."] * (len(tensors) > 3)
    return f"{name} {' '.join(descriptions)}" if descriptions else name


def _describe_tensor(leaf: Tensor) -> str:
    """Return the number in a 0-d tensor with data, or else dtype and shape."""
    if leaf.dim() == 0 and type(leaf) is Tensor and not leaf.is_meta:
        return f"{leaf.item():g}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}"
