"""Search a short step, and repeat its steady state: a step of 1024 microbatches has the order of one of 32."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple

from fpipe.finding.hunt import Hunt
from fpipe.finding.named_starts import chooses, schedule_of
from fpipe.finding.op_facts import made
from fpipe.finding.play import worth
from fpipe.finding.pool import Entry
from fpipe.finding.tasks import Rows, Steady, Tasks, later, steady_states, stretch
from fpipe.finding.wanted import Wanted
from fpipe.model import Source
from fpipe.program import Program, ProgramError, is_exchange
from fpipe.timing.simulate import simulate
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import chain, identity
from fpipe.transforms.cells import Key
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.reorder import by_table
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import split_backward

LONG = 4
"""Microbatches for each rank beyond which a shorter step is searched."""
LIKELY = 8
"""Orders of the short step of which it is told what the long step takes, the most promising first."""
STATES = 2
"""Steady states of each, the fastest first."""
NEAR = 4, 8
"""After how many more microbatches a rank it is told: from then on, each takes as long as the one before."""
BETWEEN = 4, 6
"""Microbatches a rank, beside a rest, of the steps from which it is told what a named schedule takes."""


def short_of(program: Program, wanted: Wanted) -> Program | None:
    """A step of the same stages with 2p to 3p microbatches; None for one that is short, or not the same throughout.

    Its number of microbatches leaves the same rest when it is divided by p, since groups of p may be what is repeated.
    """
    ranks, count = wanted.ranks, program.microbatches
    kinds = {op.kind for op in program.ops}
    if count <= LONG * ranks or program.slices > 1 or wanted.costs.bytes is not None or kinds & {"R", "PAIR"}:
        return None
    if {"B", "I"} <= kinds or any(map(is_exchange, program.ops)):
        return None
    try:
        return _step_of(program, 2 * ranks + count % ranks)
    except ValueError:
        return None


def _step_of(program: Program, count: int) -> Program:
    """A step of the same stages with so many microbatches."""
    takes: dict[int, list[Source | tuple[int, int]]] = defaultdict(list)
    for op in program.ops:
        if op.kind == "F" and op.microbatch == 0 and op.stage is not None:
            for value in op.reads:
                if value.name == "y" and value.stage is not None:
                    takes[op.stage].append((value.stage, value.port) if value.port else value.stage)
                elif value.name in ("x", "inputs"):
                    takes[op.stage].append("batch")
    inputs = [tuple(takes[stage]) if len(takes[stage]) != 1 else takes[stage][0] for stage in range(program.stages)]
    halves = split_backward() if any(op.kind == "I" for op in program.ops) else identity()
    steps = chain(split(count), halves, merge())
    return steps(base_program(program.stages, inputs=inputs))  # pyright: ignore[reportArgumentType]


def stretched(short: Hunt, long: Hunt) -> None:
    """Make the most promising of what was found for the short step for the long one, and of the named schedules.

    What each would take is told from a few more microbatches, so that it costs the same however long the step is.
    """
    wanted = long.wanted
    more = long.bases[0].microbatches - short.bases[0].microbatches
    likely = sorted(short.pool, key=lambda entry: entry.value[0] + more * pace(entry.tasks, entry.rows))[:LIKELY]
    found = [one for entry in likely for one in _of(entry, wanted, more)]
    for one in sorted(found, key=lambda one: one.value):
        if long.best is not None and long.best.value[0] <= one.value * (1 + 1e-9):
            break
        program = _ordered(long.bases[0], one.entry.tasks, one.rows(more))
        if program is not None:
            long.consider(program, simulate(program, wanted.costs))
    _named(short, long)


def _named(short: Hunt, long: Hunt) -> None:
    """Make for the long step each named schedule that may be the best of it, as told from two steps between.

    In both a schedule is in its steady state, with the rest of microbatches that it has in the long one. One that takes
    the shortest of a few orders may take another there: it is told the least that it may take.
    """
    wanted, count = long.wanted, long.bases[0].microbatches
    if count <= 2 * LONG * wanted.ranks:  # no longer than those two together
        long.names(long.bases[0], improve=False)
        return
    sizes = [count % (2 * wanted.ranks) + each * wanted.ranks for each in BETWEEN]
    hunts = [Hunt([_step_of(short.bases[0], size)], wanted, short.told) for size in sizes]
    for hunt in hunts:
        hunt.names(hunt.bases[0], improve=False)
    first, second = (hunt.named for hunt in hunts)
    more = (count - sizes[1]) / (sizes[1] - sizes[0])

    def then(name: str, word: str) -> float:
        """Extrapolate a number of a schedule: each microbatch adds as much as between the two steps."""
        return later(getattr(first[name], word), getattr(second[name], word), more)

    both = first.keys() & second.keys()
    told = {name: then(name, wanted.objective) for name in both if not _anew(name, wanted.ranks)}
    for name in sorted(told, key=lambda name: (told[name], name)):
        if long.named and long.best is not None and long.best.value[0] <= told[name] * (1 + 1e-9):
            break
        if then(name, "peak") <= wanted.cap * (1 + 1e-9) or second[name].fits:
            long.take([(name, hunts[1].starts[name])], improve=False)
    fits = {schedule_of(name) for hunt in hunts for name, row in hunt.named.items() if row.fits}
    least = {name: _least(name, hunts, more) for name in both - told.keys() if schedule_of(name) in fits}
    for name in sorted(least, key=lambda name: (least[name], name)):
        by_name = [getattr(row, wanted.objective) for row in long.named.values() if row.fits]
        if min(by_name, default=math.inf) <= least[name] * (1 + 1e-9):
            break
        long.take([(name, hunts[1].starts[name])], improve=False)


def _anew(name: str, ranks: int) -> bool:
    """Whether a schedule may take another order for another number of microbatches of the same rest."""
    group = re.search(r"group=(\d+)", name)
    return chooses(name) or (group is not None and 2 * ranks % int(group[1]) > 0)


def _least(name: str, hunts: Sequence[Hunt], more: float) -> float:
    """Lower bound for such a schedule: that of any order of its stages on its ranks, and its own idle time.

    The shortest of several that all grow by as much with each microbatch idles no less in a longer step. But how a rest
    that makes no whole round fits in may change with every microbatch.
    """
    wanted, count = hunts[0].wanted, hunts[0].bases[0].microbatches
    first, second = (_floor(name, hunt) for hunt in hunts)
    then = later(first, second, more)
    if count % wanted.ranks or wanted.objective == "span" or not chooses(name):  # they are compared by their makespan
        return then
    return then + min(hunts[0].named[name].makespan - first, hunts[1].named[name].makespan - second)


def _floor(name: str, hunt: Hunt) -> float:
    """Seconds that no order of the ops of a named schedule goes below, however much it holds."""
    base = hunt.bases[0]
    program = made(hunt.starts[name], base if hunt.wanted.halves is False else split_backward()(base))
    return 0.0 if program is None else hunt.floor(program, stay=False)


class _Long(NamedTuple):
    """A steady state of an order, and what a long step takes that repeats it."""

    value: float
    entry: Entry
    number: int

    def rows(self, more: int) -> Rows:
        """The order of so many microbatches more."""
        return next(islice(longer(self.entry.tasks, self.entry.rows, more), self.number, None))


def _of(entry: Entry, wanted: Wanted, more: int) -> list[_Long]:
    """The fastest steady states of an order."""
    near = [min(more, more % wanted.ranks + times * wanted.ranks) for times in NEAR]
    tried = [(lengthened(entry.tasks, size), size) for size in near]
    values: list[list[float]] = [[], []]
    for each, (tasks, size) in zip(values, tried, strict=True):
        if tasks is None:
            return []
        for rows in islice(longer(entry.tasks, entry.rows, size), STATES):
            each.append(worth(tasks.play([tasks.flat(row) for row in rows]), wanted.objective)[0])
    steps = (more - near[1]) / (near[1] - near[0]) if near[1] > near[0] else 0.0
    pairs = enumerate(zip(*values, strict=True))
    return [_Long(later(first, second, steps), entry, number) for number, (first, second) in pairs]


def _ordered(base: Program, tasks: Tasks, rows: Rows) -> Program | None:
    """The long program in the order of these tracks."""
    again = {op.stage for op in tasks.ops if op.kind == "R"}
    base = checkpoint(lambda stage, microbatch: stage in again)(base) if again else base
    lasts = [tasks.ops[steps[0][-1]] for steps in tasks.tracks]
    if any(op.parts for op in lasts) or any(len(steps) != tasks.program.microbatches for steps in tasks.tracks):
        return None
    cells: list[list[Key]] = []
    for row in rows:
        turns = [count() for _ in lasts]
        cells.append([(lasts[track].kind, lasts[track].stage, next(turns[track]), None) for track in row])
    try:
        return by_table(base, cells, move=True)
    except ProgramError:
        return None


def longer(tasks: Tasks, rows: Rows, more: int) -> Iterator[Rows]:
    """Orders of `more` microbatches more, all alike, by the steady states of an order, the fastest first."""
    return (stretch(rows, steady, more) for steady in _steady(tasks, rows))


def pace(tasks: Tasks, rows: Rows) -> float:
    """Seconds for each microbatch more: of the fastest steady state, or of the busiest rank where there is none."""
    found = _steady(tasks, rows)
    return found[0].pace if found else max(tasks.work) / max(1, tasks.program.microbatches)


def _steady(tasks: Tasks, rows: Rows) -> list[Steady]:
    ends = tasks.play([tasks.flat(row) for row in rows]).ends
    firsts = [[step[0] for step in tasks.steps(row)] for row in rows]
    return steady_states(rows, [[ends[op] - tasks.seconds[op] for op in row] for row in firsts])


def lengthened(tasks: Tasks, more: int) -> Tasks | None:
    """The tasks of `more` microbatches more, each like the first; None where they are not all alike."""
    count = tasks.program.microbatches
    if any(len(steps) != count or len({*map(len, steps)}) > 1 for steps in tasks.tracks):
        return None
    if any(op.parts for op in tasks.ops):
        return None
    tracks = sorted((op, track, at) for track, steps in enumerate(tasks.tracks) for at, op in enumerate(steps[0]))
    each = [[tasks.tracks[track][turn][at] for _, track, at in tracks] for turn in range(count)]
    first, many, total = each[0], len(tracks), count + more
    place = {op: at for row in each for at, op in enumerate(row)} | {-1: -1}

    def facts(at: int) -> tuple[object, ...]:
        op, needs = tasks.ops[at], [(place[source], way) for source, way in tasks.needs[at]]
        return op.kind, op.stage, op.rank, tasks.seconds[at], needs

    alike = [list(map(facts, row)) for row in each]
    if any(row != alike[0] for row in alike[1:]):
        return None
    steps = [[place[op] for op in steps[0]] for steps in tasks.tracks]
    return replace(
        tasks,
        ops=[tasks.ops[op]._replace(microbatch=turn) for turn in range(total) for op in first],
        seconds=[tasks.seconds[op] for op in first] * total,
        needs=[
            tuple((turn * many + place[one] if one >= 0 else -1, way) for one, way in tasks.needs[op])
            for turn in range(total)
            for op in first
        ],
        takes=[tasks.takes[op] for op in first] * total,
        drops=[tasks.drops[op] for op in first] * total,
        tracks=[[tuple(turn * many + at for at in track) for turn in range(total)] for track in steps],
        rows=[[] for _ in tasks.rows],
    )
