"""The command that judges files of gradients: what it reads, what it prints, and its exit codes."""

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
from torch import nn
from typer.testing import CliRunner

from fpipe.cli.app import app
from fpipe.cli.judge import read_tensors

F = nn.functional
MODEL = """
import torch, fpipe

def step():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    return model, params, (torch.randn(8, 3), torch.randn(8, 1))

def nothing():
    return step()[0]
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path}/mine.py:step"


def loop(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A loop of one's own over 4 microbatches of the same step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = torch.randn(8, 3), torch.randn(8, 1)
    for inputs, target in zip(*(half.split(2) for half in batch), strict=True):
        (F.mse_loss(net(inputs), target) / 4 * scale).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def run(*typed: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["check-grads", *map(str, typed)], prog_name="python -m fpipe")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


SAID = """4 of 4 leaves bitwise equal to plain autograd, largest error 0
Compared with 4 microbatches, one after the other.
The undivided batch gives the same loss and gradients, to rounding.
"""


def test_one_file_a_rank(model: str, tmp_path: Path):
    """Each rank writes its own stages; what both have must agree."""
    names = [*loop()]
    for rank, own in enumerate((names[:2], names[1:])):
        torch.save({name: loop()[name] for name in own}, tmp_path / f"rank{rank}.pt")
    assert run(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", model, "-m", 4) == (0, SAID, "")


def test_safetensors(model: str, tmp_path: Path):
    save_file(loop(), tmp_path / "grads.safetensors")
    assert run(tmp_path / "grads.safetensors", "--model", model) == (0, SAID, "")
    save_file({name: grad.bfloat16() for name, grad in loop().items()}, tmp_path / "grads.safetensors")
    code, said, _ = run(tmp_path / "grads.safetensors", "--model", model, "-m", 4)
    assert (code, said.splitlines()[1]) == (
        0,
        "Compared with 4 microbatches, one after the other; 4 equal to rounding.",
    )


def test_a_mistake_is_named_with_exit_code_1(model: str, tmp_path: Path):
    torch.save(loop(4.0), tmp_path / "grads.pt")
    assert run(tmp_path / "grads.pt", "--model", model) == (
        1,
        "",
        """error: 4 of 4 gradients are not those of plain autograd.
4 x: summed over 4 microbatches or ranks instead of averaged?
  0.weight, 0.bias, 2.weight, 2.bias
""",
    )


def test_two_files_that_differ_are_refused(model: str, tmp_path: Path):
    torch.save(loop(), tmp_path / "rank0.pt")
    torch.save(loop(2.0), tmp_path / "rank1.pt")
    code, _, said = run(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", model)
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
def test_other_files_are_refused(name: str, model: str, tmp_path: Path):
    file, (written, sentence) = tmp_path / name, OTHERS[name]
    file.write_bytes(written) if isinstance(written, bytes) else torch.save(written, file)
    code, _, said = run(file, "--model", model)
    assert code == 1
    assert sentence in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
def test_tensors_whose_numbers_cannot_be_compared_are_refused_by_name(made: Callable[[], torch.Tensor], tmp_path: Path):
    """A quantized one in two files ended the process."""
    torch.save({"w": made()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt holds a .*tensor of .* under 'w'; wanted are tensors by name."):
        read_tensors([str(tmp_path / "a.pt")] * 2)


def test_nan_in_two_files_is_the_same_number(tmp_path: Path):
    """A gradient that overflowed on all of its ranks was refused as another on each."""
    for rank in range(2):
        torch.save({"w": torch.tensor([float("nan")])}, tmp_path / f"{rank}.pt")
    assert read_tensors([str(tmp_path / f"{rank}.pt") for rank in range(2)])["w"].isnan()


def test_what_is_no_model_is_a_usage_error(model: str, tmp_path: Path):
    torch.save(loop(), tmp_path / "grads.pt")
    for text, sentence in (
        ("mine", "a function reads mine.py:step"),
        (f"{model}s", "there is no function 'steps'"),
        ("none.py:step", "there is no file 'none.py'"),
    ):
        code, _, said = run(tmp_path / "grads.pt", "--model", text)
        assert code == 2
        assert sentence in " ".join(said.split())
    assert "No such file" in run(tmp_path / "none.pt", "--model", model)[2]
    code, _, said = run(tmp_path / "grads.pt", "--model", model.replace(":step", ":nothing"))
    assert code == 1
    assert "--model returns (model, params, batch) or (model, params, batch, state), found" in said
