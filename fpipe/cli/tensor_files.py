"""Read tensors by name from files: .safetensors, and what torch.save wrote of a dict.

rank0.pt: {"0.weight": ...}   rank1.pt: {"1.weight": ...}        -->        {"0.weight": ..., "1.weight": ...}
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

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
            if name in whole and not torch.equal(whole[name], tensor):
                raise ValueError(
                    f"{name!r} is in {homes[name]} and in {file}, with different numbers. If it is tied, or data "
                    "parallel, add its gradients up first."
                )
            whole[name], homes[name] = tensor, file
    return whole


def _saved(path: Path) -> dict[str, Tensor]:
    """What torch.save wrote: a dict of tensors; None among them is no gradient."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is no file of tensors that torch.save wrote: {str(error).splitlines()[0]}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}; wanted is a dict of gradients by name.")
    named: dict[Any, Any] = {name: one for name, one in found.items() if one is not None}  # pyright: ignore[reportUnknownVariableType]
    odd = next((name for name, one in named.items() if not isinstance(one, Tensor)), None)
    if odd is not None:
        raise ValueError(f"{path} holds a {type(named[odd]).__name__} under {odd!r}; wanted are gradients by name.")
    return named


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, the data."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        made: dict[str, Tensor] = {}
        for name, one in header.items():
            start, stop = one["data_offsets"]
            part, dtype = data[8 + size + start : 8 + size + stop], _DTYPES[one["dtype"]]
            if len(part) != prod(one["shape"]) * dtype.itemsize:
                raise ValueError(f"{name!r} is cut off")
            flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
            made[name] = flat.reshape(one["shape"])
        return made
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of gradients in the safetensors format: {error}.") from None
