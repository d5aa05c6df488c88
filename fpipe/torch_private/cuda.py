"""Reach the workspaces and memory pools of CUDA behind the capture of graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


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
