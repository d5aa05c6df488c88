"""Hold what a step returns."""

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
        loss: 0-d tensor, detached. Not merged: a tuple with one for each microbatch, as for all that follow. In a
            process that has none, which is neither rank 0 nor that which computes it, an object that says so, and is
            false.
        grads: one pytree per stage, like params; a frozen parameter, and one that the loss does not depend on, gets
            None. Of `per_example(model)` each has a dimension of rows in front, or is None.
        outputs: what the last stage returned, joined over microbatches.
        state: one pytree per stage, the module state after the step.
        aux: auxiliary results of the loss, detached, joined over microbatches like outputs.
        losses: the loss of each microbatch, where `merge(losses=True)` asked for them.
        input_grads: gradients of the inputs, where `program(model, input_grads=True)` asked for them; None for a leaf
            that has no gradient.
        params, opt: the next parameters and the optimizer's state, one pytree per stage, of a program with an `update`.
        norm: the norm of all gradients before they are scaled, where `update(clip=)` asked for it.
        valid: whether that norm was below the clip, where `update(validate="after")` asked for it; if one was not, all
            that is here is of the steps done again. With `update(loss_scale=)` whether all gradients were finite; else
            nothing was updated.
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

    # Any beside the usual type: so None, a tuple of microbatches and another rank's loss are of it too.
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
        said = [_said(each.name, value) for each in fields(self) if (value := getattr(self, each.name)) is not None]
        return f"<Result: {', '.join(said) or 'nothing'}>"


_GRADIENTS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def are_gradients(found: object) -> bool:
    """Whether something is the `grads` of a result."""
    leaf = _first_tensor(found)
    return leaf is not None and _GRADIENTS.get(id(leaf)) is leaf


def _first_tensor(found: Any) -> Tensor | None:
    """The first tensor of dicts, lists and tuples."""
    if isinstance(found, Tensor):
        return found
    parts: Any = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return next((leaf for part in parts if (leaf := _first_tensor(part)) is not None), None)


def _said(name: str, value: Any) -> str:
    """A result in a few words, whatever its size."""
    if name == "timeline":
        return name
    tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    if name in ("grads", "params", "opt"):
        return f"{name} of {len(tensors)} leaves, {sum(leaf.numel() for leaf in tensors):,} numbers"
    shown = [_shown(leaf) for leaf in tensors[:3]] + ["..."] * (len(tensors) > 3)
    return f"{name} {' '.join(shown)}" if shown else name


def _shown(leaf: Tensor) -> str:
    """A number, or what kind of tensor it is; one without data is only that."""
    if leaf.dim() == 0 and type(leaf) is Tensor and not leaf.is_meta:
        return f"{leaf.item():g}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{[*leaf.shape]}"
