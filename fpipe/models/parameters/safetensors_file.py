"""Read single tensors out of a file in the safetensors format, by the package of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.limits import shortened

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
    """A tensor of a file: its dtype as the format calls it and as torch does, and its shape."""

    code: str
    dtype: torch.dtype
    shape: list[int]


class SafetensorsFile:
    """An open file in the safetensors format, of which only the header has been read.

    Attributes:
        entries: its tensors by name, in the order of their data.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: it is no such file, or is cut off.
        OSError: there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ModuleNotFoundError(
                f"{path} is read by the package safetensors, which is not installed: pip install 'fpipe[safetensors]'."
            ) from None
        self.path = path
        try:
            # A file mapped into memory would count twice: its pages, and the tensors made of them.
            self._file: Any = safe_open(path, "pt", backend="pread")
        except SafetensorError as error:
            reason = shortened(str(error)).rstrip(".")
            raise ValueError(f"{path} is no file in the safetensors format: {reason}.") from None
        self.entries: dict[str, HeaderEntry] = {}
        for name in self._file.offset_keys():
            view = self._file.get_slice(name)
            code = view.get_dtype()
            if code not in _DTYPES:
                raise ValueError(f"{path} holds {name!r} as {code}; what is read is {', '.join(_DTYPES)}.")
            self.entries[name] = HeaderEntry(code, _DTYPES[code], view.get_shape())

    def read(self, name: str) -> Tensor:
        """Read one tensor, and no other bytes of the data."""
        return self._file.get_tensor(name)
