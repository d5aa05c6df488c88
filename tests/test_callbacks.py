"""Callbacks get the numbers of each step: on the screen, in files, and from one process of several."""

import csv
import io
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fpipe
from fpipe import callbacks
from tests.processes import Processes
from tests.test_distributed import MSE, local_part


class Losses:
    """A callback that keeps losses, and whether it was closed."""

    def __init__(self) -> None:
        self.losses, self.seconds, self.is_closed = list[Any](), list[float](), False

    def on_step(self, result: fpipe.Result, seconds: float) -> None:
        self.losses.append(result.loss)
        self.seconds.append(seconds)

    def close(self) -> None:
        self.is_closed = True


def pipeline(**options: Any) -> tuple[Any, Any, Any]:
    """Return a step of two ranks, its parameters and a batch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    return fpipe.build(program, model, **options), params, (torch.randn(4, 4), torch.randn(4, 4))


def test_callbacks_get_each_result_and_are_closed():
    step, params, batch = pipeline()
    losses = Losses()
    with callbacks.track(step, losses) as tracked:
        results = [tracked(params, batch) for _ in range(3)]
        assert not losses.is_closed
    assert losses.losses == [result.loss for result in results]
    assert torch.equal(results[0].loss, step(params, batch).loss)
    assert all(seconds > 0 for seconds in losses.seconds)
    assert losses.is_closed


def test_numbers_of_a_recorded_step():
    step, params, batch = pipeline(record=True)
    result = step(params, batch)
    workload = callbacks.Workload(tokens=16, flops=1e6, peak_flops=1e9)
    numbers = callbacks.measure(result, 0.5, workload)
    assert list(numbers) == ["loss", "seconds", "tokens/s", "MFU", "GiB", "bubble", "GiB of rank 0", "GiB of rank 1"]
    assert numbers["tokens/s"] == 32
    assert numbers["MFU"] == pytest.approx(0.002)
    assert numbers["bubble"] == result.timeline.bubble
    assert numbers["GiB of rank 1"] == result.timeline.peak[1] / 2**30 > 0
    assert numbers["GiB"] > 0.01


def test_a_csv_file_is_continued_and_other_columns_are_refused(tmp_path: Path):
    step, params, batch = pipeline()
    file = tmp_path / "run.csv"
    for _ in range(2):  # as two runs
        tracked = callbacks.track(step, callbacks.CSV(file))
        losses = [tracked(params, batch).loss.item() for _ in range(2)]
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["loss"]) for row in rows[2:]] == losses
    tracked = callbacks.track(step, callbacks.CSV(file, callbacks.Workload(tokens=16)))
    with pytest.raises(ValueError, match=r"has the columns step,loss,seconds,GiB, not step,loss,seconds,tokens/s,GiB"):
        tracked(params, batch)


def progress_lines(count: int, terminal: bool, **options: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
    step, params, batch = pipeline()
    progress = callbacks.Progress(count, callbacks.Workload(tokens=16), console=console, **options)
    with callbacks.track(step, progress) as tracked:
        for _ in range(count - options.get("completed", 0)):
            tracked(params, batch)
    return console.file.getvalue()


def test_progress_prints_the_first_each_tenth_and_the_last_step_where_there_is_no_terminal():
    lines = progress_lines(12, terminal=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/12", "step 10/12", "step 12/12"]
    assert re.fullmatch(r"step 10/12  loss \d\.\d{4}  [\d,]+ tokens/s  \d+\.\d\d GiB  [\d,]+ s left", lines[1])
    assert "left" not in lines[2]


def test_progress_goes_on_after_a_resume_and_rewrites_its_line_on_a_terminal():
    assert "step 11/12" in progress_lines(12, terminal=False, completed=10)
    text = progress_lines(3, terminal=True)
    assert text.count("\n") == 1
    assert re.findall(r"step (\d)/3", text)[-1] == "3"


class SummaryWriter:
    """What TensorBoard's writer does, as far as we call it."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.is_closed = folder, list[Any](), False

    def add_scalar(self, name: str, number: float, step: int) -> None:
        self.scalars.append((name, number, step))

    def close(self) -> None:
        self.is_closed = True


def test_tensorboard_and_wandb_get_the_numbers(monkeypatch: pytest.MonkeyPatch):
    writer_module = types.ModuleType("torch.utils.tensorboard.writer")
    writer_module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", writer_module)
    step, params, batch = pipeline()
    logged = list[Any]()
    run = types.SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))
    board = callbacks.TensorBoard("runs")
    with callbacks.track(step, board, callbacks.WandB(run)) as tracked:
        losses = [tracked(params, batch).loss.item() for _ in range(2)]
    assert [(name, number, step) for name, number, step in board.writer.scalars if name == "loss"] == [
        ("loss", losses[0], 1),
        ("loss", losses[1], 2),
    ]
    assert board.writer.is_closed
    assert [(step, numbers["loss"]) for step, numbers in logged] == [(1, losses[0]), (2, losses[1])]


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch):
    step, *_ = pipeline()
    with pytest.raises(
        TypeError, match=r"callbacks is a Callback; found 'run.csv'. It has a method on_step\(result, seconds\)"
    ):
        callbacks.track(step, "run.csv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens is a positive number, found 0"):
        callbacks.Workload(tokens=0)
    with pytest.raises(ValueError, match="needs flops= and peak_flops="):
        callbacks.Workload(peak_flops=1e12)
    with pytest.raises(TypeError, match=r"run is what wandb\.init\(\.\.\) returns, found str"):
        callbacks.WandB("my project")
    makers = {
        "rich.console": callbacks.Progress,
        "torch.utils.tensorboard.writer": partial(callbacks.TensorBoard, "runs"),
    }
    for module, make in makers.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=r"needs a package: pip install \w+, or write a CSV"):
            make()


def losses_of_rank(rank: int, every_rank: bool) -> int:
    """Return how many losses a callback got on this rank."""
    _, params, batch = pipeline()
    model, _, _ = fpipe.from_sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), stages=2, loss=MSE
    )
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))
    losses = Losses()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    callbacks.track(step, losses, every_rank=every_rank)(local_part(program, rank, params), batch)
    return sum(isinstance(loss, torch.Tensor) for loss in losses.losses)


def test_rank_0_calls_alone_unless_all_are_asked_to():
    with Processes(2) as pair:
        assert pair.run(losses_of_rank, False) == [1, 0]
        assert pair.run(losses_of_rank, True) == [1, 1]
