"""A schedule of your own, as a table: which op each rank does after which."""

from __future__ import annotations

from typing import Literal

from fpipe.program import Program
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Table, in_our_letters, parse_cell, read_table
from fpipe.transforms.reorder import by_table


def from_table(rows: Table, *, replicated: bool = False, notation: Literal["fpipe", "zb"] = "fpipe") -> Transform:
    """Place and order a program as a table says.

    Args:
        rows: a list of cells for each rank, `{rank: cells}`, a grid or CSV text with one line a rank (a grid's lines
            may start with "rank 0 |"), or the path of such a file. Idle cells ("", ".", None) are left out. A cell
            names an F, B, I, W or R; a pair reads "(0F7;7B3)". B or I and W, cell by cell: a full backward that the
            table names as I and W is split, and B names I then W of a split one.
        replicated: stages may be on several ranks, which then hold replicas of their parameters.
        notation: "zb" reads the letters of the zero-bubble papers: B is our I, and BW our B.

    Raises:
        ProgramError: a cell that cannot be read (with line and column), a missing rank, an op that is missing, stands
            twice or is not in the program, a stage on two ranks, orders that wait for each other for ever.
        FileNotFoundError: there is no such file.

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
    if notation not in ("fpipe", "zb"):
        raise ValueError(f"notation is 'fpipe' or 'zb', found {notation!r}.")
    cells = read_table(rows)
    cells = in_our_letters(cells) if notation == "zb" else cells

    @transforming
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
