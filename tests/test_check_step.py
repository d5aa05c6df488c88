"""The command that judges files of parameters after training steps, of one process or a part of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app
from fpipe.oracle.named_leaves import put_together

F = nn.functional
MODEL = """
import torch, fpipe

def net_and_batches():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return net, [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(2)]

def steps():
    net, batches = net_and_batches()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    return model, params, batches
"""
TYPED = ("--rule", "AdamW", "--lr", 0.01, "--clip", 0.5, "--set", "weight_decay=0.2", "--set", "betas=0.8,0.9", "-m", 2)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path}/mine.py:steps"


def trained(scale: float = 1.0) -> dict[str, Tensor]:
    """Two steps of a loop of one's own over two microbatches each."""
    named: dict[str, Any] = {}
    exec(MODEL, named)
    net, batches = named["net_and_batches"]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    for batch in batches:
        optimizer.zero_grad()
        for x, target in zip(*(half.chunk(2) for half in batch), strict=True):
            (F.mse_loss(net(x), target) / 2 * scale).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in net.named_parameters()}


def run(*typed: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["check-step", *map(str, typed)], prog_name="python -m fpipe")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def in_parts(whole: dict[str, Tensor], tp: int = 2, dp: int = 1) -> list[dict[str, Tensor]]:
    """Each rank's part: the first layer by columns, the second by rows, biases of rows whole, dp copies of all."""
    dims = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    each = [
        {
            name: leaf.chunk(tp, dims[name])[rank].clone() if name in dims else leaf.clone()
            for name, leaf in whole.items()
        }
        for rank in range(tp)
    ]
    return [{name: leaf.clone() for name, leaf in rank.items()} for _ in range(dp) for rank in each]


def test_right_steps_are_told_right(model: str, tmp_path: Path):
    torch.save(trained(), tmp_path / "after.pt")
    code, said, _ = run(tmp_path / "after.pt", "--model", model, *TYPED)
    assert (code, said.splitlines()[0]) == (0, "4 of 4 leaves bitwise equal to plain autograd, largest error 0")
    assert "Compared after 2 training steps." in said


@pytest.mark.parametrize("dp", [1, 2])
def test_parts_of_ranks_are_put_together(model: str, tmp_path: Path, dp: int):
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2 * dp)]
    for file, own in zip(files, in_parts(trained(), dp=dp), strict=True):
        torch.save(own, file)
    code, said, _ = run(*files, "--model", model, *TYPED)
    assert (code, said.splitlines()[0]) == (0, "4 of 4 leaves bitwise equal to plain autograd, largest error 0")


def test_a_mistake_is_named_with_exit_code_1(model: str, tmp_path: Path):
    after = trained(2.0)
    torch.save(after, tmp_path / "after.pt")
    options = [one for one in TYPED if one not in ("--clip", 0.5)]
    code, _, said = run(tmp_path / "after.pt", "--model", model, *options)
    assert code == 1
    assert "of 4 parameters are not those of plain autograd and AdamW" in said


def test_ranks_as_live_tensors():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    before = fpipe.tree.tree_map(lambda leaf: leaf.clone(), params)
    batch = torch.randn(8, 3), torch.randn(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    optimizer.step()
    whole = {name: leaf.detach() for name, leaf in net.named_parameters()}
    ranks = in_parts(whole)
    assert fpipe.compare_step(model, before, batch, ranks, rule="SGD", lr=0.1).leaves
    stages = [{name: whole[name] for name in stage} for stage in before]
    assert fpipe.compare_step(model, before, batch, stages, rule="SGD", lr=0.1).leaves
    ranks[1]["2.bias"] += 1.0
    with pytest.raises(fpipe.GradientMismatch, match=r"not added over replicas or tensor-parallel ranks: 2.bias\."):
        fpipe.compare_step(model, before, batch, ranks, rule="SGD", lr=0.1)
    del ranks[1]["0.weight"]
    ranks[1]["2.bias"] -= 1.0
    with pytest.raises(ValueError, match=r"in shapes \[2, 3\], which along no dimension make the whole \[4, 3\]"):
        fpipe.compare_step(model, before, batch, ranks, rule="SGD", lr=0.1)


@pytest.mark.parametrize("order", ["neighbours", "a round apart"])
@pytest.mark.parametrize("values", ["zeros", "numbers"])
def test_copies_of_pieces_count_once(order: str, values: str):
    """Pieces that are all zero look like copies of each other, and are not."""
    whole = torch.zeros(4, 2) if values == "zeros" else torch.arange(8.0).reshape(4, 2)
    pieces = [*whole.chunk(2)]
    each = [pieces[0], pieces[0], pieces[1], pieces[1]] if order == "neighbours" else pieces * 2
    assert torch.equal(put_together([{"w": piece} for piece in each], {"w": (4, 2)})[0]["w"], whole)


def test_what_is_typed_wrongly_is_said(model: str, tmp_path: Path):
    torch.save(trained(), tmp_path / "after.pt")
    typed = tmp_path / "after.pt", "--model", model
    assert "NAME=NUMBER" in run(*typed, "--rule", "AdamW", "--lr", 0.1, "--set", "weight_decay=much")[2]
    assert "a list of 2, one for each step; found 3" in run(*typed, "--rule", "SGD", *["--lr", 0.1] * 3)[2]
    code, _, said = run(*typed, "--rule", "LBFGS", "--lr", 0.1)
    assert (code, "calls the loss again and again" in said) == (1, True)
