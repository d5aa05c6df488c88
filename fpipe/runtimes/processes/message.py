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
    """The place of a leaf in a message.

    Attributes:
        start, end: its bytes.
        size: its elements. Those that it repeats, by a stride of 0, are sent once.
        aval: of the leaf.
        shape, stride: of the elements that are sent.
        dense: whether these fill their memory.
    """

    start: int
    end: int
    size: int
    aval: Aval
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dense: bool


class Layout:
    """Places of the leaves of a value in a message of `size` bytes. A leaf is the fact of a tensor on the device, or no
    tensor: then it is equal on every rank and not sent.

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
        """Return the bytes that a leaf needs next to the message, where it has gaps and cannot stay in that."""
        place = _placed(leaf.aval, HEADER)
        if place.dense or not all(place.shape):
            return 0
        last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
        return (1 + last) * leaf.aval.dtype.itemsize

    def pack(self, leaves: Sequence[Any], head: Tensor, size: int) -> Tensor:
        """Return a message of `size` bytes with a header; raise TypeError if a leaf is not as traced."""
        parts, end = [head], HEADER
        for place, leaf in zip(self._places, leaves, strict=True):
            if place is not None:
                if place.start > end:
                    parts.append(head.new_empty(place.start - end))
                parts.append(_bytes(leaf, place))
                end = place.end
        return torch.cat([*parts, head.new_empty(size - end)] if size > end else parts)

    def unpack(self, message: Tensor) -> list[Any]:
        """Return the leaves, in the memory of the message where that has their strides."""
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


def _placed(aval: Aval, start: int) -> _Place:
    dims = [dim for dim, (n, step) in enumerate(zip(aval.shape, aval.stride, strict=True)) if step or n < 2]
    shape, stride = tuple(aval.shape[dim] for dim in dims), tuple(aval.stride[dim] for dim in dims)
    size = torch.Size(shape).numel()
    return _Place(start, start + size * aval.dtype.itemsize, size, aval, shape, stride, fills(shape, stride))


def _bytes(leaf: Tensor, place: _Place) -> Tensor:
    """Return the memory of a leaf in its order, without gaps and repeats."""
    expected = place.aval
    if leaf.dtype is not expected.dtype or leaf.shape != expected.shape or leaf.stride() != expected.stride:
        _refuse_other(leaf, expected)
    if place.dense and leaf.is_contiguous():
        flat = leaf.view(-1)
    else:
        shape, stride = ((place.size,), (1,)) if place.dense else (place.shape, place.stride)
        flat = leaf.as_strided(shape, stride).contiguous().view(-1)
    if flat.is_conj() or flat.is_neg():  # a mark, which the bytes do not have
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8)


def _refuse_other(leaf: Tensor, expected: Aval) -> None:
    """Raise TypeError for a tensor whose memory the receiver would misread; strides along one row count for nothing."""
    is_alike = leaf.dtype is expected.dtype and leaf.shape == expected.shape
    strides = zip(expected.shape, leaf.stride(), expected.stride, strict=False)
    if not is_alike or (leaf.numel() and any(n > 1 and step != traced for n, step, traced in strides)):
        raise TypeError(
            f"{aval(leaf)} with strides {[*leaf.stride()]} is to be sent, and the trace promised {expected} with "
            f"strides {[*expected.stride]}. A custom op's register_fake returns the dtype, shape and strides of its "
            "kernel."
        )


def _received(message: Tensor, place: _Place) -> Tensor:
    leaf = place.aval
    typed, start = message.view(leaf.dtype), place.start // leaf.dtype.itemsize
    if place.dense:
        return typed.as_strided(leaf.shape, leaf.stride, start)
    memory = torch.empty_strided(place.shape, place.stride, dtype=leaf.dtype, device=message.device)
    return memory.copy_(typed[start : start + place.size].view(place.shape)).as_strided(leaf.shape, leaf.stride)
