"""Say when: the order of the scheduled ops on each rank.

    rank 0 | 0F0 0B0 0F1 0B1        --> reorder([["0F0", "0F1", "0B0", "0B1"]]) -->        rank 0 | 0F0 0F1 0B0 0B1

A table names F, B, I and W, each once; what it does not name keeps to its data. A cell 2B0 also names 2I0 and 2W0 of a
split backward, and naming 2I0 and 2W0 splits 2B0. A table that names one R (or SEND, or RECV) names them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from fpipe.order import arrange, permuted, scheduled_kinds
from fpipe.program import Op, Program, ProgramError, building, kind_of, pair, parts_of
from fpipe.transforms._rewrite import Transform, keep_to_data, moved, refuse_freed
from fpipe.transforms.place import Homes, homes_said, stage_ranks
from fpipe.transforms.split_backward import split_backward

Key = tuple[str, int | None, int | None, int | None]
Cell = str | Key
Rows = Sequence[Sequence[Cell]]

_CELL = re.compile(r"(\d+)([A-Z]+)(\d+)(?:\.(\d+))?")


def reorder(order: Rows | Callable[[Program], Rows]) -> Transform:
    """Put the scheduled ops of each rank in an order, without moving any to another rank.

    Args:
        order: a list of cells for each rank, or `f(program)` that gives it. A cell is text such as "2F0", or
            `(kind, stage, microbatch, slice)`.

    Raises:
        ProgramError: an op that stands twice or is missing, that the program does not have, or that is on another rank;
            orders that would wait for each other for ever.

    >>> import fpipe
    >>> program = fpipe.split(2)(fpipe.program(1))
    >>> print(fpipe.plot(fpipe.reorder([["0F0", "0F1", "0B0", "0B1"]])(program)))
    rank 0 | 0F0 0F1 0B0 0B1
    """

    def transform(program: Program) -> Program:
        rows = order(program) if callable(order) else order
        return by_table(program, rows, move=False)

    return transform


def in_rows(policy: str | Sequence[int], ranks: int | None, rows: Callable[[Program, list[int]], Rows]) -> Transform:
    """`chain(place(policy, ranks=ranks), reorder(rows))` in one go: what a schedule is.

    `rows(program, placement)` gives the cells of each rank, where stage s is on rank `placement[s]`.
    """

    def transform(program: Program) -> Program:
        with building():
            placement = stage_ranks(policy, program.stages, ranks)
            return by_table(program, rows(program, placement), move=True)

    return transform


def by_table(program: Program, rows: Rows, *, move: bool, homes: Homes | None = None) -> Program:
    """The program in the order of a table; with `move`, on the ranks of its rows too."""
    refuse_freed(program)
    empty = next((rank for rank, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise ProgramError(f"rank {empty} has no ops in the table: ranks are 0..n-1, and each has a row of cells.")
    program = _split_where_named(program, rows)
    found = _Finder(program)
    named = [op for rank, row in enumerate(rows) for op in found.row(rank, row, move)]
    rest = found.rest()
    inputs, ops, outputs = program.inputs, [*named, *rest], program.outputs
    if move:
        inputs, ops, outputs = keep_to_data(inputs, ops, outputs, homes_said(program, homes))
    sources = None if found.repaired else permuted(program.sources, found.order)
    return arrange(inputs, ops, outputs, scheduled_kinds() | found.kinds, sources)


def parse_cell(text: str) -> tuple[Key, ...]:
    """The ops a cell names: one, or the parts of a pair.

    >>> parse_cell("2F0.1")
    (('F', 2, 0, 1),)
    >>> parse_cell("(0F7;7B3)")
    (('F', 0, 7, None), ('B', 7, 3, None))
    >>> parse_cell("0F1garbage")
    Traceback (most recent call last):
    fpipe.program.ProgramError: '0F1garbage' is not a cell: after 0F1 comes 'garbage'. Cells read 2F0 or (0F7;7B3).
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return tuple(key for part in text[1:-1].split(";") for key in parse_cell(part))
    found = _CELL.match(text)
    if found is None or found.end() != len(text):
        why = (
            f"after {found[0]} comes {text[found.end() :]!r}"
            if found
            else "it does not start with stage, kind, microbatch"
        )
        raise ProgramError(f"{text!r} is not a cell: {why}. Cells read 2F0 or (0F7;7B3).")
    stage, kind, microbatch, piece = found.groups()
    kind_of(kind)
    return ((kind, int(stage), int(microbatch), None if piece is None else int(piece)),)


def show(key: Key) -> str:
    """A key as its cell."""
    kind, stage, microbatch, piece = key
    return f"{stage}{kind}{microbatch}" + ("" if piece is None else f".{piece}")


def _split_where_named(program: Program, rows: Rows) -> Program:
    """Split each full backward that the table names as I or W."""
    halves: set[tuple[int | None, int | None]] = set()
    for row in rows:
        for cell in row:
            if isinstance(cell, tuple):
                if cell[0] == "I" or cell[0] == "W":
                    halves.add((cell[1], cell[2]))
            elif "I" in cell or "W" in cell:
                halves.update((key[1], key[2]) for key in _keys(cell) if key[0] in "IW")
    if halves:
        halves &= {(op.stage, op.microbatch) for op in parts_of(program.ops) if op.kind == "B"}
    return split_backward(where=lambda stage, microbatch: (stage, microbatch) in halves)(program) if halves else program


def _keys(cell: str) -> tuple[Key, ...]:
    return () if _is_general(cell) else parse_cell(cell)


def _is_general(cell: str) -> bool:
    """Cells such as SEND(y[0,0]>1), which name an op by a value."""
    return cell[:1].isupper()


