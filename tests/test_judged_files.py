"""Commands that check files of gradients and of trained parameters: output, messages, exit codes."""

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
def model_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return f"{tmp_path}/mine.py"


def net_and_batches() -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return names["net_and_batches"]()


def run_command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="python -m fpipe")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def loop_grads(scale: float = 1.0) -> dict[str, Tensor]:
    """Return gradients of a hand-written loop over 4 microbatches of the step."""
    net, batches = net_and_batches()
    for inputs, target in zip(*(half.split(2) for half in batches[0]), strict=True):
        (F.mse_loss(net(inputs), target) / 4 * scale).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def check_grads(*arguments: object) -> tuple[int, str, str]:
    return run_command("check-grads", *arguments)


ALL_EQUAL = """4 of 4 leaves bitwise equal to plain autograd, largest error 0
Compared with 4 microbatches, one after the other.
The undivided batch gives the same loss and gradients, to rounding.
"""


def test_gradients_may_come_in_one_file_a_rank(model_file: str, tmp_path: Path):
    """Each rank writes its stages; where two write one leaf, they must agree."""
    names = [*loop_grads()]
    for rank, local_names in enumerate((names[:2], names[1:])):
        torch.save({name: loop_grads()[name] for name in local_names}, tmp_path / f"rank{rank}.pt")
    assert check_grads(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", f"{model_file}:step", "-m", 4) == (
        0,
        ALL_EQUAL,
        "",
    )


def test_gradients_may_come_as_safetensors(model_file: str, tmp_path: Path):
    save_file(loop_grads(), tmp_path / "grads.safetensors")
    assert check_grads(tmp_path / "grads.safetensors", "--model", f"{model_file}:step") == (0, ALL_EQUAL, "")
    save_file({name: grad.bfloat16() for name, grad in loop_grads().items()}, tmp_path / "grads.safetensors")
    code, printed, _ = check_grads(tmp_path / "grads.safetensors", "--model", f"{model_file}:step", "-m", 4)
    assert (code, printed.splitlines()[1]) == (
        0,
        "Compared with 4 microbatches, one after the other; 4 equal to rounding.",
    )


def test_a_mistake_is_named_with_exit_code_1(model_file: str, tmp_path: Path):
    torch.save(loop_grads(4.0), tmp_path / "grads.pt")
    assert check_grads(tmp_path / "grads.pt", "--model", f"{model_file}:step") == (
        1,
        "",
        """error: 4 of 4 gradients are not those of plain autograd.
4 x: summed over 4 microbatches or ranks instead of averaged?
  0.weight, 0.bias, 2.weight, 2.bias
""",
    )


def test_two_files_that_differ_are_refused(model_file: str, tmp_path: Path):
    torch.save(loop_grads(), tmp_path / "rank0.pt")
    torch.save(loop_grads(2.0), tmp_path / "rank1.pt")
    code, _, message = check_grads(tmp_path / "rank0.pt", tmp_path / "rank1.pt", "--model", f"{model_file}:step")
    assert code == 1
    assert f"'0.weight' is in {tmp_path}/rank0.pt and in {tmp_path}/rank1.pt, with different numbers" in message
    assert "add its gradients up first" in message


def test_safetensors_keep_dtypes_shapes_and_numbers(tmp_path: Path):
    """Half precision, scalars, empty tensors, and a file without tensors."""
    saved = {
        "half": torch.tensor([1.5], dtype=torch.float16),
        "scalar": torch.tensor(-2.5, dtype=torch.bfloat16),
        "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "empty": torch.zeros(0, 3),
    }
    for tensors in (saved, {}):
        save_file(tensors, tmp_path / "a.safetensors")
        read_back = read_tensors([str(tmp_path / "a.safetensors")])
        assert read_back.keys() == tensors.keys()
        assert all(
            leaf.dtype == tensors[name].dtype and torch.equal(leaf, tensors[name]) for name, leaf in read_back.items()
        )


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


def test_a_safetensors_file_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = r"needs the package safetensors: pip install safetensors\.$"
    with pytest.raises(ModuleNotFoundError, match=message):
        read_tensors(["a.safetensors"])


