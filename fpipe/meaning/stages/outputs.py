"""Take apart what stages and losses return, refuse what is none of it, and read what autograd has behind it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import closed_over
from fpipe.meaning.purity.sharded import refuse_sharded
from fpipe.model import Model, Reduction, Stage
from fpipe.torch_internals import function_behind, is_fake

# Say in words what a trace leaves open: it writes a number of rows as a symbol, such as s93.

_OPEN = re.compile(r"\bs\d+\b")


def in_words(found: object) -> str:
    """A size, a shape or a condition on sizes as text, with the word for its symbols.

    >>> in_words("(2*s93, 4)")
    '(2*rows, 4)'
    """
    return _OPEN.sub("rows", str(found))


def symbols_in(text: str) -> set[str]:
    """The symbols that a text of torch's has.

    >>> symbols_in("The size of tensor a (s93) must match")
    {'s93'}
    """
    return set(_OPEN.findall(text))


def call_stage(stage: Stage, params: Any, x: Any, said: Mapping[str, Any]) -> Any:
    """Call a stage function with what it asks for of `said`. Its state is a copy, which it may write."""
    asked = {word: said[word] for word in stage.asks}
    if "state" in asked:
        asked["state"] = copied(asked["state"])
    return stage.forward(params, x, **asked)


def copied(state: Any) -> Any:
    """A state in memory of its own."""

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return tree.tree_map(copy, state)


def split_output(stage: Stage, made: Any) -> tuple[Any, dict[str, Any]]:
    """Split what a stage function returned into its output and, by name, what is beside it: its module state, what it
    hands to the next slice, a loss of its own."""
    words = [word for word in ("state", "carry") if word in stage.asks] + ["loss"] * stage.aux_loss
    if not words:
        return made, {}
    if not isinstance(made, tuple) or len(made) != 1 + len(words):
        wants = [f"asks for {word}" if word in stage.asks else f"gives its {word}" for word in words]
        raise TypeError(f"a stage that {' and '.join(wants)} returns (y, {', '.join(words)}).")
    beside = dict(zip(words, made[1:], strict=True))
    if stage.aux_loss:
        _refuse_no_scalar(beside["loss"], f"the loss of {stage.name or 'a stage'}")
    return made[0], beside


def refuse_odd_output(y: Any, who: str) -> None:
    """A stage returns tensors. One inside an object that is no pytree would pass uncut, and lose its gradient."""
    leaves = tree.leaves(y)
    refuse_sharded(leaves, f"what {who} returned")
    for leaf in leaves:
        if any(isinstance(inner, Tensor) for inner in getattr(leaf, "__dict__", {}).values()):
            found = type(leaf).__name__
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{who} returned a {found} that holds tensors, which is no pytree: its gradient would be lost. "
                    f"Return a dict or a tuple, or register {found} by torch.utils._pytree.register_pytree_node."
                )
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"{who} returned {type(y).__name__} without any tensor; a stage returns a pytree of tensors.")


def loss_of(model: Model, output: Any, target: Any) -> tuple[Tensor, Any, Any]:
    """The loss of an output, what it counts (None unless the model says reduction="count"), and its auxiliary results
    (None unless the model says aux=True)."""
    made = output if model.loss is None else model.loss(output, target)
    who = "the last stage's output, which is the loss since no loss= was given," if model.loss is None else "the loss"
    return split_loss(made, model.reduction, model.aux, who)


def split_loss(made: Any, reduction: Reduction, with_aux: bool, who: str = "the loss") -> tuple[Tensor, Any, Any]:
    """Split what a loss function returned into the loss, its count, and its auxiliary results."""
    count: Any = None
    aux: Any = None
    if with_aux:
        if not (isinstance(made, tuple) and len(made) == 2):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f"with aux=True the loss returns (loss, aux), found {_kind(made)}.")
        made, aux = made  # pyright: ignore[reportUnknownVariableType]
    if reduction == "count":
        if not (isinstance(made, tuple) and len(made) == 2):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f'with reduction="count" the loss returns (total, count), found {_kind(made)}.')
        made, count = made  # pyright: ignore[reportUnknownVariableType]
        _refuse_no_count(count)
    _refuse_no_scalar(made, who)
    return made, count, aux  # pyright: ignore[reportUnknownVariableType]


def _kind(found: Any) -> str:
    """Name a type as its user does: stand-ins of a trace are the numbers and tensors that they stand for."""
    if isinstance(found, Tensor):
        return "Tensor"
    return "float" if isinstance(found, torch.SymFloat) else type(found).__name__


def _refuse_no_scalar(made: Any, who: str) -> None:
    if not isinstance(made, Tensor):
        raise TypeError(f"{who} is a 0-d tensor, found {_kind(made)}.")
    refuse_sharded([made], who)
    if made.ndim:
        raise ValueError(
            f"{who} is a 0-d tensor, found shape {in_words(tuple(made.shape))}; reduce it, for instance by .mean()."
        )
    if not made.is_floating_point():
        raise TypeError(f"{who} is a 0-d tensor of floats, found one of {made.dtype}, which has no gradient.")


def _refuse_no_count(count: Any) -> None:
    """Check a count, which is summed over the microbatches, to divide by once."""
    wanted = "the count of (total, count) is a number or a 0-d tensor of one, found "
    if not isinstance(count, Tensor):
        if isinstance(count, bool) or not isinstance(count, Real | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{wanted}{_kind(count)}.")
    elif count.ndim:
        raise ValueError(
            f"{wanted}shape {in_words(tuple(count.shape))}; say how many there are, for instance by .sum()."
        )
    elif count.dtype == torch.bool:
        raise ValueError(f"{wanted}True or False; say how many there are, for instance by .sum().")
    elif count.requires_grad:
        raise ValueError("the count of (total, count) has a gradient, which nobody would take: .detach() it.")


def outputs_of(model: Model, stage: int, y: Any) -> tuple[Any, ...]:
    """A stage's outputs apart: the tuple it returned, if others take several of them."""
    many = model.ports(stage)
    if many == 1:
        return (y,)
    if not isinstance(y, tuple) or len(y) != many:  # pyright: ignore[reportUnknownArgumentType]
        found = f"a tuple of {len(y)}" if isinstance(y, tuple) else type(y).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(f"{model.who(stage)} returns a tuple of {many} outputs, which others take; found {found}.")
    return y  # pyright: ignore[reportUnknownVariableType]