class _Finder:
    """Finds the op of each cell, each once, and knows what was not named."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.listed = parts_of(program.ops)
        self.repaired = self.listed is not program.ops  # pairs taken apart or put together: positions no longer match
        self.order: list[int] = []  # positions, as they are found
        self.left: dict[Key, int] = {}  # what is still to be named
        self.others: dict[str, int] = {}
        table = scheduled_kinds()
        for position, op in enumerate(self.listed):
            if op[0] in table or op[0] == "R":
                self.left[op[:4]] = position
            else:
                self.others[op.cell] = position
        self.kinds: frozenset[str] = frozenset()

    @cached_property
    def ops(self) -> dict[Key, Op]:
        """All ops that a table may name, for errors that say what became of one."""
        return {op[:4]: op for op in self.listed if op.kind in scheduled_kinds() or op.kind == "R"}

    def row(self, rank: int, row: Sequence[Cell], move: bool) -> Iterator[Op]:
        take, listed, note = self.left.pop, self.listed, self.order.append
        for step, cell in enumerate(row):
            position = take(cell, None) if isinstance(cell, tuple) else None
            if position is None:
                found = self.slowly(cell, rank, step)
            else:
                found = (listed[position],)
                note(position)
            for op in found:
                if op.rank == rank:
                    yield op
                elif move:
                    yield moved(op, rank)
                else:
                    raise ProgramError(
                        f"rank {rank}, cell {step}: {op.cell} is on rank {op.rank} in this program. reorder() keeps "
                        f"ops on their rank; use fpipe.place() before, or fpipe.schedules.from_table() for both."
                    )

    def slowly(self, cell: Cell, rank: int, step: int) -> Sequence[Op]:
        """Everything but a plain op that is still to be named."""
        place = f"rank {rank}, cell {step}"
        if isinstance(cell, str) and _is_general(cell):
            if cell not in self.others:
                raise ProgramError(f"{place}: the program has no op {cell}.")
            op = self.taken(self.others.pop(cell))
            self.kinds |= {op.kind}
            return (op,)
        try:
            keys = (cell,) if isinstance(cell, tuple) else parse_cell(cell)
        except ProgramError as error:
            raise ProgramError(f"{place}: {error}") from None
        groups = [self.one(key, place) for key in keys]
        if len(keys) == 1:
            return groups[0]
        rest = [op for group in groups for op in group[1:]]
        self.repaired = True
        return (pair(*(group[0] for group in groups)), *rest)

    def one(self, key: Key, place: str) -> tuple[Op, ...]:
        """The op of a key; I and W for the B of a split backward."""
        if key in self.left:
            if key[0] == "R":
                self.kinds |= {"R"}
            return (self.taken(self.left.pop(key)),)
        kind, stage, microbatch, piece = key
        halves = [(half, stage, microbatch, piece) for half in "IW"]
        if kind == "B" and all(half in self.left for half in halves):
            return tuple(self.taken(self.left.pop(half)) for half in halves)
        raise ProgramError(f"{place}: {self.explain(key)}")

    def taken(self, position: int) -> Op:
        """The op of a position, which is now used."""
        self.order.append(position)
        return self.listed[position]

    def explain(self, key: Key) -> str:
        kind, stage, microbatch, _ = key
        program = self.program
        if key in self.ops or (kind == "B" and ("I", *key[1:]) in self.ops):
            return f"{show(key)} stands twice, or as B and as I and W; an op is named once."
        if stage is not None and stage >= program.stages:
            count = program.stages
            return f"{show(key)} names stage {stage}, out of range: this program has {count} stages, 0..{count - 1}."
        if microbatch is not None and microbatch >= program.microbatches:
            count = program.microbatches
            return (
                f"{show(key)} names microbatch {microbatch}, out of range: this program has {count} (0..{count - 1}). "
                f"Put fpipe.split({microbatch + 1}) before the table."
            )
        if kind == "R":
            return f"{show(key)}: nothing is recomputed there. Put fpipe.checkpoint() before the table."
        if kind in "IW" and ("B", *key[1:]) in self.ops:
            return f"{show(key)} stands beside {show(('B', *key[1:]))}: a backward is B, or I and W, never both."
        return f"this program has no {show(key)}."

    def rest(self) -> list[Op]:
        """The ops that keep to their data, once nothing is missing."""
        for key in self.left:
            if key[0] != "R":
                raise ProgramError(self.missing(key))
            if "R" in self.kinds:
                raise ProgramError(f"the table names some R but not {show(key)}: name all of them, or none.")
        rest = [self.taken(position) for position in (*self.left.values(), *self.others.values())]
        for op in rest:
            if op.kind in self.kinds:
                raise ProgramError(f"the table names some {op.kind} but not {op.cell}: name all of them, or none.")
        return rest

    def missing(self, key: Key) -> str:
        kind, stage, microbatch, piece = key
        named = self.ops.keys() - self.left.keys()
        forward = ("F", stage, microbatch, piece)
        if kind == "I" and ("W", *key[1:]) in named:
            half = show(("W", *key[1:]))
            return f"the table has {half} without {show(key)}, which makes what it reads. Add {show(key)} before it."
        if kind in "BI" and forward in named:
            backward = f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
            return f"the table has {show(forward)} without its backward: add {backward}."
        if kind == "W" and ("I", *key[1:]) in named:
            half = show(("I", *key[1:]))
            return f"the table has {half} without {show(key)}: the weight gradient is never computed. Add {show(key)}."
        return f"the table does not name {show(key)}; every F and every backward is named once."
