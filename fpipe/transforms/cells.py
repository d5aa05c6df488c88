"""Read tables of cells: the order of each rank's ops, as lists, a grid, CSV or a file.

    rank 0 | 0F0 0F1  .   .  0B0 0B1
    rank 1 |  .  1F0 1F1 1B0 1B1  .          --> read_table -->        [["0F0", "0F1", "0B0", "0B1"], ["1F0", ..]]

Idle cells are dropped. Whatever is no cell is an error with its line and column.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from fpipe.limits import read_text, shortened
from fpipe.program import ProgramError, cell_of, kind_of, refuse_long_words

Key = tuple[str, int | None, int | None, int | None]
"""An op by kind, stage, microbatch and slice."""
Cell = str | Key
Rows = Sequence[Sequence[Cell]]
_Row = str | Iterable[Cell | None]
Table = Sequence[_Row] | Mapping[int, _Row] | str | Path

_NUMBER = "(0|[1-9][0-9]{0,8})"
_CELL = re.compile(rf"{_NUMBER}([A-Z]+){_NUMBER}(?:\.{_NUMBER})?")


def parse_cell(text: str) -> tuple[Key, ...]:
    """Return the keys of the ops that a cell names: one, or the parts of a pair.

    >>> parse_cell("2F0.1")
    (('F', 2, 0, 1),)
    >>> parse_cell("(0F7;7B3)")
    (('F', 0, 7, None), ('B', 7, 3, None))
    >>> parse_cell("0F1garbage")
    Traceback (most recent call last):
    fpipe.ops.ProgramError: '0F1garbage' is not a cell: after 0F1 comes 'garbage'. Cells read 2F0 or (0F7;7B3).
    """
    text = text.strip()
    # torch.distributed.pipelining writes a pair as (0F7;7B3)OVERLAP_F_B.
    if text.startswith("("):
        text = text.removesuffix("OVERLAP_F_B")
    if text.startswith("(") and text.endswith(")"):
        return tuple(map(_parse_key, text[1:-1].split(";")))
    return (_parse_key(text),)


def _parse_key(text: str) -> Key:
    text = text.strip()
    match = _CELL.match(text)
    if match is None or match.end() != len(text):
        reason = (
            "a kind is in capitals" if _CELL.match(text.upper()) else "it does not start with stage, kind, microbatch"
        )
        reason = f"after {match[0]} comes {shortened(text[match.end() :])!r}" if match else reason
        raise ProgramError(f"{shortened(text)!r} is not a cell: {reason}. Cells read 2F0 or (0F7;7B3).")
    stage, kind, microbatch, slice_index = match.groups()
    kind_of(kind)
    return kind, int(stage), int(microbatch), None if slice_index is None else int(slice_index)


def from_zero_bubble_letters(cells: Iterable[Iterable[Cell]]) -> list[list[Cell]]:
    """Translate cells of the zero-bubble papers, whose B is the input gradient and whose BW a full backward.

    >>> from_zero_bubble_letters([["0B0", "0W0", "(1F1;1BW0)"]])
    [['0I0', '0W0', '(1F1;1B0)']]
    """

    def translate(cell: Cell) -> Cell:
        if isinstance(cell, tuple):
            return (_LETTER_BY_ZB_LETTER.get(cell[0], cell[0]), *cell[1:])
        return cell if names_value(cell) else re.sub("BW|B", lambda match: _LETTER_BY_ZB_LETTER[match[0]], cell)

    return [[translate(cell) for cell in row] for row in cells]


_LETTER_BY_ZB_LETTER = {"B": "I", "BW": "B"}


def names_value(cell: str) -> bool:
    """Whether a cell names an op by a value, as SEND(y[0,0]>1) does, and not by stage and microbatch."""
    return cell[:1].isupper()


def keys_of(cell: Cell) -> tuple[Key, ...]:
    """Return the keys in a cell; none where it names an op by a value."""
    return (cell,) if isinstance(cell, tuple) else () if names_value(cell) else parse_cell(cell)


def sizes_of(keys: Sequence[Key]) -> tuple[int, int, int]:
    """Return the numbers of stages, microbatches and slices of a table that names every forward.

    A slip such as 9999F0 would ask for a program of ten thousand stages, so a missing forward is an error here.
    """
    sizes = [1 + max(index or 0 for index in indices) for indices in zip(*(key[1:] for key in keys), strict=True)]
    stages, microbatches, slices = sizes
    named_forwards = {(stage, i, slice_index or 0) for kind, stage, i, slice_index in keys if kind == "F"}
    if len(named_forwards) < stages * microbatches * slices:
        # Not itertools.product, which lists its ranges before it yields the first: the numbers may be huge.
        forwards = ((s, m, q) for s in range(stages) for m in range(microbatches) for q in range(slices))
        stage, microbatch, slice_index = next(forward for forward in forwards if forward not in named_forwards)
        cell = cell_of(("F", stage, microbatch, slice_index if slices > 1 else None))
        raise ProgramError(f"the table does not name {cell}; every F and every backward is named once.")
    return stages, microbatches, slices


def read_table(table: Table) -> list[list[Cell]]:
    """Return the cells of each rank, without idle ones."""
    if isinstance(table, Path):
        table = read_text_file(table)
    if isinstance(table, str):
        if table.endswith((".csv", ".txt")) and "\n" not in table:
            raise ProgramError(f"{table!r} names a file; pass pathlib.Path({table!r}).")
        return _read_rows(table)
    if isinstance(table, Mapping):
        ranks = sorted(table)
        if ranks != list(range(len(ranks))):
            missing_rank = next(rank for rank in range(len(ranks) + 1) if rank not in table)
            raise ProgramError(f"rank {missing_rank} is missing: the table names ranks {ranks}; ranks are 0..n-1.")
        table = [table[rank] for rank in ranks]
    if not isinstance(table, Sequence):
        raise TypeError(f"a table is rows, {{rank: row}}, text or a path; found {type(table).__name__}.")
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
        raise ProgramError("the table is empty; give a row for each rank.")
    return rows


def require_file(file: Path) -> None:
    """Raise OSError for a folder or a missing file, with the name of the most similar file."""
    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a folder; name a file in it.")
    if not file.exists():
        sibling_names = [sibling.name for sibling in file.parent.iterdir()] if file.parent.is_dir() else []
        similar_names = difflib.get_close_matches(file.name, sibling_names, n=1)
        hint = f" Did you mean {str(file.with_name(similar_names[0]))!r}?" if similar_names else ""
        folder = f" here, in {str(Path.cwd())!r}" if file.parent == Path() else ""
        raise FileNotFoundError(f"there is no file {str(file)!r}{folder}.{hint}")


def read_text_file(file: Path) -> str:
    """Read a text file, without its byte order mark; the error for a missing file names the most similar one."""
    require_file(file)
    try:
        with file.open(encoding="utf-8-sig") as stream:
            return read_text(stream, str(file))
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is no UTF-8"
        raise ProgramError(f"this is not text: {problem}. Write a program, a table, CSV or JSON.") from None


def parse_csv_line(line: str) -> list[str]:
    """Return the cells of a line of CSV, which may be quoted."""
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise ProgramError(f"a line is not CSV: {error}.") from None


def _is_idle(cell: object) -> bool:
    return isinstance(cell, str) and cell.strip() in ("", ".", "None")


def _read_rows(text: str) -> list[list[Cell]]:
    """Return the rows of a grid or CSV; errors say line and column."""
    rows: list[list[Cell]] = []
    for line_number, line in enumerate(refuse_long_words(text).splitlines(), 1):
        if not line.strip():
            continue
        cells_text = line.partition("|")[2] if line.lstrip().startswith("rank") else line
        row: list[Cell] = []
        for column, cell in enumerate(parse_csv_line(cells_text) if "," in cells_text else cells_text.split(), 1):
            if _is_idle(cell):
                continue
            if not cell.strip()[:1].isupper():
                try:
                    parse_cell(re.sub("BW", "B", cell))
                except ProgramError as error:
                    raise ProgramError(f"line {line_number}, column {column}: {error}") from None
            row.append(cell.strip())
        rows.append(row)
    if not rows:
        raise ProgramError("the table is empty; write a row for each rank.")
    return rows
