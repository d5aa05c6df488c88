"""Put tensors together that ranks have each a part of, by name.

rank 0: {"w": rows 0..3, "b": all}   rank 1: {"w": rows 4..7, "b": all}        -->        {"w": rows 0..7, "b": all}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.verification.report import Close


def put_together(
    ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """The whole tensors of all ranks: pieces along one dimension in the order of ranks, copies once; and copies that
    differ, of which the first rank's counts as the whole.

    Args:
        ranks: tensors by name of each rank; a name may be on some alone.
        shapes: of the whole tensors. What has another name stays as the first rank that names it has it.

    Raises:
        ValueError: pieces that make no whole.
    """
    each: dict[str, list[Any]] = {}
    for rank in ranks:
        for name, piece in rank.items():
            each.setdefault(name, []).append(piece)
    copies = {name: pieces for name, pieces in each.items() if _are_copies(pieces, shapes.get(name))}
    apart = {name: own for name, own in copies.items() if not all(Close()(piece, own[0]) for piece in own[1:])}
    whole = {name: own[0] if name in copies else _whole(name, own, [*shapes[name]]) for name, own in each.items()}
    return whole, apart


def _are_copies(pieces: Sequence[Any], shape: Sequence[int] | None) -> bool:
    """Whether each is the whole, or what nobody knows of."""
    tensors = all(isinstance(piece, Tensor) for piece in pieces)
    return shape is None or not tensors or all([*piece.shape] == [*shape] for piece in pieces)


def _whole(name: str, pieces: Sequence[Any], shape: list[int]) -> Any:
    for dim, size in enumerate(shape):
        if not all(_but(piece.shape, dim) == _but(shape, dim) for piece in pieces):
            continue
        count, rest = divmod(sum(piece.shape[dim] for piece in pieces), max(size, 1))
        for parts in _once(pieces, count) if count and not rest else ():
            return torch.cat([*parts], dim)
    found = ", ".join(str([*piece.shape]) for piece in pieces)
    raise ValueError(f"ranks have {name!r} in shapes {found}, which along no dimension make the whole {shape}.")


def _but(shape: Sequence[int], dim: int) -> list[int | None]:
    """A shape with one dimension left open."""
    return [None if at == dim else size for at, size in enumerate(shape)]


def _once(pieces: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Each of the pieces once that ranks have so many copies of: copies are neighbours, or stand a round apart."""
    length = len(pieces) // count
    orders = [pieces[::count], pieces[:length]] if len(pieces) == length * count else []
    again = [[one for one in pieces[::count] for _ in range(count)], [*pieces[:length]] * count]
    same = [all(map(Close(), pieces, order)) for order in again[: len(orders)]]
    return [order for order, alike in zip(orders, same, strict=True) if alike]
