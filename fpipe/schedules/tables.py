"""Your own schedule as a table, or as a generator of its cells: the order of ops on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

from fpipe.limits import check_whole_number
from fpipe.program import Program, ProgramError
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Cell, Table, from_zero_bubble_letters, keys_of, read_table
from fpipe.transforms.place import RankRule, ascending_ranks, place
from fpipe.transforms.reorder import apply_table


def from_table(rows: Table, *, replicated: bool = False, notation: Literal["fpipe", "zb"] = "fpipe") -> Transform:
    """Place and order a program by a table.

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
    cells = from_zero_bubble_letters(cells) if notation == "zb" else cells

    @as_transform
    def transform(program: Program) -> Program:
        # A stage in the rows of several ranks has its parameters on each of them.
        homes = None
        if replicated:
            ranks_by_stage: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
            for rank, row in enumerate(cells):
                for cell in row:
                    for key in keys_of(cell):
                        ranks_by_stage.setdefault(key[1] or 0, set()).add(rank)
            homes = {stage: sorted(ranks) for stage, ranks in ranks_by_stage.items()}
        return apply_table(program, cells, move=True, homes=homes)

    return transform


def from_generator(
    f: Callable[[int, int, int], Iterable[Cell | None]], ranks: int, placement: str | Sequence[int] = "linear"
) -> Transform:
    """Order a program by a generator: `f(rank, ranks, microbatches)` yields the cells of one rank.

    Args:
        f: gives the cells of a rank in order, each as text ("2F0", "(0F7;7B3)") or as `(kind, stage, microbatch,
            slice)`; idle ones ("", ".", None) are left out.
        ranks: the number of ranks.
        placement: "linear", "looped", "v", or a list with the rank of each stage.

    Raises:
        ProgramError: a cell that cannot be read, names no op of the program, stands twice or is on another rank (which
            rank, and which of its cells); an op that no rank names.

    >>> import fpipe
    >>> def all_forwards_first(rank, ranks, microbatches):
    ...     yield from (f"{rank}F{index}" for index in range(microbatches))
    ...     yield from (f"{rank}B{index}" for index in reversed(range(microbatches)))
    >>> schedule = fpipe.schedules.from_generator(all_forwards_first, ranks=2)
    >>> print(fpipe.plot(fpipe.chain(fpipe.split(2), schedule)(fpipe.program(2))))
    rank 0 | 0F0 0F1  .   .  0B1 0B0
    rank 1 |  .  1F0 1F1 1B1 1B0  .
    """
    if not callable(f):
        raise TypeError(f"from_generator takes f(rank, ranks, microbatches), which yields cells; found {f!r}.")
    check_whole_number("ranks", ranks)

    @as_transform
    def transform(program: Program) -> Program:
        program = placed_on(program, placement, ranks, "from_generator")
        rows = [checked_row(rank, f(rank, ranks, program.microbatches), 4 * len(program.ops)) for rank in range(ranks)]
        return apply_table(program, read_table(rows), move=False)

    return transform


def placed_on(program: Program, placement: str | Sequence[int] | RankRule, ranks: int, name: str) -> Program:
    """Return the program placed on this many ranks, which a placement has to name all."""
    resolved = ascending_ranks(program, ranks) if placement == "linear" else placement
    program = place(resolved, ranks=ranks if isinstance(resolved, str) else None)(program)
    if program.ranks != ranks:
        raise ProgramError(f"the placement names {program.ranks} ranks, but {name} got {ranks}.")
    return program


def checked_row(rank: int, cells: Any, limit: int) -> list[Any]:
    """Return the cells that a generator yields; a key without a slice gets None for it."""
    # A generator may never stop. No row has more cells than four times the ops, idle ones included.
    if isinstance(cells, str) or not isinstance(cells, Iterable):
        raise ProgramError(f"rank {rank}: the generator gave {cells!r}; it yields cells such as '{rank}F0'.")
    row: list[Any] = [*islice(cells, limit + 1)]  # pyright: ignore[reportUnknownArgumentType]
    if len(row) > limit:
        raise ProgramError(f"rank {rank}: {limit} cells and no end; a generator stops after its last op.")
    row = [(*cell, None) if isinstance(cell, tuple) and len(cell) == 3 else cell for cell in row]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for cell in row:
        if isinstance(cell, tuple) and [*map(type, cell)][:2] != [str, int]:  # pyright: ignore[reportUnknownArgumentType]
            raise ProgramError(f"rank {rank}: {cell!r} is not a cell, such as '2F0', '(0F7;7B3)' or ('F', 2, 0, None).")
    return row
