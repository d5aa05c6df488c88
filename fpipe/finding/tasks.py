"""A placed program as numbers, on which a search tries orders: what each op takes, what it waits for, what it holds.

The ops of a rank that a schedule names are its *row*. Microbatches are alike, so ops of one kind and stage keep their
turn among themselves: they are a *track*, and an order of a rank is a row of tracks and no more.

    rank 0 | 0F0 0F1 0I0 0W0 0I1 0W1          <->          0 0 1 2 1 2
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from fpipe.finding.play import Needs, Numbers, Played, play
from fpipe.program import Op, Program, Value, is_exchange, kind_of
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import op_groups
from fpipe.timing.memory import residuals_stay
from fpipe.timing.waiting import named_waits, tails_of
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import by_table
from fpipe.transforms.shard import shares

# Stretch an order to more microbatches: find its steady state, and repeat it.
#
# Between two moments at which every track has gone on by the same number of microbatches nothing but these numbers
# has changed. What ran between them can run once more, as often as one likes: nothing waits for ever, and no rank
# holds more. Where a steady state has three microbatches and there are to be four more, it runs twice, and the last
# two are left out.

Rows = list[list[int]]
"""For each rank the tracks of its ops, in order: a track takes its microbatches in turn."""


class Steady(NamedTuple):
    """A steady state: seconds for each microbatch, how many there are, and where each row begins and ends to repeat."""

    pace: float
    microbatches: int
    begins: list[int]
    ends: list[int]


def steady_states(rows: Rows, starts: Sequence[Sequence[float]]) -> list[Steady]:
    """The steady states of an order whose ops start at these times, the fastest first.

    >>> steady_states([[0, 0, 1, 0, 1, 1]], [[0, 1, 2, 3, 4, 5]])[0]
    Steady(pace=2.0, microbatches=1, begins=[1], ends=[3])
    """
    pairs = enumerate(zip(rows, starts, strict=True))
    ops = sorted((start, rank, at, row[at]) for rank, (row, own) in pairs for at, start in enumerate(own))
    counts = dict.fromkeys((track for row in rows for track in row), 0)
    lead, reached = next(iter(counts)), [0 for _ in rows]
    seen: defaultdict[tuple[int, ...], list[tuple[float, int, list[int]]]] = defaultdict(list)
    found: list[Steady] = []
    before = ops[0][0]
    for start, rank, _, track in ops:
        if start > before:
            now, before = counts[lead], start
            ahead = tuple([count - now for count in counts.values()])
            for began, count, cut in seen[ahead][-8:]:
                found.append(Steady((start - began) / (now - count), now - count, cut, reached[:]))
            seen[ahead].append((start, now, reached[:]))
        counts[track] += 1
        reached[rank] += 1
    return sorted(found, key=lambda state: state[:2])


def stretch(rows: Rows, steady: Steady, more: int) -> Rows:
    """An order of `more` microbatches more.

    >>> stretch([[0, 0, 1, 0, 1, 1]], Steady(2.0, 1, [1], [3]), 2)
    [[0, 0, 1, 0, 1, 0, 1, 0, 1, 1]]
    """
    times = -(-more // steady.microbatches)
    repeated = (
        [*row[:end], *(row[begin:end] * times), *row[end:]]
        for row, begin, end in zip(rows, steady.begins, steady.ends, strict=True)
    )
    return [_without_last(row, times * steady.microbatches - more) for row in repeated]


def _without_last(row: list[int], count: int) -> list[int]:
    """A row without the last microbatches: nobody waits for them, and nothing else is later without them."""
    left, kept = Counter[int](), list[int]()
    for track in reversed(row):
        left[track] += 1
        if left[track] > count:
            kept.append(track)
    return kept[::-1]


def later(first: float, second: float, steps: float) -> float:
    """Extrapolate from `first` and `second`, so many steps on: in a steady state each step adds the same."""
    return second + steps * (second - first)


Step = tuple[int, ...]
"""Ops that a row names as one: an op, behind the R that it needs."""


def one_each(value: Value) -> float:
    """Weight of a residual where costs have no bytes."""
    return 1.0


def _bytes_of(costs: Costs, value: Value) -> float:
    return float(sum(costs.storages(value).values()))


@dataclass(frozen=True)
class Tasks:
    """The named ops of a program on their ranks; numbers are places in the list of `ops`.

    Args:
        needs: the ops that each waits for, each with the seconds on the way, and -1 for the caller; what is needed
            through others is left out.
        takes, drops: of residuals, what an op starts to hold, and what it lets go of when it ends: in bytes where costs
            have them (an I then keeps what its W needs), else one for each.
        tracks: for each track its steps, in turn.
        rows: the order that the program has.
        shares: how many residuals of a rank are one microbatch.
        weight: what a residual counts.
        beside: which ops are on the exchange lane of their rank; empty where none is.
    """

    program: Program
    ops: list[Op]
    seconds: list[float]
    needs: list[Needs]
    takes: list[float]
    drops: list[float]
    tracks: list[list[Step]]
    rows: Rows
    shares: list[int]
    weight: Callable[[Value], float] = one_each
    beside: Sequence[bool] = ()

    @property
    def price(self) -> float:
        """Price of playing an op, in those of one lane a rank."""
        return 2.0 if self.beside else 1.0

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.rows)

    @cached_property
    def numbers(self) -> Numbers:
        """The ops as `play` takes them."""
        wakes: list[set[int]] = [set() for _ in self.ops]
        for op, needs in zip(self.ops, self.needs, strict=True):
            for source, _ in needs:
                if source >= 0 and self.ops[source].rank != op.rank:
                    wakes[source].add(op.rank)
        works = [not beside for beside in self.beside] or [True for _ in self.ops]
        tails = tails_of(self.needs, self.seconds, works)
        beside = {at: needs for at, needs in enumerate(self.needs) if self.beside and self.beside[at]}
        needs = [((at, 0.0),) if at in beside else needs for at, needs in enumerate(self.needs)]
        return Numbers(self.seconds, needs, [tuple(sorted(ranks)) for ranks in wakes], tails, beside)

    @cached_property
    def residuals(self) -> list[list[tuple[int, int, float]]]:
        """On each rank the op that makes each residual, or a part of it, the one that drops it, and how much it is."""
        makers: dict[tuple[object, ...], list[tuple[int, float]]] = defaultdict(list)
        found: list[list[tuple[int, int, float]]] = [[] for _ in self.rows]
        for at, op in enumerate(self.ops):  # a microbatch's ops are in the order in which they need each other
            for part in op.parts or (op,):
                takes, left = holding(part, self.weight)
                open_ones = makers[part[1:4]]
                while left and open_ones:
                    maker, size = open_ones.pop()
                    gone = min(left, size)
                    found[op.rank].append((maker, at, gone))
                    left -= gone
                    if size > gone:
                        open_ones.append((maker, size - gone))
                if takes:
                    open_ones.append((at, takes))
        return found

    def follows(self, op: int, first: int) -> bool:
        """Whether an op needs another one, itself or through others."""
        todo = [op]
        while todo:
            more = [source for source, _ in self.needs[todo.pop()] if source >= 0]
            if first in more:
                return True
            todo += more
        return False

    @cached_property
    def work(self) -> list[float]:
        """Seconds that each rank works."""
        found = [0.0] * self.ranks
        for op, seconds in zip(self.ops, self.seconds, strict=True):
            found[op.rank] += seconds
        return found

    def steps(self, row: Sequence[int]) -> list[Step]:
        """The steps of a row, in order."""
        turns = {track: iter(self.tracks[track]).__next__ for track in set(row)}
        return [turns[track]() for track in row]

    def flat(self, row: Sequence[int]) -> list[int]:
        """The ops of a row, in order."""
        return list(chain.from_iterable(self.steps(row)))

    def work_of(self, flat: Sequence[int]) -> Sequence[int]:
        """The places in a row of ops of those on the main lane."""
        places = range(len(flat))
        return [at for at in places if not self.beside[flat[at]]] if self.beside else places

    def held(self, flat: Sequence[int]) -> float:
        """The most of residuals that a row of ops holds at once."""
        now = most = 0.0
        for op in flat:
            now += self.takes[op]
            if now > most:
                most = now
            now -= self.drops[op]
        return most

    def play(
        self,
        flats: Sequence[Sequence[int]],
        limit: float = math.inf,
        known: Sequence[float] = (),
        done: Sequence[int] = (),
    ) -> Played:
        """Play the ops of each rank, as `play` does.

        >>> import fpipe
        >>> tasks = tasks_of(fpipe.schedules.one_f_one_b(2)(fpipe.split(4)(fpipe.program(2))), fpipe.Costs())
        >>> tasks.play([tasks.flat(row) for row in tasks.rows])[:2]
        (15.0, 15.0)
        """
        return play(self.numbers, flats, limit, known, done)

    def ordered(self, rows: Rows) -> Program:
        """The program in another order."""
        lasts = [[self.ops[step[-1]] for step in self.steps(row)] for row in rows]
        cells: list[list[Key | str]] = [[op.cell if op.parts else op[:4] for op in row] for row in lasts]
        return by_table(self.program, cells, move=False)


def tasks_of(program: Program, costs: Costs) -> Tasks | None:
    """The named ops of a program as numbers; None where rows of named ops do not say it all: residuals leave their
    rank, a table placed transfers, an R is away from its reader, a rank has no work."""
    groups = op_groups(program.ops)
    if not residuals_stay(program, groups) or any(op.kind in ("SEND", "FREE") for op in groups.samples):
        return None
    places, needs = named_waits(program, costs, lambda op: kind_of(op.kind).place == "table" or op.kind == "R")
    ops = [program.ops[at] for at in places]
    tracks: dict[tuple[object, ...], int] = {}
    steps: list[list[Step]] = []
    rows: Rows = [[] for _ in range(program.ranks)]
    before: list[list[int]] = [[] for _ in range(program.ranks)]
    for at, op in enumerate(ops):
        before[op.rank].append(at)
        if op.kind != "R":
            key = op.rank, *((part.kind, part.stage, part.slice) for part in op.parts or (op,)), len(before[op.rank])
            track = tracks.setdefault(key, len(tracks))
            if track == len(steps):
                steps.append([])
            steps[track].append(tuple(before[op.rank]))
            rows[op.rank].append(track)
            before[op.rank] = []
    mixed = any(is_exchange(ops[at]) for each in steps for step in each if len(step) > 1 for at in step)
    if any(before) or mixed or {op.rank for op in ops if not is_exchange(op)} != {*range(program.ranks)}:
        return None
    weight = one_each if costs.bytes is None else partial(_bytes_of, costs)
    holds = [[holding(part, weight) for part in op.parts or (op,)] for op in ops]
    takes, drops = ([float(sum(part[at] for part in parts)) for parts in holds] for at in (0, 1))
    seconds = list(map(costs.seconds, ops))
    short = _short(ops, seconds, needs)
    beside = [*map(is_exchange, ops)]
    lanes_beside = beside if any(beside) else ()
    return Tasks(program, ops, seconds, short, takes, drops, steps, rows, shares(program), weight, lanes_beside)


def holding(op: Op, weight: Callable[[Value], float]) -> tuple[float, float]:
    """Residuals that an op starts to hold, and those it lets go of: an I drops what its W does not need."""
    made = sum(weight(value) for value in op.writes if value.name in ("res", "wres"))
    gone = sum(weight(value) for value in op.reads if value.name in ("res", "wres"))
    return max(0.0, made - gone), max(0.0, gone - made)


def _short(ops: list[Op], seconds: list[float], needs: list[dict[int, float]]) -> list[Needs]:
    """Needs of each op, without those that are long done when another of them is."""
    found: list[Needs] = []
    lags: list[dict[int, float]] = []  # seconds from the end of others of its microbatch to its start, at the least
    for op, each in zip(ops, needs, strict=True):
        inner: dict[int, float] = {}
        for source, way in each.items():
            if source >= 0:
                for one, lag in lags[source].items():
                    inner[one] = max(inner.get(one, 0.0), lag + seconds[source] + way)
        kept = [(source, way) for source, way in each.items() if inner.get(source, -1.0) < way]
        found.append(tuple(kept))
        own = {one: way for one, way in each.items() if one >= 0 and ops[one].microbatch == op.microbatch}
        lags.append(inner | {one: max(way, inner.get(one, 0.0)) for one, way in own.items()})
    return found
