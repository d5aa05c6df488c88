"""Assign gradients to parameters for an optimizer, add the gradients of steps, take and clip their norm.

({"w": dw}, {"w": dv})        --> assign_grads -->        params[0]["w"].grad = dw, params[1]["w"].grad = dv
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.purity.sharded import is_sharded, mesh_dim_names
from fpipe.meaning.purity.write_guard import storage_key, with_layout_of
from fpipe.meaning.single_device.params_and_state import net_order
from fpipe.meaning.single_device.result import Result, are_gradients
from fpipe.model import Model


def assign_grads(params: Any, grads: Any, *, add: bool = False) -> None:
    """Set `.grad` of each parameter, which an optimizer reads.

    Args:
        params: as a step takes them, for an optimizer over their leaves; or the net that they are of, for one over
            `net.parameters()`.
        grads: `Result.grads`.
        add: whether to add to the gradients that the parameters have, as `.backward()` does, for several steps of one
            optimizer step; a zero_grad() comes between.

    Raises:
        ValueError: gradients of another structure or shape, or of a name that the net has not; the first is named. Or
            the gradients of a result came first.

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
    if are_gradients(params):
        raise ValueError("the first argument is a result's gradients: assign_grads(params, grads) takes params first.")
    if isinstance(params, torch.optim.Optimizer):
        raise TypeError(f"params are those of a step, or the net; found {type(params).__name__}.")
    if isinstance(params, nn.Module):
        params, grads = _pair_by_name(params, grads)
    path = tree.first_difference(params, grads)
    if path is not None:
        raise ValueError(
            f"params and grads differ in structure: only one of them has a leaf at {path or 'the top'}. Gradients are "
            "Result.grads of a merged program."
        )
    # Compare all shapes before the first .grad is set: an error leaves the parameters unchanged.
    pairs = [*zip(tree.paths(params), tree.leaves(tree.in_order_of(params, grads)), strict=True)]
    for (path, param), grad in pairs:
        # Parameters handed in as gradients fit every shape, and an optimizer would just shrink them.
        are_tensors = isinstance(param, Tensor) and isinstance(grad, Tensor)
        if are_tensors and storage_key(param) == storage_key(grad) is not None:
            raise ValueError(f"the gradient at {path} is the parameter itself; hand in result.grads.")
        if grad is not None and getattr(param, "shape", None) != getattr(grad, "shape", None):
            raise ValueError(
                f"the gradient at {path} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}."
            )
    for (_, param), grad in pairs:
        if isinstance(param, Tensor):
            grad = grad if is_sharded(param) else with_layout_of(param, grad)
            param.grad = grad if not add or param.grad is None else param.grad if grad is None else param.grad + grad


