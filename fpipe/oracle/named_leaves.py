"""Read named tensors of another pipeline: of a whole net, of each stage, or the part that each rank has.

rank 0: {"w": rows 0..3, "b": all}   rank 1: {"w": rows 4..7, "b": all}        -->        {"w": rows 0..7, "b": all}
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.model import Model
from fpipe.models.parameters.params import join_params
from fpipe.verification.report import Close, describe_tensor, is_comparable, list_names


def numbered_leaves(model: Model, params: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the leaves of params, and the joined pytree of params with the number of each leaf instead of it."""
    leaves, containers = tree.flatten(tuple(check_params(model, params)))
    return leaves, join_params(model, tree.unflatten(containers, range(len(leaves))))


def leaves_by_name(pytree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by the names of a state_dict.

    >>> leaves_by_name({"0.weight": 1, "blocks": [{"w": 2}]})
    {'0.weight': 1, 'blocks.0.w': 2}
    """
    return {
        path.replace("['", ".").replace("[", ".").replace("']", "").replace("]", "").removeprefix("."): leaf
        for path, leaf in tree.paths(pytree)
    }


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Name parts of the wrappers of torch.compile, FSDP and activation checkpointing; DDP puts `module` in front."""


def strip_wrapper_names(tensors: Mapping[str, Any], known_names: Collection[str]) -> dict[str, Any]:
    """Remove the names of wrapper modules from tensor names that are known only without them.

    >>> strip_wrapper_names({"module._orig_mod.0.weight": 1, "module.step": 2}, {"0.weight"})
    {'0.weight': 1, 'module.step': 2}
    """
    named: dict[str, Any] = {}
    for name, leaf in tensors.items():
        # `parts` without wrappers, and the same without DDP's leading `module`.
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        candidates = [".".join(parts), ".".join(parts[1:] if parts[:1] == ["module"] else parts)]
        named[
            next((candidate for candidate in candidates if name not in known_names and candidate in known_names), name)
        ] = leaf
    return named


class Region(NamedTuple):
    """The region of a tensor that a rank has: `length` along `dim` from `start`."""

    dim: int
    start: int
    length: int


class Pieces(NamedTuple):
    """Tensors joined from the parts of all ranks.

    Attributes:
        tensors: whole tensors by name; of copies that differ, the first rank's.
        differing: all copies of tensors whose copies differ.
        regions: for each rank the regions that it has, by name; None stands for a copy of the whole tensor.
    """

    tensors: dict[str, Any]
    differing: dict[str, list[Tensor]]
    regions: list[dict[str, Region | None]]


def join_ranks(ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> Pieces:
    """Join the tensors of all ranks: concatenate pieces along one dimension in rank order, take copies once.

    Args:
        ranks: for each rank its tensors by name; a name may be on some ranks only.
        shapes: the shapes of the whole tensors by name. Of other names the first rank's tensor is taken as it is.

    Raises:
        ValueError: the pieces do not make up the whole tensor along any dimension.
    """
    pieces = Pieces({}, {}, [{} for _ in ranks])
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        holders = [number for number, rank in enumerate(ranks) if name in rank]
        parts = [ranks[number][name] for number in holders]
        # Parts of the whole shape are copies, such as norms under tensor parallelism; anything else is a piece.
        if _are_copies(parts, shapes.get(name)):
            pieces.tensors[name], regions = parts[0], [None] * len(parts)
            if not all(Close()(part, parts[0]) for part in parts[1:]):
                pieces.differing[name] = parts
        else:
            pieces.tensors[name], regions = _join_pieces(name, parts, [*shapes[name]])
        for number, region in zip(holders, regions, strict=True):
            pieces.regions[number][name] = region
    return pieces


def _are_copies(parts: Sequence[Any], shape: Sequence[int] | None) -> bool:
    tensors = all(isinstance(part, Tensor) for part in parts)
    return shape is None or not tensors or all([*part.shape] == [*shape] for part in parts)


def _join_pieces(name: str, parts: Sequence[Tensor], shape: list[int]) -> tuple[Tensor, list[Region]]:
    """Return the whole tensor, and the region of it that each part is.

    Neither the dimension nor the replication is known: try each dimension along which the sizes add up to a multiple.
    """
    for dim, size in enumerate(shape):
        other_sizes = shape[:dim] + shape[dim + 1 :]
        if any([*part.shape[:dim], *part.shape[dim + 1 :]] != other_sizes for part in parts):
            continue
        # Sizes that add up to n times the whole are n copies of each piece, as with n replicas of a sharded net.
        copies, remainder = divmod(sum(part.shape[dim] for part in parts), max(size, 1))
        for order in _possible_orders(parts, copies) if copies and not remainder else ():
            pieces = [parts[order.index(number)] for number in range(max(order) + 1)]
            starts = [sum(part.shape[dim] for part in pieces[:number]) for number in range(len(pieces))]
            return torch.cat(pieces, dim), [Region(dim, starts[k], pieces[k].shape[dim]) for k in order]
    shapes = ", ".join(str([*part.shape]) for part in parts)
    raise ValueError(f"ranks have {name!r} in shapes {shapes}, which along no dimension make the whole {shape}.")


def _possible_orders(parts: Sequence[Tensor], copies: int) -> Iterator[list[int]]:
    """Yield assignments of ranks to pieces: copies are on neighbouring ranks (0 0 1 1), or alternate (0 1 0 1)."""
    count, remainder = divmod(len(parts), copies)
    for order in ([k // copies for k in range(len(parts))], [k % count for k in range(len(parts))]):
        if not remainder and all(Close()(part, parts[order.index(k)]) for part, k in zip(parts, order, strict=True)):
            yield order


def params_by_leaf(
    model: Model, params: Sequence[Any], new_params: Any
) -> tuple[dict[int, tuple[str, Tensor]], Pieces | None]:
    """Return name and new tensor of each parameter by the number of its leaf, and the pieces if they are by rank.

    Raises:
        ValueError: a parameter that is missing, or of another shape, dtype or layout than before.
    """
    pieces: Pieces | None = None
    leaves, numbered = numbered_leaves(model, params)
    numbers = leaves_by_name(numbered)
    if isinstance(new_params, tuple | list) and _is_by_rank(model, new_params):  # pyright: ignore[reportUnknownArgumentType]
        ranks = [strip_wrapper_names(rank, numbers) for rank in new_params]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        pieces = join_ranks(ranks, {name: leaves[number].shape for name, number in numbers.items()})
        new_params = pieces.tensors
    elif isinstance(new_params, tuple | list):
        new_params = join_params(model, [*new_params])  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(new_params, Mapping):
        raise ValueError(
            "after is a dict by name, such as dict(net.named_parameters()), or one tree for each stage; "
            f"found {type(new_params).__name__}."
        )
    tensors = strip_wrapper_names(leaves_by_name(new_params), numbers)
    param_by_leaf: dict[int, tuple[str, Tensor]] = {}
    for name, number in numbers.items():
        if number not in param_by_leaf and tensors.get(name) is not None:
            param_by_leaf[number] = name, _checked_param(name, tensors[name], leaves[number])
    missing = next((name for name, number in numbers.items() if number not in param_by_leaf), None)
    if missing is not None:
        raise ValueError(f"there is no {missing!r} after the steps; found {list_names([*tensors]) or 'nothing'}.")
    return param_by_leaf, pieces


def _checked_param(name: str, leaf: Any, old_param: Tensor) -> Tensor:
    """Return the whole new parameter on the device of the old one, or raise ValueError if they do not match."""
    leaf = leaf.full_tensor() if is_sharded(leaf) else leaf
    same_layout = is_comparable(leaf) and (leaf.is_complex(), leaf.layout) == (old_param.is_complex(), old_param.layout)
    if not same_layout and describe_tensor(leaf) != describe_tensor(old_param):
        raise ValueError(
            f"{name!r} is {describe_tensor(leaf)} after the steps, and {describe_tensor(old_param)} before."
        )
    if leaf.shape != old_param.shape:
        raise ValueError(f"{name!r} has the shape {[*leaf.shape]} after the steps, and {[*old_param.shape]} before.")
    return leaf.detach().to(old_param.device)


def _is_by_rank(model: Model, new_params: Sequence[Any]) -> bool:
    """Whether these are dicts of one net's names, one for each rank, rather than one tree for each stage."""
    all_by_name = all(
        isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors) for tensors in new_params
    )
    return all_by_name and all(stage.names is not None for stage in model.stages)
