"""A schedule written in runs: a few cells of a rank that come again and again, each time of later microbatches.

    rank 0 of 1F1B, p=3 m=8:   F0 F1 | F2 B0  F3 B1  F4 B2  F5 B3  F6 B4  F7 B5 | B6 B7
    the same in runs:          2 x F   6 x (F B)                                  2 x B

So a step of 4096 ranks and 8192 microbatches, 67 million ops, is 12,288 runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from fpipe.program import Op
from fpipe.timing.costs import Costs

Lane = tuple[str, int]
"""A kind and a stage: what a rank does for one microbatch after the other."""
Symbol = tuple[Lane, ...]
"""A cell without its microbatch: one lane, or the two of a PAIR."""


class Part(NamedTuple):
    """An op of a run: its microbatch is `first` at the first turn and `step` more at each turn after."""

    kind: str
    stage: int
    first: int
    step: int


class Run(NamedTuple):
    """Cells, each of one part or of the two of a PAIR, that a rank does `turns` times in a row."""

    cells: tuple[tuple[Part, ...], ...]
    turns: int

    def __str__(self) -> str:
        names = [f"({';'.join(map(_name, cell))})" if len(cell) > 1 else _name(*cell) for cell in self.cells]
        return f"{self.turns} x ({' '.join(names)})" if self.turns > 1 else " ".join(names)


def _name(part: Part) -> str:
    return f"{part.stage}{part.kind}{part.first}"


def table(rows: Iterable[Sequence[Run]]) -> list[list[str]]:
    """The cells of rows, written out as tables have them.

    >>> row = Row()
    >>> row.add([[("F", 0)]], 2)
    >>> row.add([[("F", 0)], [("B", 0)]], 2)
    >>> print(*row.runs, sep=", ")
    2 x (0F0), 2 x (0F2 0B0)
    >>> table([row.runs])
    [['0F0', '0F1', '0F2', '0B0', '0F3', '0B1']]
    """
    return [[cell for run in row for cell in _written(run)] for row in rows]


def _written(run: Run) -> Iterator[str]:
    for turn in range(run.turns):
        for cell in run.cells:
            names = [f"{part.stage}{part.kind}{part.first + turn * part.step}" for part in cell]
            yield f"({';'.join(names)})" if len(names) > 1 else names[0]


class Row:
    """The runs of a rank as they are made: each lane goes on with its next microbatch; a B is an I and a W.

    Args:
        first: the first microbatch of a lane's stage, where that is not 0.
    """

    def __init__(self, first: dict[int, int] | None = None) -> None:
        self.runs: list[Run] = []
        self.next: defaultdict[Lane, int] = defaultdict(int)
        for stage, microbatch in (first or {}).items():
            self.next.update({(kind, stage): microbatch for kind in "FIW"})

    def add(self, symbols: Sequence[Iterable[Lane]], count: int) -> None:
        """Some cells, so many times."""
        if count < 1 or not symbols:
            return
        often = Counter(lane for symbol in symbols for lane in symbol)
        cells: list[tuple[Part, ...]] = []
        met: Counter[Lane] = Counter()
        for symbol in symbols:
            parts: list[Part] = []
            for kind, stage in symbol:
                lane = ("I" if kind == "B" else kind, stage)
                parts.append(Part(kind, stage, self.next[lane] + met[lane], often[kind, stage]))
                met[lane] += 1
            cells.append(tuple(parts))
        for (kind, stage), times in often.items():
            for one in "IW" if kind == "B" else kind:
                self.next[one, stage] += times * count
        self.runs.append(Run(tuple(cells), count))


def cell_seconds(cell: Sequence[Part], rank: int, costs: Costs) -> float:
    """What a cell costs."""
    ops = [Op(kind, stage, 0, None, rank, (), ()) for kind, stage, _, _ in cell]
    return float(costs.seconds(ops[0] if len(ops) == 1 else Op("PAIR", None, None, None, rank, (), (), tuple(ops))))


def worked(row: Sequence[Run], rank: int, costs: Costs) -> float:
    """Seconds that a rank works."""
    return sum(count * sum(cell_seconds(cell, rank, costs) for cell in cells) for cells, count in row)


def held(row: Sequence[Run]) -> tuple[int, int]:
    """The most forwards whose residuals a rank holds at once: to the end of W, and to the end of I.

    >>> row = Row()
    >>> for symbols, count in (([[("F", 0)]], 2), ([[("F", 0)], [("I", 0)]], 3), ([[("W", 0)], [("I", 0)]], 2)):
    ...     row.add(symbols, count)
    >>> held(row.runs)
    (5, 3)
    """
    return _most(row, {"F": 1, "B": -1, "W": -1}), _most(row, {"F": 1, "B": -1, "I": -1})


def _most(row: Sequence[Run], change: dict[str, int]) -> int:
    now = most = 0
    for cells, count in row:
        changes = [change.get(part.kind, 0) for cell in cells for part in cell]
        highest = max(accumulate(changes), default=0)
        turn = sum(changes)
        most = max(most, now + highest + max(0, turn) * (count - 1))
        now += turn * count
    return most