WRONG_FILES: dict[str, tuple[Any, str]] = {
    # Used to be read as a file without tensors, whose gradients were then reported missing.
    "a.safetensors": (struct.pack("<Q", 2**63) + b"{}", NO_FORMAT),
    "b.safetensors": (b"0F0 0F1", NO_FORMAT),
    "a.pt": (b"hello", NO_DICT),
    "b.pt": (nn.Linear(1, 1), NO_DICT),
    "c.pt": ([1, 2], "holds a list; wanted is a dict of tensors by name"),
    "d.pt": ({"step": 3}, "holds a int under 'step'; wanted are tensors by name"),
    "meta.pt": ({"w": torch.empty(3, device="meta")}, "on meta under 'w'; wanted are tensors by name"),
    "integer.pt": ({"w": torch.arange(3)}, "tensor of torch.int64, torch.strided, on cpu under 'w'"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_files_without_tensors_by_name_are_refused(name: str, model_file: str, tmp_path: Path):
    file, (content, sentence) = tmp_path / name, WRONG_FILES[name]
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    code, _, message = check_grads(file, "--model", f"{model_file}:step")
    assert code == 1
    assert sentence in message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "nested"],
)
def test_tensors_whose_numbers_cannot_be_compared_are_refused_by_name(make: Callable[[], Tensor], tmp_path: Path):
    """A quantized tensor in two files used to end the process."""
    torch.save({"w": make()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt holds a .*tensor of .* under 'w'; wanted are tensors by name."):
        read_tensors([str(tmp_path / "a.pt")] * 2)


def test_nan_in_two_files_counts_as_equal(tmp_path: Path):
    """Used to refuse a gradient that overflowed on all ranks: NaN differs from NaN."""
    for rank in range(2):
        torch.save({"w": torch.tensor([float("nan")])}, tmp_path / f"{rank}.pt")
    assert read_tensors([str(tmp_path / f"{rank}.pt") for rank in range(2)])["w"].isnan()


def test_a_wrong_model_argument_is_a_usage_error(model_file: str, tmp_path: Path):
    torch.save(loop_grads(), tmp_path / "grads.pt")
    for text, sentence in (
        ("mine", "a function reads mine.py:step"),
        (f"{model_file}:stop", "there is no function 'stop'"),
        ("none.py:step", "there is no file 'none.py'"),
    ):
        code, _, message = check_grads(tmp_path / "grads.pt", "--model", text)
        assert code == 2
        assert sentence in " ".join(message.split())
    assert "No such file" in check_grads(tmp_path / "none.pt", "--model", f"{model_file}:step")[2]
    code, _, message = check_grads(tmp_path / "grads.pt", "--model", f"{model_file}:nothing")
    assert code == 1
    assert "--model returns (model, params, batch) or (model, params, batch, state), found" in message


ADAMW = ("--rule", "AdamW", "--lr", 0.01, "--clip", 0.5, "--set", "weight_decay=0.2", "--set", "betas=0.8,0.9", "-m", 2)


EQUAL_STEPS = "4 of 4 tensors of the run bitwise equal to the reference, largest error 0"


def trained_params(scale: float = 1.0) -> dict[str, Tensor]:
    """Return parameters after two steps of a hand-written loop over two microbatches each."""
    net, batches = net_and_batches()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    for batch in batches:
        optimizer.zero_grad()
        for x, target in zip(*(half.chunk(2) for half in batch), strict=True):
            (F.mse_loss(net(x), target) / 2 * scale).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in net.named_parameters()}


def check_step(*arguments: object) -> tuple[int, str, str]:
    return run_command("check-step", *arguments)


def rank_parts(params: dict[str, Tensor], tp: int = 2, dp: int = 1) -> list[dict[str, Tensor]]:
    """Return each rank's part: the first layer by columns, the second by rows, its bias whole, dp copies of all."""
    dims = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    parts_by_rank = [
        {
            name: leaf.chunk(tp, dims[name])[rank].clone() if name in dims else leaf.clone()
            for name, leaf in params.items()
        }
        for rank in range(tp)
    ]
    return [{name: leaf.clone() for name, leaf in part.items()} for _ in range(dp) for part in parts_by_rank]


def test_right_steps_are_confirmed(model_file: str, tmp_path: Path):
    torch.save(trained_params(), tmp_path / "after.pt")
    code, printed, _ = check_step(tmp_path / "after.pt", "--model", f"{model_file}:steps", *ADAMW)
    assert (code, printed.splitlines()[0]) == (0, EQUAL_STEPS)
    assert "Compared after 2 training steps." in printed


@pytest.mark.parametrize("dp", [1, 2])
def test_parts_of_ranks_are_joined(model_file: str, tmp_path: Path, dp: int):
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2 * dp)]
    for file, local_params in zip(files, rank_parts(trained_params(), dp=dp), strict=True):
        torch.save(local_params, file)
    code, printed, _ = check_step(*files, "--model", f"{model_file}:steps", *ADAMW)
    assert (code, printed.splitlines()[0]) == (0, EQUAL_STEPS)


