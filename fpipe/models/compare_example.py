"""Compare stages that were cut out of a traced function with the function itself, on the example it was traced with.

loss, gradients of the stages  ==  loss, gradients of the function        or a ValueError that names the parameter

Two rows of the example prove as much as all if they reach every parameter, and if autograd alone gives the gradients: a
trace has the same operations for any rows. Whatever two rows leave open, all of them decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.graphs.tracing.fake import LeakedTensor
from fpipe.meaning.purity.attributes import Attributes
from fpipe.meaning.purity.closure import modules_of
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.stages.outputs import split_loss
from fpipe.meaning.stages.way_back import partly_python
from fpipe.model import Model
from fpipe.models.tracing.boundary import KEY

_ULPS = 16


def refuse_difference(
    model: Model,
    own: Sequence[Any],
    batch: tuple[Any, Any],
    leaves: Mapping[str, Tensor],
    run: Callable[[Mapping[str, Tensor], tuple[Any, Any]], Any],
    who: str,
    eps: float,
    state: Sequence[Any] | None = None,
) -> None:
    """A ValueError unless the stages give the function's own loss and gradients on the example, if that has data: a
    trace may have lost something, such as the backward of a custom `autograd.Function`.

    Args:
        model, own, state: what the function was cut into, its parameters per stage, and its state.
        batch: the example.
        leaves: the parameters by name.
        run: the function, of these and of a batch; `who` is what errors call it.
        eps: the machine epsilon of what it computes with, where that is not the parameters'.
    """
    if any(leaf.is_meta for leaf in tree.leaves((leaves, batch)) if isinstance(leaf, Tensor)):
        return
    compared = partial(_compared, model, own, leaves, run, who, eps, state)
    with suppress(Exception):  # two rows may be no batch that it takes, or give no number
        few = _two_rows(batch)
        if few is not None and compared(few):
            return
    compared(batch)


def _two_rows(batch: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """The first two rows of an example, if all its tensors have the same number of rows, and that is more."""
    sizes = {len(leaf) for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1 or max(sizes) <= 2:
        return None

    def cut(leaf: Any) -> Any:
        return leaf[:2] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return tree.tree_map(cut, batch)


def _compared(
    model: Model,
    own: Sequence[Any],
    leaves: Mapping[str, Tensor],
    run: Callable[[Mapping[str, Tensor], tuple[Any, Any]], Any],
    who: str,
    eps: float,
    state: Sequence[Any] | None,
    batch: tuple[Any, Any],
) -> bool:
    """A ValueError if the stages give something else on a batch. Whether no other rows can tell more: each parameter
    has a gradient other than 0, and none of it is Python's or hidden from autograd, which may ask for the data."""
    leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    floats = {name: leaf for name, leaf in leaves.items() if leaf.is_floating_point() or leaf.is_complex()}
    trained = {name: leaf.requires_grad_() for name, leaf in floats.items()}
    with torch.enable_grad():
        with _BesideAutograd() as beside:
            loss, *_ = split_loss(run(leaves, batch), model.reduction, model.aux)
        if hasattr(loss, "fake_mode"):
            raise LeakedTensor(
                f"{who} computes with a fake tensor, which it has kept since it was traced (in a cache), "
                f"so its loss on the example has no data. Clear it there, and let {who} keep no tensors."
            )
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True) if loss.requires_grad else ()
    proves = not (beside.met or partly_python([loss]))
    alone = replace(model, reduction="sum", aux=False, loss=_loss_alone(model) if model.loss else None)
    attributes = Attributes([one for stage in model.stages for one in modules_of(stage.forward)], who, every=True)
    try:
        found = over_parts(alone, own, [(batch, 1)], key=KEY, state=state)  # uncut: whichever rows its leaves have
    finally:
        attributes.put_back()
    if loss.isnan().any() and found.loss.isnan().any():
        raise ValueError(f"{who} gives the loss nan on the example; take one whose loss and gradients can be compared.")
    if not torch.equal(found.loss, loss.detach()):
        raise ValueError(
            f"the stages give the loss {found.loss.item()}, {who} gives {loss.item()} on the same example: it does "
            "something that a trace does not capture, such as values read by .item(), or a seed of its own."
        )
    right = dict(zip(trained, grads, strict=False))
    by_stages = {name: grad for stage in found.grads for name, grad in stage.items()}
    # What is 0 but for rounding, as the gradient of a key's bias under a softmax, is as wrong as the whole is large.
    whole = math.hypot(*(float(grad.norm()) for grad in grads if grad is not None))
    for name, leaf in leaves.items():
        expected, grad = right.get(name), by_stages[name]
        error = grad if expected is None else grad - expected
        least = max(eps, torch.finfo(leaf.dtype).eps)
        size = 0.0 if expected is None else float(expected.norm())
        limit = 0.0 if expected is None else size * least**0.5 + whole * _ULPS * least
        if leaf.requires_grad and error.norm() > limit:
            raise ValueError(
                f"the stages give another gradient of {name} than {who}: a custom autograd.Function, a hook or "
                "inference_mode, say, which no trace above autograd captures. Use no_grad for the last, or "
                "from_functions."
            )
        proves &= expected is None or size > 0
    return proves


_GRAD_FN: Any = Tensor.grad_fn
_HOOKED = Tensor.register_hook, _GRAD_FN.__get__


class _BesideAutograd(TorchFunctionMode):
    """Meets hooks of gradients, and what is computed in inference_mode."""

    met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met |= func in _HOOKED or torch.is_inference_mode_enabled()
        return func(*args, **(kwargs or {}))


def _loss_alone(model: Model) -> Callable[[Any, Any], Any]:
    """The loss function of a model, without what it counts and its auxiliary results."""
    whole: Any = model.loss
    return lambda y, target: split_loss(whole(y, target), model.reduction, model.aux)[0]
