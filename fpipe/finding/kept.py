"""A schedule that was found, kept as its table: a transform like any other, and text."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass

from fpipe.program import Program, ProgramError, kind_of, parts_of
from fpipe.schedules.tables import from_table
from fpipe.transforms.cells import is_general, parse_cell, read_table
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.offload import offload
from fpipe.transforms.reorder import by_table

_AWAY = re.compile(r"OFFLOAD\(res\[(\d+),(\d+)\]@(\w+)\)")


@dataclass(frozen=True)
class Kept:
    """A schedule as its table: which op each rank does after which, and what is recomputed or moved out of memory.

    It places and orders any program of as many stages and microbatches; put it where a named schedule would stand.

    Args:
        rows: the cells of each rank. An R says what is recomputed, an OFFLOAD what waits elsewhere.
        replicated: whether stages are on several ranks, which hold replicas of their parameters.

    >>> import fpipe
    >>> kept = kept_of(fpipe.schedules.gpipe(2)(fpipe.split(2)(fpipe.program(2))))
    >>> print(kept.to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    >>> Kept.from_csv(kept.to_csv()) == Kept.from_json(kept.to_json()) == kept
    True
    """

    rows: tuple[tuple[str, ...], ...]
    replicated: bool = False

    def __call__(self, program: Program) -> Program:
        """Order a program."""
        again = {parse_cell(cell)[0][1:3] for row in self.rows for cell in row if "R" in cell and not is_general(cell)}
        cells = [[cell for cell in row if is_general(cell) or "R" not in cell] for row in self.rows]
        away = {
            (int(found[1]), int(found[2])): found[3] for row in cells for found in map(_AWAY.fullmatch, row) if found
        }
        if again:
            program = checkpoint(lambda stage, microbatch: (stage, microbatch) in again)(program)
        named = [[cell for cell in row if not is_general(cell)] for row in cells]
        program = from_table(named, replicated=self.replicated)(program)
        if not away:
            return program
        home = {cell: rank for rank, row in enumerate(cells) for cell in row}
        to = {home[f"{stage}F{microbatch}"]: place for (stage, microbatch), place in away.items()}
        host = set(to.values()) == {"host"}
        moved = offload(
            lambda stage, microbatch: (stage, microbatch) in away, to="host" if host else lambda rank: int(to[rank])
        )
        return by_table(moved(program), cells, move=False)

    def to_csv(self) -> str:
        """One line a rank; `fpipe.schedules.from_table` reads it too, where nothing is recomputed or moved."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows)
        return text.getvalue()

    @staticmethod
    def from_csv(text: str, *, replicated: bool = False) -> Kept:
        """Read it back; `replicated` is no part of a table.

        Raises:
            ProgramError: a cell that cannot be read.
        """
        return Kept(tuple(tuple(map(str, row)) for row in read_table(text)), replicated)

    def to_json(self) -> str:
        """All it says, as JSON; `from_json` reads it back."""
        said = {
            "format": _FORMAT,
            "version": 1,
            "replicated": self.replicated,
            "rows": [" ".join(row) for row in self.rows],
        }
        return f"{json.dumps(said, indent=1)}\n"

    @staticmethod
    def from_json(text: str) -> Kept:
        """Read it back.

        Raises:
            ProgramError: it is no schedule as JSON.
        """
        try:
            said = json.loads(text)
            if said["format"] != _FORMAT or said["version"] != 1:
                raise ValueError(f"format {said['format']!r}, version {said['version']!r}")
            return Kept(tuple(tuple(row.split()) for row in said["rows"]), bool(said["replicated"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProgramError(f"this is no schedule as to_json() writes it ({error}).") from None

    def __repr__(self) -> str:
        return f"<Kept: {len(self.rows)} ranks, {sum(map(len, self.rows))} cells>"


_FORMAT = "fpipe.schedule"


def kept_of(program: Program) -> Kept:
    """The schedule that a program has."""
    rows: list[list[str]] = [[] for _ in range(program.ranks)]
    for op in program.ops:
        if kind_of(op.kind).time or op.parts or op.kind in ("OFFLOAD", "LOAD"):
            rows[op.rank].append(op.cell)
    where: dict[int, set[int]] = {}
    for op in parts_of(program.ops):
        if kind_of(op.kind).time:
            where.setdefault(op.stage or 0, set()).add(op.rank)
    return Kept(tuple(map(tuple, rows)), any(len(ranks) > 1 for ranks in where.values()))
