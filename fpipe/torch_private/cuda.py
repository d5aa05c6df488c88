"""Reach the workspaces, memory pools and generators of CUDA behind the capture of graphs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.torch_version import TorchVersion, __version__

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


def register_generators(device: torch.device, graph: Any, generators: Iterable[torch.Generator]) -> None:
    """Register all generators that a graph will draw from, before its capture."""
    # From torch 2.14 on a CUDA graph registers a generator when that draws first, and its method only warns.
    if device.type == "cuda" and TorchVersion(__version__) >= "2.14":
        return
    for generator in generators:
        graph.register_generator_state(generator)


def clear_workspaces(device: torch.device) -> None:
    """Free the workspaces of cuBLAS, so that the next product makes one (2.13: `_cuda_clearCublasWorkspaces`)."""
    if device.type == "cuda":
        _C._cuda_clearCublasWorkspaces()


def end_allocation(device: torch.device, pool: Any) -> None:
    """End the allocation into a pool after a failed capture, which torch 2.11 leaves on (2.13: `endAllocateToPool`)."""
    if device.type == "cuda":
        # Later versions have ended it, and raise.
        with suppress(RuntimeError):
            _C._cuda_endAllocateToPool(device.index, pool)
