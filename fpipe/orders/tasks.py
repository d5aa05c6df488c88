"""A placed program as numbers, on which a search tries orders: what each op takes, what it waits for, what it holds.

The ops of a rank that a schedule names are its *row*. Microbatches are alike, so ops of one kind and stage keep their
turn among themselves: they are a *lane*, and an order of a rank is a row of lanes and no more.

    rank 0 | 0F0 0F1 0I0 0W0 0I1 0W1          <->          0 0 1 2 1 2

`play` gives the times that `simulate` gives, in a twentieth of the time that a program takes to be built and simulated.
It is apart from the clock of `orders/linear_pipeline.py`, which knows only chains, and fills in each W by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import ClassVar, NamedTuple

from fpipe.program import Op, Program, Value, kind_of
from fpipe.timing.columns import op_groups
from fpipe.timing.costs import Costs
from fpipe.timing.memory import residuals_stay
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import by_table
from fpipe.transforms.shares import shares

Rows = list[list[int]]
"""For each rank the lanes of its ops, in order."""
Step = tuple[int, ...]
"""What a row names as one: an op, behind the R that it needs."""


def one_each(value: Value) -> float:
    """What a residual counts where costs have no bytes."""
    return 1.0


def _bytes_of(costs: Costs, value: Value) -> float:
    return float(sum(costs.storages(value).values()))


class Played(NamedTuple):
    """When each op ends, and how long it all takes."""

    makespan: float
    span: float
    ends: list[float]


NEVER = Played(math.inf, math.inf, [])
"""What ops come to that wait for each other for ever, or take longer than anybody wants to know."""


@dataclass(frozen=True)
class Tasks:
    """The named ops of a program on their ranks.

    Args:
        program: whose ops these are.
        ops: those that take their turn on a rank; the numbers below are places in this list.
        seconds: of each.
        needs: for each the ops that it waits for, each with the seconds on the way; what is needed through others is
            left out. The number behind the last op is the caller, who has everything from the start.
        takes, drops: of residuals, what an op starts to hold, and what it lets go of when it ends: in bytes where costs
            have them (an I then keeps what its W needs), else one for each.
        lanes: for each lane its steps, in turn.
        rows: the order that the program has.
        shares: how many residuals of a rank are one microbatch.
        weight: what a residual counts.
    """

    price: ClassVar[float] = 1.0  # what it takes to play an op

    program: Program
    ops: list[Op]
    seconds: list[float]
    needs: list[tuple[tuple[int, float], ...]]
    takes: list[float]
    drops: list[float]
    lanes: list[list[Step]]
    rows: Rows
    shares: list[int]
    weight: Callable[[Value], float] = one_each

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.rows)

    @cached_property
    def wakes(self) -> list[tuple[int, ...]]:
        """For each op the other ranks that may wait for it."""
        found: list[set[int]] = [set() for _ in self.ops]
        for op, needs in zip(self.ops, self.needs, strict=True):
            for source, _ in needs:
                if source < len(self.ops) and self.ops[source].rank != op.rank:
                    found[source].add(op.rank)
        return [tuple(sorted(ranks)) for ranks in found]

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

    @cached_property
    def again(self) -> frozenset[tuple[int | None, int | None]]:
        """Stages and microbatches that are recomputed."""
        return frozenset((op.stage, op.microbatch) for op in self.ops if op.kind == "R")

    def follows(self, op: int, first: int) -> bool:
        """Whether an op needs another one, itself or through others."""
        todo = [op]
        while todo:
            more = [source for source, _ in self.needs[todo.pop()] if source < len(self.ops)]
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

    def flat(self, row: Sequence[int]) -> list[int]:
        """The ops of a row, in order."""
        turns = {lane: iter(self.lanes[lane]) for lane in set(row)}
        return list(chain.from_iterable(next(turns[lane]) for lane in row))

    def held(self, flat: Sequence[int]) -> float:
        """The most of residuals that a row of ops holds at once."""
        now = most = 0.0
        for op in flat:
            now += self.takes[op]
            if now > most:
                most = now
            now -= self.drops[op]
        return most

    def peak(self, rows: Rows) -> list[float]:
        """Microbatches that each rank holds at most, as `Timeline.peak` has them."""
        return [self.held(self.flat(row)) / share for row, share in zip(rows, self.shares, strict=True)]

    @cached_property
    def tails(self) -> list[float]:
        """Seconds from the end of each op to the end of the last op that needs it, at the least."""
        found = [0.0] * len(self.ops)
        for at in reversed(range(len(self.ops))):
            for source, way in self.needs[at]:
                if source < len(self.ops):
                    found[source] = max(found[source], way + self.seconds[at] + found[at])
        return found

    def play(
        self,
        flats: Sequence[Sequence[int]],
        limit: float = math.inf,
        known: Sequence[float] = (),
        done: Sequence[int] = (),
    ) -> Played:
        """Let each rank do its ops in order, each as soon as what it needs is there.

        Args:
            flats: the ops of each rank.
            limit: a makespan beyond which nobody wants to know: then it is infinite.
            known, done: when the first so many ops of each rank end, if that is known.

        >>> import fpipe
        >>> tasks = tasks_of(fpipe.schedules.one_f_one_b(2)(fpipe.split(4)(fpipe.program(2))), fpipe.Costs())
        >>> tasks.play([tasks.flat(row) for row in tasks.rows])[:2]
        (15.0, 15.0)
        """
        seconds, needs, wakes, tails = self.seconds, self.needs, self.wakes, self.tails
        ranks = range(len(flats))
        if done:
            ends, place = list(known), list(done)
            free = [ends[flats[rank][place[rank] - 1]] if place[rank] else 0.0 for rank in ranks]
            for rank in ranks:
                for op in flats[rank][place[rank] :]:
                    ends[op] = -1.0
        else:
            ends, place, free = [-1.0] * len(seconds) + [0.0], [0 for _ in ranks], [0.0 for _ in ranks]
        waits = [-1 for _ in ranks]
        todo = [*ranks]
        while todo:
            rank = todo.pop()
            row, now = flats[rank], free[rank]
            reached = len(row)
            for at in range(place[rank], reached):
                op = row[at]
                for source, way in needs[op]:
                    there = ends[source]
                    if there < 0:
                        break
                    if there + way > now:
                        now = there + way
                else:
                    ends[op] = now = now + seconds[op]
                    if now + tails[op] > limit:
                        return NEVER
                    for other in wakes[op]:
                        if waits[other] == op:
                            waits[other] = -1
                            todo.append(other)
                    continue
                waits[rank], reached = source, at
                break
            place[rank], free[rank] = reached, now
        if any(map(int.__lt__, place, map(len, flats))):
            return NEVER
        starts = (ends[row[0]] - seconds[row[0]] if row else 0.0 for row in flats)
        span = max((end - start for end, start in zip(free, starts, strict=True)), default=0.0)
        return Played(max(free, default=0.0), span, ends)

    def ordered(self, rows: Rows) -> Program:
        """The program in another order."""
        cells: list[list[Key | str]] = []
        for row in rows:
            turns = {lane: iter(self.lanes[lane]) for lane in set(row)}
            last = (self.ops[next(turns[lane])[-1]] for lane in row)
            cells.append([op.cell if op.parts else op[:4] for op in last])
        return by_table(self.program, cells, move=False)


def tasks_of(program: Program, costs: Costs) -> Tasks | None:
    """The named ops of a program as numbers.

    Returns:
        None where a row of named ops does not say it all: residuals that leave their rank, transfers that a table
        placed, an R away from its reader, a rank without ops.
    """
    known = op_groups(program.ops)
    if not residuals_stay(program, known) or any(op.kind in ("SEND", "FREE") for op in known.each):
        return None
    number: dict[int, int] = {}
    through: dict[int, dict[int, float]] = {}  # an op that no schedule names -> what it waits for
    ops: list[Op] = []
    needs: list[dict[int, float]] = []
    homes = {end.value: end.homes for end in program.inputs}
    caller = -1
    for at, (op, sources) in enumerate(zip(program.ops, program.sources, strict=True)):
        found: dict[int, float] = {}
        for value, source in zip(op.reads, sources, strict=True):
            where = homes[value] if source < 0 else (program.ops[source].rank,)
            way = 0.0
            if op.rank not in where:
                way = costs.latency(min(where), op.rank) + costs.carrying(value, min(where), op.rank)
            if source < 0 and not way:
                continue
            inner = {number[source]: 0.0} if source in number else through.get(source, {caller: 0.0})
            for one, more in inner.items():
                found[one] = max(found.get(one, 0.0), more + way)
        if kind_of(op.kind).place == "table" or op.kind == "R":
            number[at] = len(ops)
            ops.append(op)
            needs.append(found)
        else:
            through[at] = found
    named = [op.kind != "R" for op in ops]
    lanes: dict[tuple[object, ...], int] = {}
    steps: list[list[Step]] = []
    rows: Rows = [[] for _ in range(program.ranks)]
    before: list[list[int]] = [[] for _ in range(program.ranks)]
    for op, is_named, at in zip(ops, named, range(len(ops)), strict=True):
        before[op.rank].append(at)
        if is_named:
            key = op.rank, *((part.kind, part.stage, part.slice) for part in op.parts or (op,)), len(before[op.rank])
            lane = lanes.setdefault(key, len(lanes))
            if lane == len(steps):
                steps.append([])
            steps[lane].append(tuple(before[op.rank]))
            rows[op.rank].append(lane)
            before[op.rank] = []
    if any(before) or not all(rows):
        return None
    weight = one_each if costs.bytes is None else partial(_bytes_of, costs)
    holds = [[holding(part, weight) for part in op.parts or (op,)] for op in ops]
    takes, drops = ([float(sum(part[at] for part in parts)) for parts in holds] for at in (0, 1))
    seconds = list(map(costs.seconds, ops))
    short = _short(ops, seconds, needs)
    return Tasks(program, ops, seconds, short, takes, drops, steps, rows, shares(program), weight)


def holding(op: Op, weight: Callable[[Value], float]) -> tuple[float, float]:
    """What an op starts to hold of residuals, and what it lets go of: an I drops what its W does not need."""
    made = sum(weight(value) for value in op.writes if value.name in ("res", "wres"))
    gone = sum(weight(value) for value in op.reads if value.name in ("res", "wres"))
    return max(0.0, made - gone), max(0.0, gone - made)


def _short(ops: list[Op], seconds: list[float], needs: list[dict[int, float]]) -> list[tuple[tuple[int, float], ...]]:
    """What each op waits for, without what is long done when another of these is."""
    found: list[tuple[tuple[int, float], ...]] = []
    lags: list[dict[int, float]] = []  # seconds from the end of others of its microbatch to its start, at the least
    for op, each in zip(ops, needs, strict=True):
        inner: dict[int, float] = {}
        for source, way in each.items():
            if source >= 0:
                for one, lag in lags[source].items():
                    inner[one] = max(inner.get(one, 0.0), lag + seconds[source] + way)
        kept = [(source, way) for source, way in each.items() if inner.get(source, -1.0) < way]
        found.append(tuple((source if source >= 0 else len(ops), way) for source, way in kept))
        own = {one: way for one, way in each.items() if one >= 0 and ops[one].microbatch == op.microbatch}
        lags.append(inner | {one: max(way, inner.get(one, 0.0)) for one, way in own.items()})
    return found