def scaled(weight: float, scale: float, dtype: torch.dtype) -> float:
    """The cotangent of a loss of this dtype: its microbatch's weight in the mean, times `loss_scale`."""
    made = weight * scale
    if scale != 1.0 and made > torch.finfo(dtype).max:
        raise ValueError(
            f"loss_scale={scale!r} is too much for a loss in {dtype}, whose gradient would start at {made!r} (the most "
            f"there is {torch.finfo(dtype).max!r}). Build with a smaller one, or return the loss in a wider dtype."
        )
    return made


# Read what autograd would do behind results: whether its way back is partly Python, and where else it leads.


def partly_python(made: Iterable[Any], custom_ops: bool = True) -> bool:
    """Whether a custom `torch.autograd.Function`, a module's hook or, if asked for, the backward of a custom op is on
    the way back from results; torch's own functions ask for nothing."""
    counted = ("torch.nn.modules._functions", *["torch._library"] * custom_ops)
    modules = (str(getattr(function_behind(node), "__module__", "torch.")) for node in _way_back(made))
    return any(not module.startswith("torch.") or module.startswith(counted) for module in modules)


# Without data torch multiplies what was not the largest by 0, which gives -0, or NaN of an infinite cotangent.
_OTHERWISE_WITH_DATA = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def refuse_max_gradients(made: Iterable[Any]) -> None:
    """Refuse results that a gradient would lead from through a whole tensor's max, min or median."""
    for name in (node.name() for node in _way_back(made)):
        if name in _OTHERWISE_WITH_DATA:
            raise Untraceable(
                f"the gradient of a whole tensor's max, min or median ({name}) is another without data; amax and amin "
                "have one that a trace can hold"
            )


def _way_back(made: Iterable[Any]) -> Iterator[Any]:
    """The nodes of autograd behind results."""
    todo = [leaf.grad_fn for leaf in made if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while todo:
        node: Any = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [behind for behind, _ in node.next_functions]
            yield node


class MissingGradient(ValueError):
    """A function computes with a tensor that wants a gradient and is none of what it is handed."""


def refuse_missing_gradients(model: Model, made: Iterable[Any], given: Iterable[Any]) -> None:
    """Refuse results that a gradient would lead from to a tensor that a stage or the loss closes over.

    A leaf that a function makes itself, to differentiate by it, is none. Of fake tensors it is fake too, so any other
    is refused; of real ones only those are known that the functions name.
    """
    made, known = [*made], {id(leaf) for leaf in given}
    leaves = [getattr(node, "variable", None) for node in _way_back(made)]
    missing = {id(leaf): leaf for leaf in leaves if leaf is not None and id(leaf) not in known}
    functions = [("the loss", model.loss)] + [(f"stage {at}", stage.forward) for at, stage in enumerate(model.stages)]
    for who, function in functions if missing else ():
        for name, tensor in closed_over(function):
            if tensor is missing.get(id(tensor)):
                raise MissingGradient(_MISSING.format(f"{who} closes over {name!r}", tuple(tensor.shape)))
    if any(map(is_fake, made)):
        for tensor in (leaf for leaf in missing.values() if not is_fake(leaf)):
            raise MissingGradient(_MISSING.format("a stage or the loss reads a tensor", tuple(tensor.shape)))


_MISSING = (
    "{} of shape {} that wants a gradient, which no step would give: gradients are of what a stage is handed. Hand it "
    "in among params, or say .detach() or requires_grad_(False)."
)
