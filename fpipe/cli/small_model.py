"""A small real model for a program of any number of stages, to verify its gradients on."""

from __future__ import annotations

import torch
from torch import Tensor

from fpipe.model import Model
from fpipe.models.from_functions import from_functions
from fpipe.program import Program

WIDTH = 8


def small_model(program: Program) -> tuple[Model, tuple[dict[str, Tensor], ...], tuple[Tensor, Tensor]]:
    """A model of as many stages, its parameters, and a batch whose microbatches are not all of one size; of a program
    with sequence slices it is causal along the sequence, and the slices are not all of one length."""
    make = torch.Generator().manual_seed(0)
    params = tuple(
        {"w": torch.randn(WIDTH, WIDTH, generator=make) / WIDTH**0.5, "b": torch.randn(WIDTH, generator=make)}
        for _ in range(program.stages)
    )
    rows = 2 * program.microbatches + (2 if program.microbatches > 2 else 0)
    shape = (rows, WIDTH) if program.slices == 1 else (rows, 2 * program.slices + 1, WIDTH)
    batch = (torch.randn(shape, generator=make), torch.randn(shape, generator=make))
    return from_functions([_stage if program.slices == 1 else _causal] * program.stages, _loss), params, batch


def _stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"])


def _causal(params: dict[str, Tensor], x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """A position sees the sum of those before it; what a slice sums up it hands to the next."""
    total = (x @ params["w"]).cumsum(1)
    if carry is not None:
        total = total + carry
    return torch.tanh(total + params["b"]), total[:, -1:]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()
