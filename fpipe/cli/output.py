"""Print tables, programs and progress: fitted to a terminal, and in full width, one line a row, to a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from fpipe.pictures.plot import plot
from fpipe.program import Program
from fpipe.timing.amounts import align_columns
from fpipe.timing.costs import Costs


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with columns of numbers to the right.

    On a terminal too narrow for the longest word of each column a row is a paragraph, one line for each column.
    """
    width = columns_of_terminal()
    # A column is never narrower than its longest word; the first one, of names, is not wrapped at all.
    widths = [max(len(part) for cell in cells for part in cell.split()) for cells in zip(columns, *rows, strict=True)]
    name_width = max(len(row[0]) for row in rows) if width is not None else 0
    if width is not None and sum(widths) + 3 * len(columns) + name_width - widths[0] > width:
        _paragraphs(columns, rows, width)
        return
    right = [all(_is_number(row[k]) for row in rows) for k in range(len(columns))]
    if width is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=SIMPLE_HEAD, pad_edge=False)
        for k, (column, is_number) in enumerate(zip(columns, right, strict=True)):
            side = "right" if is_number else "left"
            grid.add_column(column, justify=side, overflow="fold", no_wrap=k == 0, min_width=widths[k])
        for row in rows:
            grid.add_row(*row)
        Console(highlight=False, markup=False).print(grid)
        return
    print("\n".join(align_columns((columns, *rows), [not is_number for is_number in right])))


def columns_of_terminal() -> int | None:
    """Return the width of the terminal in columns, None for a pipe."""
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
    """Format a number with as many digits as it needs, at most six."""
    return f"{value:.6g}"


def print_error(sentence: str) -> None:
    """Print an error on standard error."""
    print(f"error: {sentence}", file=sys.stderr)


def print_program(program: Program, costs: Costs | None) -> None:
    """Draw a program as wide as the terminal."""
    width = columns_of_terminal()
    print(plot(program, costs=costs, width=width and max(width, 40)))


@contextmanager
def progress(task: str, *, is_shown: bool = True) -> Generator[Callable[..., None]]:
    """Yield a function that moves a bar on standard error, if that is a terminal, to `completed` of `total`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        yield partial(bar.update, bar.add_task(task, total=None))
