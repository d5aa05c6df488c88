"""Ops in place, rewritten: the bits of plain autograd, whoever reads what was there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe


def has_autograds_bits(function: Callable[..., Any], params: dict[str, Tensor], x: Tensor) -> bool:
    model = fpipe.from_functions([function], loss=lambda y, t: (y - t).square().sum())
    return fpipe.verify(fpipe.program(model), model, (params,), (x, torch.zeros(len(x), 1))).bitwise


@pytest.mark.parametrize(("width", "rows"), [(5, 7), (6, 1), (16, 7), (20, 40)])
def test_a_cell_whose_gates_are_columns_of_a_table(width: int, rows: int):
    """The sigmoid of a new table took other lanes of the processor than that of some columns: half of all widths."""
    torch.manual_seed(0)
    cell = nn.GRUCell(width, width)
    params = {name: leaf.detach() for name, leaf in cell.named_parameters()}
    x = 3 * torch.randn(rows, width)
    assert has_autograds_bits(lambda p, x: torch.func.functional_call(cell, p, (x,)), params, x)


@pytest.mark.parametrize("turned", ["transpose_", "unsqueeze_", "squeeze_"])
def test_what_is_written_through_a_view_that_was_turned_in_place(turned: str):
    """On fake tensors autograd remembers the view as it was: the gradient was another one, in silence."""

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x @ p["w"]
        if turned == "transpose_":
            h.view(2, 2, 4).transpose_(0, 1).mul_(p["v"][0])
        elif turned == "unsqueeze_":
            h[:, 0].unsqueeze_(1).mul_(p["v"][:, :1])
        else:
            h[:, :1].squeeze_(1).mul_(p["v"][:, 0])
        return h * p["v"]

    params = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}
    with pytest.warns(UserWarning, match=rf"it transposes a view in place \(aten\.{turned}"):
        assert has_autograds_bits(function, params, torch.randn(4, 4))
