"""Notice which buffers modules write as they run, and put them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from fpipe.graphs.pure import same_numbers

Modules = Sequence[tuple[str, nn.Module]]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Where a module has its buffers; what is written here is there."""
    return vars(module)["_buffers"]


class Places:
    """Which tensors are modules' buffers, to tell afterwards where others are, and to put these back."""

    def __init__(self, modules: Modules) -> None:
        self.owners = [(path, owner, dict(own_buffers(owner))) for path, owner in modules]

    def put_back(self, free: Collection[tuple[nn.Module, str]] = ()) -> list[str]:
        """The names of buffers that are others, or new, save those that are `free` to be."""
        changed: list[str] = []
        for path, owner, found in self.owners:
            now = own_buffers(owner)
            names = [name for name in now if name not in found or now[name] is not found[name]]
            names = [name for name in (*names, *(found.keys() - now.keys())) if (owner, name) not in free]
            changed += [f"{path}.{name}" for name in names]
            for name in names:
                now.pop(name, None)
            now.update({name: found[name] for name in names if name in found})
        return changed


class Buffers:
    """The buffers of modules as they are, to tell afterwards which were written, and to put them back.

    Versions tell most writes. `F.batch_norm` writes without a new one, so floating buffers of modules in training are
    compared.
    """

    def __init__(self, modules: Modules) -> None:
        self.places = Places(modules)
        with _disable_current_modes():  # they have numbers where what runs has none
            self.copies = [
                (f"{path}.{name}", owner, buffer, buffer._version, buffer.clone())
                for path, owner, found in self.places.owners
                for name, buffer in found.items()
                if buffer is not None
            ]

    def put_back(self) -> list[str]:
        """The names of what was written, which is now as it was."""
        written = self.places.put_back()
        with _disable_current_modes():
            for name, owner, buffer, version, before in self.copies:
                told = buffer._version == version and not _is_compared(owner, buffer)
                if not (told or (_has_numbers(buffer) and same_numbers(buffer, before))):
                    written.append(name)
                    with torch.no_grad():
                        buffer.copy_(before)
        return written


def _is_compared(owner: nn.Module, buffer: Tensor) -> bool:
    """Whether a write may leave its version as it was."""
    return owner.training and buffer.is_floating_point() and _has_numbers(buffer)


def _has_numbers(buffer: Tensor) -> bool:
    return not (buffer.is_meta or hasattr(buffer, "fake_mode"))
