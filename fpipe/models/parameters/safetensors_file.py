"""Read single tensors out of a file in the safetensors format: its header says where each one is.

8 bytes: the length of the header | header: {name: dtype, shape, place} | data: tensor after tensor, without a gap
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}
"""How the format calls each dtype."""


class HeaderEntry(NamedTuple):
    """A tensor of a file: its dtype as the format calls it and as torch does, its shape, and the bytes of the data from
    `start` to `stop`."""

    code: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    stop: int


class SafetensorsFile:
    """A file in the safetensors format, of which the header is read.

    Attributes:
        entries: its tensors by name, in the order of their data.

    Raises:
        ValueError: it is no such file, or is cut off.
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path, size = path, path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.first = 8 + length
            try:
                header: Any = json.loads(file.read(length).decode() if self.first <= size else "")
                places = sorted(_place(name, one) for name, one in header.items() if name != "__metadata__")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{path} is no file in the safetensors format: it has no such header.") from None
        data, last = max(size - self.first, 0), 0
        self.entries: dict[str, HeaderEntry] = {}
        for start, stop, name, code, shape in places:
            if code not in _DTYPES:
                raise ValueError(f"{path} holds {name!r} as {code}; what is read is {', '.join(_DTYPES)}.")
            if stop > data:
                raise ValueError(f"{path} is cut off: {name!r} ends at byte {stop} of its data, which has {data}.")
            dtype = _DTYPES[code]
            if start != last or min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"{path} is no file in the safetensors format: {name!r}, {code} of shape {shape}, is said to be in "
                    f"the bytes from {start} to {stop}, and those before it end at {last}."
                )
            self.entries[name] = HeaderEntry(code, dtype, shape, start, stop)
            last = stop
        if last != data:
            raise ValueError(f"{path} is no file in the safetensors format: {data - last} bytes are of no tensor.")

    def read(self, name: str) -> Tensor:
        """One tensor: no other bytes of the data are read."""
        _, dtype, shape, start, stop = self.entries[name]
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        part = bytearray(stop - start)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.first + start)
            view = memoryview(part)
            while view and (read := file.readinto(view)):  # no system call reads more than 2 GiB
                view = view[read:]
        return torch.frombuffer(part, dtype=dtype).reshape(shape)


def _place(name: str, said: Any) -> tuple[int, int, str, str, list[int]]:
    """First and last byte of a tensor, its name, dtype and shape, as its entry of the header says them."""
    (start, stop), code, shape = said["data_offsets"], said["dtype"], [*said["shape"]]
    wholes = all(type(number) is int for number in (start, stop, *shape))
    if not wholes or prod(filter(None, shape)) >= 2**63:
        raise ValueError
    return start, stop, name, str(code), shape
