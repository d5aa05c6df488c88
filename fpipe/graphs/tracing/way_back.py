"""Read what autograd would do behind results: whether its way back is partly Python, and where else it leads.

loss(y) + 0.01 * net.weight.square().sum()        -->        MissingGradient: net.weight, which no step is handed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from fpipe.graphs.purity.closure import closed_over
from fpipe.model import Model


def partly_python(made: Iterable[Any]) -> bool:
    """Whether a `torch.autograd.Function` of somebody's own, or a module's hook, is on the way back from results;
    torch's own ask for nothing."""
    for node in _way_back(made):
        module = str(getattr(getattr(node, "_forward_cls", None), "__module__", "torch."))
        if not module.startswith("torch.") or module.startswith(("torch._library", "torch.nn.modules._functions")):
            return True
    return False


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

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(f"a gradient of a tensor of shape {tuple(tensor.shape)} would be missing")
        self.tensor = tensor

    def of(self, model: Model) -> ValueError:
        """This error, naming the tensor and who computes with it."""
        functions = [("the loss", model.loss)] + [(f"stage {at}", one.forward) for at, one in enumerate(model.stages)]
        known = (
            (who, name) for who, function in functions for name, one in closed_over(function) if one is self.tensor
        )
        who, name = next(known, ("a stage or the loss", None))
        return ValueError(
            f"{who} closes over {'a tensor' if name is None else repr(name)} of shape {tuple(self.tensor.shape)} that "
            "wants a gradient, which no step would give: gradients are of what a stage is handed. Hand it in among "
            "params, or say .detach() or requires_grad_(False)."
        )


def refuse_missing_gradients(made: Iterable[Any], given: Iterable[Any]) -> None:
    """A MissingGradient for a tensor that a function closes over, and that a gradient of its results would reach."""
    known = {id(leaf) for leaf in given}
    for node in _way_back(made):
        tensor = getattr(node, "variable", None)
        if tensor is not None and id(tensor) not in known:
            raise MissingGradient(tensor)


def check_gradients(model: Model, made: Iterable[Any], given: Iterable[Any]) -> None:
    """A ValueError for a tensor that a stage or the loss closes over, and that a gradient would reach."""
    try:
        refuse_missing_gradients(made, given)
    except MissingGradient as error:
        raise error.of(model) from None
