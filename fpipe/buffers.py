"""Notice which buffers a module writes as it runs, and put them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of modules as they are, to tell afterwards which were written, and to put them back.

    Versions tell most writes. `F.batch_norm` writes without a new one, so floating buffers of modules in training are
    compared.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.owners = [(path, owner, _own_buffers(owner)) for path, owner in modules]
        self.copies = [
            {name: (buffer._version, buffer.clone()) for name, buffer in found.items()} for _, _, found in self.owners
        ]

    def put_back(self) -> list[str]:
        """The names of what was written, which is now as it was."""
        written: list[str] = []
        for (path, owner, found), copies in zip(self.owners, self.copies, strict=True):
            now = _own_buffers(owner)
            for name, buffer in found.items():
                version, before = copies[name]
                told = buffer._version == version and not (owner.training and buffer.is_floating_point())
                if now.get(name) is not buffer or not (told or _equal(buffer, before)):
                    written.append(f"{path}.{name}")
                    setattr(owner, name, buffer)
                    with torch.no_grad():
                        buffer.copy_(before)
            for name in now.keys() - found.keys():
                written.append(f"{path}.{name}")
                delattr(owner, name)
        return written


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal numbers, NaN for NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
