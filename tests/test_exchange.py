"""Stages that are collectives, on 2 x 2 processes: two ranks of a program, times two that exchange tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from fpipe.tree import tree_map
from tests.processes import Processes


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    processes = Processes(4)
    yield processes
    processes.close()


def meshed() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))


def layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Swapped(torch.autograd.Function):
    """An all-to-all and its gradient, in plain torch.distributed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, made = group, torch.empty_like(x)
        dist.all_to_all_single(made, x.contiguous(), group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        made = torch.empty_like(dy[0])
        dist.all_to_all_single(made, dy[0].contiguous(), group=ctx.group)
        return made, None


def one_block(rank: int, name: str, stages: int, placed: Any) -> list[str]:
    mesh = meshed()
    where = fpipe.place(placed) if placed else fpipe.identity()
    schedule = fpipe.chain(where, getattr(fpipe.schedules, name)(2))
    place, member = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    torch.manual_seed(member)
    params = tuple({"w": torch.randn(6, 6)} if at % 2 == 0 else {} for at in range(stages))
    batch = torch.randn(16, 6), torch.randn(16, 6)
    fns = [layer if at % 2 == 0 else fpipe.exchange("all_to_all", axis="ep") for at in range(stages)]
    model = fpipe.from_functions(fns, loss=squares)
    program = fpipe.chain(fpipe.split(4), schedule, fpipe.merge())(fpipe.program(model))
    example = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, broadcast=True)
    found = step(fpipe.local_params(program, params, place), batch)

    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in one.items()} for one in params]
    total = torch.zeros(())
    grads: list[Any] = [None] * stages
    for x, target in zip(*(part.tensor_split(4) for part in batch), strict=True):
        y = x
        for at, own in enumerate(leaves):
            y = Swapped.apply(y, mesh.get_group("ep")) if at % 2 else layer(own, y)
        own_loss = squares(y, target) * 0.25
        each = torch.autograd.grad(own_loss, [one["w"] for one in leaves if one])
        grads = [*grads]
        for at, grad in zip(range(0, stages, 2), each, strict=True):
            grads[at] = grad if grads[at] is None else grads[at] + grad
        total = total + own_loss.detach()
    odd = [] if torch.equal(found.loss, total) else [f"loss {found.loss} for {total}"]
    for at, stage in enumerate(found.grads):
        if stage and not torch.equal(stage["w"], grads[at]):
            odd.append(f"stage {at}")
    return odd


@pytest.mark.parametrize(
    ("name", "stages", "placed"),
    [("one_f_one_b", 5, [0, 0, 0, 1, 1]), ("zb_h1", 5, None), ("dualpipev", 9, None)],
)
def test_a_block_over_an_exchange_has_the_gradients_of_autograd(
    four: Processes, name: str, stages: int, placed: list[int] | None
):
    assert four.each(one_block, name, stages, placed) == [[]] * 4
