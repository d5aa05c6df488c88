"""The examples of several processes train as one process does, and resume bit by bit on other ranks."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.processes import Processes, free_port

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_page_shows_the_smallest_example_and_its_output():
    page = (EXAMPLES.parent / "docs" / "running.md").read_text()
    script = EXAMPLES / "two_ranks.py"
    assert f"```py\n{script.read_text()}```" in page
    with Processes(2) as pair:
        outputs = pair.run(run_script, script, free_port())
    assert "".join(outputs) in page


def run_script(rank: int, script: Path, port: int) -> str:
    """Run a script in a process that torchrun might have started, and return its prints."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def train(rank: int, arguments_typed: list[str]) -> tuple[int, int]:
    sys.path.insert(0, str(EXAMPLES))
    from rich.console import Console
    from train_gpt import arguments, train

    sys.path.pop(0)
    return train(arguments(arguments_typed), Console(quiet=True))


def train_on(ranks: int, *command_lines: list[str]) -> list[Any]:
    """Run trainings one by one on these ranks; return the results of each rank."""
    processes = Processes(ranks)
    try:
        return [processes.run(train, command_line) for command_line in command_lines]
    finally:
        processes.close()


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint by torch alone, without the id in each rank's file."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tensor_metadata.size, dtype=tensor_metadata.properties.dtype)
        for name, tensor_metadata in metadata.items()
    }  # type: ignore[union-attr]
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {name: leaf for name, leaf in tensors.items() if not name.startswith("save_id/")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("ranks", "other_ranks"), [(2, 3), pytest.param(4, 2, marks=pytest.mark.deep)])
def test_a_training_resumes_bit_by_bit_on_other_ranks_and_another_schedule(
    tmp_path: Path, ranks: int, other_ranks: int
):
    stopped, full, resumed = (str(tmp_path / name) for name in ("half", "whole", "resumed"))
    blocks = ["--blocks", str(ranks), "--steps", "2"]
    runs = train_on(ranks, [*blocks, "--stop", "1", "--save", stopped], [*blocks, "--check", "--save", full])
    assert runs[1] == [(2, 2), *[(2, 0)] * (ranks - 1)]  # the first rank compares
    assert train_on(other_ranks, [*blocks, "--resume", stopped, "--schedule", "zb_h1", "--save", resumed]) == [
        [(1, 0)] * other_ranks
    ]
    expected, resumed_tensors = load_tensors(Path(full)), load_tensors(Path(resumed))
    assert expected.keys() == resumed_tensors.keys()
    assert len(resumed_tensors) > 3 * 20
    assert all(torch.equal(tensor, resumed_tensors[name]) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_replicas_train_as_one_process_does_and_resume_with_another_number(tmp_path: Path):
    folder, arguments = str(tmp_path / "half"), ["--steps", "2", "--blocks", "1", "--check"]
    stopped_run = [*arguments, "--replicas", "2", "--stop", "1", "--save", folder]
    runs = train_on(4, stopped_run, [*arguments, "--replicas", "4", "--resume", folder])
    assert runs == [[(1, 1), *[(1, 0)] * 3], [(1, 1), *[(1, 0)] * 3]]  # the first process compares
    assert len(load_tensors(tmp_path / "half")) > 3 * 12


def llama(rank: int) -> tuple[float, float, float]:
    sys.path.insert(0, str(EXAMPLES))
    from llama import arguments, train
    from rich.console import Console

    sys.path.pop(0)
    return train(arguments(["--gather", "use", "--steps", "1"]), Console(quiet=True))


def test_a_llama_from_meta_holds_the_bytes_of_its_estimate_and_of_the_page(four: Processes):
    page = (EXAMPLES.parent / "docs" / "large_models.md").read_text()
    results = four.run(llama)
    assert len({loss for loss, *_ in results}) == 1
    for rank, (_, estimated, measured) in enumerate(results[:2]):
        (row,) = (line.split("|")[-3:-1] for line in page.splitlines() if line.startswith(f"| rank {rank}"))
        assert row == [f" {estimated / 2**20:.1f} ", f" {measured / 2**20:.1f} "]
        assert measured == pytest.approx(estimated, rel=1e-4)  # the loss that all ranks get has a few bytes
