"""Write the numbers of each step: to a CSV file, TensorBoard, Weights & Biases, or as a line of progress."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fpipe.callbacks.measurements import Workload, measure
from fpipe.limits import check_whole_number, checked_init
from fpipe.meaning.single_device.result import Result


class StepWriter(ABC):
    """Base class of writers of each step's numbers: a subclass has `write(step, numbers)`.

    Args:
        workload: the work of a step, for its rates.

    >>> import fpipe, torch
    >>> class Printer(StepWriter):
    ...     def write(self, step, numbers):
    ...         print(step, numbers["loss"])
    >>> Printer().on_step(fpipe.Result(loss=torch.tensor(2.5)), 0.25)
    1 2.5
    """

    def __init__(self, workload: Workload | None = None) -> None:
        self.workload, self.steps = workload, 0

    def on_step(self, result: Result, seconds: float) -> None:
        """Count the step and write its numbers."""
        self.steps += 1
        self.write(self.steps, measure(result, seconds, self.workload))

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of `measure`; steps count from 1."""


@checked_init
class CSV(StepWriter):
    """Append a row for each step to a CSV file, with the numbers of `measure`.

    Args:
        file: its path. A file that exists is continued, if it has the same columns.
        workload: the work of a step, for its rates.

    Raises:
        ValueError: at the first step, a file with other columns.

    >>> import tempfile, fpipe, torch
    >>> path = Path(tempfile.mkdtemp(), "run.csv")
    >>> CSV(path).on_step(fpipe.Result(loss=torch.tensor(2.5)), 0.25)
    >>> path.read_text().splitlines()[0]
    'step,loss,seconds,GiB'
    """

    def __init__(self, file: str | PathLike[str], workload: Workload | None = None) -> None:
        super().__init__(workload)
        self.path, self.columns, self.rows_before = Path(file), list[str](), 0

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the row of a step; whoever reads the file meanwhile finds whole rows."""
        if not self.columns:
            self.begin(["step", *numbers])
        # Opened for each row: a run that is killed has lost none, and the file can be read meanwhile.
        with self.path.open("a", newline="", encoding="utf-8") as file:
            row = [self.rows_before + step, *map(numbers.get, self.columns[1:])]
            csv.writer(file, lineterminator="\n").writerow(row)

    def begin(self, columns: list[str]) -> None:
        """Write the head of a new file, or count the rows of one that exists."""
        self.columns = columns
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(",".join(columns) + "\n", encoding="utf-8")
            return
        head, *rows = self.path.read_text(encoding="utf-8").splitlines()
        if head != ",".join(columns):
            raise ValueError(f"{self.path} has the columns {head}, not {','.join(columns)}: name another file.")
        self.rows_before = len(rows)


@checked_init
class TensorBoard(StepWriter):
    """Write the numbers of each step as TensorBoard's scalars.

    Args:
        folder: where its event files go.
        workload: the work of a step, for its rates.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.

    >>> board = TensorBoard("runs/mine")  # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike[str], workload: Workload | None = None) -> None:
        super().__init__(workload)
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError("TensorBoard needs a package: pip install tensorboard, or write a CSV.") from None
        self.writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Flush the remaining events and close their file."""
        self.writer.close()


@checked_init
class WandB(StepWriter):
    """Log the numbers of each step to a run of Weights & Biases.

    Args:
        run: what `wandb.init(..)` returned, or anything with `log(numbers, step=)`.
        workload: the work of a step, for its rates.

    Raises:
        TypeError: a run without `log`.

    >>> import fpipe, torch
    >>> class Run:
    ...     def log(self, numbers, step):
    ...         print(step, numbers["loss"])
    >>> WandB(Run()).on_step(fpipe.Result(loss=torch.tensor(2.5)), 0.25)
    1 2.5
    """

    def __init__(self, run: Any, workload: Workload | None = None) -> None:
        super().__init__(workload)
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"run is what wandb.init(..) returns, found {type(run).__name__}.")
        self.run = run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self.run.log(dict(numbers), step=step)


@checked_init
class Progress(StepWriter):
    """Show a line with the step, loss, rates, memory and the time left; one in ten steps where there is no terminal.

    Args:
        total: how many steps the training has; without it no time left is shown.
        workload: the work of a step, for its rates.
        completed: how many steps are done already, as after a resume.
        interval: where there is no terminal, after how many steps a line is printed.
        console: rich's console; by default one on standard output.

    Raises:
        ModuleNotFoundError: the package rich is not installed.
        ValueError: a number that is no whole number.

    >>> import fpipe, torch
    >>> progress = Progress(total=1)
    >>> progress.on_step(fpipe.Result(loss=torch.tensor(2.5)), 0.25)  # doctest: +ELLIPSIS
    step 1/1  loss 2.5000  ... GiB
    """

    def __init__(
        self,
        total: int | None = None,
        workload: Workload | None = None,
        *,
        completed: int = 0,
        interval: int = 10,
        console: Any = None,
    ) -> None:
        super().__init__(workload)
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            raise ModuleNotFoundError("progress needs a package: pip install rich, or write a CSV.") from None
        for name, number, minimum in (("total", total, 1), ("completed", completed, 0), ("interval", interval, 1)):
            if number is not None:
                check_whole_number(name, number, minimum=minimum)
        self.total, self.completed, self.interval, self.start = total, completed, interval, time.perf_counter()
        # Where output goes to a file, a line that rewrites itself would fill it with escape sequences.
        self.console: Any = Console() if console is None else console
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        if self.live is not None:
            self.live.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of a step."""
        step += self.completed
        if self.live is not None:
            self.live.update(self.line(step, numbers), refresh=True)
        elif step % self.interval == 0 or step in (self.completed + 1, self.total):
            self.console.print(self.line(step, numbers), highlight=False, soft_wrap=True)

    def line(self, step: int, numbers: Mapping[str, float]) -> str:
        """Return the line of a step.

        >>> Progress(total=9).line(9, {"loss": 2.5, "tokens/s": 4000.0, "MFU": 0.41, "GiB": 3.2})
        'step 9/9  loss 2.5000  4,000 tokens/s  MFU 41.0%  3.20 GiB'
        """
        texts = [f"step {step}" + ("" if self.total is None else f"/{self.total}")]
        texts += [template.format(numbers[name]) for name, template in _TEMPLATES.items() if name in numbers]
        if self.total is not None and self.completed < step < self.total:
            seconds_a_step = (time.perf_counter() - self.start) / (step - self.completed)
            texts.append(f"{seconds_a_step * (self.total - step):,.0f} s left")
        return "  ".join(texts)

    def close(self) -> None:
        """Stop rewriting the line."""
        if self.live is not None:
            self.live.stop()


_TEMPLATES = {
    "loss": "loss {:.4f}",
    "norm": "norm {:.3g}",
    "tokens/s": "{:,.0f} tokens/s",
    "MFU": "MFU {:.1%}",
    "GiB": "{:.2f} GiB",
    "bubble": "bubble {:.1%}",
}
