"""Recorded runs on two processes: replicas, DDP, FSDP2 and torch's pipeline, right ones and mistakes."""

import copy
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import fpipe
from tests.processes import Processes, processes

mse = nn.functional.mse_loss
two = processes(2)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


def make_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(10 + rank)
    return [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(2)]


def reduce_grads(net: nn.Module, rank: int, case: str) -> None:
    for name, param in net.named_parameters():
        assert param.grad is not None
        if case == "norm not reduced" and name == "2.weight":
            continue
        if case == "rank missing" and rank == 1:
            param.grad.zero_()
        dist.all_reduce(param.grad)
        param.grad /= 2
        if case == "reduced twice":
            dist.all_reduce(param.grad)
            dist.all_reduce(param.grad)
        if case == "divided twice":
            param.grad /= 2


def train(rank: int, folder: str, case: str) -> None:
    net: Any = make_net()
    if "ddp" in case:
        net = DistributedDataParallel(net)
    if "fsdp2" in case:
        net = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with fpipe.record_run(folder, net=net, optimizer=optimizer) as record:
        for x, t in make_batches(rank):
            with record.step((x, t), clip=0.1):
                for a, b in zip(x.split(4), t.split(4), strict=True):
                    with record.microbatch((a, b)), net.no_sync() if "no sync" in case else nullcontext():
                        (mse(net(a), b) / 2).backward()
                if case == "clip first":
                    record.clipped(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                if "ddp" not in case and "fsdp2" not in case:
                    reduce_grads(net, rank, case)
                record.reduced()
                clip = 0.1 if case != "clip per rank" or rank == 0 else 0.05
                params = [p.grad.to_local() for p in net.parameters()] if "norm of parts" in case else None
                if params is not None:
                    norm = nn.utils.get_total_norm(params)
                    torch._foreach_mul_(params, 0.1 / float(norm + 1e-6))
                    record.clipped(norm)
                elif case != "clip first":
                    record.clipped(nn.utils.clip_grad_norm_(net.parameters(), clip))
                optimizer.step()
                optimizer.zero_grad()
            if case == "stale rank" and rank == 1:
                net.load_state_dict(make_net().state_dict())


@pytest.mark.parametrize("case", ["replicas", "ddp", "fsdp2"])
def test_right_replicas_are_right(two: Processes, tmp_path: Path, case: str):
    two.run(train, str(tmp_path), case)
    report = fpipe.compare_run(make_net(), tmp_path, loss=mse)
    assert (report.where, report.mistake) == (None, None)
    assert not [note for note in report.notes if "not judged" in note]


@pytest.mark.parametrize(
    ("case", "subject", "phase", "mistake"),
    [
        ("norm not reduced", "2.weight", "reduction", "it is not added over ranks: rank 0 has its own"),
        ("reduced twice", "0.weight", "reduction", "it is 4 x the mean of 2 ranks: reduced twice?"),
        ("ddp, no sync", "0.weight", "reduction", "it is not added over ranks: rank 0 has its own"),
        ("divided twice", "0.weight", "reduction", "it is 0.5 x the mean of 2 ranks: divided twice"),
        ("clip first", "the clip", "clip", "it stands before the reduction"),
        ("fsdp2, norm of parts", "the norm", "norm", "each rank has the norm of its own part"),
        ("rank missing", "0.weight", "reduction", "rank 1 is missing"),
        ("clip per rank", "the clip", "clip", "x those before the clip, not"),
        (
            "stale rank",
            "0.weight",
            "start",
            "the parameters of rank 1 are those before the step before: its update is lost",
        ),
    ],
)
def test_wrong_replicas_are_named(two: Processes, tmp_path: Path, case: str, subject: str, phase: str, mistake: str):
    two.run(train, str(tmp_path), case)
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(make_net(), tmp_path, loss=mse)
    report: Any = refused.value.report
    assert (report.where, report.phase) == (subject, phase)
    assert mistake in report.mistake


def train_drawn(rank: int, folder: str, seed: int) -> None:
    """Train replicas that a seed draws: how they reduce, dtype, optimizer, clip, and the order of microbatches."""
    draw = random.Random(seed)
    kind, dtype = draw.choice(["ddp", "fsdp2", "replicas"]), draw.choice([torch.float32, torch.bfloat16])
    net: Any = make_net().to(dtype)
    if kind == "ddp":
        net = DistributedDataParallel(net)
    if kind == "fsdp2":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    rule, settings = draw.choice([(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
    # On the CPU torch 2.13's fused SGD computes another momentum in bfloat16, which is rightly accused.
    is_fusible = kind != "fsdp2" and (rule, dtype) != (torch.optim.SGD, torch.bfloat16)
    kernel = draw.choice(["foreach", "fused"]) if is_fusible else "foreach"
    optimizer = rule(net.parameters(), lr=0.01, **settings, **{kernel: True})
    clip, parts, is_reversed = draw.choice([None, 0.1]), draw.choice([1, 2, 4]), draw.random() < 0.5
    with fpipe.record_run(folder, net=net, optimizer=optimizer) as record:
        for batch in make_batches(rank):
            x, t = (half.to(dtype) for half in batch)
            pairs = [*zip(x.chunk(parts), t.chunk(parts), strict=True)]
            with record.step((x, t), clip=clip):
                for a, b in reversed(pairs) if is_reversed else pairs:
                    with record.microbatch((a, b)):
                        (mse(net(a), b) / parts).backward()
                if kind == "replicas":
                    reduce_grads(net, rank, "right")
                    record.reduced()
                if clip is not None:
                    record.clipped(nn.utils.clip_grad_norm_(net.parameters(), clip))
                optimizer.step()
                optimizer.zero_grad()


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_replicas_are_not_accused(two: Processes, tmp_path: Path, seed: int):
    two.run(train_drawn, str(tmp_path), seed)
    # The record says the dtype of each call.
    assert fpipe.compare_run(make_net(), tmp_path, loss=mse).where is None


def train_dropout(rank: int, folder: str, offset: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    batches = make_batches(rank)
    torch.manual_seed(offset * rank)
    with fpipe.record_run(folder, net=net) as record, record.step():
        with record.microbatch():
            mse(net(batches[0][0]), batches[0][1]).backward()
        for param in net.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
        record.reduced()


def test_equal_seeds_are_noted(two: Processes, tmp_path: Path):
    sentence = "1 draws the same numbers on ranks 0 and 1: are their seeds equal?"
    for offset in (0, 1):
        two.run(train_dropout, str(tmp_path / str(offset)), offset)
        notes = fpipe.compare_run(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), tmp_path / str(offset)).notes
        assert (sentence in notes) == (offset == 0)


def train_pipeline(rank: int, folder: str, memory_is_nan: bool) -> None:
    # torch learns the shapes of stages by a trial on uninitialized memory, which it fills with NaN when it is asked to.
    torch.use_deterministic_algorithms(memory_is_nan)
    try:
        run_pipeline(rank, folder)
    finally:
        torch.use_deterministic_algorithms(False)


def run_pipeline(rank: int, folder: str) -> None:
    stage_net = copy.deepcopy(make_net())
    for name in ("2", "3") if rank == 0 else ("0", "1"):
        delattr(stage_net, name)
    schedule = Schedule1F1B(PipelineStage(stage_net, rank, 2, torch.device("cpu")), 4, loss_fn=mse)
    optimizer = torch.optim.SGD(stage_net.parameters(), lr=0.1, momentum=0.9)
    with fpipe.record_run(folder, net=stage_net, optimizer=optimizer) as record:
        for x, t in make_batches(0):
            with record.step():
                with record.microbatch():
                    schedule.step(x) if rank == 0 else schedule.step(target=t)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("memory_is_nan", [False, True])
def test_a_pipeline_is_right(two: Processes, tmp_path: Path, memory_is_nan: bool):
    two.run(train_pipeline, str(tmp_path), memory_is_nan)
    report = fpipe.compare_run(make_net(), tmp_path, loss=mse)
    assert (report.where, report.mistake) == (None, None)
    assert report.max_error < 1e-5
    names = {leaf.name for leaf in report.leaves}
    assert {"step 0: gradient of 3.weight after microbatch 0, rank 1", "step 1: 0, output 0"} <= names
    assert report.notes == ("The first forward adds no gradient: it counts as a pipeline's trial run of shapes.",)
