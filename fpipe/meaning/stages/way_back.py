"""Read what autograd would do behind results: whether its way back is partly Python, and where else it leads.

loss(y) + 0.01 * net.weight.square().sum()        -->        MissingGradient: net.weight, which no step is handed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import closed_over
from fpipe.model import Model
from fpipe.torch_internals import function_behind, is_fake


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
