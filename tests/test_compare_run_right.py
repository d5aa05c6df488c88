"""Right runs of drawn nets, optimizers and loops are never accused."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fpipe

mse = nn.functional.mse_loss


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.recomputes = nn.Linear(width, width), False

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.attend, x, use_reentrant=False) if self.recomputes else self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Experts(nn.Module):
    """A mixture of experts, whose router takes the best of its logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.router(x).softmax(-1).topk(1, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            total = total + torch.where(choices == number, weights * expert(x), 0.0)
        return x + total


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, around drawn layers."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(7, width), nn.Sequential(*layers)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    lambda params: torch.optim.Adagrad(params, lr=0.01),
]


def check_right_run(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, dtype = draw.choice([4, 8]), draw.choice([torch.float32, torch.float32, torch.bfloat16])
    makers: list[Callable[[], nn.Module]] = [
        lambda: Attention(width),
        lambda: Experts(width),
        lambda: Normed(width),
        lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Identity()),
    ]
    net = Tied([draw.choice(makers)() for _ in range(draw.randint(1, 3))], width).to(dtype)
    plain_net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, Attention):
            module.recomputes = draw.random() < 0.5
    optimizer = draw.choice(OPTIMIZERS)(net.parameters())
    autocasts, clip, parts = draw.random() < 0.3, draw.choice([None, 0.3]), draw.choice([1, 2, 4])
    with fpipe.record_run(folder, net=net, optimizer=optimizer, steps=2) as record:
        for _ in range(3):
            ids = torch.randint(0, 7, (4, 5))
            with record.step((ids, ids), clip=clip):
                for part in ids.split(4 // parts):
                    with record.microbatch((part, part)):
                        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                            logits = net(part)
                        (token_loss(logits, part) / parts).backward()
                if clip is not None:
                    record.clipped(nn.utils.clip_grad_norm_(net.parameters(), clip))
                optimizer.step()
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    assert fpipe.compare_run(plain_net, folder, loss=token_loss).where is None


@pytest.mark.parametrize("seed", range(4))
def test_a_right_run_is_not_accused(tmp_path: Path, seed: int):
    check_right_run(tmp_path, seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4, 150))
def test_many_right_runs_are_not_accused(tmp_path: Path, seed: int):
    check_right_run(tmp_path, seed)
