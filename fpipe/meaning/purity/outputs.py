"""Split and check what stages and losses return, and inspect the autograd graph behind it.

(y, state, carry, loss)      --> split_output -->      y, {"state": .., "carry": .., "loss": ..}
((total, count), aux)        --> split_loss -->        total, count, aux
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import closed_over_tensors
from fpipe.meaning.purity.sharded import refuse_sharded
from fpipe.model import Model, Reduction, Stage
from fpipe.torch_internals import function_behind, is_fake

# Name the symbols of a trace: torch writes an open number of rows as s93.

_ROW_SYMBOL = re.compile(r"\bs\d+\b")


def with_rows_named(size: object) -> str:
    """Return a size, a shape or a condition on sizes as text, with "rows" for torch's symbols.

    >>> with_rows_named("(2*s93, 4)")
    '(2*rows, 4)'
    """
    return _ROW_SYMBOL.sub("rows", str(size))


def symbols_in(text: str) -> set[str]:
    """Return the symbols in a text of torch's.

    >>> symbols_in("The size of tensor a (s93) must match")
    {'s93'}
    """
    return set(_ROW_SYMBOL.findall(text))


def call_stage(stage: Stage, params: Any, x: Any, options: Mapping[str, Any]) -> Any:
    """Call a stage function with the keyword arguments that it asks for, its state as a copy that it may write."""
    kwargs = {name: options[name] for name in stage.keywords}
    if "state" in kwargs:
        kwargs["state"] = copy_state(kwargs["state"])
    return stage.forward(params, x, **kwargs)


def copy_state(state: Any) -> Any:
    """Return a copy of a module state."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return tree.tree_map(copy, state)


def split_output(stage: Stage, returned: Any) -> tuple[Any, dict[str, Any]]:
    """Split the result of a stage function into its output and its extras: "state", "carry" and "loss" by name."""
    names = [name for name in ("state", "carry") if name in stage.keywords] + ["loss"] * stage.aux_loss
    if not names:
        return returned, {}
    if not isinstance(returned, tuple) or len(returned) != 1 + len(names):
        demands = [f"asks for {name}" if name in stage.keywords else f"gives its {name}" for name in names]
        raise TypeError(f"a stage that {' and '.join(demands)} returns (y, {', '.join(names)}).")
    extras = dict(zip(names, returned[1:], strict=True))
    if stage.aux_loss:
        _check_scalar_loss(extras["loss"], f"the loss of {stage.name or 'a stage'}")
    return returned[0], extras


def check_output(y: Any, label: str) -> None:
    """Raise TypeError unless a stage returned a pytree of tensors."""
    leaves = tree.leaves(y)
    refuse_sharded(leaves, f"what {label} returned")
    for leaf in leaves:
        # A tensor inside an object that is no pytree would not be detached from its graph, and get no gradient.
        if any(isinstance(attribute, Tensor) for attribute in getattr(leaf, "__dict__", {}).values()):
            class_name = type(leaf).__name__
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{label} returned a {class_name} that holds tensors, which is no pytree: its gradient would be "
                    "lost. Return a dict, or call register_pytree_node."
                )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"{label} returned {type(y).__name__} without any tensor; a stage returns a pytree of tensors.")


def loss_of(model: Model, output: Any, target: Any) -> tuple[Tensor, Any, Any]:
    """Return the loss of an output, its count (None unless reduction="count") and auxiliary results (or None)."""
    returned = output if model.loss is None else model.loss(output, target)
    label = "the last stage's output, which is the loss since no loss= was given," if model.loss is None else "the loss"
    return split_loss(returned, model.reduction, model.aux, label)


def split_loss(returned: Any, reduction: Reduction, with_aux: bool, label: str = "the loss") -> tuple[Tensor, Any, Any]:
    """Split the result of a loss function into the loss, its count or None, and its auxiliary results or None."""
    count: Any = None
    aux: Any = None
    if with_aux:
        if not (isinstance(returned, tuple) and len(returned) == 2):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f"with aux=True the loss returns (loss, aux), found {_type_name(returned)}.")
        returned, aux = returned  # pyright: ignore[reportUnknownVariableType]
    if reduction == "count":
        if not (isinstance(returned, tuple) and len(returned) == 2):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f'with reduction="count" the loss returns (total, count), found {_type_name(returned)}.')
        returned, count = returned  # pyright: ignore[reportUnknownVariableType]
        _check_count(count)
    _check_scalar_loss(returned, label)
    return returned, count, aux  # pyright: ignore[reportUnknownVariableType]


def _type_name(value: Any) -> str:
    """Return the name of a value's type; fake tensors and symbolic numbers count as Tensor and float."""
    if isinstance(value, Tensor):
        return "Tensor"
    return "float" if isinstance(value, torch.SymFloat) else type(value).__name__


def _check_scalar_loss(returned: Any, label: str) -> None:
    if not isinstance(returned, Tensor):
        raise TypeError(f"{label} is a 0-d tensor, found {_type_name(returned)}.")
    refuse_sharded([returned], label)
    if returned.ndim:
        raise ValueError(
            f"{label} is a 0-d tensor, found shape {with_rows_named(tuple(returned.shape))}; reduce it, for instance "
            "by .mean()."
        )
    if not returned.is_floating_point():
        raise TypeError(f"{label} is a 0-d tensor of floats, found one of {returned.dtype}, which has no gradient.")


