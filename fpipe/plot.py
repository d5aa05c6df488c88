"""Look at a program: the grid of a schedule, one line a rank, one column a tick of the clock."""

from __future__ import annotations

from fpipe.costs import Ticks
from fpipe.program import Program, the_program
from fpipe.simulate import simulate


def plot(program: Program) -> str:
    """The grid of a program's scheduled ops as text: time to the right in ticks, an idle tick is a dot.

    Each F, B, I, W and R takes one tick here; `simulate` knows real costs.

    >>> import fpipe
    >>> print(plot(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(2))))
    rank 0 | 0F0 0F1  .   .  0B0 0B1
    rank 1 |  .  1F0 1F1 1B0 1B1  .
    """
    events = simulate(the_program(program), Ticks()).events
    columns = round(max((end for _, _, end in events), default=0))
    grid: list[list[str]] = [["."] * columns for _ in range(program.ranks)]
    for op, start, end in events:
        if end > start:
            grid[op.rank][round(start)] = op.cell
    width = max((len(cell) for row in grid for cell in row), default=1)
    digits = len(str(program.ranks - 1))
    lines = (
        f"rank {rank:>{digits}} | " + " ".join(cell.center(width) for cell in row) for rank, row in enumerate(grid)
    )
    return "\n".join(line.rstrip() for line in lines)
