"""Lay the leaves of a value out in one message, known before anything is sent: a header, and then each tensor.

    y: float32[8, 4], mask: int64[8]        -->        | header 64 | y 128 | mask 64 |        in bytes

A leaf starts at a multiple of 64 bytes, as freshly allocated memory does, and has equal strides on both sides: kernels
choose their algorithm, and so the bits, by alignment and strides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Aval, Fact, aval_of_tensor
from fpipe.meaning.purity.write_guard import is_dense

_ALIGNMENT = 64
# Bytes of the header, and of the mark of a step that it begins with.
HEADER, MARK = 64, 8


class _LeafBytes(NamedTuple):
    """The bytes of a leaf in a message.

    Attributes:
        start, end: the range of its bytes.
        size: the number of elements sent. Elements that a leaf repeats, by a stride of 0, are sent once.
        aval: of the leaf.
        shape, stride: of the elements that are sent.
        is_dense: whether these fill their memory without gaps.
    """

    start: int
    end: int
    size: int
    aval: Aval
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_dense: bool


class Layout:
    """The layout of a value's leaves in a message of `size` bytes.

    A leaf is the fact of a tensor on the device, or no tensor: then it is equal on every rank and not sent.

    >>> cpu = torch.device("cpu")
    >>> layout = Layout([Fact(Aval((2, 3), (0, 1), torch.float32, cpu), 0, 12), None], cpu)
    >>> message = layout.pack([torch.ones(3).expand(2, 3), None], header_of_step(1, 1, None), layout.size)
    >>> layout.unpack(message)[0].stride()
    (0, 1)
    """

    def __init__(self, leaves: Sequence[Any], device: torch.device) -> None:
        self._leaves, self._leaf_bytes, self.size = [*leaves], list[_LeafBytes | None](), HEADER
        for leaf in leaves:
            if isinstance(leaf, Fact) and leaf.aval.device != device:
                raise ValueError(
                    f"{leaf.aval} is on {leaf.aval.device}, and this rank's first tensor on {device}; a rank sends "
                    "from one device."
                )
            leaf_bytes = _bytes_of_aval(leaf.aval, self.size) if isinstance(leaf, Fact) else None
            self._leaf_bytes.append(leaf_bytes)
            # Round up to the next multiple of the alignment.
            self.size = self.size if leaf_bytes is None else -(-leaf_bytes.end // _ALIGNMENT) * _ALIGNMENT

    def bytes_to_unpack(self, leaf: Fact) -> int:
        """Return the bytes that a leaf takes outside the message: 0 unless its strides leave gaps."""
        leaf_bytes = _bytes_of_aval(leaf.aval, HEADER)
        if leaf_bytes.is_dense or not all(leaf_bytes.shape):
            return 0
        dims = zip(leaf_bytes.shape, leaf_bytes.stride, strict=True)
        last_offset = sum((length - 1) * stride for length, stride in dims)
        return (1 + last_offset) * leaf.aval.dtype.itemsize

    def pack(self, leaves: Sequence[Any], step_header: Tensor, size: int) -> Tensor:
        """Return a message of `size` bytes with a header; raise TypeError if a leaf is not as traced."""
        parts, packed_end = [step_header], HEADER
        for leaf_bytes, leaf in zip(self._leaf_bytes, leaves, strict=True):
            if leaf_bytes is not None:
                if leaf_bytes.start > packed_end:
                    # Padding is shorter than the header. Memory that nobody has written, a graph may not read.
                    parts.append(step_header[: leaf_bytes.start - packed_end])
                parts.append(_pack_leaf(leaf, leaf_bytes))
                packed_end = leaf_bytes.end
        return torch.cat([*parts, step_header[:1].expand(size - packed_end)] if size > packed_end else parts)

    def unpack(self, message: Tensor) -> list[Any]:
        """Return the leaves: views of the message, or copies of leaves whose strides leave gaps."""
        return [
            leaf if leaf_bytes is None else _unpack_leaf(message, leaf_bytes)
            for leaf_bytes, leaf in zip(self._leaf_bytes, self._leaves, strict=True)
        ]


def header_of_step(step: int, signature: int, key: object) -> Tensor:
    """Return the header of all messages of a step: a mark, and the step, signature and key as text."""
    # The mark is a hash of the whole text, and so of keys that are too long for the header.
    text = f"{step}/{signature}/{key}".encode()
    header_bytes = hashlib.sha256(text).digest()[:MARK] + text[: HEADER - MARK].ljust(HEADER - MARK, b"\0")
    return torch.frombuffer(bytearray(header_bytes), dtype=torch.uint8)


def mark_of(message: Tensor) -> Tensor:
    """Return the mark of a message as a tensor of one number."""
    return message[:MARK].view(torch.int64)


def step_of(message: Tensor) -> tuple[str, str, str]:
    """Return the step, the signature and the key of a message; a long key is cut off."""
    text = bytes(message[MARK:HEADER].tolist()).rstrip(b"\0").decode(errors="replace")
    step, _, signature_and_key = text.partition("/")
    signature, _, key = signature_and_key.partition("/")
    return step, signature, key


def _bytes_of_aval(aval: Aval, start: int) -> _LeafBytes:
    # Along a dimension of stride 0 all elements are one: send that one.
    strides = enumerate(zip(aval.shape, aval.stride, strict=True))
    sent_dims = [dim for dim, (length, element_stride) in strides if element_stride or length < 2]
    shape, stride = tuple(aval.shape[dim] for dim in sent_dims), tuple(aval.stride[dim] for dim in sent_dims)
    size = torch.Size(shape).numel()
    return _LeafBytes(start, start + size * aval.dtype.itemsize, size, aval, shape, stride, is_dense(shape, stride))


def _pack_leaf(leaf: Tensor, leaf_bytes: _LeafBytes) -> Tensor:
    """Return the bytes of a leaf in the order of its memory, without gaps and repeats."""
    expected = leaf_bytes.aval
    if leaf.dtype is not expected.dtype or leaf.shape != expected.shape or leaf.stride() != expected.stride:
        _refuse_untraced_strides(leaf, expected)
    if leaf_bytes.is_dense and leaf.is_contiguous():
        elements = leaf.view(-1)
    else:
        shape, stride = ((leaf_bytes.size,), (1,)) if leaf_bytes.is_dense else (leaf_bytes.shape, leaf_bytes.stride)
        elements = leaf.as_strided(shape, stride).contiguous().view(-1)
    # A lazy conjugate or negative is a flag of the tensor, which its bytes do not show.
    if elements.is_conj() or elements.is_neg():
        elements = elements.resolve_conj().resolve_neg()
    return elements.view(torch.uint8)


def _refuse_untraced_strides(leaf: Tensor, expected: Aval) -> None:
    """Raise TypeError for a tensor whose memory the receiver would misread."""
    has_same_type = leaf.dtype is expected.dtype and leaf.shape == expected.shape
    # The stride of a dimension with one index reaches no element, so it may differ.
    dims = zip(expected.shape, leaf.stride(), expected.stride, strict=False)
    differs = any(length > 1 and stride != expected_stride for length, stride, expected_stride in dims)
    if not has_same_type or (leaf.numel() and differs):
        raise TypeError(
            f"{aval_of_tensor(leaf)} with strides {[*leaf.stride()]} is to be sent, and the trace promised {expected} "
            f"with strides {[*expected.stride]}. A custom op's register_fake returns "
            "what its kernel does."
        )


def _unpack_leaf(message: Tensor, leaf_bytes: _LeafBytes) -> Tensor:
    expected = leaf_bytes.aval
    elements, start = message.view(expected.dtype), leaf_bytes.start // expected.dtype.itemsize
    if leaf_bytes.is_dense:
        return elements.as_strided(expected.shape, expected.stride, start)
    # Strides with gaps: copy the elements apart into fresh memory, then show the repeated ones again.
    memory = torch.empty_strided(leaf_bytes.shape, leaf_bytes.stride, dtype=expected.dtype, device=message.device)
    memory.copy_(elements[start : start + leaf_bytes.size].view(leaf_bytes.shape))
    return memory.as_strided(expected.shape, expected.stride)