def test_a_mistake_of_steps_is_named_with_exit_code_1(model_file: str, tmp_path: Path):
    wrong_params = trained_params(2.0)
    torch.save(wrong_params, tmp_path / "after.pt")
    options = [option for option in ADAMW if option not in ("--clip", 0.5)]
    code, _, message = check_step(tmp_path / "after.pt", "--model", f"{model_file}:steps", *options)
    assert code == 1
    assert "0.weight, update of step 1: 4 of 4 parameters are not those of AdamW." in message


def test_compare_step_takes_the_tensors_of_ranks():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)
    old_params = fpipe.tree.tree_map(lambda leaf: leaf.clone(), params)
    batch = torch.randn(8, 3), torch.randn(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    optimizer.step()
    new_params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    ranks = rank_parts(new_params)
    assert fpipe.compare_step(model, old_params, batch, ranks, rule="SGD", lr=0.1).leaves
    stages = [{name: new_params[name] for name in stage} for stage in old_params]
    assert fpipe.compare_step(model, old_params, batch, stages, rule="SGD", lr=0.1).leaves
    ranks[1]["2.bias"] += 1.0
    with pytest.raises(fpipe.GradientMismatch, match=r"2\.bias, replicas of step 0: ranks have copies that differ"):
        fpipe.compare_step(model, old_params, batch, ranks, rule="SGD", lr=0.1)
    del ranks[1]["0.weight"]
    ranks[1]["2.bias"] -= 1.0
    with pytest.raises(ValueError, match=r"in shapes \[2, 3\], which along no dimension make the whole \[4, 3\]"):
        fpipe.compare_step(model, old_params, batch, ranks, rule="SGD", lr=0.1)


@pytest.mark.parametrize("order", ["neighbours", "a round apart"])
@pytest.mark.parametrize("values", ["zeros", "numbers"])
def test_copies_of_pieces_count_once(order: str, values: str):
    """Pieces of zeros look like copies of one piece, and are not."""
    expected = torch.zeros(4, 2) if values == "zeros" else torch.arange(8.0).reshape(4, 2)
    pieces = [*expected.chunk(2)]
    pieces_by_rank = [pieces[0], pieces[0], pieces[1], pieces[1]] if order == "neighbours" else pieces * 2
    assert torch.equal(join_ranks([{"w": piece} for piece in pieces_by_rank], {"w": (4, 2)})[0]["w"], expected)


def test_wrong_options_of_check_step_are_refused(model_file: str, tmp_path: Path):
    torch.save(trained_params(), tmp_path / "after.pt")
    arguments = tmp_path / "after.pt", "--model", f"{model_file}:steps"
    assert "NAME=NUMBER" in check_step(*arguments, "--rule", "AdamW", "--lr", 0.1, "--set", "weight_decay=much")[2]
    assert "a list of 2, one for each step; found 3" in check_step(*arguments, "--rule", "SGD", *["--lr", 0.1] * 3)[2]
    code, _, message = check_step(*arguments, "--rule", "LBFGS", "--lr", 0.1)
    assert (code, "calls the loss again and again" in message) == (1, True)
