"""Print for eyes and for pipes: a terminal gets a table that fits it, a pipe gets one line a row, as wide as it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; what looks like a number stands to the right."""
    right = [all(_is_number(row[at]) for row in rows) for at in range(len(columns))]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
        for at, (column, number) in enumerate(zip(columns, right, strict=True)):
            drawn.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=at == 0)
        for row in rows:
            drawn.add_row(*row)
        Console(highlight=False, markup=False).print(drawn)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        print("  ".join(cells).rstrip())


def _is_number(text: str) -> bool:
    return text.rstrip("%").replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"


def number(value: float) -> str:
    """A number with as many digits as it needs, at most six."""
    return f"{value:.6g}"


def complain(sentence: str) -> None:
    """Say on standard error what went wrong."""
    print(f"error: {sentence}", file=sys.stderr)
