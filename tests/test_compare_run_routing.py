"""Recorded runs of mixtures of experts: a choice that rounding flips is no mistake, and a wrong router is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from tests.processes import Processes, processes

mse = nn.functional.mse_loss
two = processes(2)
WIDTH, EXPERTS = 16, 8


class Experts(nn.Module):
    """Two of eight experts for each token, by scores that the module computes itself."""

    experts_per_token = 2

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.scores(x).topk(self.experts_per_token, -1)
        products = x[..., None, None, :] @ self.up[choices]
        return x + (weights[..., None, None] * products).squeeze(-2).sum(-2)

    def scores(self, x: Tensor) -> Tensor:
        return (x @ self.gate.T).softmax(-1)


class RoundedOtherwise(Experts):
    """Scores one unit of their dtype larger or smaller, as another kernel may round them."""

    def scores(self, x: Tensor) -> Tensor:
        signs = torch.tensor([-1, 1, 1, -1, 1, -1, 1, -1])
        return super().scores(x) * (1 + torch.finfo(x.dtype).eps * signs).to(x.dtype)


class RoundedAndScaled(RoundedOtherwise):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class Smallest(Experts):
    def scores(self, x: Tensor) -> Tensor:
        return (-(x @ self.gate.T)).softmax(-1)


class TopOne(Experts):
    experts_per_token = 1


def record_experts(folder: Path, kind: type[Experts], dtype: torch.dtype) -> nn.Module:
    """Record a step of a net whose experts are of a kind, and return the plain net."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Experts()).to(dtype)
    # Two pairs of experts have equal scores, so rounding alone chooses, whatever the CPU.
    net[1].gate.data[:4] = net[1].gate.data[:4:2].repeat_interleave(2, 0)
    plain_net = copy.deepcopy(net)
    net[1].__class__ = kind
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, t = (torch.randn(64, WIDTH).to(dtype) for _ in range(2))
    with fpipe.record_run(folder, net=net, optimizer=optimizer) as record, record.step((x, t)):
        for pair in zip(x.split(32), t.split(32), strict=True):
            with record.microbatch(pair):
                (mse(net(pair[0]), pair[1]) / 2).backward()
        optimizer.step()
    return plain_net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_that_rounding_flips_are_replayed_and_said(tmp_path: Path, dtype: torch.dtype):
    net = record_experts(tmp_path, RoundedOtherwise, dtype)
    report = fpipe.compare_run(net, tmp_path, loss=mse)
    assert report.where is None
    assert [note for note in report.notes if "rows its top-k differs, within rounding" in note]


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        # Used to be taken for rounding: noise flipped choices in the reference too.
        (RoundedAndScaled, "its output is off by 0.1 % of its norm"),
        (Smallest, "its top-k does not take the largest scores"),
        (TopOne, "its top-k has the shape [32, 1], not [32, 2]"),
    ],
)
def test_wrong_experts_are_named(tmp_path: Path, kind: type[Experts], mistake: str):
    net = record_experts(tmp_path, kind, torch.float32)
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(net, tmp_path, loss=mse)
    report: Any = refused.value.report
    assert (report.where, report.phase) == ("1", "forward")
    assert mistake in report.mistake


class GatherRows(torch.autograd.Function):
    """Join the tokens of all ranks; the gradient of a token is added over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ScatterRows.forward(ctx, grads[0])


class ScatterRows(torch.autograd.Function):
    """Add the outputs of all ranks, and keep this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return GatherRows.forward(ctx, grads[0])


class Router(nn.Linear):
    """Returns its logits, for a loss of balance, and the weights and numbers of two experts."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = super().forward(input)
        weights, choices = logits.softmax(-1).topk(2, -1)
        return logits, weights, choices


class Mixture(nn.Module):
    """The best two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        _, weights, choices = self.router(x)
        # [tokens, experts]: the weight of each expert, 0 where it is not chosen.
        shares = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, choices, weights)
        return x + self.combine(x, shares)

    def combine(self, x: Tensor, shares: Tensor) -> Tensor:
        return sum(share[:, None] * expert(x) for expert, share in zip(self.experts, shares.T, strict=True))


class ParallelMixture(Mixture):
    """A part of the experts on each rank, which take the tokens of all ranks."""

    def combine(self, x: Tensor, shares: Tensor) -> Tensor:
        local_shares = GatherRows.apply(shares).chunk(dist.get_world_size(), 1)[dist.get_rank()]
        return ScatterRows.apply(super().combine(GatherRows.apply(x), local_shares))


def make_mixtures() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(), nn.LayerNorm(WIDTH), Mixture(), nn.Linear(WIDTH, WIDTH))


def test_outputs_of_which_others_are_made_are_right(tmp_path: Path):
    """Used to count gradients of logits twice: as recorded, and as they flow from the weights."""
    net = make_mixtures()
    x, t = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    with fpipe.record_run(tmp_path, net=net) as record, record.step((x, t)), record.microbatch((x, t)):
        mse(net(x), t).backward()
    assert fpipe.compare_run(net, tmp_path, loss=mse).notes == ()


def train_expert_parallel(rank: int, folder: str, case: str) -> None:
    net, count = make_mixtures(), 4 // dist.get_world_size()
    for mixture in (net[1], net[3]):
        mixture.__class__ = ParallelMixture
        mixture.experts = mixture.experts[count * rank : count * (rank + 1)]
    experts = {param for name, param in net.named_parameters() if "experts" in name}
    names = {f"{i}.experts.{k}": f"{i}.experts.{count * rank + k}" for i in (1, 3) for k in range(count)}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    x, t = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    with fpipe.record_run(folder, net=net, optimizer=optimizer, names=names) as record, record.step((x, t)):
        for pair in zip(x.split(6), t.split(6), strict=True):
            with record.microbatch(pair):
                (mse(net(pair[0]), pair[1]) / 2).backward()
        for name, param in net.named_parameters():
            if case == "router of rank 1 missing" and rank == 1 and name == "3.router.weight":
                param.grad.zero_()
            if param not in experts and not (case == "router alone" and name == "3.router.weight"):
                dist.all_reduce(param.grad)
            if param not in experts or case != "experts summed":
                param.grad /= dist.get_world_size()
        record.reduced()
        optimizer.step()


def test_expert_parallel_mixtures_are_right(two: Processes, tmp_path: Path):
    two.run(train_expert_parallel, str(tmp_path), "right")
    report = fpipe.compare_run(make_mixtures(), tmp_path, loss=mse)
    assert report.where is None
    assert "1 is not judged: a rank has some of its parts." in report.notes
    names = {leaf.name for leaf in report.leaves}
    assert {"step 0: 3.experts.2, output 0", "step 0: reduced gradient of 3.experts.0.weight, rank 0"} <= names


def test_experts_that_are_summed_beside_averages_are_noted(two: Processes, tmp_path: Path):
    two.run(train_expert_parallel, str(tmp_path), "experts summed")
    notes = fpipe.compare_run(make_mixtures(), tmp_path, loss=mse).notes
    sentence = "Gradients such as that of 1.experts.0.weight are 2 x the mean of the ranks: is the loss divided?"
    assert sentence in notes


def test_router_weights_that_ranks_do_not_add_up_are_named(two: Processes, tmp_path: Path):
    two.run(train_expert_parallel, str(tmp_path), "router alone")
    with pytest.raises(fpipe.GradientMismatch) as refused:
        fpipe.compare_run(make_mixtures(), tmp_path, loss=mse)
    report: Any = refused.value.report
    assert (report.where, report.phase) == ("3.router.weight", "reduction")
    assert "it is not added over ranks" in report.mistake
