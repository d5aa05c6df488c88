"""The result of a search: the schedule as a table, its times, a lower bound, and the named schedules beside it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fpipe.program import HtmlRepr, Program, ProgramError, kind_of, parts_of
from fpipe.schedules.notations import from_table
from fpipe.timing.costs import adds_gradients
from fpipe.timing.timeline import Timeline
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
_PRICED_KINDS = ("OFFLOAD", "LOAD", "GATHER", "SCATTER", "UPDATE")


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


@dataclass(frozen=True)
class NamedRow:
    """A named schedule under the same costs.

    Attributes:
        name: its name, with options.
        makespan, span: in seconds.
        peak: the most that a rank holds, in the unit of `Timeline.peak`.
        fits: whether it keeps the cap and the other conditions of the search.
    """

    name: str
    makespan: float
    span: float
    peak: float
    fits: bool


@dataclass(frozen=True, repr=False)
class SearchResult(HtmlRepr):
    """The best schedule that a search found.

    Attributes:
        schedule: a transform, kept as a table: `fpipe.chain(fpipe.split(m), found.schedule, fpipe.merge())`.
        program: the program that was searched for, in this schedule.
        timeline: start and end of each op.
        objective: what was minimized, "makespan" or "span".
        bound: seconds that no order of these ops on these ranks goes below, under the cap: by the solver's proof, or by
            `fpipe.bounds`.
        gap: how far above the bound it is, as a share of it: 0 is optimal.
        free: kinds of op that the costs say take no time, such as OFFLOAD, and "transfers".
        beat: the best named schedule that fits, and its seconds; None where none does.
        named: all named schedules that serve the sizes, the best first.
        complete: whether the search ran to its end; False after Ctrl-C.
        gather: the best policy of gathering parameters, of those that were asked for; `program` and `timeline` have it,
            and a chain has `fpipe.shard(gather=found.gather)` behind `merge`.

    >>> import fpipe
    >>> found = fpipe.search(2, fpipe.Costs(2, 3, 1), ranks=2, microbatches=3, seconds=0.1, solver="local")
    >>> found.timeline.makespan, found.bound, found.beat
    (21.0, 21.0, ('zb_h2', 21.0))
    """

    schedule: ScheduleTable
    program: Program = field(compare=False)
    timeline: Timeline = field(compare=False)
    objective: str
    bound: float
    named: tuple[NamedRow, ...]
    complete: bool = True
    gather: str = ""

    @property
    def value(self) -> float:
        """Seconds of the objective."""
        return getattr(self.timeline, self.objective)

    @property
    def gap(self) -> float:
        """How far the value is above the bound, as a share of the bound."""
        return max(0.0, self.value / self.bound - 1) if self.bound else 0.0

    @property
    def free(self) -> list[str]:
        """Kinds of op beside the stages' work that the costs say take no time, and "transfers" where these do not."""
        free_ops = (event.op for event in self.timeline.events if event.end == event.start)
        # A REDUCE of a number, such as the loss, and ops on values alone, such as ADD, have no cost to say.
        free_kinds = {
            op.kind for op in free_ops if op.kind in _PRICED_KINDS or (op.kind == "REDUCE" and adds_gradients(op))
        }
        are_free = any(transfer.start == transfer.end for transfer in self.timeline.transfers)
        return [*sorted(free_kinds), *(["transfers"] if are_free else [])]

    @property
    def beat(self) -> tuple[str, float] | None:
        """The best named schedule that fits, and its seconds."""
        return next(((row.name, getattr(row, self.objective)) for row in self.named if row.fits), None)

    @property
    def pictured(self) -> Mapping[str, Timeline]:
        """The timeline, under the name of its picture."""
        return {"found": self.timeline}

    def __str__(self) -> str:
        best = "no order of these ops on these ranks takes less"
        if self.gap > 1e-9:
            best = f"none of these ops on these ranks takes less than {self.bound:g}, this is {self.gap:.1%} above"
        lines = [f"{self.timeline}", f"{self.objective} {self.value:g}: {best}"]
        if self.beat is not None:
            lines.append(f"the best schedule by name is {self.beat[0]} with {self.beat[1]:g}")
        if self.gather:
            lines.append(f"parameters are gathered by fpipe.shard(gather={self.gather!r}), which no bound here counts")
        if self.free:
            lines.append(f"the costs assume that these take no time: {', '.join(self.free)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        stopped = "" if self.complete else ", stopped"
        return f"<SearchResult: {self.objective} {self.value:g}, gap {self.gap:.1%}{stopped}>"
