"""Read tensors by name from files: .safetensors, and what torch.save wrote of a dict.

rank0.pt: {"0.weight": ...}   rank1.pt: {"1.weight": ...}        -->        {"0.weight": ..., "1.weight": ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fpipe.models.parameters.sources import SafetensorsFile
from fpipe.verification.report import Close, in_words, is_comparable


def read_tensors(files: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of all files by name, which in two files has the same numbers."""
    whole: dict[str, Tensor] = {}
    homes: dict[str, str] = {}
    for file, found in zip(files, read_each(files), strict=True):
        for name, tensor in found.items():
            if name in whole and not Close()(whole[name], tensor):
                raise ValueError(
                    f"{name!r} is in {homes[name]} and in {file}, with different numbers. If it is tied, or data "
                    "parallel, add its gradients up first."
                )
            whole[name], homes[name] = tensor, file
    return whole


def read_each(files: Sequence[str]) -> list[dict[str, Tensor]]:
    """The tensors of each file by name."""
    return [(_safetensors if file.endswith(".safetensors") else _saved)(Path(file)) for file in files]


def _saved(path: Path) -> dict[str, Tensor]:
    """Read a file of torch.save: a dict of tensors; None among them is no gradient."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # what comes depends on the first bytes of the file
        raise ValueError(f"{path} is no dict of tensors that torch.save wrote.") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}; wanted is a dict of tensors by name.")
    named: dict[Any, Any] = {name: one for name, one in found.items() if one is not None}  # pyright: ignore[reportUnknownVariableType]
    odd = next((name for name, one in named.items() if not isinstance(name, str) or not is_comparable(one)), None)
    if odd is not None:
        raise ValueError(f"{path} holds {in_words(named[odd])} under {odd!r}; wanted are tensors by name.")
    return named


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Read a file in the safetensors format."""
    file = SafetensorsFile(path)
    for name, (code, dtype, *_) in file.entries.items():
        if not is_comparable(torch.empty(0, dtype=dtype)):
            raise ValueError(f"{path} holds {name!r} as {code}; wanted are F64, F32, F16, BF16 and C64.")
    return {name: file.read(name) for name in file.entries}
