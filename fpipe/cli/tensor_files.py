"""Read tensors by name from files: .safetensors, and what torch.save wrote of a dict.

rank0.pt: {"0.weight": ...}   rank1.pt: {"1.weight": ...}        -->        {"0.weight": ..., "1.weight": ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe.verification.report import Close

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def read_tensors(files: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of all files by name.

    Raises:
        ValueError: a file that holds something else, or one name with different tensors in two files.
        OSError: there is no such file.
    """
    whole: dict[str, Tensor] = {}
    homes: dict[str, str] = {}
    for file in files:
        for name, tensor in (_safetensors if file.endswith(".safetensors") else _saved)(Path(file)).items():
            if name in whole and not Close()(whole[name], tensor):
                raise ValueError(
                    f"{name!r} is in {homes[name]} and in {file}, with different numbers. If it is tied, or data "
                    "parallel, add its gradients up first."
                )
            whole[name], homes[name] = tensor, file
    return whole


def _saved(path: Path) -> dict[str, Tensor]:
    """Read a file of torch.save: a dict of tensors; None among them is no gradient."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # what comes depends on the first bytes of the file
        raise ValueError(f"{path} is no dict of tensors that torch.save wrote.") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}; wanted is a dict of gradients by name.")
    named: dict[Any, Any] = {name: one for name, one in found.items() if one is not None}  # pyright: ignore[reportUnknownVariableType]
    odd = next((name for name, one in named.items() if not isinstance(name, str) or not _is_plain(one)), None)
    if odd is not None:
        raise ValueError(f"{path} holds {_in_words(named[odd])} under {odd!r}; wanted are gradients by name.")
    return named


def _is_plain(found: Any) -> bool:
    """Whether this is a tensor whose numbers can be compared; of others torch raises or ends the process."""
    is_number = isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())
    return (
        is_number
        and found.layout in (torch.strided, torch.sparse_coo)
        and found.device.type == "cpu"
        and not found.is_nested
    )


def _in_words(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    nested = "nested " * found.is_nested
    return f"a {nested}tensor of {found.dtype}, {found.layout}, on {found.device.type}"


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, the data:
    tensor after tensor, without a gap."""
    whole = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(whole[:8], "little")
    try:
        header: Any = json.loads(whole[8:first].decode())
        places = sorted(_place(name, one) for name, one in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is no file in the safetensors format: it has no such header.") from None
    data, made, last = whole[first:], dict[str, Tensor](), 0
    for start, stop, name, code, shape in places:
        if code not in _DTYPES:
            raise ValueError(f"{path} holds {name!r} as {code}; gradients are {', '.join(_DTYPES)}.")
        dtype = _DTYPES[code]
        if stop > len(data):
            raise ValueError(f"{path} is cut off: {name!r} ends at byte {stop} of its data, which has {len(data)}.")
        if start != last or min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{path} is no file in the safetensors format: {name!r}, {code} of shape {shape}, is said to be in the "
                f"bytes from {start} to {stop}, and those before it end at {last}."
            )
        part = data[start:stop]  # a copy, which begins where its numbers may
        made[name] = (torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)).reshape(shape)
        last = stop
    if last != len(data):
        raise ValueError(f"{path} is no file in the safetensors format: {len(data) - last} bytes are of no tensor.")
    return made


def _place(name: str, said: Any) -> tuple[int, int, str, str, list[int]]:
    """First and last byte of a tensor, its name, dtype and shape, as its entry of the header says them."""
    (start, stop), code, shape = said["data_offsets"], said["dtype"], [*said["shape"]]
    wholes = all(type(number) is int for number in (start, stop, *shape))
    if not wholes or prod(filter(None, shape)) >= 2**63:
        raise ValueError
    return start, stop, name, str(code), shape
