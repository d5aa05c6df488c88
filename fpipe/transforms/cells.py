"""Read a table: which op each rank does after which, as lists, a grid, CSV or a file; other signs are errors."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from fpipe.limits import read_text, shortened
from fpipe.program import ProgramError, cell_of, kind_of, readable

Key = tuple[str, int | None, int | None, int | None]
"""An op by kind, stage, microbatch and slice."""
Cell = str | Key
Rows = Sequence[Sequence[Cell]]
Table = Sequence[Sequence[Cell | None]] | Mapping[int, Sequence[Cell | None]] | str | Path

_N = "(0|[1-9][0-9]{0,8})"
_CELL = re.compile(rf"{_N}([A-Z]+){_N}(?:\.{_N})?")


def parse_cell(text: str) -> tuple[Key, ...]:
    """The ops a cell names: one, or the parts of a pair.

    >>> parse_cell("2F0.1")
    (('F', 2, 0, 1),)
    >>> parse_cell("(0F7;7B3)")
    (('F', 0, 7, None), ('B', 7, 3, None))
    >>> parse_cell("0F1garbage")
    Traceback (most recent call last):
    fpipe.ops.ProgramError: '0F1garbage' is not a cell: after 0F1 comes 'garbage'. Cells read 2F0 or (0F7;7B3).
    """
    text = text.strip()
    if text.startswith("("):
        text = text.removesuffix("OVERLAP_F_B")  # as torch writes a pair
    if text.startswith("(") and text.endswith(")"):
        return tuple(map(_parse_key, text[1:-1].split(";")))
    return (_parse_key(text),)


def _parse_key(text: str) -> Key:
    text = text.strip()
    match = _CELL.match(text)
    if match is None or match.end() != len(text):
        why = "it does not start with stage, kind, microbatch"
        why = f"after {match[0]} comes {shortened(text[match.end() :])!r}" if match else why
        raise ProgramError(f"{shortened(text)!r} is not a cell: {why}. Cells read 2F0 or (0F7;7B3).")
    stage, kind, microbatch, piece = match.groups()
    kind_of(kind)
    return kind, int(stage), int(microbatch), None if piece is None else int(piece)


def in_our_letters(cells: Iterable[Iterable[Cell]]) -> list[list[Cell]]:
    """Translate cells of the zero-bubble papers, whose B is the input gradient and whose BW a full backward.

    >>> in_our_letters([["0B0", "0W0", "(1F1;1BW0)"]])
    [['0I0', '0W0', '(1F1;1B0)']]
    """

    def ours(cell: Cell) -> Cell:
        if isinstance(cell, tuple):
            return (_OURS.get(cell[0], cell[0]), *cell[1:])
        return cell if is_general(cell) else re.sub("BW|B", lambda found: _OURS[found[0]], cell)

    return [[ours(cell) for cell in row] for row in cells]


_OURS = {"B": "I", "BW": "B"}


def is_general(cell: str) -> bool:
    """Cells such as SEND(y[0,0]>1), which name an op by a value."""
    return cell[:1].isupper()


def keys_of(cell: Cell) -> tuple[Key, ...]:
    """The keys in a cell; none where it names an op by a value."""
    return (cell,) if isinstance(cell, tuple) else () if is_general(cell) else parse_cell(cell)


def sizes_of(keys: Sequence[Key]) -> tuple[int, int, int]:
    """Count stages, microbatches and slices of a whole table; a wrong number would make a program of very many."""
    sizes = [1 + max(number or 0 for number in column) for column in zip(*(key[1:] for key in keys), strict=True)]
    stages, microbatches, slices = sizes
    named = {(stage, microbatch, piece or 0) for kind, stage, microbatch, piece in keys if kind == "F"}
    if len(named) < stages * microbatches * slices:
        # Not itertools.product, which lists its ranges before it gives the first place: the numbers may be huge.
        places = ((s, m, q) for s in range(stages) for m in range(microbatches) for q in range(slices))
        stage, microbatch, piece = next(place for place in places if place not in named)
        cell = cell_of(("F", stage, microbatch, piece if slices > 1 else None))
        raise ProgramError(f"the table does not name {cell}; every F and every backward is named once.")
    return stages, microbatches, slices


def read_table(table: Table) -> list[list[Cell]]:
    """Read the cells of each rank, without idle ones."""
    if isinstance(table, Path):
        table = text_of(table)
    if isinstance(table, str):
        if table.endswith((".csv", ".txt")) and "\n" not in table:
            raise ProgramError(f"{table!r} is the name of a file, it seems; hand in pathlib.Path({table!r}).")
        return _from_text(table)
    if isinstance(table, Mapping):
        ranks = sorted(table)
        if ranks != list(range(len(ranks))):
            missing = next(rank for rank in range(len(ranks) + 1) if rank not in table)
            raise ProgramError(f"rank {missing} is missing: the table names ranks {ranks}; ranks are 0..n-1.")
        table = [table[rank] for rank in ranks]
    if not isinstance(table, Sequence):
        raise TypeError(f"a table is a list of rows, {{rank: row}}, text or a path; found {type(table).__name__}.")
    rows: list[list[Cell]] = []
    for row in table:
        if not isinstance(row, Iterable):
            raise TypeError(f"a row of a table is a list of cells, or text; found {row!r}.")
        cells = row.split() if isinstance(row, str) else row
        rows.append([cell for cell in cells if cell is not None and not _is_idle(cell)])
    for cell in chain.from_iterable(rows):
        if not isinstance(cell, str | tuple) or not len(cell):
            raise TypeError(f"a cell is text such as '2F0', or (kind, stage, microbatch, slice); found {cell!r}.")
    if not rows:
        raise ProgramError("the table is empty; give a list of cells for each rank.")
    return rows


def text_of(file: Path) -> str:
    """Read the text of a file; a byte order mark is none of it."""
    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a folder; name a file in it.")
    if not file.exists():
        names = [neighbour.name for neighbour in file.parent.iterdir()] if file.parent.is_dir() else []
        close = difflib.get_close_matches(file.name, names, n=1)
        hint = f" Did you mean {str(file.with_name(close[0]))!r}?" if close else ""
        where = f" here, in {str(Path.cwd())!r}" if file.parent == Path() else ""
        raise FileNotFoundError(f"there is no file {str(file)!r}{where}.{hint}")
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return read_text(stream, str(file))
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is no UTF-8"
        raise ProgramError(f"this is not text: {why}. Write a program, a table, CSV or JSON.") from None


def csv_cells(line: str) -> list[str]:
    """The cells of a line of CSV, which may be quoted."""
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise ProgramError(f"a line is not CSV: {error}.") from None


def _is_idle(cell: object) -> bool:
    return isinstance(cell, str) and cell.strip() in ("", ".", "None")


def _from_text(text: str) -> list[list[Cell]]:
    """Read the cells of a grid or CSV; errors say line and column."""
    rows: list[list[Cell]] = []
    for number, line in enumerate(readable(text).splitlines(), 1):
        if not line.strip():
            continue
        body = line.partition("|")[2] if line.lstrip().startswith("rank") else line
        row: list[Cell] = []
        for column, cell in enumerate(csv_cells(body) if "," in body else body.split(), 1):
            if _is_idle(cell):
                continue
            if not cell.strip()[:1].isupper():
                try:
                    parse_cell(re.sub("BW", "B", cell))
                except ProgramError as error:
                    raise ProgramError(f"line {number}, column {column}: {error}") from None
            row.append(cell.strip())
        rows.append(row)
    if not rows:
        raise ProgramError("the table is empty; write a line of cells for each rank.")
    return rows
