"""Rewritten in-place ops have the bits of plain autograd, whoever reads the tensor before the write."""

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
def test_a_cell_that_writes_columns_of_a_table_has_autograds_bits(width: int, rows: int):
    """Half of all widths used to differ: sigmoid of a new table uses other SIMD lanes than of some of its columns."""
    torch.manual_seed(0)
    cell = nn.GRUCell(width, width)
    params = {name: leaf.detach() for name, leaf in cell.named_parameters()}
    x = 3 * torch.randn(rows, width)
    assert has_autograds_bits(lambda p, x: torch.func.functional_call(cell, p, (x,)), params, x)


@pytest.mark.parametrize("view_op", ["transpose_", "unsqueeze_", "squeeze_"])
def test_a_write_through_a_view_transposed_in_place_has_autograds_bits(view_op: str):
    """Used to give a wrong gradient, in silence: on fake tensors autograd keeps the view before its transposition."""

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x @ p["w"]
        if view_op == "transpose_":
            h.view(2, 2, 4).transpose_(0, 1).mul_(p["v"][0])
        elif view_op == "unsqueeze_":
            h[:, 0].unsqueeze_(1).mul_(p["v"][:, :1])
        else:
            h[:, :1].squeeze_(1).mul_(p["v"][:, 0])
        return h * p["v"]

    params = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}
    with pytest.warns(UserWarning, match=rf"it transposes a view in place \(aten\.{view_op}"):
        assert has_autograds_bits(function, params, torch.randn(4, 4))
