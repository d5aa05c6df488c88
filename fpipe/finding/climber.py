"""Make an order better, one small change after another, where it counts: on the path that makes it as long as it is.

    rank 1 | 1F0 1F1 1I0 [1W0 1I1] 1F2         1I1 is on the path, and waits for 1W0 alone: swap them, or move one of a
                                               busy row of ops to its front or its end

The same seed gives the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import Generic, NamedTuple, Protocol, TypeVar

from fpipe.finding.play import Played, Value, worth
from fpipe.finding.tasks import Rows, Tasks

PATTERN = 0.1
"""How often two tracks change places wherever they follow each other."""

_MEMORY = 60
"""For how many steps a worse order may stay."""


# Climb to a better order, one small change after another.
#
# A change that makes it no worse stays. With a memory of some steps so does one that is no worse than what stood so
# many steps ago (late acceptance, Burke and Bykov 2017), so that the climb leaves a dead end.


class Valued(Protocol):
    """An order that knows what it is worth, the less the better."""

    @property
    def value(self) -> Value:
        """Its worth."""
        ...


S = TypeVar("S", bound=Valued)


class Climb(Generic[S]):
    """An order that is being improved: where it stands, the best so far, after how many steps, and since which.

    >>> from typing import NamedTuple
    >>> Point = NamedTuple("Point", [("value", tuple[float, float])])
    >>> climb = Climb(Point((9.0, 0.0)))
    >>> climb.on(50, lambda point, late: Point((abs(point.value[0] - 2.0), 0.0)), lambda value: value[0] < 1.5)
    >>> climb.best, climb.steps
    (Point(value=(1.0, 0.0)), 4)
    """

    def __init__(self, start: S, memory: int = 1) -> None:
        self.now = self.best = start
        self.seen = deque([start.value] * memory)
        self.steps = self.since = 0

    def on(self, steps: int, change: Callable[[S, Value], S | None], enough: Callable[[Value], bool]) -> None:
        """Try so many changes, until the best value is `enough`.

        The value of a change counts only if it is no more than the one that `change` is given; None is no change.
        """
        for _ in range(steps):
            if enough(self.best.value):
                break
            self.steps += 1
            late = max(self.now.value, self.seen[0])
            found = change(self.now, late)
            if found is None:
                continue
            if found.value <= late:
                self.now = found
                if found.value < self.best.value:
                    self.best, self.since = found, self.steps
            self.seen.popleft()
            self.seen.append(self.now.value)


class _Tried(NamedTuple):
    """An order, its ops, and when they end."""

    value: Value
    rows: Rows
    flats: list[list[int]]
    played: Played


class Climber:
    """A climb on the orders of some tasks, from one that keeps to the caps: what each rank may hold of residuals."""

    def __init__(self, tasks: Tasks, rows: Rows, caps: Sequence[float], objective: str, seed: int) -> None:
        self.tasks, self.caps, self.objective, self.random = tasks, caps, objective, Random(seed)
        flats = [tasks.flat(row) for row in rows]
        played = tasks.play(flats)
        self.climb = Climb(_Tried(worth(played, objective), rows, flats, played), _MEMORY)
        self.recomputes = any(len(steps[0]) > 1 for steps in tasks.tracks)
        self.takes = [max(tasks.takes[op] for op in steps[0]) for steps in tasks.tracks]
        self.drops = [sum(tasks.drops[op] for op in steps[0]) for steps in tasks.tracks]
        self._look(self.climb.now)

    def on(self, steps: int, floor: float) -> None:
        """Try so many changes, or until nothing is left to gain."""
        self.climb.on(steps, self._changed, lambda value: value[0] <= floor)

    def _changed(self, now: _Tried, late: Value) -> _Tried | None:
        """The order with one change, played as far as it may be no worse than `late`."""
        if now is not self.looked:
            self._look(now)
        change = self._change(now.rows)
        row = change and self._fitting(*change)
        if change is None or row is None:
            return None
        rank, flat = change[0], self.tasks.flat(row)
        if flat == now.flats[rank]:
            return None
        flats, rows = now.flats[:], now.rows[:]
        flats[rank], rows[rank] = flat, row
        limit = late[0] * (1 + 1e-12) if self.objective == "makespan" else math.inf
        played = self.tasks.play(flats, limit, now.played.ends, self._done(rank, now.flats[rank], flat))
        return _Tried(worth(played, self.objective), rows, flats, played)

    def _done(self, rank: int, before: list[int], after: list[int]) -> list[int]:
        """How many ops of each rank end as before, where one row has changed."""
        same = next(at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
        ends, seconds = self.looked.played.ends, self.tasks.seconds
        since = ends[before[same - 1]] if same else 0.0
        if self.tasks.beside:  # an exchange starts no earlier than the work before it
            last = next((before[at] for at in reversed(range(same)) if not self.tasks.beside[before[at]]), -1)
            since = ends[last] - seconds[last] if last >= 0 else 0.0
        found = [bisect_left(begun, since) for begun in self.begun]
        found[rank] = min(found[rank], same)
        return found

    def _fitting(self, rank: int, row: list[int]) -> list[int] | None:
        """The row, in which what finds no room waits for the next op that makes some; None where that is no help."""
        cap, takes, drops = self.caps[rank], self.takes, self.drops
        for _ in range(4):
            now, full = 0.0, -1
            for at, track in enumerate(row):
                now += takes[track]
                if now > cap:
                    full = at
                    break
                now -= drops[track]
            if full < 0:
                return row
            after = next((place for place in range(full + 1, len(row)) if drops[row[place]] > takes[row[place]]), None)
            if after is None:
                return None
            row = [*row[:full], *row[full + 1 : after + 1], row[full], *row[after + 1 :]]
        return None

    def _change(self, rows: Rows) -> tuple[int, list[int]] | None:
        """A rank and its row with one step elsewhere."""
        random = self.random
        kind = random.random()
        if kind < PATTERN:
            return self._everywhere(rows)
        if self.blocks and kind < 0.8:
            rank, first, last = random.choice(self.blocks)
            row = rows[rank]
            take = random.randint(first, last)
            chance = random.random()
            if chance < 0.4:
                put = take + random.choice((-1, 1))
            elif chance < 0.6:
                put = first
            elif chance < 0.8:
                put = last
            else:
                put = random.randint(first, last)
        else:
            rank = random.randrange(len(rows))
            row = rows[rank]
            take = random.randrange(len(row))
            put = take + random.choice((-4, -3, -2, -1, 1, 2, 3, 4))
        if not 0 <= put < len(row):
            return None
        if {*row[min(take, put) : max(take, put) + 1]} == {row[take]}:
            return None
        made = row[:]
        made.insert(put, made.pop(take))
        return rank, made

    def _everywhere(self, rows: Rows) -> tuple[int, list[int]] | None:
        """Two tracks that follow each other change places wherever they do, in a part of a row: a steady state changes
        all at once."""
        random = self.random
        rank = random.randrange(len(rows))
        row = rows[rank][:]
        one = random.randrange(len(row) - 1) if len(row) > 1 else 0
        pair = row[one : one + 2]
        if len({*pair}) < 2:
            return None
        at, last = (0, len(row) - 1) if random.random() < 0.3 else sorted((one, random.randrange(len(row))))
        while at < last:
            if row[at : at + 2] == pair:
                row[at : at + 2] = pair[1], pair[0]
                at += 1
            at += 1
        return rank, row

    def _look(self, order: _Tried) -> None:
        """Find the rows of ops on the path, each of which waits for nothing but the one before on its rank."""
        tasks, ends, flats = self.tasks, order.played.ends, order.flats
        seconds, needs = tasks.seconds, tasks.needs
        self.looked = order
        self.begun = [[ends[op] - seconds[op] for op in flat] for flat in flats]
        if tasks.beside:
            self.begun = [[*accumulate(row, max)] for row in self.begun]
        work = [tasks.work_of(flat) for flat in flats]
        lasts = [ends[flat[own[-1]]] for flat, own in zip(flats, work, strict=True)]
        if self.objective == "makespan":
            rank = lasts.index(max(lasts))
        else:
            firsts = [flat[own[0]] for flat, own in zip(flats, work, strict=True)]
            spans = [last - ends[first] + seconds[first] for last, first in zip(lasts, firsts, strict=True)]
            rank = spans.index(max(spans))
        self.blocks: list[tuple[int, int, int]] = []
        flat, at = flats[rank], work[rank][-1]
        end_of_block = at
        while True:
            op = flat[at]
            start = ends[op] - seconds[op]
            close = start - 1e-9 * (start + 1)
            before = self._before(flat, at, close)
            if before >= 0:
                at = before
                continue
            if end_of_block > at:
                first, last = at, end_of_block
                if self.recomputes:
                    place = [turn for turn, track in enumerate(order.rows[rank]) for _ in tasks.tracks[track][0]]
                    first, last = place[at], place[end_of_block]
                if last > first:
                    self.blocks.append((rank, first, last))
            source = next((one for one, way in needs[op] if ends[one] + way >= close), -1)
            if source < 0:
                return
            rank = tasks.ops[source].rank
            flat = flats[rank]
            at = end_of_block = flat.index(source)

    def _before(self, flat: Sequence[int], at: int, close: float) -> int:
        """The place in a row of the op for whose end, or whose start on another lane, the one at `at` waits; or -1."""
        beside, ends, seconds = self.tasks.beside, self.looked.played.ends, self.tasks.seconds
        if not beside:
            return at - 1 if at and ends[flat[at - 1]] >= close else -1
        own = beside[flat[at]]
        for place in reversed(range(at)):
            op = flat[place]
            if beside[op] == own:
                if ends[op] >= close and (not own or seconds[op]):
                    return place
            elif own and ends[op] - seconds[op] >= close:
                return place
        return -1