def _pair_by_name(net: nn.Module, grads: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if grads is None:
        raise ValueError("found no gradients: a program without a loss has none.")
    grads = [stage for stage in grads if stage is not None] if isinstance(grads, Sequence) else grads
    if not isinstance(grads, Sequence) or not all(isinstance(stage, Mapping) for stage in grads):
        raise ValueError(
            f"of a net the gradients are those of a model made from it, a dict per stage; found {type(grads).__name__}."
            f"{' Hand in result.grads.' if hasattr(grads, 'grads') else ''}"
        )
    named = {str(name): grad for stage in grads for name, grad in stage.items()}
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for unknown in (name for name in named if name not in parameters):
        raise ValueError(f"there is a gradient of {unknown!r}, which is no parameter of this {type(net).__name__}.")
    return {name: parameters[name] for name in named}, named


def add_grads(total: Any, grads: Any) -> Any:
    """Add the gradients of two steps, for one optimizer step after several.

    Nothing is scaled: twice one step is exactly two times its gradients, and a mean over steps is yours to take.

    Raises:
        TypeError: something that is no gradient, such as a `Result`.
        ValueError: gradients of another structure; the first such place is named.

    >>> import torch
    >>> add_grads(({"w": torch.ones(2), "frozen": None},), ({"w": torch.ones(2), "frozen": None},))
    ({'w': tensor([2., 2.]), 'frozen': None},)
    """
    for leaf in tree.leaves((total, grads)):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"gradients are tensors, as Result.grads has them; found {type(leaf).__name__}.")
    path = tree.first_difference(total, grads)
    if path is not None:
        raise ValueError(f"gradients differ: only one structure has a leaf at {path or 'the top'}.")
    grads = tree.in_order_of(total, grads)
    for (path, a), b in zip(tree.paths(total), tree.leaves(grads), strict=True):
        shapes = [tuple(leaf.shape) for leaf in (a, b) if isinstance(leaf, Tensor)]
        if len({*shapes}) > 1:
            leaf_path = path or "the top"
            raise ValueError(f"gradients of two models: at {leaf_path} they are of shapes {shapes[0]} and {shapes[1]}.")

    def sum_of(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(sum_of, total, grads)


def global_norm(
    grads: Any, norm_type: float = 2.0, *, model: Model | None = None, mesh: DeviceMesh | None = None
) -> Tensor:
    """Return the norm of all gradients together, as one long vector; a tied leaf counts once, where it lives.

    `clip_grads` scales gradients to one.

    Args:
        grads: any pytree of gradients, dense, sparse or nested; None has none. Of a DTensor the norm is that of the
            whole: then all processes of its mesh call it.
        norm_type: 2 is the Euclidean norm, `float("inf")` the largest absolute number.
        model: of which these are the gradients, an entry for each stage: then norms of leaves are stacked in the order
            of its net's parameters, as torch does, and not stage by stage.
        mesh: that of the step, whose dimension "pp" has the ranks of the program: then `grads` has an entry for each
            stage, None for those of other ranks, and each process gets the norm over all stages. All call it.

    Returns:
        A 0-d tensor, with the bits of `torch.nn.utils.get_total_norm` for leaves in the same order.

    Raises:
        TypeError: what is no gradient: a whole `Result`, say, has no norm.
        ValueError: a norm_type that is no number above 0; in a process group, without a mesh, gradients of a stage that
            are on another rank.

    >>> import torch
    >>> global_norm(({"w": torch.tensor([3.0]), "b": None}, {"w": torch.tensor([[4.0]])}))
    tensor(5.)
    """
    for path, leaf in tree.paths(grads):
        if not isinstance(leaf, Tensor) and (leaf is not None or not path):
            hint = " Hand in result.grads." if isinstance(leaf, Result) else ""
            hint = " Hand in a list of them." if isinstance(leaf, Iterator) else hint
            actual = type(leaf).__name__ + (f" at {path}" if path else "")
            raise TypeError(f"global_norm takes a pytree of gradients, each a tensor or None; found {actual}.{hint}")
    _require_positive("norm_type", norm_type)
    if mesh is None:
        _refuse_part(grads)
        return _total_norm(tree.tree_map(partial(_dense_numbers, norm_type), grads), norm_type, model)
    mesh_dim_names(mesh, {"pp": "ranks"})

    def norm_of(grad: Any) -> Tensor | None:
        return None if grad is None else global_norm(grad, norm_type)

    # The norm of a norm is itself, so the norms of other ranks may stand for their gradients.
    local = {index: tree.tree_map(norm_of, stage) for index, stage in enumerate(grads) if stage}
    group = mesh.get_group("pp")
    norms_by_rank: list[dict[int, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(norms_by_rank, local, group=group)
    # A stage on two ranks counts once.
    norms = {index: stage for rank in norms_by_rank for index, stage in rank.items()}
    return _total_norm([norms.get(index) for index in range(len(grads))], norm_type, model)


def _total_norm(grads: Any, norm_type: float, model: Model | None) -> Tensor:
    """Take the norm of dense tensors, stacked as the net of the model has them."""
    leaves = tree.leaves(grads)
    order = range(len(leaves)) if model is None else net_order(model, grads)
    return torch.nn.utils.get_total_norm([leaves[index] for index in order if leaves[index] is not None], norm_type)


def clip_grads(
    grads: Any,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    model: Model | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Any, Tensor]:
    """Scale gradients down to a largest norm; return new tensors, and the norm before.

    They have the bits of `torch.nn.utils.clip_grad_norm_`.

    Args:
        grads: any pytree of gradients, as `global_norm` takes it, or a part of them on each rank.
        max_norm: the largest norm, above 0. Gradients of a smaller one keep their bits.
        norm_type: 2 is the Euclidean norm, `float("inf")` the largest absolute number.
        model: of which these are the gradients, as `global_norm` takes it.
        mesh: that of the step, where ranks have gradients of their own stages. All processes call it.

    Raises:
        TypeError: what is no gradient.
        ValueError: a norm that is no number above 0; in a process group, without a mesh, a part of the gradients.

    >>> import torch
    >>> clipped, norm = clip_grads(({"w": torch.tensor([3.0, 4.0])}, {"b": None}), 1.0)
    >>> norm.item(), [round(one, 4) for one in clipped[0]["w"].tolist()]
    (5.0, [0.6, 0.8])
    """
    _require_positive("max_norm", max_norm)
    norm = global_norm(grads, norm_type, model=model, mesh=mesh)
    # The same formula as torch's, with its 1e-6, for the same bits.
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def scaled(grad: Any) -> Any:
        return grad if grad is None else grad * share.to(grad.device)

    return tree.tree_map(scaled, grads), norm


def _require_positive(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"{name} is a number above 0, found {number!r:.80}.")


def _refuse_part(grads: Any) -> None:
    """Raise ValueError if gradients of a stage are None because another rank has them."""
    is_group = dist.is_initialized() and dist.get_world_size() > 1
    stages: Sequence[Any] = grads if is_group and isinstance(grads, tuple | list) else ()
    absent = next((stage for stage, grad in enumerate(stages) if grad is None), None)
    if absent is None or any(isinstance(grad, Tensor) for grad in stages):
        return
    raise ValueError(
        f"the gradients of stage {absent} are on another rank. Say global_norm(grads, mesh=mesh) on all ranks, with "
        "the mesh of the step."
    )


def _dense_numbers(norm_type: float, grad: Any) -> Any:
    """Return the numbers of a gradient, dense, sparse or nested, as a dense tensor; of a DTensor its norm."""
    if grad is None:
        return None
    if is_sharded(grad):
        return torch.linalg.vector_norm(grad, norm_type).full_tensor()
    if grad.is_nested:
        return torch.cat([part.flatten() for part in grad.unbind()])
    if grad.layout == torch.strided:
        return grad
    values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad.values()
    # The norm inf is a maximum, which an empty tensor does not have.
    return values if values.numel() else values.new_zeros(1)
