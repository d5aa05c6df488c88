"""Print for eyes and for pipes: a terminal gets what fits it, a pipe gets one line a row, as wide as it is."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from fpipe.pictures.plot import plot
from fpipe.program import Program
from fpipe.timing.amounts import aligned
from fpipe.timing.costs import Costs


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; what looks like a number stands to the right.

    On a terminal too narrow for the longest word of each column a row is a paragraph, one line for each column.
    """
    width = columns_of_terminal()
    words = [max(len(word) for cell in cells for word in cell.split()) for cells in zip(columns, *rows, strict=True)]
    if width is not None and sum(words) + 3 * len(columns) + max(len(row[0]) for row in rows) - words[0] > width:
        _paragraphs(columns, rows, width)
        return
    right = [all(_is_number(row[at]) for row in rows) for at in range(len(columns))]
    if width is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
        for at, (column, number) in enumerate(zip(columns, right, strict=True)):
            side = "right" if number else "left"
            drawn.add_column(column, justify=side, overflow="fold", no_wrap=at == 0, min_width=words[at])
        for row in rows:
            drawn.add_row(*row)
        Console(highlight=False, markup=False).print(drawn)
        return
    print("\n".join(aligned((columns, *rows), [not number for number in right])))


def columns_of_terminal() -> int | None:
    """How wide the terminal is that is printed on; None in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _paragraphs(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    indent = 3 + max(map(len, columns[1:]))
    for row in rows:
        print(row[0])
        for column, cell in zip(columns[1:], row[1:], strict=True):
            head = f"  {column}".ljust(indent + 1)
            print(textwrap.fill(cell, max(width, 40), initial_indent=head, subsequent_indent=" " * (indent + 1)))


def _is_number(text: str) -> bool:
    return text.rstrip("%").replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"


def number(value: float) -> str:
    """A number with as many digits as it needs, at most six."""
    return f"{value:.6g}"


def print_error(sentence: str) -> None:
    """Say on standard error what went wrong."""
    print(f"error: {sentence}", file=sys.stderr)


def print_program(program: Program, costs: Costs | None) -> None:
    """Draw a program as wide as the terminal."""
    width = columns_of_terminal()
    print(plot(program, costs=costs, width=width and max(width, 40)))


@contextmanager
def progress(task: str, *, shown: bool = True) -> Generator[Callable[..., None]]:
    """A bar on standard error, where that is a terminal: a function of what it has `completed` of its `total`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield partial(bar.update, bar.add_task(task, total=None))