def _check_count(count: Any) -> None:
    """Raise TypeError or ValueError unless a count is a number, or a 0-d tensor of one, without a gradient."""
    expected = "the count of (total, count) is a number or a 0-d tensor of one, found "
    if not isinstance(count, Tensor):
        if isinstance(count, bool) or not isinstance(count, Real | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{expected}{_type_name(count)}.")
    elif count.ndim:
        raise ValueError(
            f"{expected}shape {with_rows_named(tuple(count.shape))}; say how many there are, as by .sum()."
        )
    elif count.dtype == torch.bool:
        raise ValueError(f"{expected}True or False; say how many there are, as by .sum().")
    elif count.requires_grad:
        raise ValueError("the count of (total, count) has a gradient, which nobody would take: .detach() it.")


def outputs_of(model: Model, stage: int, y: Any) -> tuple[Any, ...]:
    """Return a stage's outputs as a tuple, one for each port that other stages read."""
    port_count = model.ports(stage)
    if port_count == 1:
        return (y,)
    if not isinstance(y, tuple) or len(y) != port_count:  # pyright: ignore[reportUnknownArgumentType]
        description = f"a tuple of {len(y)}" if isinstance(y, tuple) else type(y).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(
            f"{model.label_of(stage)} returns a tuple of {port_count} outputs, which others take; found {description}."
        )
    return y  # pyright: ignore[reportUnknownVariableType]


def scaled_weight(weight: float, scale: float, dtype: torch.dtype) -> float:
    """Return the cotangent of a loss: its microbatch's weight in the mean, times `loss_scale`."""
    cotangent = weight * scale
    if scale != 1.0 and cotangent > torch.finfo(dtype).max:
        raise ValueError(
            f"loss_scale={scale!r} is too much for a loss in {dtype}, whose gradient would start at {cotangent!r}. "
            "Take a smaller scale or a wider dtype."
        )
    return cotangent


# Inspect the autograd graph behind results: whether a backward runs Python, and which leaves it reaches.


def has_python_backward(results: Iterable[Any], custom_ops: bool = True, ignored: Collection[Any] = ()) -> bool:
    """Whether the backward of results runs Python: a custom autograd.Function, a module's hook or a custom op.

    Functions of torch's own and ignored ones do not count, nor custom ops if `custom_ops` is False.
    """
    python_packages = ("torch.nn.modules._functions", *["torch._library"] * custom_ops)
    functions = (function for node in _backward_nodes(results) if (function := function_behind(node)) not in ignored)
    modules = (str(getattr(function, "__module__", "torch.")) for function in functions)
    return any(not module.startswith("torch.") or module.startswith(python_packages) for module in modules)


# With data torch's backward indexes the largest element. Without data (fake tensors) it multiplies all others by 0,
# which gives -0, or NaN for an infinite cotangent.
_DATA_DEPENDENT_BACKWARDS = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def refuse_max_gradients(results: Iterable[Any]) -> None:
    """Raise Untraceable if the backward of results goes through a whole tensor's max, min or median."""
    for name in (node.name() for node in _backward_nodes(results)):
        if name in _DATA_DEPENDENT_BACKWARDS:
            raise Untraceable(
                f"the gradient of a whole tensor's max, min or median ({name}) is another without data; use amax"
            )


def _backward_nodes(results: Iterable[Any]) -> Iterator[Any]:
    pending = [leaf.grad_fn for leaf in results if isinstance(leaf, Tensor)]
    visited: set[Any] = {None}
    while pending:
        node: Any = pending.pop()
        if node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            yield node


class MissingGradient(ValueError):
    """A function reads a tensor that requires a gradient and is none of its arguments."""


def refuse_missing_gradients(model: Model, results: Iterable[Any], arguments: Iterable[Any]) -> None:
    """Raise MissingGradient if the results depend on a leaf that a stage or the loss closes over.

    A leaf that a function makes, to differentiate by it, is allowed. In a trace such a leaf is fake, so any real leaf
    is refused. With real tensors, only leaves that the functions name are known to come from outside.
    """
    results, known_ids = [*results], {id(leaf) for leaf in arguments}
    leaves = [getattr(node, "variable", None) for node in _backward_nodes(results)]
    missing = {id(leaf): leaf for leaf in leaves if leaf is not None and id(leaf) not in known_ids}
    functions = [("the loss", model.loss)] + [
        (f"stage {index}", stage.forward) for index, stage in enumerate(model.stages)
    ]
    for label, function in functions if missing else ():
        for name, tensor in closed_over_tensors(function):
            if tensor is missing.get(id(tensor)):
                raise MissingGradient(_MISSING_GRADIENT.format(f"{label} closes over {name!r}", tuple(tensor.shape)))
    if any(map(is_fake, results)):
        for tensor in (leaf for leaf in missing.values() if not is_fake(leaf)):
            raise MissingGradient(_MISSING_GRADIENT.format("a stage or the loss reads a tensor", tuple(tensor.shape)))


_MISSING_GRADIENT = (
    "{} of shape {} that wants a gradient, which no step would give. Hand it in among params, or say .detach() or "
    "requires_grad_(False)."
)
