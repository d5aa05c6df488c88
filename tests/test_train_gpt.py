"""The examples of several processes: losses of one process, and a training that goes on elsewhere bit by bit."""

from __future__ import annotations

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


def test_the_page_shows_the_smallest_example_and_what_it_prints():
    page = (EXAMPLES.parent / "docs" / "running.md").read_text()
    script = EXAMPLES / "two_ranks.py"
    assert f"```py\n{script.read_text()}```" in page
    with Processes(2) as pair:
        ran = pair.each(as_script, script, free_port())
    assert "".join(ran) in page


def as_script(rank: int, script: Path, port: int) -> str:
    """What a script prints in a process that torchrun might have started."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def train(rank: int, typed: list[str]) -> tuple[int, int]:
    sys.path.insert(0, str(EXAMPLES))
    from rich.console import Console
    from train_gpt import arguments, train

    sys.path.pop(0)
    return train(arguments(typed), Console(quiet=True))


def on(ranks: int, *typed: list[str]) -> list[Any]:
    """What each rank returned, of one run after the other."""
    processes = Processes(ranks)
    try:
        return [processes.each(train, one) for one in typed]
    finally:
        processes.close()


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a training as torch reads them, and not the id that each rank's file has."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in metadata.items()}  # type: ignore[union-attr]
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name: leaf for name, leaf in found.items() if not name.startswith("save_id/")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("ranks", "others"), [(2, 3), pytest.param(4, 2, marks=pytest.mark.deep)])
def test_it_goes_on_bit_by_bit_on_other_ranks_and_another_schedule(tmp_path: Path, ranks: int, others: int):
    half, whole, resumed = (str(tmp_path / name) for name in ("half", "whole", "resumed"))
    blocks = ["--blocks", str(ranks), "--steps", "3"]
    first = on(ranks, [*blocks, "--stop", "2", "--save", half], [*blocks, "--check", "--save", whole])
    assert first[1] == [(3, 3), *[(3, 0)] * (ranks - 1)]  # the first rank compares
    assert on(others, [*blocks, "--resume", half, "--schedule", "zb_h1", "--save", resumed]) == [[(1, 0)] * others]
    expected, found = saved(Path(whole)), saved(Path(resumed))
    assert expected.keys() == found.keys()
    assert len(found) > 3 * 20
    assert all(torch.equal(one, found[name]) for name, one in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_replicas_train_as_one_process_does_and_go_on_with_another_number_of_them(tmp_path: Path):
    half, small = str(tmp_path / "half"), ["--steps", "3", "--blocks", "1", "--check"]
    first = [*small, "--replicas", "2", "--stop", "2", "--save", half]
    ran = on(4, first, [*small, "--replicas", "4", "--resume", half])
    assert ran == [[(2, 2), *[(2, 0)] * 3], [(1, 1), *[(1, 0)] * 3]]  # the first process compares
    assert len(saved(tmp_path / "half")) > 3 * 12


def llama(rank: int) -> tuple[float, float, float]:
    sys.path.insert(0, str(EXAMPLES))
    from llama import arguments, train
    from rich.console import Console

    sys.path.pop(0)
    return train(arguments(["--gather", "use", "--steps", "1"]), Console(quiet=True))


def test_a_llama_from_meta_holds_what_it_was_told_and_what_the_page_says(four: Processes):
    page = (EXAMPLES.parent / "docs" / "large_models.md").read_text()
    found = four.each(llama)
    assert len({loss for loss, *_ in found}) == 1
    for rank, (_, told, held) in enumerate(found[:2]):
        (row,) = (line.split("|")[-3:-1] for line in page.splitlines() if line.startswith(f"| rank {rank}"))
        assert row == [f" {told / 2**20:.1f} ", f" {held / 2**20:.1f} "]
        assert held == pytest.approx(told, rel=1e-4)  # the loss that all ranks get has a few bytes
