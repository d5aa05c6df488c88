"""Put the scheduled ops of each rank in the order of a table.

    rank 0 | 0F0 0B0 0F1 0B1        --> reorder([["0F0", "0F1", "0B0", "0B1"]]) -->        rank 0 | 0F0 0F1 0B0 0B1

A table names each F, B, I and W once. All other ops are placed by their data, unless the table names them too; a table
that names one R (or SEND, or RECV) names them all. A cell 2B0 also names 2I0 and 2W0 of a split backward, and naming
2I0 and 2W0 splits 2B0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

from fpipe.order import arrange, scheduled_kinds
from fpipe.program import Op, Program, ProgramError, cell_of, pair, parts_of
from fpipe.transforms._rewrite import Transform, as_transform, place_by_data, refuse_freed, with_rank
from fpipe.transforms.cells import Cell, Key, Rows, Table, keys_of, names_value, parse_cell, read_table
from fpipe.transforms.place import Homes, ascending_ranks, checked_homes, stage_ranks
from fpipe.transforms.split_backward import split_backwards
from fpipe.transforms.update import is_post_validated, refuse_without_redo

_CELL_WITHOUT_STAGE = re.compile(r"[FBIWR]\d+")


def reorder(order: Table | Callable[[Program], Rows]) -> Transform:
    """Put the scheduled ops of each rank in an order, without moving any to another rank.

    Args:
        order: a table as `from_table` takes it (a list of cells for each rank, a grid, CSV, a path), or `f(program)`
            that gives the lists. A cell is text such as "2F0", or `(kind, stage, microbatch, slice)`.

    Raises:
        ProgramError: an op that stands twice or is missing, that the program does not have, or that is on another rank;
            orders that would wait for each other for ever.

    >>> import fpipe
    >>> program = fpipe.split(2)(fpipe.program(1))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0B0 0F1 0B1
    >>> print(fpipe.plot(fpipe.reorder([["0F0", "0F1", "0B0", "0B1"]])(program)))
    rank 0 | 0F0 0F1 0B0 0B1
    """

    @as_transform
    def transform(program: Program) -> Program:
        rows = order(program) if callable(order) else read_table(order)
        if not isinstance(rows, Sequence) or isinstance(rows, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the order is a list of cells for each rank; the function gave {rows!r}.")
        return apply_table(program, rows, move=False)

    return transform


def from_rows(policy: str | Sequence[int], ranks: int | None, rows: Callable[[Program, list[int]], Rows]) -> Transform:
    """Make a schedule: place stages and order ops, as `chain(place(policy, ranks=ranks), reorder(rows))` in one pass.

    `rows(program, placement)` gives the cells of each rank, where stage s is on rank `placement[s]`. A "linear" one is
    kept where the program has it already, with whatever numbers of stages.
    """

    @as_transform
    def transform(program: Program) -> Program:
        placement = (
            ascending_ranks(program, ranks) if policy == "linear" else stage_ranks(policy, program.stages, ranks)
        )
        return apply_table(program, rows(program, placement), move=True)

    return transform


def apply_table(program: Program, rows: Rows, *, move: bool, homes: Homes | None = None) -> Program:
    """Put the program in the order of a table; with `move`, on the ranks of its rows as well."""
    refuse_freed(program)
    for rank, row in enumerate(rows):
        if not row:
            raise ProgramError(f"rank {rank} has no ops in the table: each rank 0..n-1 has a row.")
    program = _split_where_named(program, rows)
    # Behind forward_only() a schedule still draws its backwards; they name nothing here.
    if not any(op.kind in "BIW" for op in parts_of(program.ops)):
        rows = [[cell for cell in row if isinstance(cell, str) or cell[0] not in "BIW"] for row in rows]
    finder = _CellFinder(program)
    positions = [finder.find_row(rank, row) for rank, row in enumerate(rows)]
    del rows  # the cells of a million ops take 80 MB
    finder.refuse_unnamed()
    (finder.move_rows if move else finder.refuse_moves)(positions)
    inputs, ops, outputs, sources = program.inputs, finder.ops, program.outputs, program.sources
    if finder.has_new_pairs:
        ops, positions, sources = *finder.without_gaps(positions), None
    if move:
        inputs, ops, outputs = place_by_data(inputs, ops, outputs, checked_homes(program, homes))
    arranged = arrange(inputs, ops, outputs, scheduled_kinds() | finder.named_optional_kinds, sources, positions)
    if is_post_validated(arranged):
        refuse_without_redo(arranged)
    return arranged


def _split_where_named(program: Program, rows: Rows) -> Program:
    """Split each full backward that the table names as I or W."""
    if {cell[0] for row in rows for cell in row} <= {"F", "B", "R"}:  # keys, and no halves among them
        return program
    named_halves = (cell for row in rows for cell in row if "I" in cell or "W" in cell)
    halves = {key[1:3] for cell in named_halves for key in keys_of(cell) if key[0] in "IW"}
    halves &= {op[1:3] for op in parts_of(program.ops) if op.kind == "B"} if halves else set()
    if not halves:
        return program
    ops = split_backwards(program.ops, lambda stage, microbatch: (stage, microbatch) in halves)
    return Program.trusted(program.inputs, tuple(ops), program.outputs)  # the table orders them


_ColumnKey = tuple[str, int | None, int | None]


class _CellFinder:
    """Finder of the positions of ops that cells name, each once; it reports ops that no cell has named."""

    def __init__(self, program: Program) -> None:
        self.program = program
        parts = parts_of(program.ops)
        # The pairs of the program are taken apart, and only those of the table are put together again.
        self.has_new_pairs = parts is not program.ops
        self.ops: list[Op | Any] = list(parts)
        # Scheduled ops that are still to be named, by kind, stage and slice, then by microbatch. A row names one
        # column after the other, whose small dicts stay in the processor's cache: a look-up in one dict of all keys
        # takes three times as long.
        self.unnamed: defaultdict[_ColumnKey, dict[int | None, int]] = defaultdict(dict)
        self.optional: dict[Key | str, int] = {}  # the rest: R by its key, what keeps to its data by its cell
        named_kinds = scheduled_kinds()
        for position, op in enumerate(parts):
            kind, stage, microbatch, slice_index = op[:4]
            if kind in named_kinds:
                self.unnamed[kind, stage, slice_index][microbatch] = position
            else:
                self.optional[op[:4] if kind == "R" else op.cell] = position
        self.named_optional_kinds: frozenset[str] = frozenset()

    def find_row(self, rank: int, row: Sequence[Cell]) -> list[int]:
        unnamed, keys, positions = self.unnamed, cast(Sequence[Key], row), [-1] * len(row)
        # Schedules write a row as keys, nearly all of them of scheduled ops: one comprehension finds these.
        if set(map(type, row)) == {tuple}:
            positions = [unnamed[kind, stage, q].pop(microbatch, -1) for kind, stage, microbatch, q in keys]
        # What is left (-1) is text, a pair, an R, a split backward or a mistake, and is found one by one.
        if -1 in positions:
            groups = [
                (position,) if position >= 0 else self.find_cell(cell, f"rank {rank}, cell {index}")
                for index, (cell, position) in enumerate(zip(row, positions, strict=True))
            ]
            positions = [position for group in groups for position in group]
        return positions

    def move_rows(self, positions: Sequence[Sequence[int]]) -> None:
        # In the order of the program, as the ops lie in memory, and not row by row: a tenth off a large build.
        ranks = [-1] * len(self.ops)
        for rank, row in enumerate(positions):
            for position in row:
                ranks[position] = rank
        self.ops = [op if rank < 0 else with_rank(op, rank) for op, rank in zip(self.ops, ranks, strict=True)]

    def refuse_moves(self, positions: Sequence[Sequence[int]]) -> None:
        for rank, row in enumerate(positions):
            for cell, op in enumerate(self.ops[position] for position in row):
                if op[4] != rank:
                    raise ProgramError(
                        f"rank {rank}, cell {cell}: {op.cell} is on rank {op.rank} in this program. reorder() keeps "
                        "ops on their rank; use from_table() to move them."
                    )

    def find_cell(self, cell: Cell, location: str) -> Sequence[int]:
        """Return the positions of the ops that a cell names: by a value, by a key, or by two keys as a pair."""
        if isinstance(cell, str) and names_value(cell):
            if cell in self.optional:
                return (self.find_optional(cell),)
            rank = location.split()[1].rstrip(",")
            hint = f" A cell names its stage too: {rank}{cell}, if the stage is the rank."
            raise ProgramError(
                f"{location}: the program has no op {cell}.{hint * bool(_CELL_WITHOUT_STAGE.fullmatch(cell))}"
            )
        try:
            keys = (cell,) if isinstance(cell, tuple) else parse_cell(cell)
        except ProgramError as error:
            raise ProgramError(f"{location}: {error}") from None
        groups = [self.find_key(key, location) for key in keys]
        if len(keys) == 1:
            return groups[0]
        firsts = [group[0] for group in groups]
        paired = pair(*(self.ops[position] for position in firsts))
        for position in firsts:
            self.ops[position] = None
        self.ops[firsts[0]] = paired
        self.has_new_pairs = True
        return (firsts[0], *(position for group in groups for position in group[1:]))

    def find_key(self, key: Key, location: str) -> tuple[int, ...]:
        """Return the position of a key's op; two positions, of I and W, for the B of a split backward."""
        if key in self.optional:
            return (self.find_optional(key),)
        kind, stage, microbatch, slice_index = key
        is_split = kind == "B" and microbatch not in self.unnamed[kind, stage, slice_index]
        columns = [self.unnamed[half, stage, slice_index] for half in (("I", "W") if is_split else (kind,))]
        if all(microbatch in column for column in columns):
            return tuple(column.pop(microbatch) for column in columns)
        raise ProgramError(f"{location}: {self.explain_unknown(key)}")

    def find_optional(self, key: Key | str) -> int:
        position = self.optional.pop(key)
        self.named_optional_kinds |= {self.ops[position].kind}
        return position

    def without_gaps(self, rows: list[list[int]]) -> tuple[list[Op], list[list[int]]]:
        """Return ops and rows without the places of second parts, which pairs have absorbed."""
        # A pair stands at the place of its first part; `find_cell` has emptied those of its other parts.
        filled = [position for position, op in enumerate(self.ops) if op is not None]
        new_by_old = {old: new for new, old in enumerate(filled)}
        return [self.ops[old] for old in filled], [[new_by_old[position] for position in row] for row in rows]

    def refuse_unnamed(self) -> None:
        unnamed = (position for column in self.unnamed.values() for position in column.values())
        first_unnamed = min(unnamed, default=None)
        if first_unnamed is not None:
            raise ProgramError(self.explain_missing(self.ops[first_unnamed][:4]))
        self.unnamed.clear()  # of a million ops the empty columns keep 40 MB
        for position in self.optional.values():
            op = self.ops[position]
            if op.kind in self.named_optional_kinds:
                raise ProgramError(f"the table names some {op.kind} but not {op.cell}: name all of them, or none.")

    @cached_property  # only for errors
    def program_keys(self) -> set[Key]:
        return {op[:4] for op in parts_of(self.program.ops) if op.kind in scheduled_kinds() or op.kind == "R"}

    def explain_unknown(self, key: Key) -> str:
        kind, stage, microbatch, _ = key
        stages, microbatches = self.program.stages, self.program.microbatches
        cell, full_backward = cell_of(key), ("B", *key[1:])
        if key in self.program_keys or (kind == "B" and ("I", *key[1:]) in self.program_keys):
            zero_bubble = " In the letters of the zero-bubble papers B is our I: from_table(..., notation='zb')."
            return f"{cell} stands twice, or as B and as I and W; an op is named once.{zero_bubble * (kind in 'IW')}"
        if stage is not None and stage >= stages:
            return f"{cell} names stage {stage}, out of range: this program has {stages} stages, 0..{stages - 1}."
        if microbatch is not None and microbatch >= microbatches:
            return (
                f"{cell} names microbatch {microbatch}, out of range: this program has {microbatches} "
                f"(0..{microbatches - 1}). Put fpipe.split({microbatch + 1}) before the table."
            )
        if kind == "R":
            return f"{cell}: nothing is recomputed there. Put fpipe.checkpoint() before the table."
        if kind in "IW" and full_backward in self.program_keys:
            return f"{cell} stands beside {cell_of(full_backward)}: a backward is B, or I and W, never both."
        return f"this program has no {cell}."

    def explain_missing(self, key: Key) -> str:
        """Explain which op the table leaves out, by the ops of the same stage and microbatch that it names."""
        kind, stage, microbatch, _ = key
        columns = self.unnamed.items()
        unnamed = {(kind, stage, i, slice_index) for (kind, stage, slice_index), column in columns for i in column}
        named = self.program_keys - unnamed
        forward, other_half = ("F", *key[1:]), ("W" if kind == "I" else "I", *key[1:])
        cell, cell_of_half = cell_of(key), cell_of(other_half)
        if kind == "I" and other_half in named:
            return f"the table has {cell_of_half} without {cell}, which makes what it reads. Add it before."
        if kind in "BI" and forward in named:
            backward = f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
            return f"the table has {cell_of(forward)} without its backward: add {backward}."
        if kind == "W" and other_half in named:
            return f"the table has {cell_of_half} without {cell}: the weight gradient is never computed. Add it."
        return f"the table does not name {cell}; every F and every backward is named once."
