"""Recorded runs on meshes of four processes: replicas of tensor-parallel nets, of pipelines and of mixtures."""

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fpipe
from tests.processes import Processes, processes
from tests.test_compare_run_parallel import WIDTH, make_net, stage_of
from tests.test_compare_run_routing import make_mixtures, train_expert_parallel

mse = nn.functional.mse_loss
four = processes(4)
# Of a step without a clip or other microbatches: a tensor-parallel net, and a pipeline.
QUICK_SEEDS = [12, 13]

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


class MeshRun(ABC):
    """A training run that a seed draws, over replicas ("dp") of a net that is cut over two ranks.

    Attributes:
        net: the part of this rank.
        batches: the batches of this replica.
    """

    def __init__(self, mesh: DeviceMesh, seed: int, case: str) -> None:
        draw = random.Random(seed)
        self.mesh, self.case, self.net = mesh, case, make_net()
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        self.net.to(dtype)
        self.rule, self.settings = draw.choice(OPTIMIZERS)
        self.clip = 0.1 if case == "norm of a stage" else draw.choice([None, 0.1])
        self.parts, self.schedule_kind = draw.choice([1, 2]), draw.choice([ScheduleGPipe, Schedule1F1B])
        torch.manual_seed(seed + mesh.get_local_rank("dp"))
        self.batches = [torch.randn(2, 4, 6, WIDTH).to(dtype).unbind() for _ in range(draw.choice([1, 2]))]

    def run(self, folder: str) -> None:
        optimizer = self.rule(self.net.parameters(), lr=0.01, foreach=False, **self.settings)
        with fpipe.record_run(folder, net=self.net, optimizer=optimizer) as record:
            for x, t in self.batches:
                with record.step(clip=self.clip):
                    self.backward(record, x, t)
                    for name, param in self.net.named_parameters():
                        self.average(name, param)
                    record.reduced()
                    if self.clip is not None:
                        record.clipped(self.clip_grads(self.clip))
                    optimizer.step()
                    optimizer.zero_grad()

    @abstractmethod
    def backward(self, record: Any, x: Tensor, t: Tensor) -> None:
        """Run forward and backward of each microbatch, recorded."""

    def average(self, name: str, param: nn.Parameter) -> None:
        grad = local_grad(param)
        dist.all_reduce(grad, group=self.mesh.get_group("dp"))
        grad /= self.mesh["dp"].size()

    def clip_grads(self, clip: float) -> Tensor:
        """Clip by the norm of all parts of the net."""
        square = torch.zeros(())
        for param in self.net.parameters():
            square += local_grad(param).float().square().sum() / self.copies_of(param)
        if self.case != "norm of a stage":
            dist.all_reduce(square, group=self.mesh.get_group(1))
        norm = square.sqrt()
        for param in self.net.parameters():
            local_grad(param).mul_(min(1.0, clip / (float(norm) + 1e-6)))
        return norm

    def copies_of(self, param: nn.Parameter) -> int:
        return 1


def local_grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad


class TensorParallelRun(MeshRun):
    """Projections are cut by heads, and norms see half of the sequence on each rank."""

    def __init__(self, mesh: DeviceMesh, seed: int, case: str) -> None:
        super().__init__(mesh, seed, case)
        columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        plan = {f"attention.qkv.{k}": columns for k in range(3)} | {"attention.out": rows, "up": columns, "down": rows}
        for block in self.net:
            parallelize_module(block, mesh["tp"], plan)
        self.batches = [tuple(x.chunk(2, 1)[mesh.get_local_rank("tp")] for x in pair) for pair in self.batches]

    def backward(self, record: Any, x: Tensor, t: Tensor) -> None:
        for a, b in zip(x.chunk(self.parts), t.chunk(self.parts), strict=True):
            with record.microbatch((a, b)):
                # The mean over both halves of the sequence.
                (mse(self.net(a), b) / (2 * self.parts)).backward()

    def average(self, name: str, param: nn.Parameter) -> None:
        if not isinstance(param, DTensor) and self.case != "norms alone":
            dist.all_reduce(local_grad(param), group=self.mesh.get_group("tp"))
        super().average(name, param)

    def copies_of(self, param: nn.Parameter) -> int:
        return 1 if isinstance(param, DTensor) and param.placements[0].is_shard() else 2


class PipelineRun(MeshRun):
    """Two stages of a block each."""

    def __init__(self, mesh: DeviceMesh, seed: int, case: str) -> None:
        super().__init__(mesh, seed, case)
        stage = mesh.get_local_rank("pp")
        self.net = stage_of(self.net, (str(stage),))
        pipeline_stage = PipelineStage(self.net, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        self.schedule = self.schedule_kind(pipeline_stage, 2, loss_fn=mse)

    def backward(self, record: Any, x: Tensor, t: Tensor) -> None:
        with record.microbatch():
            if self.mesh.get_local_rank("pp") == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=t)

    def average(self, name: str, param: nn.Parameter) -> None:
        if self.case != "stage alone" or not name.startswith("1."):
            super().average(name, param)


def train(rank: int, folder: str, kind: str, seed: int, case: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", kind))
    run = {"tp": TensorParallelRun, "pp": PipelineRun}[kind](mesh, seed, case)
    run.run(folder)


def check_right_mesh(four: Processes, folder: Path, seed: int) -> None:
    four.run(train, str(folder), ("tp", "pp")[seed % 2], seed, "right")
    assert fpipe.compare_run(make_net(), folder, loss=mse).where is None


@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_drawn_meshes_are_not_accused(four: Processes, tmp_path: Path, seed: int):
    check_right_mesh(four, tmp_path, seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [seed for seed in range(150) if seed not in QUICK_SEEDS])
def test_many_drawn_meshes_are_not_accused(four: Processes, tmp_path: Path, seed: int):
    check_right_mesh(four, tmp_path, seed)


@pytest.mark.parametrize(
    ("kind", "case", "subject", "phase", "mistake"),
    [
        ("pp", "stage alone", "1.norm.weight", "reduction", "it is not added over ranks: rank 1 has its own"),
        *(
            pytest.param(*row, marks=pytest.mark.deep)
            for row in (
                ("tp", "norms alone", "0.norm.weight", "reduction", "it is added over ranks 0, 2 alone"),
                ("pp", "norm of a stage", "the norm", "norm", "each rank has the norm of its own part"),
            )
        ),
    ],
)
def test_mistakes_on_a_mesh_are_named(
    four: Processes, tmp_path: Path, kind: str, case: str, subject: str, phase: str, mistake: str
):
    four.run(train, str(tmp_path), kind, QUICK_SEEDS[0], case)
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(make_net(), tmp_path, loss=mse)
    report: Any = refused.value.report
    assert (report.where, report.phase) == (subject, phase)
    assert mistake in report.mistake


def test_a_router_that_a_rank_does_not_add_up_is_named(four: Processes, tmp_path: Path):
    for case in ("right", "router of rank 1 missing"):
        four.run(train_expert_parallel, str(tmp_path / case), case)
    assert fpipe.compare_run(make_mixtures(), tmp_path / "right", loss=mse).where is None
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(make_mixtures(), tmp_path / "router of rank 1 missing", loss=mse)
    report: Any = refused.value.report
    assert (report.where, report.phase, report.mistake) == ("3.router.weight", "reduction", "rank 1 is missing")
