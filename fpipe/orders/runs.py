"""A schedule written in runs: a few cells of a rank that come again and again, each time of later microbatches.

    rank 0 of 1F1B, p=3 m=8:   F0 F1 | F2 B0  F3 B1  F4 B2  F5 B3  F6 B4  F7 B5 | B6 B7
    the same in runs:          2 x F   6 x (F B)                                  2 x B

So a step of 4096 ranks and 8192 microbatches, 67 million ops, is 12,288 runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from fpipe.program import Op
from fpipe.timing.costs import Costs

if TYPE_CHECKING:
    from torch import Tensor

Track = tuple[str, int]
"""A kind and a stage: what a rank does for one microbatch after the other."""
Symbol = tuple[Track, ...]
"""A cell without its microbatch: one track, or the two of a PAIR."""


class RunPart(NamedTuple):
    """An op of a run: its microbatch is `first` at the first turn and `step` more at each turn after."""

    kind: str
    stage: int
    first: int
    step: int


class Run(NamedTuple):
    """Cells, each of one part or of the two of a PAIR, that a rank does `turns` times in a row."""

    cells: tuple[tuple[RunPart, ...], ...]
    turns: int

    def __str__(self) -> str:
        names = [f"({';'.join(map(_name, cell))})" if len(cell) > 1 else _name(*cell) for cell in self.cells]
        return f"{self.turns} x ({' '.join(names)})" if self.turns > 1 else " ".join(names)


def _name(part: RunPart) -> str:
    return f"{part.stage}{part.kind}{part.first}"


class RunRow:
    """The runs of a rank as they are made: each track goes on with its next microbatch, from the `first` of its
    stage or 0 on; a B is an I and a W.

    >>> row = RunRow()
    >>> row.add([[("F", 0)]], 2)
    >>> row.add([[("F", 0)], [("B", 0)]], 2)
    >>> print(*row.runs, sep=", ")
    2 x (0F0), 2 x (0F2 0B0)
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.runs: list[Run] = []
        self.next: defaultdict[Track, int] = defaultdict(int)
        for stage, microbatch in (first or {}).items():
            self.next.update({(kind, stage): microbatch for kind in "FIW"})

    def add(self, symbols: Sequence[Iterable[Track]], count: int) -> None:
        """Some cells, so many times."""
        if count < 1 or not symbols:
            return
        tracks = [track for symbol in symbols for track in symbol]
        cells: list[tuple[RunPart, ...]] = []
        for symbol in symbols:
            parts: list[RunPart] = []
            for kind, stage in symbol:
                first = self.next["I" if kind == "B" else kind, stage]
                parts.append(RunPart(kind, stage, first, tracks.count((kind, stage))))
                self._on(kind, stage, 1)
            cells.append(tuple(parts))
        for kind, stage in tracks:
            self._on(kind, stage, count - 1)
        self.runs.append(Run(tuple(cells), count))

    def _on(self, kind: str, stage: int, count: int) -> None:
        for one in "IW" if kind == "B" else kind:
            self.next[one, stage] += count


KINDS = "FBIW"
"""Kinds of parts; in columns each is its place here."""


@dataclass(frozen=True)
class Columns:
    """The runs of all ranks, taken apart into columns of whole numbers.

    Attributes:
        ranks: how many.
        rank, turns, cells: of each run: whose it is, how often it runs, and how many cells it has.
        run, slot, place, kind, stage, first, step: of each part, in order: its run, its cell there, whether it is the
            first (0) or second (1) of its cell, and what it is.
    """

    ranks: int
    rank: Tensor
    turns: Tensor
    cells: Tensor
    run: Tensor
    slot: Tensor
    place: Tensor
    kind: Tensor
    stage: Tensor
    first: Tensor
    step: Tensor

    @cached_property
    def cell(self) -> Tensor:
        """Of each part the number of its cell, counted through all runs."""
        return (self.place == 0).cumsum(0) - 1

    def seconds(self, costs: Costs) -> Tensor:
        """Seconds of each cell."""
        import torch

        stages = int(self.stage.max()) + 1
        known = torch.zeros(len(KINDS), stages, dtype=torch.float64)
        for number in self.kind.unique().tolist():
            each = [float(costs.seconds(Op(KINDS[number], stage, 0, None, 0, (), ()))) for stage in range(stages)]
            known[number] = torch.tensor(each, dtype=torch.float64)
        how = "amax" if costs.pair == "max" else "sum"
        found = torch.zeros(int(self.cells.sum()), dtype=torch.float64)
        return found.scatter_reduce_(0, self.cell, known[self.kind, self.stage], how)

    def worked(self, costs: Costs) -> Tensor:
        """Seconds that each rank works."""
        run = self.run[self.place == 0]
        spent = self.seconds(costs).mul_(self.turns[run])
        return spent.new_zeros(self.ranks).index_add_(0, self.rank[run], spent)

    def held(self) -> tuple[list[int], list[int]]:
        """The most forwards whose residuals each rank holds at once: to the end of W, and to the end of I.

        >>> row = RunRow()
        >>> for symbols, count in (([[("F", 0)]], 2), ([[("F", 0)], [("I", 0)]], 3), ([[("W", 0)], [("I", 0)]], 2)):
        ...     row.add(symbols, count)
        >>> columns([row.runs]).held()
        ([5], [3])
        """
        return self._most((1, -1, 0, -1)), self._most((1, -1, -1, 0))

    def _most(self, change: tuple[int, ...]) -> list[int]:
        import torch

        changes = torch.tensor(change)[self.kind]
        none = torch.zeros_like(self.turns)
        turn = none.index_add(0, self.run, changes)
        within = changes.cumsum(0) - (turn.cumsum(0) - turn)[self.run]
        highest = none.scatter_reduce(0, self.run, within, "amax")
        whole = turn * self.turns
        of_rank = torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, self.rank, whole)
        before = whole.cumsum(0) - whole - (of_rank.cumsum(0) - of_rank)[self.rank]
        most = before + highest + turn.clamp(min=0) * (self.turns - 1)
        return torch.zeros(self.ranks, dtype=torch.int64).scatter_reduce_(0, self.rank, most, "amax").tolist()


def columns(rows: Sequence[Sequence[Run]]) -> Columns:
    """The runs of rows as columns."""
    import torch

    runs = [(rank, run.turns, len(run.cells)) for rank, row in enumerate(rows) for run in row]
    parts = [
        (slot, place, KINDS.index(kind), *numbers)
        for row in rows
        for run in row
        for slot, cell in enumerate(run.cells)
        for place, (kind, *numbers) in enumerate(cell)
    ]
    sizes = [sum(map(len, run.cells)) for row in rows for run in row]
    run = torch.arange(len(runs)).repeat_interleave(torch.tensor(sizes))
    rank, turns, cells = map(torch.tensor, zip(*runs, strict=True))
    slot, place, kind, stage, first, step = map(torch.tensor, zip(*parts, strict=True))
    return Columns(len(rows), rank, turns, cells, run, slot, place, kind, stage, first, step)
