"""Recorded runs under tensor parallelism, pipelines, expert parallelism and digests: right ones, and their mistakes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fpipe
from tests.processes import Processes, processes

mse = nn.functional.mse_loss
two = processes(2)
WIDTH, HEADS = 8, 2


class Rotary(nn.Module):
    """Turn pairs of numbers by an angle that grows with the position."""

    first_position = 0

    def forward(self, x: Tensor) -> Tensor:
        angles = (torch.arange(x.shape[-2]) + self.first_position)[:, None] * torch.tensor([1.0, 0.1])
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention over the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for project in self.qkv)
        scores = nn.functional.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(scores.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def make_batches(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return [(torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH)) for _ in range(2)]


def refusal(folder: Path, net: nn.Module | None = None, loss: Any = mse) -> Any:
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(make_net() if net is None else net, folder, loss=loss)
    return refused.value.report


def train_tensor_parallel(rank: int, folder: str, case: str) -> None:
    """Train with projections cut by heads, and norms that see half of the sequence on each rank."""
    tp, net = init_device_mesh("cpu", (2,)), make_net()
    cut_columns, cut_rows = (
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
    )
    plan = {f"attention.qkv.{k}": cut_columns for k in range(3)} | {"attention.out": cut_rows}
    for block in net:
        parallelize_module(block, tp, plan | {"up": cut_columns, "down": cut_rows})
    norms = [param for param in net.parameters() if not isinstance(param, DTensor)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with fpipe.record_run(folder, net=net, optimizer=optimizer) as record:
        for x, t in make_batches():
            # The mean over both halves of the sequence.
            x, t = (half.chunk(2, 1)[rank] for half in (x, t))
            with record.step((x, t)):
                with record.microbatch((x, t)):
                    (mse(net(x), t) / 2).backward()
                for param in norms if case != "norms alone" else ():
                    dist.all_reduce(param.grad)
                record.reduced()
                optimizer.step()
                optimizer.zero_grad()


def test_tensor_parallel_layers_are_right(two: Processes, tmp_path: Path):
    two.run(train_tensor_parallel, str(tmp_path), "right")
    report = fpipe.compare_run(make_net(), tmp_path, loss=mse)
    assert (report.where, report.mistake) == (None, None)
    assert not [note for note in report.notes if "not judged" in note]
    names = {leaf.name for leaf in report.leaves}
    assert {"step 0: 1.attention.qkv.2, output 0", "step 1: gradient of output 0 of 0.norm"} <= names


def test_a_norm_that_tensor_parallel_ranks_do_not_add_up_is_named(two: Processes, tmp_path: Path):
    two.run(train_tensor_parallel, str(tmp_path), "norms alone")
    report = refusal(tmp_path)
    assert (report.where, report.phase) == ("0.norm.weight", "reduction")
    assert "it is not added over ranks" in report.mistake


class SumForward(torch.autograd.Function):
    """Add the parts of all ranks in the forward; the gradient is every rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class SumBackward(torch.autograd.Function):
    """Add the gradients of all ranks in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return SumForward.forward(ctx, grads[0])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class SplitMLP(MLP):
    """The same by hand, with plain parts of the weights on each rank."""

    adds_bias_twice = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(SumBackward.apply(x)))
        if self.adds_bias_twice:
            return SumForward.apply(self.down(hidden))
        return SumForward.apply(hidden @ self.down.weight.T) + self.down.bias


def make_mlps() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), nn.Tanh(), MLP())


def train_split(rank: int, folder: str, case: str) -> None:
    net = make_mlps()
    for mlp in (net[0], net[2]):
        mlp.__class__ = SplitMLP
        mlp.up.weight, mlp.up.bias, mlp.down.weight = (
            nn.Parameter(param.detach().chunk(2, dim)[rank].clone())
            for param, dim in ((mlp.up.weight, 0), (mlp.up.bias, 0), (mlp.down.weight, 1))
        )
    net[2].adds_bias_twice = case == "bias twice"
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    shards = {"*.up.*": 0, "*.down.weight": 1}
    with fpipe.record_run(folder, net=net, optimizer=optimizer, shards=shards) as record:
        for x, t in make_batches():
            with record.step((x, t)):
                with record.microbatch((x, t)):
                    mse(net(x), t).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_plain_parts_are_right(two: Processes, tmp_path: Path):
    two.run(train_split, str(tmp_path), "right")
    report = fpipe.compare_run(make_mlps(), tmp_path, loss=mse)
    assert (report.where, report.mistake, report.notes) == (None, None, ())


def test_a_bias_that_every_rank_adds_is_named(two: Processes, tmp_path: Path):
    two.run(train_split, str(tmp_path), "bias twice")
    report = refusal(tmp_path, make_mlps())
    assert (report.where, report.phase, report.mistake) == ("2", "forward", "its down.bias is added 2 times")


def stage_of(net: nn.Module, names: tuple[str, ...]) -> Any:
    stage_net = copy.deepcopy(net)
    for name, _ in net.named_children():
        if name not in names:
            delattr(stage_net, name)
    return stage_net


def make_tied() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7, bias=False))
    net[2].weight = net[0].weight
    return net


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def train_pipeline(rank: int, folder: str, case: str) -> None:
    net, loss, names = (make_tied(), token_loss, ("01", "2")) if "tied" in case else (make_net(), mse, "01")
    stage_net = stage_of(net, tuple(names[rank]))
    if case == "shifted" and rank == 1:
        stage_net[0].attention.rotary.first_position = 1
    schedule = ScheduleGPipe(PipelineStage(stage_net, rank, 2, torch.device("cpu")), 2, loss_fn=loss)
    optimizer = torch.optim.SGD(stage_net.parameters(), lr=0.1)
    torch.manual_seed(1)
    batches = [(ids, ids) for ids in torch.randint(0, 7, (2, 4, 3))] if "tied" in case else make_batches()
    with fpipe.record_run(folder, net=stage_net, optimizer=optimizer) as record:
        for x, t in batches:
            with record.step():
                with record.microbatch():
                    schedule.step(x) if rank == 0 else schedule.step(target=t)
                if case == "tied":
                    dist.all_reduce(next(iter(stage_net.parameters())).grad)
                record.reduced()
                optimizer.step()
                optimizer.zero_grad()


def test_a_tied_weight_on_two_stages_is_right(two: Processes, tmp_path: Path):
    two.run(train_pipeline, str(tmp_path), "tied")
    assert fpipe.compare_run(make_tied(), tmp_path, loss=token_loss).where is None


def test_mistakes_of_pipelines_are_named(two: Processes, tmp_path: Path):
    two.run(train_pipeline, str(tmp_path / "shifted"), "shifted")
    report = refusal(tmp_path / "shifted")
    assert (report.where, report.phase) == ("1.attention.rotary", "forward")
    two.run(train_pipeline, str(tmp_path / "alone"), "tied alone")
    report = refusal(tmp_path / "alone", make_tied(), token_loss)
    assert (report.where, report.phase) == ("0.weight", "reduction")
    assert "it is not added over ranks: rank 0 has its own" in report.mistake


def train_digest(rank: int, folder: str, case: str) -> None:
    net: Any = make_net()
    replicas = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with fpipe.record_run(folder, net=replicas, optimizer=optimizer, digest=True) as record:
        for x, t in make_batches(rank):
            with record.step((x, t), clip=0.1):
                with record.microbatch((x, t)):
                    mse(replicas(x), t).backward()
                record.clipped(nn.utils.clip_grad_norm_(net.parameters(), 0.2 if case == "clip" else 0.1))
                optimizer.step()
                optimizer.zero_grad()
            if case == "stale" and rank == 1:
                net.load_state_dict(make_net().state_dict())


@pytest.mark.parametrize(
    ("case", "subject", "phase"),
    [("right", None, None), ("clip", "the clip", "clip"), ("stale", "0.norm.weight", "start")],
)
def test_a_digest_shows_reduction_norm_clip_and_copies(
    two: Processes, tmp_path: Path, case: str, subject: str | None, phase: str | None
):
    two.run(train_digest, str(tmp_path), case)
    report = refusal(tmp_path) if subject else fpipe.compare_run(make_net(), tmp_path, loss=mse)
    assert (report.where, report.phase) == (subject, phase)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 600_000
