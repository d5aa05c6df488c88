"""Ways to run a step, each with its time and memory, the best first, and the front that nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from fpipe.program import HtmlRepr, Program
from fpipe.timing.amounts import align_columns, format_amount
from fpipe.timing.timeline import Timeline

Unit = Literal["bytes", "rows"]


@dataclass(frozen=True)
class PlanRow:
    """A way to run a step, with its time and memory.

    Attributes:
        schedule: its name, with options behind a colon; `found` for one that a search found.
        microbatches: how many.
        rows: of a microbatch, in the mean.
        checkpoint: what is recomputed: a word of `fpipe.checkpoint`.
        costs: where its seconds are from: "given", "measured", or "interpolated" between two that were.
        makespan: seconds of a step; of replicas until they have added up their last gradient.
        throughput: rows a second.
        bubble: the idle share of the makespan.
        memory: the most that each rank holds, in bytes with its parameters; or in rows, where a rank's share of the
            residuals of one row is 1.
        fits: whether that is within each rank's memory.
        gather: when parameters that replicas share out are gathered: a word of `fpipe.shard`, or "never" where
            replicas have whole ones; empty where there is one replica.
        program, timeline: what runs, and when.
    """

    schedule: str
    microbatches: int
    rows: float
    checkpoint: str
    costs: str
    makespan: float
    throughput: float
    bubble: float
    memory: tuple[float, ...]
    fits: bool
    gather: str = ""
    program: Program = field(repr=False, compare=False, kw_only=True)
    timeline: Timeline = field(repr=False, compare=False, kw_only=True)

    @property
    def name(self) -> str:
        """The words that identify this way among the others."""
        recompute = "" if self.checkpoint == "never" else f", recompute {self.checkpoint}"
        gather = f", gather {self.gather}" if self.gather else ""
        return f"{self.schedule}, m={self.microbatches}{recompute}{gather}"

    @property
    def peak_memory(self) -> float:
        """The peak memory of the fullest rank."""
        return max(self.memory)

    @property
    def seconds_per_row(self) -> float:
        """Seconds of a step for each row of the batch, by which ways are compared."""
        return self.makespan / (self.rows * self.microbatches)


@dataclass(frozen=True, repr=False)
class RunPlan(HtmlRepr):
    """Ways to run a step, sorted: first all that fit, by seconds a row. Prints as a table; `fpipe.plot` draws it.

    Attributes:
        rows: the ways.
        refused: which schedule does not serve the sizes, and why.
        unit: of memory, "bytes" or "rows".
        cap: the memory of each rank, infinite where none was said.
        complete: whether all were tried; False after Ctrl-C.

    >>> import fpipe
    >>> tried = fpipe.Candidates(microbatches=[4], schedules=["gpipe", "one_f_one_b"])
    >>> plan = fpipe.plan_run(fpipe.Costs(2, 2, 2), fpipe.Machine(ranks=2), tried)
    >>> [(row.name, row.makespan, row.peak_memory) for row in plan.front]
    [('one_f_one_b, m=4', 30.0, 2.0), ('gpipe, m=4, recompute always', 38.0, 1.0)]
    """

    rows: tuple[PlanRow, ...]
    refused: tuple[tuple[str, str], ...]
    unit: Unit
    cap: tuple[float, ...]
    complete: bool = True

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> PlanRow:
        """The shortest way that fits."""
        return self.rows[0]

    @cached_property
    def front(self) -> tuple[PlanRow, ...]:
        """The Pareto front of time against memory, the shortest first: nothing is both shorter and smaller."""
        # In order of time, a way is on the front if it takes less memory than all before it.
        front: list[PlanRow] = []
        for row in sorted(self.rows, key=lambda row: (row.seconds_per_row, row.peak_memory)):
            if not front or row.peak_memory < front[-1].peak_memory:
                front.append(row)
        return tuple(front)

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dicts of numbers and words, for `json` or a data frame."""
        field_names = [field.name for field in fields(PlanRow) if field.name not in ("program", "timeline", "memory")]
        return [
            {field_name: getattr(row, field_name) for field_name in field_names}
            | {"memory": list(row.memory), "front": row in self.front}
            for row in self.rows
        ]

    def rows_to_show(self, count: int = 12) -> tuple[PlanRow, ...]:
        """Return the rows worth printing: the best `count`, and the front."""
        return tuple(row for index, row in enumerate(self.rows) if index < count or row in self.front)

    def cells(self, rows: Iterable[PlanRow]) -> list[list[str]]:
        """Return rows of the table as text, its heading first. A star marks the front."""
        has_shards = any(row.gather for row in self.rows)
        heading = ["schedule", "m", "rows", "recompute", *(["gather"] if has_shards else []), "seconds", "bubble"]
        table = [[*heading, "held" if self.unit == "bytes" else "rows held", "rows/s", "costs", ""]]
        for row in rows:
            memory = format_amount(row.peak_memory, self.unit == "bytes")
            choices = [row.schedule, str(row.microbatches), f"{row.rows:g}", row.checkpoint]
            choices += [row.gather] if has_shards else []
            figures = [f"{row.makespan:.5g}", f"{row.bubble:.1%}", memory, f"{row.throughput:.5g}", row.costs]
            marks = "*" * (row in self.front), "" if row.fits else "too much"
            table.append([*choices, *figures, " ".join(filter(None, marks))])
        return table

    def __str__(self) -> str:
        cells = self.cells(self.rows_to_show())
        lines = align_columns(cells, [title in ("schedule", "recompute", "gather", "costs", "") for title in cells[0]])
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.refused)])

    def __repr__(self) -> str:
        return f"<RunPlan: {len(self.rows)} ways, best {self.best.name} ({self.best.makespan:.5g} s)>"
