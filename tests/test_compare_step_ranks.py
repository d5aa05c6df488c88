"""Steps that torch's own pipelines, replicas, shards and tensor-parallel layers make on four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fpipe
from tests.processes import Processes
from tests.test_distributed import MSE
from tests.toys import Toy

MICROBATCHES, CLIP, RATE = 2, 0.05, 0.1  # of each replica


def local(leaf: Tensor) -> Tensor:
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach().clone()


def named(module: nn.Module) -> dict[str, Tensor]:
    return {name: local(leaf) for name, leaf in module.named_parameters()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))


def batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(*shape), torch.randn(*shape)) for _ in range(2)]


class Pipelined:
    """Two stages under torch's 1F1B, each on two ranks with rows of their own."""

    def __init__(self, mesh: DeviceMesh, how: str) -> None:
        self.how, self.pp, self.dp = how, mesh["pp"], mesh["dp"]
        number = self.pp.get_local_rank()
        self.stage: Any = mlp()
        for name in ("2", "3") if number == 0 else ("0", "1"):
            del self.stage._modules[name]
        if "shards" in how:
            fully_shard(self.stage, mesh=self.dp)
        stage = PipelineStage(self.stage, number, 2, torch.device("cpu"), group=self.pp.get_group())
        average = "summed" not in how
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=MSE, scale_grads=average)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=RATE, momentum=0.9)

    def average(self) -> None:
        """Over replicas."""
        for leaf in self.stage.parameters():
            dist.all_reduce(leaf.grad, group=self.dp.get_group())
            leaf.grad.div_(2)

    def clip(self) -> None:
        """By the norm of all, which torch leaves to its users."""
        leaves = [leaf for leaf in self.stage.parameters() if leaf.grad is not None]
        if "summed" in self.how:
            return
        if "own norms" in self.how:
            nn.utils.clip_grad_norm_(leaves, CLIP)
            return
        parts = [leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in leaves]
        square = torch.stack([part.square().sum() for part in parts]).sum()
        if "shards" in self.how and "own parts" not in self.how:
            dist.all_reduce(square, group=self.dp.get_group())
        if "own parts" not in self.how:
            dist.all_reduce(square, group=self.pp.get_group())
        share = torch.clamp(CLIP / (square.sqrt() + 1e-6), max=1.0)
        for part in parts:
            part.mul_(share)

    def run(self) -> dict[str, Tensor]:
        for x, target in batches(8, 8):
            mine = 0 if "shared rows" in self.how else self.dp.get_local_rank()
            x, target = (half.chunk(2)[mine] for half in (x, target))
            self.optimizer.zero_grad()
            self.schedule.step(*([x] if self.pp.get_local_rank() == 0 else []), target=target)
            if "shards" not in self.how and "alone" not in self.how:
                self.average()
            self.clip()
            self.optimizer.step()
        return named(self.stage)


def pipelined(rank: int, how: str) -> dict[str, Tensor]:
    return Pipelined(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), how).run()


PIPELINED = {
    "replicas": None,
    "shards": None,
    "replicas, summed": "Gradients are summed over 2 microbatches or replicas and not averaged",
    "replicas alone": "Ranks have copies that differ: .*or each rank clips by a norm of its own: 0.weight, 0.bias",
    "replicas, shared rows": "All 2 replicas are handed the same rows, those of replica 0",
    "shards, own norms": "Each stage is clipped by its own norm: the norm misses other ranks",
    "shards, own parts": "Each rank is clipped by the norm of what it has itself: the norm misses other ranks",
}


def judged(net: nn.Module, each: Any, after: Any, **how: Any) -> fpipe.Report:
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    return fpipe.compare_step(model, params, each, after, **how)


@pytest.mark.parametrize("how", PIPELINED)
def test_steps_of_torchs_pipeline_are_judged(four: Processes, how: str):
    after, words, clip = four.each(pipelined, how), PIPELINED[how], None if "summed" in how else CLIP
    said: dict[str, Any] = {"rule": "SGD", "lr": RATE, "momentum": 0.9, "clip": clip, "microbatches": 2 * MICROBATCHES}
    if words is None:
        assert len(judged(mlp(), batches(8, 8), after, **said).leaves) == 6
        return
    with pytest.raises(fpipe.GradientMismatch, match=words):
        judged(mlp(), batches(8, 8), after, **said)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    bias = Toy(lambda own, x: x + own.bias, bias=nn.Parameter(torch.randn(8)))  # which comes after the reduction
    layers = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False), bias
    return nn.Sequential(*layers)


def in_tensor_parallel(rank: int, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A block under sequence parallelism, in two replicas: its norm and its last bias see half of the sequence on each
    rank. Parameters after two steps, and the last gradients before they are clipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, net = mesh["tp"], block()
    plan = {
        "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "3": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1)),
    }
    parallelize_module(net, tp, plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, foreach=False)
    for x, target in batches(4, 6, 8)[: 1 if "once" in how else 2]:
        x, target = (half.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[tp.get_local_rank()] for half in (x, target))
        optimizer.zero_grad()
        (MSE(net(x), target) / 2).backward()  # the mean over both halves of the sequence
        copies = [leaf for leaf in net.parameters() if not isinstance(leaf, DTensor)]
        pieces = [leaf for leaf in net.parameters() if isinstance(leaf, DTensor)]
        for leaf in copies if "not added" not in how else copies[:0]:
            dist.all_reduce(leaf.grad, group=tp.get_group())
        parts = [leaf.grad.to_local() if isinstance(leaf, DTensor) else leaf.grad for leaf in net.parameters()]
        for part in parts:
            dist.all_reduce(part, group=mesh["dp"].get_group())
            part.div_(2)
        grads = {name: local(leaf.grad) for name, leaf in net.named_parameters()}
        square = torch.stack([leaf.grad.to_local().square().sum() for leaf in pieces]).sum()
        own = torch.stack([leaf.grad.square().sum() for leaf in copies]).sum()
        alone = "copies twice" in how or "own parts" in how
        square = square + own if alone else square
        if "own parts" not in how:
            dist.all_reduce(square, group=tp.get_group())
        square = square if alone or "left out" in how else square + own
        for part in parts if "unclipped" not in how else ():
            part.mul_(torch.clamp(CLIP / (square.sqrt() + 1e-6), max=1.0))
        optimizer.step()
    return named(net), grads


PARALLEL: dict[str, str | None] = {
    "right": None,
    "own parts, once": "such as 0.weight: each rank is clipped by the norm of what it has itself: the norm misses",
    "copies twice": "The norm counts parameters of which 2 ranks have copies once for each of them",
    "copies left out": "The norm misses parameters of which all ranks have copies",
    "not added, unclipped, once": (
        r"tensor-parallel ranks: 0.weight, 0.bias, 4.bias\.\n"
        "The gradient of 0.weight is not added over ranks: those of 4 add up to 2 times the right one"
    ),
}


@pytest.mark.parametrize("how", PARALLEL)
def test_steps_of_tensor_parallel_layers_are_judged(four: Processes, how: str):
    after, grads = zip(*four.each(in_tensor_parallel, how), strict=True)
    clip, words = None if "unclipped" in how else CLIP, PARALLEL[how]
    said: dict[str, Any] = {"rule": "SGD", "lr": RATE, "momentum": 0.9, "clip": clip, "microbatches": 2, "grads": grads}
    each = batches(4, 6, 8)[: 1 if "once" in how else 2]
    if words is None:
        assert len(judged(block(), each, after, **said).leaves) == 5
        return
    with pytest.raises(fpipe.GradientMismatch, match=words):
        judged(block(), each, after, **said)
