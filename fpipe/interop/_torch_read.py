"""Read torch's tables cell by cell; whatever is no cell of theirs is refused with its line and column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Literal, NamedTuple

from fpipe.limits import shortened
from fpipe.program import ProgramError, readable
from fpipe.transforms.cells import csv_cells, text_of

Format = Literal["compute_only", "compute_comms"]

COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
_OF_A_STAGE = (*WEIGHTS, "WAIT_REDUCE_GRAD")

_N = "(0|[1-9][0-9]{0,8})"
_ACTION = re.compile(rf"{_N}({'|'.join((*WAITS, *TRANSFERS, *WEIGHTS, *COMPUTE))})(?:{_N})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing torch's runtime does: `2F0` is F of stage 2 for microbatch 0, `2RESHARD` has no microbatch."""

    stage: int
    kind: str
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell with its line and column, both from 1: one action, or the two that overlap."""

    line: int
    column: int
    actions: tuple[Action, ...]

    @property
    def place(self) -> str:
        """Where it stands, for errors."""
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> str | None:
        """The cell as a table of ours names it, or None if it computes nothing."""
        if self.actions[0].kind not in COMPUTE:
            return None
        cells = ";".join(map(str, self.actions))
        return cells if len(self.actions) == 1 else f"({cells})"


Table = str | Path | Mapping[int, Sequence[object]]
"""CSV text, the path of a CSV file, or what torch's schedules have as their `pipeline_order`."""


def read(table: Table, format: Format | None) -> list[list[Cell]]:
    """The cells of each rank, idle ones left out; each op once, of stages and microbatches 0..n-1."""
    if format not in (None, "compute_only", "compute_comms"):
        raise ValueError(f"format is 'compute_only' or 'compute_comms', found {format!r}.")
    rows = [list(_row(number, line, format)) for number, line in enumerate(_lines(table), 1)]
    if not any(rows):
        raise ProgramError("the table is empty; give one line of cells for each rank.")
    for empty in (number for number, row in enumerate(rows, 1) if not row):
        raise ProgramError(f"line {empty} has no cells: ranks are 0..n-1, and each has a row.")
    _each_once(rows)
    _without_gaps(rows)
    return rows


def actions_of(rows: Sequence[Sequence[Cell]], kinds: Sequence[str]) -> Iterator[tuple[Cell, Action]]:
    """The actions of some kinds, with the cells they stand in."""
    for cell in chain.from_iterable(rows):
        for action in cell.actions:
            if action.kind in kinds:
                yield cell, action


def _lines(table: Table) -> list[list[str]]:
    if isinstance(table, Mapping):
        return [["" if action is None else str(action) for action in table[rank]] for rank in sorted(table)]
    if isinstance(table, Path):
        table = text_of(table)
    if not isinstance(table, str):
        raise TypeError(f"a table is CSV text or the path of a CSV file, found {type(table).__name__}.")
    if table.endswith(".csv") and "\n" not in table:
        raise ProgramError(f"{table!r} is the name of a file, it seems; hand in pathlib.Path({table!r}).")
    return [csv_cells(line) for line in readable(table).strip("\r\n").splitlines()]


def _row(number: int, line: list[str], format: Format | None) -> Iterator[Cell]:
    for column, text in enumerate(line, 1):
        if not text.strip():
            continue
        try:
            actions = _actions(text.strip())
        except ProgramError as error:
            raise ProgramError(f"line {number}, column {column}: {error}") from None
        cell = Cell(number, column, actions)
        if format == "compute_only" and cell.compute is None:
            raise ProgramError(
                f"{cell.place}: {actions[0]} does not compute, and the format is 'compute_only'; read this table with "
                "format='compute_comms'."
            )
        yield cell


def _actions(text: str) -> tuple[Action, ...]:
    overlap = _OVERLAP.fullmatch(text)
    if overlap:
        found = tuple(_action(part.strip()) for part in overlap[1].split(";"))
        if len(found) < 2 or any(action.kind not in COMPUTE for action in found):
            raise ProgramError(f"{shortened(text)!r} is to overlap two ops of computation, as in (0F3;3B1)OVERLAP_F_B.")
        return found
    return (_action(text),)


def _action(text: str) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None or (found[3] is None) == (found[2] not in _OF_A_STAGE):
        raise ProgramError(
            f"{shortened(text)!r} is not a cell of torch.distributed.pipelining. Cells read 2F0 (F, B, I or W) or "
            "(0F3;3B1)OVERLAP_F_B; with transfers also 2SEND_F0, 2RECV_F0, 2SEND_B0, 2RECV_B0, 2WAIT_SEND_F0, "
            "2WAIT_SEND_B0, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD and 2WAIT_REDUCE_GRAD."
        )
    return Action(int(found[1]), found[2], None if found[3] is None else int(found[3]))


def _each_once(rows: list[list[Cell]]) -> None:
    first: dict[Action, Cell] = {}
    for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS)):
        if action in first:
            raise ProgramError(f"{cell.place}: {action} stands in {first[action].place} already; each stands once.")
        first[action] = cell


def _without_gaps(rows: list[list[Cell]]) -> None:
    """A wrong number would make a table of many stages or microbatches with nothing in them."""
    for word, field in (("stage", 0), ("microbatch", 2)):
        known = {action[field] for _, action in actions_of(rows, ("F",))}
        first = next(number for number in count() if number not in known)
        for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS, *WEIGHTS, *WAITS)):
            number = action[field]
            if isinstance(number, int) and number >= first:
                raise ProgramError(
                    f"{cell.place}: {action} names {word} {number}, but the table has no forward of {word} "
                    f"{first}; it names all of 0..n-1."
                )
