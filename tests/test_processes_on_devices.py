"""Ranks in processes, each on a GPU, give the bits of plain autograd over NCCL.

NCCL refuses two ranks of one host on one GPU. Told that they are on two hosts, they meet on one GPU over sockets.
"""

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.tree import leaves
from tests.fake_accelerator.scenarios import PARTS, ROWS, STEPS, squares, train_by_adamw, train_by_autograd
from tests.processes import GROUP_OPTIONS, Processes

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def join(rank: int, file: str, size: int = 2) -> None:
    """Replace the process group of this process by one of NCCL."""
    dist.destroy_process_group()
    if torch.cuda.device_count() < size:
        os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    GROUP_OPTIONS.update(backend="nccl", init_method=file)
    dist.init_process_group(**GROUP_OPTIONS)


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.deep), pytest.param("cuda", marks=ON_GPU)]
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[Any]]]:
    """Return a function that calls its argument in each of two processes, with rank and device."""
    with Processes(2) as pair:
        if request.param == "cuda":
            pair.run(join, Path(tmp_path_factory.mktemp("nccl"), "group").as_uri())
        yield lambda function, *args: pair.run(function, request.param, *args)


def net_and_batch(kind: str, stages: int) -> tuple[nn.Sequential, list[Tensor]]:
    """Return a net and a batch, so wide on a GPU that the host runs far ahead: a missing wait reads too early."""
    torch.manual_seed(0)
    width = 8 if kind == "cpu" else 1024
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(stages)))
    return net.to(kind), [torch.randn(ROWS, width, device=kind) for _ in range(2)]


def sgd(params: Any, grads: Any) -> None:
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param -= 0.01 * grad


def has_equal_bits(actual: Any, expected: Any) -> bool:
    return all(
        torch.equal(actual_tensor, expected_tensor)
        for actual_tensor, expected_tensor in zip(actual, expected, strict=True)
    )


def train_by_sgd(rank: int, kind: str, schedule: str, stages: int, record: bool = False) -> bool:
    """Compare steps that each train on the gradients of the step before."""
    net, batch = net_and_batch(kind, stages)
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    pipeline = fpipe.chain(fpipe.split(PARTS), fpipe.schedules.get(schedule)(2), fpipe.merge(outputs=False))
    program = pipeline(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", example=(params, tuple(batch)), record=record)
    mine = fpipe.local_params(program, params, rank)
    local_stages = [stage for stage, stage_params in enumerate(mine) if stage_params]
    for _ in range(STEPS):
        result = step(mine, tuple(batch))
        sgd(leaves([mine[stage] for stage in local_stages]), leaves([result.grads[stage] for stage in local_stages]))
    if record:
        times = [(start, end) for _, start, end in result.timeline.events]
        assert min(start for start, _ in times) > -5e-4
        assert all(start <= end for start, end in times)
    twin_params = [*twin.parameters()]
    train_by_autograd(twin, tuple(batch), lambda: sgd(twin_params, [param.grad for param in twin_params]))
    return has_equal_bits(
        leaves([mine[stage] for stage in local_stages]),
        [param for stage in local_stages for param in twin[stage].parameters()],
    )


def train_by_update(rank: int, kind: str) -> bool:
    """Compare steps with an in-place optimizer whose norm both ranks add up."""
    net, batch = net_and_batch(kind, 2)
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    parts = fpipe.split(PARTS), fpipe.schedules.zb_h1(2), fpipe.merge(outputs=False), fpipe.update("AdamW", clip=1.0)
    program = fpipe.chain(*parts)(fpipe.program(model))
    example = params, tuple(batch)
    step = fpipe.build(program, model, runtime="distributed", example=example, donate=True)
    mine = fpipe.local_params(program, params, rank)
    opt = fpipe.optimizer_state(program, mine)
    for _ in range(STEPS):
        result = step(mine, tuple(batch), opt=opt, lr=0.1)
        mine, opt = result.params, result.opt
    train_by_adamw(twin, tuple(batch))
    return has_equal_bits(leaves(mine[rank]), twin[rank].parameters())


def refuse_missing_params(rank: int, kind: str) -> bool:
    """Check that both ranks end if rank 0 lacks parameters."""
    net, batch = net_and_batch(kind, 2)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    pipeline = fpipe.chain(fpipe.split(PARTS), fpipe.schedules.one_f_one_b(2), fpipe.merge())
    program, batch_tuple = pipeline(fpipe.program(model)), tuple(batch)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch_tuple), timeout=30)
    mine = fpipe.local_params(program, params, rank)
    step(mine, batch_tuple)
    with pytest.raises((ValueError, RuntimeError)) as error_info:
        step(mine if rank else ({}, {}), batch_tuple)
    assert rank == 0 or "rank 0 failed" in str(error_info.value)
    with pytest.raises(fpipe.RankError, match="the run is over"):
        step(mine, batch_tuple)
    return True


def layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def train_experts(rank: int, kind: str, record: bool = False) -> bool:
    """Exchange rows between the layers of two processes, and compare with one net on all rows."""
    torch.manual_seed(0)
    width = 8 if kind == "cpu" else 512
    weights = [torch.randn(2, width, width, device=kind) / width**0.5 for _ in range(2)]
    x, target = (torch.randn(2, ROWS, width, device=kind) for _ in range(2))
    model = fpipe.from_functions([layer, fpipe.exchange("all_to_all", axis="ep"), layer], loss=squares)
    parts = fpipe.split(2), fpipe.place([0, 0, 0]), fpipe.schedules.one_f_one_b_overlap(1), fpipe.merge(outputs=False)
    program = fpipe.chain(*parts)(fpipe.program(model))
    mesh = init_device_mesh(kind, (1, 2), mesh_dim_names=("pp", "ep"))
    params = {"w": weights[0][rank].clone()}, {}, {"w": weights[1][rank].clone()}
    rank_batch = x[rank], target[rank]
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rank_batch), record=record)
    results = [step(params, rank_batch) for _ in range(STEPS)]
    grads_by_step = [leaves(result.grads) for result in results]
    if record:
        assert all(-5e-4 < start <= end for _, start, end in results[-1].timeline.events)
    for weight in weights:
        weight.requires_grad_()
    for microbatch in range(2):
        rows = slice(microbatch * ROWS // 2, (microbatch + 1) * ROWS // 2)
        hidden = torch.stack([torch.tanh(x[ep_rank, rows] @ weights[0][ep_rank]) for ep_rank in range(2)])
        received = _all_to_all(hidden)
        losses = [
            squares(torch.tanh(received[ep_rank] @ weights[1][ep_rank]), target[ep_rank, rows]) / 2
            for ep_rank in range(2)
        ]
        torch.autograd.backward(losses)
    return all(has_equal_bits(grads, [weight.grad[rank] for weight in weights]) for grads in grads_by_step)


def _all_to_all(rows: Tensor) -> list[Tensor]:
    """Return for each receiver its half of the rows of every sender."""
    return [torch.cat([sender.chunk(2)[receiver] for sender in rows]) for receiver in range(2)]


def by_replicas(net: nn.Module, batch: list[Tensor]) -> list[Tensor]:
    """Return the summed gradients of two replicas, each of two microbatches."""
    halves = list[list[Tensor]]()
    for x, target in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
        net.zero_grad()
        for x_part, target_part in zip(x.chunk(2), target.chunk(2), strict=True):
            (squares(net(x_part), target_part) * 0.25).backward()
        halves.append([leaf.grad for leaf in net.parameters() if leaf.grad is not None])
    return [a + b for a, b in zip(*halves, strict=True)]


def train_replicas(rank: int, kind: str) -> bool:
    """Compare two replicas of one rank; test_devices.py has replicas that shard parameters."""
    net, batch = net_and_batch(kind, 2)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1), fpipe.merge(outputs=False))(fpipe.program(model))
    mesh = init_device_mesh(kind, (2, 1), mesh_dim_names=("dp", "pp"))
    rank_batch = tuple(tensor.chunk(2)[rank] for tensor in batch)
    expected = by_replicas(net, batch)
    program = fpipe.data_parallel()(merged)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rank_batch))
    grads_by_step = [leaves(step(params, rank_batch).grads) for _ in range(STEPS)]
    return all(has_equal_bits(grads, expected) for grads in grads_by_step)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(partial(train_by_sgd, schedule="zb_h1", stages=2), id="ZB-H1"),
        pytest.param(partial(train_by_sgd, schedule="interleaved", stages=4), id="interleaved"),
        pytest.param(partial(train_by_sgd, schedule="zbv", stages=4), id="ZBV"),
        pytest.param(partial(train_by_sgd, schedule="one_f_one_b", stages=2, record=True), id="1F1B, recorded"),
        train_by_update,
        train_experts,
        pytest.param(partial(train_experts, record=True), id="exchanged, recorded"),
        train_replicas,
        refuse_missing_params,
    ],
)
def test_ranks_in_processes_give_the_bits_of_autograd(ranks: Callable[..., list[Any]], scenario: Callable[..., bool]):
    assert ranks(scenario) == [True, True]


@ON_GPU
def test_gloo_carries_tensors_of_a_gpu_through_the_host():
    with Processes(2) as pair:
        assert pair.run(train_by_sgd, "cuda", "zb_h1", 2) == [True, True]
