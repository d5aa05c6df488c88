"""Draw random programs, as recipes: a graph of stages, recomputed and split backwards, and a legal order on ranks."""

import itertools
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from fpipe.model import Source
from fpipe.program import Program
from fpipe.schedules.notations import from_table
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import split_backward
from fpipe.transforms.training import program as base_program

Takes = tuple[Source | tuple[Source, ...], ...]
"""Inputs of each stage: "batch", a stage, or several of these."""
Order = tuple[tuple[str, ...], ...]
"""The cells of each rank, as `schedules.from_table` reads them."""


@st.composite
def graphs(draw: st.DrawFn, stages: st.SearchStrategy[int] | None = None) -> Takes:
    """Draw the inputs of each stage: the batch or earlier stages, in any number; every stage but the last has a reader.

    Args:
        stages: how many; 1 to 5 by default.

    >>> from hypothesis import find, strategies as st
    >>> find(graphs(st.just(3)), lambda takes: takes[2] == (0, 1))
    ('batch', 0, (0, 1))
    """
    n = draw(st.integers(1, 5) if stages is None else stages)
    sources_by_stage: list[list[Source]] = [["batch"]]
    for stage in range(1, n):
        earlier: list[Source] = ["batch", *range(stage)]
        sources_by_stage.append(draw(st.lists(st.sampled_from(earlier[::-1]), min_size=1, max_size=3)))
    for stage in range(n - 1):
        if not any(stage in sources for sources in sources_by_stage):
            sources_by_stage[stage + 1].append(stage)
    return tuple(sources[0] if len(sources) == 1 else tuple(sources) for sources in sources_by_stage)


@st.composite
def placements(draw: st.DrawFn, stages: int) -> list[int]:
    """Draw a rank for each stage; every rank has one.

    >>> from hypothesis import find
    >>> find(placements(3), lambda ranks: max(ranks) == 1)
    [0, 0, 1]
    """
    drawn_ranks = draw(st.lists(st.integers(0, stages - 1), min_size=stages, max_size=stages))
    ranks = sorted(set(drawn_ranks))
    return [ranks.index(rank) for rank in drawn_ranks]


@st.composite
def legal_orders(draw: st.DrawFn, program: Program, replicas: bool = False) -> Order:
    """Draw a placement, and an order of ops for each rank such that all orders together cannot deadlock.

    Args:
        program: whose F, B, I and W are ordered.
        replicas: place each stage anew for each microbatch.

    Returns:
        The cells of each rank, for `fpipe.schedules.from_table`.

    >>> import fpipe
    >>> from hypothesis import find
    >>> find(legal_orders(fpipe.split(2)(fpipe.program(2))), lambda rows: len(rows) == 2)
    (('0F0', '0B0', '0F1', '0B1'), ('1F0', '1B0', '1F1', '1B1'))
    """
    times = program.microbatches if replicas else 1
    placement = draw(placements(program.stages * times))
    cells = {op.cell: op for op in program.ops if op.kind in "FBIW"}
    writer = {value: op for op in program.ops for value in op.writes}
    needs_by_cell: dict[str, set[str]] = {cell: set() for cell in cells}
    for cell, op in cells.items():
        todo = list(op.reads)
        while todo:
            source = writer.get(todo.pop())
            if source is not None and source.cell in cells:
                needs_by_cell[cell].add(source.cell)
            elif source is not None:
                todo += source.reads
    wish = {cell: number for number, cell in enumerate(draw(st.permutations(list(cells))))}
    rows: list[list[str]] = [[] for _ in range(1 + max(placement))]
    waiting = dict(needs_by_cell)
    while waiting:
        cell = min((cell for cell, needs in waiting.items() if not needs & waiting.keys()), key=wish.__getitem__)
        op = cells[cell]
        rows[placement[(op.stage or 0) * times + (op.microbatch or 0) % times]].append(cell)
        del waiting[cell]
    return tuple(map(tuple, rows))


@dataclass(frozen=True)
class DrawnProgram:
    """A recipe of a program: each stage's inputs, microbatches, recomputed and split backwards, and a table.

    >>> plan = DrawnProgram(("batch", 0), 2, frozenset(), frozenset({(0, 1)}), (("0F0", "0F1", "0B0", "0I1", "0W1"),
    ...                                                                ("1F0", "1B0", "1F1", "1B1")))
    >>> import fpipe
    >>> print(fpipe.plot(plan.program))
    rank 0 | 0F0 0F1  .  0B0  .  0I1 0W1
    rank 1 |  .  1F0 1B0 1F1 1B1  .   .
    """

    takes: Takes
    microbatches: int
    recomputed: frozenset[tuple[int, int]]
    halved: frozenset[tuple[int, int]]
    table: Order
    grain: Literal["stage", "layer"] = "stage"

    @property
    def base(self) -> Program:
        """One batch on one rank."""
        return base_program(len(self.takes), inputs=self.takes)

    @property
    def split(self) -> Transform:
        return split(self.microbatches)

    @property
    def transforms(self) -> dict[str, Transform]:
        """The four transforms that commute."""
        return {
            "checkpoint": checkpoint(lambda stage, microbatch: (stage, microbatch) in self.recomputed, self.grain),
            "split_backward": split_backward(lambda stage, microbatch: (stage, microbatch) in self.halved),
            "schedule": from_table(self.table),
            "merge": merge(),
        }

    @property
    def program(self) -> Program:
        return chain(self.split, *self.transforms.values())(self.base)


@st.composite
def programs(draw: st.DrawFn, takes: st.SearchStrategy[Takes] | None = None, microbatches: int = 4) -> DrawnProgram:
    """Draw a program: a graph of stages, sizes, recomputed and split backwards, and a legal order on ranks.

    Args:
        takes: the graph; any of 1 to 5 stages by default.
        microbatches: at most so many.

    Returns:
        A `DrawnProgram`, which makes the program and prints as what was drawn.

    >>> from hypothesis import find
    >>> find(programs(), lambda drawn: drawn.microbatches == 2).table
    (('0F0', '0B0', '0F1', '0B1'),)
    """
    graph = draw(takes if takes is not None else graphs())
    m = draw(st.integers(1, microbatches))
    cells = list(itertools.product(range(len(graph)), range(m)))
    subsets = st.frozensets(st.sampled_from(cells))
    recomputed, halved = draw(subsets), draw(subsets)
    cut = chain(split(m), split_backward(lambda stage, index: (stage, index) in halved))
    table = draw(legal_orders(cut(base_program(len(graph), inputs=graph))))
    return DrawnProgram(graph, m, recomputed, halved, table, draw(st.sampled_from(["stage", "layer"])))
