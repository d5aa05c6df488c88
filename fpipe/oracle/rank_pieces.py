"""Put tensors together that ranks have each a part of, by name.

rank 0: {"w": rows 0..3, "b": all}   rank 1: {"w": rows 4..7, "b": all}        -->        {"w": rows 0..7, "b": all}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.verification.report import Close


class Region(NamedTuple):
    """The part of a tensor that a rank has: `length` along `dim` from `start`."""

    dim: int
    start: int
    length: int

    def of(self, whole: Tensor) -> Tensor:
        """That part."""
        return whole.narrow(*self)


class Pieces(NamedTuple):
    """The parts of all ranks.

    Attributes:
        whole: tensors put together; of copies that differ the first rank's counts.
        apart: all copies of those that differ.
        places: of each rank the parts that it has, by name, None for a copy of the whole.
    """

    whole: dict[str, Any]
    apart: dict[str, list[Tensor]]
    places: list[dict[str, Region | None]]


def put_together(ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> Pieces:
    """The whole tensors of all ranks: pieces along one dimension in the order of ranks, copies once.

    Args:
        ranks: tensors by name of each rank; a name may be on some alone.
        shapes: of the whole tensors. What has another name stays as the first rank that names it has it.

    Raises:
        ValueError: pieces that make no whole.
    """
    found = Pieces({}, {}, [{} for _ in ranks])
    names = dict.fromkeys(name for rank in ranks for name in rank)
    for name in names:
        there = [number for number, rank in enumerate(ranks) if name in rank]
        own = [ranks[number][name] for number in there]
        if _are_copies(own, shapes.get(name)):
            found.whole[name], places = own[0], [None] * len(own)
            if not all(Close()(piece, own[0]) for piece in own[1:]):
                found.apart[name] = own
        else:
            found.whole[name], places = _whole(name, own, [*shapes[name]])
        for number, place in zip(there, places, strict=True):
            found.places[number][name] = place
    return found


def _are_copies(pieces: Sequence[Any], shape: Sequence[int] | None) -> bool:
    """Whether each is the whole, or what nobody knows of."""
    tensors = all(isinstance(piece, Tensor) for piece in pieces)
    return shape is None or not tensors or all([*piece.shape] == [*shape] for piece in pieces)


def _whole(name: str, pieces: Sequence[Tensor], shape: list[int]) -> tuple[Tensor, list[Region]]:
    """The tensor, and where in it each piece is."""
    for dim, size in enumerate(shape):
        if not all(_but(piece.shape, dim) == _but(shape, dim) for piece in pieces):
            continue
        count, rest = divmod(sum(piece.shape[dim] for piece in pieces), max(size, 1))
        for order in _orders(pieces, count) if count and not rest else ():
            first = [pieces[order.index(number)] for number in range(max(order) + 1)]
            starts = [sum(piece.shape[dim] for piece in first[:number]) for number in range(len(first))]
            places = [Region(dim, starts[number], first[number].shape[dim]) for number in order]
            return torch.cat(first, dim), places
    found = ", ".join(str([*piece.shape]) for piece in pieces)
    raise ValueError(f"ranks have {name!r} in shapes {found}, which along no dimension make the whole {shape}.")


def _but(shape: Sequence[int], dim: int) -> list[int | None]:
    """A shape with one dimension left open."""
    return [None if at == dim else size for at, size in enumerate(shape)]


def _orders(pieces: Sequence[Tensor], count: int) -> Iterator[list[int]]:
    """Which of the different pieces each rank has, where there are so many copies of each: copies are neighbours, or
    stand a round apart."""
    length, rest = divmod(len(pieces), count)
    for order in ([k // count for k in range(len(pieces))], [k % length for k in range(len(pieces))]):
        if not rest and all(Close()(piece, pieces[order.index(k)]) for piece, k in zip(pieces, order, strict=True)):
            yield order
