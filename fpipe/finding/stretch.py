"""Search a short step, and repeat its steady state: a step of 1024 microbatches has the order of one of 32."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from fpipe.finding.hunt import Hunt, Wanted
from fpipe.finding.longer import longer, pace
from fpipe.finding.named_starts import again
from fpipe.finding.pool import Entry
from fpipe.finding.tasks import Rows, Tasks
from fpipe.model import Source
from fpipe.program import Program, ProgramError
from fpipe.timing.simulate import simulate
from fpipe.training import program as base_program
from fpipe.transforms.cells import Key
from fpipe.transforms.chain import chain, identity
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.reorder import by_table
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import split_backward

LONG = 4
"""Microbatches for each rank beyond which a shorter step is searched."""
TRIED = 2
"""Orders, and named schedules, that are made for the long step, the most promising first."""


def short_of(program: Program, wanted: Wanted) -> Program | None:
    """A step of the same stages with 2p to 3p microbatches; None for one that is short, or not the same throughout.

    Its number of microbatches leaves the same rest when it is divided by p, since groups of p may be what is repeated.
    """
    ranks, count = wanted.ranks, program.microbatches
    kinds = {op.kind for op in program.ops}
    if count <= LONG * ranks or program.slices > 1 or wanted.costs.bytes is not None or kinds & {"R", "PAIR"}:
        return None
    if {"B", "I"} <= kinds:
        return None
    takes: dict[int, list[Source | tuple[int, int]]] = defaultdict(list)
    for op in program.ops:
        if op.kind == "F" and op.microbatch == 0 and op.stage is not None:
            for value in op.reads:
                if value.name == "y" and value.stage is not None:
                    takes[op.stage].append((value.stage, value.port) if value.port else value.stage)
                elif value.name in ("x", "inputs"):
                    takes[op.stage].append("batch")
    inputs = [tuple(takes[stage]) if len(takes[stage]) != 1 else takes[stage][0] for stage in range(program.stages)]
    halves = split_backward() if "I" in kinds else identity()
    steps = chain(split(2 * ranks + count % ranks), halves, merge())
    try:
        return steps(base_program(program.stages, inputs=inputs))  # pyright: ignore[reportArgumentType]
    except ValueError:
        return None


def stretched(short: Hunt, long: Hunt) -> None:
    """Make what was found for the short step for the long one, and the named schedules that promise most beside it."""
    wanted = long.wanted
    more = long.bases[0].microbatches - short.bases[0].microbatches

    def promise(entry: Entry) -> float:
        return entry.value[0] + more * pace(entry.tasks, entry.rows)

    count = 0
    for entry in sorted(short.pool, key=promise):
        for rows in islice(longer(entry.tasks, entry.rows, more), 2):
            program = _ordered(long.bases[0], entry.tasks, rows)
            if program is not None and long.consider(program, simulate(program, wanted.costs)):
                count += 1
                break
        if count >= TRIED:
            break
    different: dict[str, str] = {}
    for name in sorted(short.origins, key=lambda name: promise(short.origins[name])):
        different.setdefault(repr(short.origins[name].rows), name)
    likely = list(different.values())[:TRIED]
    long.take(((name, again(name, wanted.ranks, wanted.costs, wanted.objective)) for name in likely), improve=False)


def _ordered(base: Program, tasks: Tasks, rows: Rows) -> Program | None:
    """The long program in the order of these lanes."""
    again = {op.stage for op in tasks.ops if op.kind == "R"}
    base = checkpoint(lambda stage, microbatch: stage in again)(base) if again else base
    lasts = [tasks.ops[steps[0][-1]] for steps in tasks.lanes]
    if any(op.parts for op in lasts) or any(len(steps) != tasks.program.microbatches for steps in tasks.lanes):
        return None
    cells: list[list[Key]] = []
    for row in rows:
        turn = [0] * len(lasts)
        cells.append([])
        for lane in row:
            cells[-1].append((lasts[lane].kind, lasts[lane].stage, turn[lane], None))
            turn[lane] += 1
    try:
        return by_table(base, cells, move=True)
    except ProgramError:
        return None
