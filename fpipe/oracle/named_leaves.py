"""Read tensors by name from elsewhere: of a whole net, of each stage, or the part that each rank has.

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
from fpipe.verification.report import Close, in_words, is_comparable, listed


def numbered_leaves(model: Model, params: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the parameters, and the pytree that they are joined to with the number of each leaf in its place."""
    leaves, containers = tree.flatten(tuple(check_params(model, params)))
    return leaves, join_params(model, tree.unflatten(containers, range(len(leaves))))


def by_name(pytree: Any) -> dict[str, Any]:
    """Name each leaf as a state_dict would.

    >>> by_name({"0.weight": 1, "blocks": [{"w": 2}]})
    {'0.weight': 1, 'blocks.0.w': 2}
    """
    return {
        place.replace("['", ".").replace("[", ".").replace("']", "").replace("]", "").removeprefix("."): leaf
        for place, leaf in tree.paths(pytree)
    }


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Modules that torch.compile, FSDP and activation checkpointing put around one; DDP's `module` leads a name."""


def without_wrappers(tensors: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Leave the names of wrapping modules out of names that are unknown with them and known without.

    >>> without_wrappers({"module._orig_mod.0.weight": 1, "module.step": 2}, {"0.weight"})
    {'0.weight': 1, 'module.step': 2}
    """
    named: dict[str, Any] = {}
    for name, leaf in tensors.items():
        inner = [part for part in name.split(".") if part not in _WRAPPERS]
        shorter = [".".join(inner), ".".join(inner[1:] if inner[:1] == ["module"] else inner)]
        named[next((other for other in shorter if name not in known and other in known), name)] = leaf
    return named


class Region(NamedTuple):
    """The part of a tensor that a rank has: `length` along `dim` from `start`."""

    dim: int
    start: int
    length: int


class Pieces(NamedTuple):
    """The parts of all ranks.

    Attributes:
        whole: tensors put together; of copies that differ the first rank's counts.
        differing: all copies of those that differ.
        regions: of each rank the parts that it has, by name; None stands for a copy of the whole.
    """

    whole: dict[str, Any]
    differing: dict[str, list[Tensor]]
    regions: list[dict[str, Region | None]]


def put_together(ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> Pieces:
    """Put the tensors of all ranks together: pieces along one dimension in the order of ranks, copies once.

    Args:
        ranks: tensors by name of each rank; a name may be on some alone.
        shapes: of the whole tensors. A tensor of another name stays as the first rank that names it has it.

    Raises:
        ValueError: pieces that make no whole.
    """
    pieces = Pieces({}, {}, [{} for _ in ranks])
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        holders = [number for number, rank in enumerate(ranks) if name in rank]
        parts = [ranks[number][name] for number in holders]
        if _are_copies(parts, shapes.get(name)):
            pieces.whole[name], regions = parts[0], [None] * len(parts)
            if not all(Close()(part, parts[0]) for part in parts[1:]):
                pieces.differing[name] = parts
        else:
            pieces.whole[name], regions = _joined(name, parts, [*shapes[name]])
        for number, region in zip(holders, regions, strict=True):
            pieces.regions[number][name] = region
    return pieces


def _are_copies(parts: Sequence[Any], shape: Sequence[int] | None) -> bool:
    tensors = all(isinstance(part, Tensor) for part in parts)
    return shape is None or not tensors or all([*part.shape] == [*shape] for part in parts)


def _joined(name: str, parts: Sequence[Tensor], shape: list[int]) -> tuple[Tensor, list[Region]]:
    """Return the whole tensor, and where in it each part is."""
    for dim, size in enumerate(shape):
        across = shape[:dim] + shape[dim + 1 :]
        if any([*part.shape[:dim], *part.shape[dim + 1 :]] != across for part in parts):
            continue
        copies, rest = divmod(sum(part.shape[dim] for part in parts), max(size, 1))
        for order in _orders(parts, copies) if copies and not rest else ():
            first = [parts[order.index(number)] for number in range(max(order) + 1)]
            starts = [sum(part.shape[dim] for part in first[:number]) for number in range(len(first))]
            return torch.cat(first, dim), [Region(dim, starts[k], first[k].shape[dim]) for k in order]
    shapes = ", ".join(str([*part.shape]) for part in parts)
    raise ValueError(f"ranks have {name!r} in shapes {shapes}, which along no dimension make the whole {shape}.")


def _orders(parts: Sequence[Tensor], copies: int) -> Iterator[list[int]]:
    """Yield which of the different pieces each rank may have: copies are neighbours, or stand a round apart."""
    count, rest = divmod(len(parts), copies)
    for order in ([k // copies for k in range(len(parts))], [k % count for k in range(len(parts))]):
        if not rest and all(Close()(part, parts[order.index(k)]) for part, k in zip(parts, order, strict=True)):
            yield order


def params_by_leaf(
    model: Model, params: Sequence[Any], after: Any
) -> tuple[dict[int, tuple[str, Tensor]], Pieces | None]:
    """Return name and tensor of each parameter after the steps by the number of its leaf, and the pieces of ranks.

    Raises:
        ValueError: a parameter that is missing, or of another shape, dtype or layout than before.
    """
    pieces: Pieces | None = None
    leaves, numbered = numbered_leaves(model, params)
    numbers = by_name(numbered)
    if isinstance(after, tuple | list) and _are_ranks(model, after):  # pyright: ignore[reportUnknownArgumentType]
        ranks = [without_wrappers(rank, numbers) for rank in after]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        pieces = put_together(ranks, {name: leaves[number].shape for name, number in numbers.items()})
        after = pieces.whole
    elif isinstance(after, tuple | list):
        after = join_params(model, [*after])  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(after, Mapping):
        raise ValueError(
            "after is a dict by name, such as {name: p for name, p in net.named_parameters()}, or one tree for each "
            f"stage; found {type(after).__name__}."
        )
    tensors = without_wrappers(by_name(after), numbers)
    named: dict[int, tuple[str, Tensor]] = {}
    for name, number in numbers.items():
        if number not in named and tensors.get(name) is not None:
            named[number] = name, _beside(name, tensors[name], leaves[number])
    missing = next((name for name, number in numbers.items() if number not in named), None)
    if missing is not None:
        raise ValueError(f"there is no {missing!r} after the steps; found {listed([*tensors]) or 'nothing'}.")
    return named, pieces


def _beside(name: str, leaf: Any, before: Tensor) -> Tensor:
    """Return the whole parameter on the device that it was on before the steps."""
    leaf = leaf.full_tensor() if is_sharded(leaf) else leaf
    alike = is_comparable(leaf) and (leaf.is_complex(), leaf.layout) == (before.is_complex(), before.layout)
    if not alike and in_words(leaf) != in_words(before):
        raise ValueError(f"{name!r} is {in_words(leaf)} after the steps, and {in_words(before)} before.")
    if leaf.shape != before.shape:
        raise ValueError(f"{name!r} has the shape {[*leaf.shape]} after the steps, and {[*before.shape]} before.")
    return leaf.detach().to(before.device)


def _are_ranks(model: Model, after: Sequence[Any]) -> bool:
    """Whether these are dicts by the names of a net, of a stage or a rank each."""
    flat = all(isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors) for tensors in after)
    return flat and all(stage.names is not None for stage in model.stages)
