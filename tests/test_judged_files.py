"""The commands that judge files of gradients and of parameters after steps: what they read and print, exit codes."""

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import fpipe
from fpipe.cli.app import app
from fpipe.cli.judge import read_tensors
from fpipe.oracle.named_leaves import join_ranks

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

def step():
    model, params, batches = steps()
    return model, params, batches[0]

def nothing():
    return step()[0]
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path}/mine.py"


def net_and_batches() -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return names["net_and_batches"]()


def run(*typed: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, [str(word) for word in typed], prog_name="python -m fpipe")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def loop(scale: float = 1.0) -> dict[str, Tensor]:
    """Gradients of a loop by hand over 4 microbatches of the step."""
    net, batches = net_and_batches()
    for inputs, target in zip(*(half.split(2) for half in batches[0]), strict=True):
        (F.mse_loss(net(inputs), target) / 4 * scale).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def check_grads(*typed: object) -> tuple[int, str, str]:
    return run("check-grads", *typed)


SAID = """4 of 4 leaves bitwise equal to plain autograd, largest error 0
Compared with 4 microbatches, one after the other.
The undivided batch gives the same loss and gradients, to rounding.
"""


def test_one_file_a_rank(mine: str, tmp_path: Path):
    """Each rank writes its own stages; what both have must agree."""
    names = [*loop()]
    for rank, own in enumerate((names[:2], names[1:])):
        torch.save({name: loop()[name] for name in own}, tmp_path / f"rank{rank}.pt")
    assert check_grads(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", f"{mine}:step", "-m", 4) == (
        0,
        SAID,
        "",
    )


def test_safetensors(mine: str, tmp_path: Path):
    save_file(loop(), tmp_path / "grads.safetensors")
    assert check_grads(tmp_path / "grads.safetensors", "--model", f"{mine}:step") == (0, SAID, "")
    save_file({name: grad.bfloat16() for name, grad in loop().items()}, tmp_path / "grads.safetensors")
    code, said, _ = check_grads(tmp_path / "grads.safetensors", "--model", f"{mine}:step", "-m", 4)
    assert (code, said.splitlines()[1]) == (
        0,
        "Compared with 4 microbatches, one after the other; 4 equal to rounding.",
    )


def test_a_mistake_is_named_with_exit_code_1(mine: str, tmp_path: Path):
    torch.save(loop(4.0), tmp_path / "grads.pt")
    assert check_grads(tmp_path / "grads.pt", "--model", f"{mine}:step") == (
        1,
        "",
        """error: 4 of 4 gradients are not those of plain autograd.
4 x: summed over 4 microbatches or ranks instead of averaged?
  0.weight, 0.bias, 2.weight, 2.bias
""",
    )


