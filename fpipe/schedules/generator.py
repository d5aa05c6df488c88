"""A schedule of your own, as a loop: what each rank does, cell after cell, yielded by a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fpipe.limits import whole
from fpipe.program import Program, ProgramError
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Cell, is_general, parse_cell
from fpipe.transforms.reorder import in_rows

Cells = Iterable[Cell | None]


def from_generator(
    f: Callable[[int, int, int], Cells], ranks: int, placement: str | Sequence[int] = "linear"
) -> Transform:
    """Order a program as a loop says: `f(rank, ranks, microbatches)` yields the cells of one rank.

    Args:
        f: gives the cells of a rank in order, each as text ("2F0", "(0F7;7B3)") or as `(kind, stage, microbatch,
            slice)`; idle ones ("", ".", None) are left out.
        ranks: how many.
        placement: "linear", "looped", "v", or a list with the rank of each stage.

    Raises:
        ProgramError: a cell that cannot be read, names no op of the program, stands twice or is on another rank (which
            rank, and the how-manieth cell); an op that no rank names.

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
    whole("ranks", ranks)

    def rows(program: Program, placement: list[int]) -> list[list[Cell]]:
        if 1 + max(placement) != ranks:
            raise ProgramError(f"the placement names {1 + max(placement)} ranks; from_generator was told {ranks}.")
        return [_row(f, rank, program, placement) for rank in range(ranks)]

    ordered = in_rows(placement, ranks, rows)
    return transforming(lambda program: ordered(program))


def _row(f: Callable[[int, int, int], Cells], rank: int, program: Program, placement: list[int]) -> list[Cell]:
    """The cells of one rank, each one of an op that is there."""
    ranks, most = 1 + max(placement), 2 * len(program.ops)  # a B may be named as I and W
    given: Any = f(rank, ranks, program.microbatches)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ProgramError(f"rank {rank}: the generator gave {given!r}; it yields cells such as '{rank}F0'.")
    row: list[Cell] = []
    idle = 0
    for number, cell in enumerate(given):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if cell is None or (isinstance(cell, str) and cell.strip() in ("", ".")):
            idle += 1
            if idle > 1000 * (1 + most):
                raise ProgramError(f"rank {rank}: {idle} idle cells and no end; a generator stops after its last op.")
            continue
        where = f"rank {rank}, cell {number}"
        found = _the_cell(cell, where)  # pyright: ignore[reportUnknownArgumentType]
        for kind, stage, *_ in (found,) if isinstance(found, tuple) else () if is_general(found) else parse_cell(found):
            if stage is not None and stage < len(placement) and placement[stage] != rank:
                raise ProgramError(
                    f"{where}: {cell!r} names a {kind} of stage {stage}, which is on rank {placement[stage]} in this "
                    "placement."
                )
        row.append(found)
        if len(row) > most:
            raise ProgramError(f"{where}: {len(row)} cells, more than the program has ops; a generator has an end.")
    if not row:
        raise ProgramError(f"rank {rank}: the generator yields no cell; each rank has ops.")
    return row


def _the_cell(cell: object, where: str) -> Cell:
    """A cell as tables have them."""
    if isinstance(cell, str):
        text = cell.strip()
        if not is_general(text):
            try:
                parse_cell(text)
            except ProgramError as error:
                raise ProgramError(f"{where}: {error}") from None
        return text
    key: tuple[Any, ...] = tuple(cell) if isinstance(cell, tuple | list) else ()  # pyright: ignore[reportUnknownArgumentType]
    if len(key) in (3, 4) and isinstance(key[0], str) and all(type(n) is int or n is None for n in key[1:]):
        return (key[0], key[1], key[2], key[3] if len(key) == 4 else None)
    raise ProgramError(f"{where}: {cell!r} is no cell; cells read '2F0', '(0F7;7B3)' or ('F', 2, 0, None).")
