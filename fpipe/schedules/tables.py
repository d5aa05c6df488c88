"""A schedule of your own, as a table: which op each rank does after which."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from fpipe.program import Program, ProgramError
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.reorder import Cell, by_table, parse_cell

Table = Sequence[Sequence[Cell | None]] | Mapping[int, Sequence[Cell | None]] | str | Path


def from_table(rows: Table, *, replicated: bool = False) -> Transform:
    """Place and order a program as a table says.

    Args:
        rows: a list of cells for each rank, `{rank: cells}`, a grid or CSV text with one line a rank (a grid's lines
            may start with "rank 0 |"), or the path of such a file. Idle cells ("", ".", None) are left out. A cell
            names an F, B, I, W or R; a pair reads "(0F7;7B3)". B or I and W, cell by cell: a full backward that the
            table names as I and W is split, and B names I then W of a split one.
        replicated: stages may be on several ranks, which then hold replicas of their parameters.

    Raises:
        ProgramError: a cell that cannot be read (with row and column), a missing rank, an op that is missing, stands
            twice or is not in the program, a stage on two ranks, orders that wait for each other for ever.

    >>> import fpipe
    >>> table = '''
    ... 0F0 0F1 .   0B0 .   0B1
    ... .   1F0 1B0 1F1 1B1 .
    ... '''
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table))(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1  .  0B0  .  0B1
    rank 1 |  .  1F0 1B0 1F1 1B1  .
    """
    cells = _rows(rows)

    def transform(program: Program) -> Program:
        homes = None
        if replicated:
            where: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
            for rank, row in enumerate(cells):
                for cell in row:
                    for key in (cell,) if isinstance(cell, tuple) else parse_cell(cell):
                        where.setdefault(key[1] or 0, set()).add(rank)
            homes = {stage: sorted(found) for stage, found in where.items()}
        return by_table(program, cells, move=True, homes=homes)

    return transform


def _rows(table: Table) -> list[list[Cell]]:
    if isinstance(table, Path):
        table = table.read_text()
    if isinstance(table, str):
        return _from_text(table)
    if isinstance(table, Mapping):
        ranks = sorted(table)
        if ranks != list(range(len(ranks))):
            missing = next(rank for rank in range(len(ranks) + 1) if rank not in table)
            raise ProgramError(f"rank {missing} is missing: the table names ranks {ranks}; ranks are 0..n-1.")
        table = [table[rank] for rank in ranks]
    rows = [[cell for cell in row if cell is not None and cell not in ("", ".")] for row in table]
    if not rows:
        raise ProgramError("the table is empty; give a list of cells for each rank.")
    return rows


def _from_text(text: str) -> list[list[Cell]]:
    """A grid or CSV text; errors say the row and column of the stray cell."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows: list[list[Cell]] = []
    for number, line in enumerate(lines, 1):
        body = line.partition("|")[2] if line.lstrip().startswith("rank") else line
        found = next(csv.reader([body])) if "," in body else body.split()
        row: list[Cell] = []
        for column, cell in enumerate(found, 1):
            if cell.strip() in ("", "."):
                continue
            if not cell.strip()[:1].isupper():
                try:
                    parse_cell(cell)
                except ProgramError as error:
                    raise ProgramError(f"row {number}, column {column}: {error}") from None
            row.append(cell.strip())
        rows.append(row)
    if not rows:
        raise ProgramError("the table is empty; write a line of cells for each rank.")
    return rows
