"""`compare_step` checks torch's pipelines, replicas, shards and tensor-parallel layers on four processes."""

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


def local_tensor(leaf: Tensor) -> Tensor:
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach().clone()


def local_params(module: nn.Module) -> dict[str, Tensor]:
    return {name: local_tensor(leaf) for name, leaf in module.named_parameters()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))


def batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(*shape), torch.randn(*shape)) for _ in range(2)]


class PipelineTraining:
    """Two stages under torch's 1F1B, in two replicas with different rows."""

    def __init__(self, mesh: DeviceMesh, case: str) -> None:
        self.case, self.pp, self.dp = case, mesh["pp"], mesh["dp"]
        stage_index = self.pp.get_local_rank()
        self.stage: Any = mlp()
        for name in ("2", "3") if stage_index == 0 else ("0", "1"):
            del self.stage._modules[name]
        if "shards" in case:
            fully_shard(self.stage, mesh=self.dp)
        pipeline_stage = PipelineStage(self.stage, stage_index, 2, torch.device("cpu"), group=self.pp.get_group())
        self.schedule = Schedule1F1B(pipeline_stage, MICROBATCHES, loss_fn=MSE)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=RATE, momentum=0.9)

    def average(self) -> None:
        """Average gradients over replicas."""
        for leaf in self.stage.parameters():
            dist.all_reduce(leaf.grad, group=self.dp.get_group())
            leaf.grad.div_(2)

    def clip(self) -> None:
        """Clip by the norm over all ranks, which torch leaves to its users."""
        leaves = [leaf for leaf in self.stage.parameters() if leaf.grad is not None]
        local_grads = [leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in leaves]
        square = torch.stack([grad.square().sum() for grad in local_grads]).sum()
        if "shards" in self.case:
            dist.all_reduce(square, group=self.dp.get_group())
        dist.all_reduce(square, group=self.pp.get_group())
        factor = torch.clamp(CLIP / (square.sqrt() + 1e-6), max=1.0)
        for grad in local_grads:
            grad.mul_(factor)

    def run(self) -> dict[str, Tensor]:
        for x, target in batches(8, 8):
            x, target = (half.chunk(2)[self.dp.get_local_rank()] for half in (x, target))
            self.optimizer.zero_grad()
            self.schedule.step(*([x] if self.pp.get_local_rank() == 0 else []), target=target)
            if "shards" not in self.case and "alone" not in self.case:
                self.average()
            self.clip()
            self.optimizer.step()
        return local_params(self.stage)


def train_pipelined(rank: int, case: str) -> dict[str, Tensor]:
    return PipelineTraining(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), case).run()


PIPELINED = {
    "replicas": None,
    "shards": None,
    "replicas alone": "0.weight, replicas of step 1: ranks have copies that differ: its gradient is not added",
}


def compare(net: nn.Module, step_batches: Any, params_by_rank: Any, **options: Any) -> fpipe.Report:
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    return fpipe.compare_step(model, params, step_batches, params_by_rank, **options)


@pytest.mark.parametrize("case", PIPELINED)
def test_steps_of_torchs_pipeline_are_compared(four: Processes, case: str):
    params_by_rank, message = four.run(train_pipelined, case), PIPELINED[case]
    options: dict[str, Any] = {
        "rule": "SGD",
        "lr": RATE,
        "momentum": 0.9,
        "clip": CLIP,
        "microbatches": 2 * MICROBATCHES,
    }
    if message is None:
        assert len(compare(mlp(), batches(8, 8), params_by_rank, **options).leaves) == 6
        return
    with pytest.raises(fpipe.GradientMismatch, match=message):
        compare(mlp(), batches(8, 8), params_by_rank, **options)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    bias = Toy(lambda toy, x: x + toy.bias, bias=nn.Parameter(torch.randn(8)))  # added after the reduction
    layers = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False), bias
    return nn.Sequential(*layers)


def train_tensor_parallel(rank: int, case: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train a sequence-parallel block in two replicas; return its parameters and last unclipped gradients.

    The norm and the last bias see half of the sequence on each rank.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, net = mesh["tp"], block()
    plan = {
        "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "3": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1)),
    }
    parallelize_module(net, tp, plan)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, foreach=False)
    for x, target in batches(4, 6, 8):
        x, target = (half.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[tp.get_local_rank()] for half in (x, target))
        optimizer.zero_grad()
        (MSE(net(x), target) / 2).backward()  # the mean over both halves of the sequence
        copies = [leaf for leaf in net.parameters() if not isinstance(leaf, DTensor)]
        shards = [leaf for leaf in net.parameters() if isinstance(leaf, DTensor)]
        for leaf in copies if "not added" not in case else copies[:0]:
            dist.all_reduce(leaf.grad, group=tp.get_group())
        local_grads = [leaf.grad.to_local() if isinstance(leaf, DTensor) else leaf.grad for leaf in net.parameters()]
        for grad in local_grads:
            dist.all_reduce(grad, group=mesh["dp"].get_group())
            grad.div_(2)
        grads = {name: local_tensor(leaf.grad) for name, leaf in net.named_parameters()}
        square = torch.stack([leaf.grad.to_local().square().sum() for leaf in shards]).sum()
        copies_square = torch.stack([leaf.grad.square().sum() for leaf in copies]).sum()
        dist.all_reduce(square, group=tp.get_group())
        for grad in local_grads:
            grad.mul_(torch.clamp(CLIP / ((square + copies_square).sqrt() + 1e-6), max=1.0))
        optimizer.step()
    return local_params(net), grads


PARALLEL: dict[str, str | None] = {
    "right": None,
    "not added": "0.weight, reduction of step 1: it is not added over ranks: their gradients differ",
}


@pytest.mark.parametrize("case", PARALLEL)
def test_steps_of_tensor_parallel_layers_are_compared(four: Processes, case: str):
    params_by_rank, grads = zip(*four.run(train_tensor_parallel, case), strict=True)
    message = PARALLEL[case]
    options: dict[str, Any] = {
        "rule": "SGD",
        "lr": RATE,
        "momentum": 0.9,
        "clip": CLIP,
        "microbatches": 2,
        "grads": grads,
    }
    step_batches = batches(4, 6, 8)
    if message is None:
        assert len(compare(block(), step_batches, params_by_rank, **options).leaves) == 5
        return
    with pytest.raises(fpipe.GradientMismatch, match=message):
        compare(block(), step_batches, params_by_rank, **options)