def test_two_files_that_differ_are_refused(mine: str, tmp_path: Path):
    torch.save(loop(), tmp_path / "rank0.pt")
    torch.save(loop(2.0), tmp_path / "rank1.pt")
    code, _, said = check_grads(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", f"{mine}:step")
    assert code == 1
    assert f"'0.weight' is in {tmp_path}/rank0.pt and in {tmp_path}/rank1.pt, with different numbers" in said
    assert "add its gradients up first" in said


def test_safetensors_are_read_as_they_were_saved(tmp_path: Path):
    """bfloat16, scalars, empty tensors, a float16, and a file without any."""
    whole = {
        "half": torch.tensor([1.5], dtype=torch.float16),
        "scalar": torch.tensor(-2.5, dtype=torch.bfloat16),
        "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "empty": torch.zeros(0, 3),
    }
    for tensors in (whole, {}):
        save_file(tensors, tmp_path / "a.safetensors")
        found = read_tensors([str(tmp_path / "a.safetensors")])
        assert found.keys() == tensors.keys()
        assert all(one.dtype == tensors[name].dtype and torch.equal(one, tensors[name]) for name, one in found.items())


NO_DICT = "is no dict of tensors that torch.save wrote"
NO_FORMAT = "is no file in the safetensors format: "
HEADERS: dict[str, tuple[Any, str]] = {
    "a file cut off": ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, NO_FORMAT),
    "an overflow": ({"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}, NO_FORMAT),
    "integers": ({"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}, "'w' as I32; wanted are F64, F32, F16, BF16"),
    "a dtype of no name": ({"dtype": "F4", "shape": [24], "data_offsets": [0, 12]}, "'w' as F4; what is read is F64,"),
    "a long name": ({"dtype": "F32" * 10_000, "shape": [2], "data_offsets": [0, 8]}, NO_FORMAT),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_headers_of_safetensors_are_refused(case: str, tmp_path: Path):
    header, sentence = HEADERS[case]
    head = json.dumps({"w": header}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<3f", 1, 2, 3))
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        read_tensors([str(tmp_path / "a.safetensors")])
    assert len(str(error.value)) < 500


def test_a_file_wants_the_package_safetensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install 'fpipe\[safetensors\]'\.$"):
        read_tensors(["a.safetensors"])


OTHERS: dict[str, tuple[Any, str]] = {
    # A file without tensors was read, whose gradients were then missed.
    "a.safetensors": (struct.pack("<Q", 2**63) + b"{}", NO_FORMAT),
    "b.safetensors": (b"0F0 0F1", NO_FORMAT),
    "a.pt": (b"hello", NO_DICT),
    "b.pt": (nn.Linear(1, 1), NO_DICT),
    "c.pt": ([1, 2], "holds a list; wanted is a dict of tensors by name"),
    "d.pt": ({"step": 3}, "holds a int under 'step'; wanted are tensors by name"),
    "meta.pt": ({"w": torch.empty(3, device="meta")}, "on meta under 'w'; wanted are tensors by name"),
    "integer.pt": ({"w": torch.arange(3)}, "tensor of torch.int64, torch.strided, on cpu under 'w'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_refused(name: str, mine: str, tmp_path: Path):
    file, (written, sentence) = tmp_path / name, OTHERS[name]
    file.write_bytes(written) if isinstance(written, bytes) else torch.save(written, file)
    code, _, said = check_grads(file, "--model", f"{mine}:step")
    assert code == 1
    assert sentence in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "nested"],
)
def test_tensors_whose_numbers_cannot_be_compared_are_refused_by_name(made: Callable[[], Tensor], tmp_path: Path):
    """A quantized one in two files ended the process."""
    torch.save({"w": made()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt holds a .*tensor of .* under 'w'; wanted are tensors by name."):
        read_tensors([str(tmp_path / "a.pt")] * 2)


def test_nan_in_two_files_is_the_same_number(tmp_path: Path):
    """A gradient that overflowed on all of its ranks was refused as another on each."""
    for rank in range(2):
        torch.save({"w": torch.tensor([float("nan")])}, tmp_path / f"{rank}.pt")
    assert read_tensors([str(tmp_path / f"{rank}.pt") for rank in range(2)])["w"].isnan()


def test_what_is_no_model_is_a_usage_error(mine: str, tmp_path: Path):
    torch.save(loop(), tmp_path / "grads.pt")
    for text, sentence in (
        ("mine", "a function reads mine.py:step"),
        (f"{mine}:stop", "there is no function 'stop'"),
        ("none.py:step", "there is no file 'none.py'"),
    ):
        code, _, said = check_grads(tmp_path / "grads.pt", "--model", text)
        assert code == 2
        assert sentence in " ".join(said.split())
    assert "No such file" in check_grads(tmp_path / "none.pt", "--model", f"{mine}:step")[2]
    code, _, said = check_grads(tmp_path / "grads.pt", "--model", f"{mine}:nothing")
    assert code == 1
    assert "--model returns (model, params, batch) or (model, params, batch, state), found" in said


TYPED = ("--rule", "AdamW", "--lr", 0.01, "--clip", 0.5, "--set", "weight_decay=0.2", "--set", "betas=0.8,0.9", "-m", 2)


def trained(scale: float = 1.0) -> dict[str, Tensor]:
    """Two steps of a loop of one's own over two microbatches each."""
    net, batches = net_and_batches()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    for batch in batches:
        optimizer.zero_grad()
        for x, target in zip(*(half.chunk(2) for half in batch), strict=True):
            (F.mse_loss(net(x), target) / 2 * scale).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in net.named_parameters()}


def check_step(*typed: object) -> tuple[int, str, str]:
    return run("check-step", *typed)


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


def test_right_steps_are_told_right(mine: str, tmp_path: Path):
    torch.save(trained(), tmp_path / "after.pt")
    code, said, _ = check_step(tmp_path / "after.pt", "--model", f"{mine}:steps", *TYPED)
    assert (code, said.splitlines()[0]) == (0, "4 of 4 leaves bitwise equal to plain autograd, largest error 0")
    assert "Compared after 2 training steps." in said


@pytest.mark.parametrize("dp", [1, 2])
def test_parts_of_ranks_are_put_together(mine: str, tmp_path: Path, dp: int):
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2 * dp)]
    for file, own in zip(files, in_parts(trained(), dp=dp), strict=True):
        torch.save(own, file)
    code, said, _ = check_step(*files, "--model", f"{mine}:steps", *TYPED)
    assert (code, said.splitlines()[0]) == (0, "4 of 4 leaves bitwise equal to plain autograd, largest error 0")


def test_a_mistake_of_steps_is_named_with_exit_code_1(mine: str, tmp_path: Path):
    after = trained(2.0)
    torch.save(after, tmp_path / "after.pt")
    options = [one for one in TYPED if one not in ("--clip", 0.5)]
    code, _, said = check_step(tmp_path / "after.pt", "--model", f"{mine}:steps", *options)
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
    assert torch.equal(join_ranks([{"w": piece} for piece in each], {"w": (4, 2)})[0]["w"], whole)


def test_what_is_typed_wrongly_is_said(mine: str, tmp_path: Path):
    torch.save(trained(), tmp_path / "after.pt")
    typed = tmp_path / "after.pt", "--model", f"{mine}:steps"
    assert "NAME=NUMBER" in check_step(*typed, "--rule", "AdamW", "--lr", 0.1, "--set", "weight_decay=much")[2]
    assert "a list of 2, one for each step; found 3" in check_step(*typed, "--rule", "SGD", *["--lr", 0.1] * 3)[2]
    code, _, said = check_step(*typed, "--rule", "LBFGS", "--lr", 0.1)
    assert (code, "calls the loss again and again" in said) == (1, True)
