"""Lay the leaves of a value out in one message, known before anything is sent: a header, and then each tensor.

    y: float32[8, 4], mask: int64[8]        -->        | header 64 | y 128 | mask 64 |        in bytes

A leaf starts at a multiple of 64 bytes, as fresh memory does, and has its strides on both sides: kernels look at them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Aval, Fact, aval
from fpipe.meaning.purity.own_memory import fills

_ALIGNED = 64
HEADER, MARK = 64, 8
"""Bytes of the header, and of the mark of a step that it begins with."""


class _Place(NamedTuple):
    """Where a leaf lies: bytes from `start` to `end`, so many elements. What it repeats (stride 0) is sent once: it is
    `shape` then."""

    start: int
    end: int
    size: int
    known: Aval
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: bool


class Layout:
    """How the leaves of a value lie in a message of `size` bytes: facts of tensors on one device, or what is no tensor,
    which is equal on every rank and not sent.

    >>> cpu = torch.device("cpu")
    >>> layout = Layout([Fact(Aval((2, 3), (0, 1), torch.float32, cpu), 0, 12), None], cpu)
    >>> layout.unpack(layout.pack([torch.ones(3).expand(2, 3), None], header(1, 1, None), layout.size))[0].stride()
    (0, 1)
    """

    def __init__(self, leaves: Sequence[Any], device: torch.device) -> None:
        self._leaves, self._places, self.size = [*leaves], list[_Place | None](), HEADER
        for leaf in leaves:
            if isinstance(leaf, Fact) and leaf.aval.device != device:
                raise ValueError(
                    f"{leaf.aval} is on {leaf.aval.device}, and what this rank is handed first on {device}; what ranks "
                    "send each other is on one device of each."
                )
            place = _placed(leaf.aval, self.size) if isinstance(leaf, Fact) else None
            self._places.append(place)
            self.size = self.size if place is None else -(-place.end // _ALIGNED) * _ALIGNED

    def copied(self, leaf: Fact) -> int:
        """The bytes that a leaf needs beside the message, if it cannot lie in that as it is."""
        place = _placed(leaf.aval, HEADER)
        if place.dense or not all(place.shape):
            return 0
        last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
        return (1 + last) * leaf.aval.dtype.itemsize

    def pack(self, leaves: Sequence[Any], head: Tensor, size: int) -> Tensor:
        """The message of so many bytes behind its header; a TypeError if a leaf is not what was traced."""
        parts, end = [head], HEADER
        for place, leaf in zip(self._places, leaves, strict=True):
            if place is not None:
                if place.start > end:
                    parts.append(head.new_empty(place.start - end))
                parts.append(_bytes(leaf, place))
                end = place.end
        return torch.cat([*parts, head.new_empty(size - end)] if size > end else parts)

    def unpack(self, message: Tensor) -> list[Any]:
        """The leaves, in the memory of the message where that has their strides."""
        return [
            leaf if place is None else _received(message, place)
            for place, leaf in zip(self._places, self._leaves, strict=True)
        ]


def header(step: int, signature: int, key: object) -> Tensor:
    """Return the header of all messages of a step: its mark, and what tells it from others."""
    text = f"{step}/{signature}/{key}".encode()
    data = hashlib.sha256(text).digest()[:MARK] + text[: HEADER - MARK].ljust(HEADER - MARK, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def mark_of(message: Tensor) -> Tensor:
    """Return the mark of a message, one number."""
    return message[:MARK].view(torch.int64)


def step_of(message: Tensor) -> tuple[str, str, str]:
    """Return the step of a message, its signature, and its key or the beginning of that."""
    text = bytes(message[MARK:HEADER].tolist()).rstrip(b"\0").decode(errors="replace")
    step, _, rest = text.partition("/")
    signature, _, key = rest.partition("/")
    return step, signature, key


def _placed(known: Aval, start: int) -> _Place:
    once = [dim for dim, (n, step) in enumerate(zip(known.shape, known.stride, strict=True)) if step or n < 2]
    shape, stride = tuple(known.shape[dim] for dim in once), tuple(known.stride[dim] for dim in once)
    size = torch.Size(shape).numel()
    return _Place(start, start + size * known.dtype.itemsize, size, known, shape, stride, fills(shape, stride))


def _bytes(leaf: Tensor, place: _Place) -> Tensor:
    """A leaf as it is sent: its memory as it lies there, without gaps and repeats."""
    known = place.known
    if leaf.dtype is not known.dtype or leaf.shape != known.shape or leaf.stride() != known.stride:
        _refuse_other(leaf, known)
    if place.dense and leaf.is_contiguous():
        flat = leaf.view(-1)
    else:
        shape, stride = ((place.size,), (1,)) if place.dense else (place.shape, place.stride)
        flat = leaf.as_strided(shape, stride).contiguous().view(-1)
    if flat.is_conj() or flat.is_neg():  # what is only marked so
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8)


def _refuse_other(leaf: Tensor, known: Aval) -> None:
    """A TypeError for a tensor that would be read otherwise than it lies; a stride along one row or none is none."""
    alike = leaf.dtype is known.dtype and leaf.shape == known.shape
    steps = zip(known.shape, leaf.stride(), known.stride, strict=False)
    if not alike or (leaf.numel() and any(n > 1 and one != other for n, one, other in steps)):
        raise TypeError(
            f"{aval(leaf)} with strides {[*leaf.stride()]} is to be sent, and the trace promised {known} with strides "
            f"{[*known.stride]}. A custom op's register_fake returns the dtype, shape and strides of its kernel."
        )


def _received(message: Tensor, place: _Place) -> Tensor:
    known = place.known
    typed, start = message.view(known.dtype), place.start // known.dtype.itemsize
    if place.dense:
        return typed.as_strided(known.shape, known.stride, start)
    memory = torch.empty_strided(place.shape, place.stride, dtype=known.dtype, device=message.device)
    return memory.copy_(typed[start : start + place.size].view(place.shape)).as_strided(known.shape, known.stride)
