"""A schedule as a table: a transform like any other, and text to keep."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass

from fpipe.program import Program, ProgramError, kind_of, parts_of
from fpipe.schedules.tables import from_table
from fpipe.transforms.cells import names_value, parse_cell, read_table
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.offload import offload
from fpipe.transforms.reorder import apply_table

OFFLOAD_CELL = re.compile(r"OFFLOAD\(res\[(\d+),(\d+)\]@(\w+)\)")


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule as a table: the order of ops on each rank, with recomputed and offloaded cells.

    It is a transform for programs with as many stages and microbatches; use it like a named schedule.

    Args:
        rows: the cells of each rank. An R recomputes a stage, an OFFLOAD moves its residuals.
        replicated: whether stages are on several ranks, which hold replicas of their parameters.

    >>> import fpipe
    >>> kept = schedule_table_of(fpipe.schedules.gpipe(2)(fpipe.split(2)(fpipe.program(2))))
    >>> print(kept.to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    >>> ScheduleTable.from_csv(kept.to_csv()) == ScheduleTable.from_json(kept.to_json()) == kept
    True
    """

    rows: tuple[tuple[str, ...], ...]
    replicated: bool = False

    def __call__(self, program: Program) -> Program:
        """Place and order a program."""
        # The table names R, OFFLOAD and LOAD, but they are ops of other transforms. So take them out of the table, let
        # `checkpoint` and `offload` make them for the cells where they stood, and order the copies by the whole table.
        op_cells = (cell for row in self.rows for cell in row if not names_value(cell))
        recomputed = {parse_cell(cell)[0][1:3] for cell in op_cells if "R" in cell}
        cells = [[cell for cell in row if names_value(cell) or "R" not in cell] for row in self.rows]
        matches = (OFFLOAD_CELL.fullmatch(cell) for row in cells for cell in row)
        memory_by_cell = {(int(match[1]), int(match[2])): match[3] for match in matches if match}
        if recomputed:
            program = checkpoint(lambda stage, microbatch: (stage, microbatch) in recomputed)(program)
        table_cells = [[cell for cell in row if not names_value(cell)] for row in cells]
        program = from_table(table_cells, replicated=self.replicated)(program)
        if not memory_by_cell:
            return program
        rank_by_cell = {cell: rank for rank, row in enumerate(cells) for cell in row}
        memory_by_rank = {rank_by_cell[f"{stage}F{m}"]: memory for (stage, m), memory in memory_by_cell.items()}
        is_host = set(memory_by_rank.values()) == {"host"}
        offloaded = offload(
            lambda stage, microbatch: (stage, microbatch) in memory_by_cell,
            destination="host" if is_host else lambda rank: int(memory_by_rank[rank]),
        )
        return apply_table(offloaded(program), cells, move=False)

    def to_csv(self) -> str:
        """Return a line of cells for each rank; `from_table` reads it too if nothing is recomputed or moved."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows)
        return text.getvalue()

    @staticmethod
    def from_csv(text: str, *, replicated: bool = False) -> ScheduleTable:
        """Read a schedule from CSV, where `replicated` is not written.

        Raises:
            ProgramError: a cell that cannot be read.
        """
        return ScheduleTable(tuple(tuple(map(str, row)) for row in read_table(text)), replicated)

    def to_json(self) -> str:
        """Return the schedule as JSON, which `from_json` reads."""
        rows = [" ".join(row) for row in self.rows]
        document = {"format": _FORMAT, "version": 1, "replicated": self.replicated, "rows": rows}
        return f"{json.dumps(document, indent=1)}\n"

    @staticmethod
    def from_json(text: str) -> ScheduleTable:
        """Read a schedule from JSON.

        Raises:
            ProgramError: the text is not a schedule as JSON.
        """
        try:
            document = json.loads(text)
            if document["format"] != _FORMAT or document["version"] != 1:
                raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
            return ScheduleTable(tuple(tuple(row.split()) for row in document["rows"]), bool(document["replicated"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProgramError(f"this is no schedule as to_json() writes it ({error}).") from None

    def __repr__(self) -> str:
        return f"<ScheduleTable: {len(self.rows)} ranks, {sum(map(len, self.rows))} cells>"


_FORMAT = "fpipe.schedule"


def schedule_table_of(program: Program) -> ScheduleTable:
    """Return the schedule of a program as a table."""
    rows: list[list[str]] = [[] for _ in range(program.ranks)]
    for op in program.ops:
        if kind_of(op.kind).time or op.parts or op.kind in ("OFFLOAD", "LOAD"):
            rows[op.rank].append(op.cell)
    ranks_by_stage: dict[int, set[int]] = {}
    for op in parts_of(program.ops):
        if kind_of(op.kind).time:
            ranks_by_stage.setdefault(op.stage or 0, set()).add(op.rank)
    return ScheduleTable(tuple(map(tuple, rows)), any(len(ranks) > 1 for ranks in ranks_by_stage.values()))
