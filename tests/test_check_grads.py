"""The command that judges files of gradients: what it reads, what it prints, and its exit codes."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fpipe.cli.app import app
from fpipe.cli.tensor_files import read_tensors

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


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """As the safetensors package does: the length of the header, the header, the data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


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
    save_safetensors(loop(), tmp_path / "grads.safetensors")
    assert run(tmp_path / "grads.safetensors", "--model", model) == (0, SAID, "")
    save_safetensors({name: grad.bfloat16() for name, grad in loop().items()}, tmp_path / "grads.safetensors")
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


@pytest.mark.parametrize(
    ("name", "written", "sentence"),
    [
        ("a.safetensors", b"0F0 0F1", "is no file in the safetensors format: it has no such header"),
        ("a.safetensors", (9).to_bytes(8, "little") + b'{"a": {}}', "it has no such header"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", "it has no such header"),
        ("a.pt", b"0F0 0F1", "is no dict of tensors that torch.save wrote"),
        ("a.pt", b"hello", "is no dict of tensors that torch.save wrote"),
        ("a.pt", nn.Linear(1, 1), "is no dict of tensors that torch.save wrote"),
        ("a.pt", [1, 2], "holds a list; wanted is a dict of tensors by name"),
        ("a.pt", {"step": 3}, "holds a int under 'step'; wanted are tensors by name"),
    ],
)
def test_other_files_are_refused(name: str, written, sentence: str, model: str, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(written) if isinstance(written, bytes) else torch.save(written, file)
    code, _, said = run(file, "--model", model)
    assert code == 1
    assert sentence in said


def test_a_file_that_is_cut_off_is_refused(model: str, tmp_path: Path):
    file = tmp_path / "grads.safetensors"
    save_safetensors(loop(), file)
    file.write_bytes(file.read_bytes()[:-4])
    assert "is cut off: '2.bias' ends at byte 84 of its data, which has 80." in run(file, "--model", model)[2]
    assert "No such file" in run(tmp_path / "none.pt", "--model", model)[2]


def by_hand(path: Path, data: bytes, **tensors: tuple[str, list[int], int, int]) -> str:
    """A file as the public description of the format has it."""
    words = ("dtype", "shape", "data_offsets")
    header = {name: dict(zip(words, (*one[:2], one[2:]), strict=True)) for name, one in tensors.items()}
    text = json.dumps({"__metadata__": {"step": "3"}, **header}).encode() + b"   "  # blanks may fill it up
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def test_safetensors_are_read_as_the_format_says(tmp_path: Path):
    """Any order, bfloat16, scalars, empty tensors, and metadata beside them."""
    data = struct.pack("<e", 1.5) + struct.pack("<f", -2.5)[2:] + struct.pack("<4f", 1, 2, 3, 4)
    file = by_hand(
        tmp_path / "a.safetensors",
        data,
        w=("F32", [2, 2], 4, 20),
        scalar=("BF16", [], 2, 4),
        half=("F16", [1], 0, 2),
        empty=("F32", [0, 3], 20, 20),
    )
    found = read_tensors([file])
    assert {name: (one.dtype, one.tolist(), (*one.shape,)) for name, one in found.items()} == {
        "half": (torch.float16, [1.5], (1,)),
        "scalar": (torch.bfloat16, -2.5, ()),
        "w": (torch.float32, [[1.0, 2.0], [3.0, 4.0]], (2, 2)),
        "empty": (torch.float32, [], (0, 3)),
    }
    assert read_tensors([by_hand(tmp_path / "none.safetensors", b"")]) == {}


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": ("F32", [2], 0, 8), "b": ("F32", [2], 4, 12)}, "bytes from 4 to 12, and those before it end at 8"),
        ({"a": ("F32", [1], 0, 4), "b": ("F32", [1], 8, 12)}, "bytes from 8 to 12, and those before it end at 4"),
        ({"a": ("F32", [1], -4, 0)}, "'a', F32 of shape [1], is said to be in the bytes from -4 to 0"),
        ({"a": ("F32", [2], 0, 12)}, "'a', F32 of shape [2], is said to be in the bytes from 0 to 12"),
        ({"a": ("F32", [-3, -1], 0, 12)}, "'a', F32 of shape [-3, -1]"),
        ({"a": ("F32", [2], 0, 8)}, "4 bytes are of no tensor"),
        ({"a": ("F32", [4], 0, 16)}, "is cut off: 'a' ends at byte 16 of its data, which has 12"),
        ({"a": ("I32", [3], 0, 12)}, "holds 'a' as I32; wanted are F64, F32, F16, BF16"),
    ],
)
def test_wrong_safetensors_are_refused(tensors, sentence: str, tmp_path: Path):
    """Tensors that overlap were read as they are."""
    file = by_hand(tmp_path / "a.safetensors", struct.pack("<3f", 1, 2, 3), **tensors)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_tensors([file])


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
    code, _, said = run(tmp_path / "grads.pt", "--model", model.replace(":step", ":nothing"))
    assert code == 1
    assert "--model returns (model, params, batch) or (model, params, batch, state), found" in said
