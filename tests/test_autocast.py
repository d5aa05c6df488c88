"""`build(autocast=)`: steps under autocast whatever is around them, with the bits of a loop under `torch.autocast`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from tests.processes import Processes
from tests.test_distributed import MSE, own, rows
from tests.test_update import differences, net_of

HALVES = (torch.bfloat16, torch.float16)


def casting(model: Any, schedule: str = "zb_h1") -> fpipe.Program:
    parts = fpipe.split(4), fpipe.schedules.get(schedule)(2), fpipe.merge(outputs=False)
    return fpipe.chain(*parts, fpipe.update("AdamW"))(fpipe.program(model))


def loop(net: nn.Module, batch: Any, dtype: torch.dtype) -> Any:
    """The loss and the optimizer of one step of a plain loop under autocast."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False), []
    for x, target in zip(*(half.tensor_split(4) for half in batch), strict=True):
        with torch.autocast("cpu", dtype):
            loss = MSE(net(x), target) * 0.25
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return sum(losses[1:], losses[0]), optimizer


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("how", [{}, {"trace": False}, {"runtime": "threads"}, {"example": True}], ids=repr)
def test_a_step_has_the_bits_of_a_loop_under_autocast(how: dict[str, Any], dtype: torch.dtype):
    net, batch = net_of(2), rows(8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = casting(model)
    more = how | ({"example": (params, batch)} if "example" in how else {})
    step = fpipe.build(program, model, autocast=dtype, **more)
    assert not torch.is_autocast_enabled("cpu")
    result = step(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.01)
    assert not torch.is_autocast_enabled("cpu")
    loss, optimizer = loop(net, batch, dtype)
    assert torch.equal(result.loss, loss)
    assert differences(net, optimizer, result) == []
    whole = fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.01)
    assert not torch.equal(whole.loss, loss)


def on_two(rank: int) -> list[str]:
    net, batch = net_of(2), rows(8)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = casting(model)
    mine = own(program, rank, params)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), autocast=torch.bfloat16)
    result = step(mine, batch, opt=fpipe.optimizer_state(program, mine), lr=0.01)
    loss, optimizer = loop(net, batch, torch.bfloat16)
    return ["loss"] * (not torch.equal(result.loss, loss)) + differences(net, optimizer, result)


def test_two_processes_have_the_bits_of_a_loop_under_autocast(pair: Processes):
    assert pair.each(on_two) == [[], []]
