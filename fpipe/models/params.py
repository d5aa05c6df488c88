"""Parameters as stages have them, as a state_dict has them, and as an optimizer wants their gradients.

({"0.weight": w0}, {"1.weight": w1})        --> join_params -->        {"0.weight": w0, "1.weight": w1}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Model, check_params, same_keys, the_model, with_ties
from fpipe.runtimes.result import Result


def join_params(model: Model, per_stage: Sequence[Any]) -> Any:
    """The parameters of all stages in one dict, or their gradients; `split_params` is its inverse.

    Of a model made from a module: by the names of its state_dict, a parameter with several names under each of them.
    Frozen parameters and buffers are not among them. Of a model made by `from_loss`: the pytree it was given. Of one
    made from functions: {stage: its parameters}, a tied leaf with each of its stages.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> fpipe.join_params(model, params).keys() == net.state_dict().keys()
    True
    """
    the_model(model)
    if model.whole is not None:
        names, containers = model.whole
        found = {name: leaf for stage in check_params(model, per_stage) for name, leaf in stage.items()}
        same_keys(found, names, "the params of all stages")
        return tree.unflatten(containers, [found[name] for name in names])
    whole: dict[Any, Any] = {}
    for number, (stage, params) in enumerate(zip(model.stages, with_ties(model, per_stage), strict=True)):
        if stage.names is None:
            whole[number] = params
            continue
        same_keys(params, [leaf[0] for leaf in stage.names], f"params of stage {number}")
        whole.update({name: params[leaf[0]] for leaf in stage.names for name in leaf})
    return whole


def split_params(model: Model, whole: Any) -> tuple[Any, ...]:
    """Parameters, or gradients, per stage; the inverse of `join_params`.

    Raises:
        ValueError: a name too many or too few, or one parameter with different values under its names.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=2)
    >>> [list(stage) for stage in fpipe.split_params(model, net.state_dict())]
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """
    the_model(model)
    if model.whole is not None:
        return _by_first_reader(model, whole)
    said = [[(number,)] if stage.names is None else stage.names for number, stage in enumerate(model.stages)]
    same_keys(whole, [name for stage in said for leaf in stage for name in leaf], "the whole")
    split: list[Any] = []
    for number, stage in enumerate(model.stages):
        if stage.names is None:
            split.append(whole[number])
            continue
        for leaf in stage.names:
            for name in leaf[1:]:
                _same_tensor(whole[leaf[0]], whole[name], repr(leaf[0]), repr(name))
        split.append({leaf[0]: whole[leaf[0]] for leaf in stage.names})
    for uses in model.tied_uses:
        for number, leaf, _, owner, first, _ in uses[1:]:
            named = model.stages[number].names is not None
            here, there = (repr(leaf), repr(first)) if named else (f"[{number}][{leaf!r}]", f"[{owner}][{first!r}]")
            _same_tensor(split[owner][first], split[number][leaf], there, here)
            split[number] = {key: value for key, value in split[number].items() if key != leaf}
    return tuple(split)


def _by_first_reader(model: Model, whole: Any) -> tuple[Any, ...]:
    """The leaves of one pytree, each in the first stage that reads it."""
    assert model.whole is not None
    names, containers = model.whole
    if tree.flatten(whole)[1] != containers:
        raise ValueError("the whole has another structure than the params that the model was made with.")
    leaves = dict(zip(names, tree.leaves(whole), strict=True))
    return tuple({name: leaves[name] for (name,) in stage.names or ()} for stage in model.stages)


def assign_grads(params: Any, grads: Any) -> None:
    """Set `.grad` of each parameter, as an optimizer reads it.

    Raises:
        ValueError: gradients of another structure or shape; the first such place is named.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> model, params, state = fpipe.from_sequential(net, stages=1)
    >>> optimizer = torch.optim.SGD((leaf for stage in params for leaf in stage.values()), lr=1.0)
    >>> before = net[0].bias.item()
    >>> fpipe.assign_grads(params, ({"0.weight": torch.zeros(1, 2), "0.bias": torch.tensor([2.0])},))
    >>> optimizer.step()
    >>> round(before - net[0].bias.item(), 4)
    2.0
    """
    place = tree.difference(params, grads)
    if place is not None:
        raise ValueError(
            f"params and grads differ in structure: only one of them has a leaf at {place or 'the top'}. Gradients are "
            "Result.grads of a merged program."
        )
    pairs = list(zip(tree.paths(params), tree.leaves(tree.like(params, grads)), strict=True))
    for (place, param), grad in pairs:
        if getattr(param, "shape", None) != getattr(grad, "shape", None) and grad is not None:
            raise ValueError(
                f"the gradient at {place} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}."
            )
    for (_, param), grad in pairs:
        if isinstance(param, Tensor):
            param.grad = grad


def add_grads(one: Any, other: Any) -> Any:
    """The gradients of two steps added, for an optimizer step after several of them.

    Nothing is scaled: twice one step is exactly two times its gradients, and a mean over steps is yours to take.

    Raises:
        TypeError: something that is no gradient, such as a `Result`.
        ValueError: gradients of another structure; the first such place is named.

    >>> import torch
    >>> add_grads(({"w": torch.ones(2), "frozen": None},), ({"w": torch.ones(2), "frozen": None},))
    ({'w': tensor([2., 2.]), 'frozen': None},)
    """
    odd = next((leaf for grads in (one, other) for leaf in tree.leaves(grads) if not _is_grad(leaf)), None)
    if odd is not None:
        raise TypeError(f"gradients are tensors, as Result.grads has them; found {type(odd).__name__}.")
    place = tree.difference(one, other)
    if place is not None:
        raise ValueError(f"gradients of two structures: only one has a leaf at {place or 'the top'}.")
    other = tree.like(one, other)
    for (place, a), b in zip(tree.paths(one), tree.leaves(other), strict=True):
        shapes = [tuple(leaf.shape) for leaf in (a, b) if isinstance(leaf, Tensor)]
        if len({*shapes}) > 1:
            raise ValueError(
                f"gradients of two models: at {place or 'the top'} they are of shapes {shapes[0]} and {shapes[1]}."
            )

    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(added, one, other)


def _is_grad(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, Tensor | int | float)


def global_norm(grads: Any, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as one long vector; a tied leaf counts once, where it lives.

    To clip: multiply each gradient by `min(1, limit / norm)`.

    Args:
        grads: any pytree of gradients, dense, sparse or nested; None has none.
        norm_type: 2 is the Euclidean norm, `float("inf")` the largest absolute number.

    Returns:
        A 0-d tensor; for the leaves of a module in their order it has the bits of `torch.nn.utils.get_total_norm`.

    Raises:
        TypeError: what is no gradient: a whole `Result`, say, has no norm.

    >>> import torch
    >>> global_norm(({"w": torch.tensor([3.0]), "b": None}, {"w": torch.tensor([[4.0]])}))
    tensor(5.)
    """
    for place, leaf in tree.paths(grads):
        if not isinstance(leaf, Tensor) and (leaf is not None or not place):
            hint = " Hand in result.grads." if isinstance(leaf, Result) else ""
            hint = " Hand in a list of them." if isinstance(leaf, Iterator) else hint
            where = f" at {place}" if place else ""
            raise TypeError(
                f"global_norm takes a pytree of gradients, each a tensor or None; found {type(leaf).__name__}{where}."
                f"{hint}"
            )
    found = [_numbers(leaf) for leaf in tree.leaves(grads) if leaf is not None]
    return torch.nn.utils.get_total_norm(found, norm_type)


def _numbers(grad: Tensor) -> Tensor:
    """The numbers of a gradient: of a sparse one those that are not zero, of a nested one those of its parts."""
    if grad.is_nested:
        return torch.cat([part.flatten() for part in grad.unbind()])
    if grad.layout == torch.strided:
        return grad
    values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad.values()
    return values if values.numel() else values.new_zeros(1)  # of no numbers there is no largest


def _same_tensor(one: Any, other: Any, name: str, alias: str) -> None:
    if one is not other and not (isinstance(one, Tensor) and (one.is_set_to(other) or torch.equal(one, other))):
        raise ValueError(f"{name} and {alias} are one parameter, but have different values.")
