"""First orders of tasks, by list scheduling: whenever a rank is free, the ready op that some rule likes best runs.

A rule weighs kind, stage and microbatch. A forward runs only where there is room for it and for all that the oldest
microbatch which has begun on the rank will still hold there, or for all that every one will: then no order jams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from fpipe.finding.tasks import Rows, Tasks
from fpipe.schedules.list_scheduler import NOTHING, Scheduled, TaskGraph, list_schedule


class Rule(NamedTuple):
    """A priority: the step with the smallest sum runs first, by its kind (F, B or I, W), for each stage that its
    microbatch has come through, and for each microbatch before it."""

    kinds: tuple[float, float, float]
    stage: float
    microbatch: float


ALL, OLDEST, ENTRY = "all", "oldest", "entry"
"""The residuals for which a forward leaves room on its rank: the rest of all microbatches that have begun there, the
rest of the oldest of them, or all of the oldest and what those hold that entered after it."""

RULES = (
    Rule((1, 0, 100), 0, 0.01),
    Rule((0, 1, 100), 0, 0.01),
    Rule((0, 0, 0), -0.5, 1),
    Rule((0, 0, 3), -0.1, 1),
    Rule((0, 0, 100), -0.1, 0.3),
    Rule((0, 0, 100), 0.1, 0.3),
    Rule((2, 0, 1), -0.01, 0.1),
)
PACED_RULES = (*RULES, Rule((0, 0.5, 100), 0.17, 1), Rule((0, 0, 0.5), 0.17, 1))
"""Rules for microbatches that enter at a pace; the last two follow one that takes a sixth of the pace for each op."""


def rules(seed: int) -> Iterator[Rule]:
    """The usual ones, then random ones."""
    yield from RULES
    random = Random(seed)
    while True:
        kinds = random.uniform(0, 3), random.uniform(0, 3), random.choice((2.0, 5.0, 100.0))
        yield Rule(kinds, random.uniform(-0.5, 0.5), random.uniform(0, 1))


class ListOrders:
    """Orders of tasks by rules."""

    def __init__(self, tasks: Tasks, caps: Sequence[float]) -> None:
        self.tasks, self.caps = tasks, caps
        self.steps = [(track, step) for track, steps in enumerate(tasks.tracks) for step in steps]
        number = {op: at for at, (_, step) in enumerate(self.steps) for op in step}
        last = [tasks.ops[step[-1]] for _, step in self.steps]
        self.rank = [op.rank for op in last]
        self.microbatch = [op.microbatch or 0 for op in last]
        self.kind = [0 if op.kind == "F" else 2 if op.kind == "W" else 1 for op in last]
        self.depth = [(op.stage or 0) if op.kind == "F" else 2 * tasks.program.stages - (op.stage or 0) for op in last]
        self.takes = [sum(tasks.takes[op] for op in step) for _, step in self.steps]
        self.drops = [sum(tasks.drops[op] for op in step) for _, step in self.steps]
        needs: list[dict[int, float]] = []
        beside = tasks.beside or [False for _ in tasks.ops]
        took = [one if away else 0.0 for one, away in zip(tasks.seconds, beside, strict=True)]  # not of its rank's time
        self.first = [beside[step[-1]] for _, step in self.steps]
        for at, (_, step) in enumerate(self.steps):
            each = [
                (number[source], way + took[source]) for op in step for source, way in tasks.needs[op] if source >= 0
            ]
            needs.append({source: way for source, way in sorted(each, key=lambda one: one[1]) if source != at})
        for steps in tasks.tracks:  # the ops of a track keep their turn
            for before, after in pairwise(number[step[0]] for step in steps):
                needs[after].setdefault(before, 0.0)
        seconds = [sum(tasks.seconds[op] - took[op] for op in step) for _, step in self.steps]
        self.graph = TaskGraph.of(tasks.ranks, self.rank, seconds, needs)
        self.whole = [sum(self._per_microbatch(rank)) for rank in range(tasks.ranks)]

    def _per_microbatch(self, rank: int) -> list[float]:
        """The residuals of the first microbatch that a rank takes."""
        own = [at for at, one in enumerate(self.rank) if one == rank and self.takes[at]]
        first = min((self.microbatch[at] for at in own), default=0)
        return [self.takes[at] for at in own if self.microbatch[at] == first]

    def order(self, rule: Rule, leaves_room: str = ALL, ahead: float = math.inf) -> Rows | None:
        """Return the order by a rule, or None where it jams.

        Microbatches enter at the pace of the busiest rank, at most so many `ahead`: those that enter as early as they
        can hold room that others need. `leaves_room` is `ALL`, `OLDEST` or `ENTRY`; with the last an order that is not
        paced mostly jams.
        """
        pace = max(self.tasks.work) / self.tasks.program.microbatches
        enters = [max(0.0, pace * (microbatch - ahead)) for microbatch in self.microbatch]
        key = [
            -math.inf if first else rule.kinds[kind] + rule.stage * depth + rule.microbatch * microbatch
            for first, kind, depth, microbatch in zip(self.first, self.kind, self.depth, self.microbatch, strict=True)
        ]
        held = [0.0] * self.tasks.ranks
        begun: list[dict[int, float]] = [{} for _ in held]  # microbatch -> residuals that it has still to make
        gone = [0.0] * self.tasks.ranks

        def pick(rank: int, time: float, ready: list[int]) -> int:
            held[rank] -= gone[rank]
            gone[rank] = 0.0
            best, left = NOTHING, begun[rank]
            for at in ready:
                more, own = self.takes[at], self.microbatch[at]
                if more and self._needed_room(left, rank, own, more, leaves_room, held[rank]) > self.caps[rank]:
                    continue
                if best < 0 or (key[at], at) < (key[best], best):
                    best = at
            if best >= 0:
                held[rank] += self.takes[best]
                gone[rank] = self.drops[best]
                if self.takes[best]:
                    rest = left.pop(self.microbatch[best], self.whole[rank]) - self.takes[best]
                    if rest > 1e-9:
                        left[self.microbatch[best]] = rest
            return best

        return self._rows_of(list_schedule(self.graph, pick, enters))

    def _needed_room(
        self, left: dict[int, float], rank: int, microbatch: int, takes: float, leaves_room: str, held: float
    ) -> float:
        """The residuals that a rank has to have room for if a forward of a microbatch takes so much now.

        `left` is, of each microbatch that has begun on the rank, what its other forwards will take.
        """
        left = left if microbatch in left else {**left, microbatch: self.whole[rank]}
        if leaves_room == ALL:
            return held + sum(left.values())
        oldest = min(left)
        if microbatch == oldest:
            return held + takes
        if leaves_room == OLDEST:
            return held + takes + left[oldest]
        # Those before the oldest that is not all there need no more room, and leave theirs.
        younger = sum(self.whole[rank] - rest for index, rest in left.items() if index != oldest)
        return max(held, younger + self.whole[rank]) + takes

    def with_weights_in_gaps(self, rows: Rows) -> Rows | None:
        """The order of the rows with each W where its rank would wait, or has no room for what is next; None where it
        jams.

        Forwards and input gradients keep their order. A published order has its W where F = I = W leaves gaps; other
        costs leave them elsewhere.
        """
        tasks, caps = self.tasks, self.caps
        is_weight = [tasks.ops[steps[0][-1]].kind == "W" for steps in tasks.tracks]
        left = [[track for track in reversed(row) if not is_weight[track]] for row in rows]
        held, gone = [0.0] * tasks.ranks, [0.0] * tasks.ranks

        def pick(rank: int, time: float, ready: list[int]) -> int:
            held[rank] -= gone[rank]
            gone[rank] = 0.0
            following = left[rank][-1] if left[rank] else NOTHING
            best = next((step for step in ready if self.steps[step][0] == following), NOTHING)
            if best >= 0 and held[rank] + self.takes[best] <= caps[rank]:
                left[rank].pop()
            else:
                weights = [step for step in ready if is_weight[self.steps[step][0]]]
                best = min(weights, key=self.microbatch.__getitem__, default=NOTHING)
            if best >= 0:
                held[rank] += self.takes[best]
                gone[rank] = self.drops[best]
            return best

        return self._rows_of(list_schedule(self.graph, pick))

    def _rows_of(self, found: Scheduled) -> Rows | None:
        """The tracks of a list schedule; None where it jams."""
        if any(found.stuck) or sum(map(len, found.rows)) < len(self.steps):
            return None
        return [[self.steps[step][0] for step in row] for row in found.rows]
