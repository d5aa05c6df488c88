"""First orders of a search, by list scheduling: whenever a rank is free, it runs the ready op with the best priority.

A rule computes the priority from kind, stage and microbatch. Under a cap, greed deadlocks: forwards
fill the memory, and the backwards that would free it need a forward that has no room. So a forward runs only if there
is room left for what the microbatches that have begun on the rank will still add, or the oldest of them. The limit of
each rank follows from the cap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from random import Random
from typing import NamedTuple

from fpipe.finding.tasks import Rows, Tasks
from fpipe.schedules.list_scheduler import NOTHING, ListSchedule, TaskGraph, list_schedule
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate


class Rule(NamedTuple):
    """Weights of a priority; the ready step with the smallest sum runs first.

    Args:
        kinds: added for an F; a B or I; a W.
        stage: added for each stage that the microbatch has passed, forward and backward.
        microbatch: added for each microbatch before this one.
    """

    kinds: tuple[float, float, float]
    stage: float
    microbatch: float


ROOM_FOR_ALL, ROOM_FOR_OLDEST, ROOM_FROM_ENTRY = "all", "oldest", "entry"
"""The room that a forward leaves: the missing residuals of all microbatches that have begun on the rank; those of the
oldest one; or all of the oldest one and what those hold that entered after it."""

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
    """Yield the fixed rules, then random ones."""
    yield from RULES
    random = Random(seed)
    while True:
        kinds = random.uniform(0, 3), random.uniform(0, 3), random.choice((2.0, 5.0, 100.0))
        yield Rule(kinds, random.uniform(-0.5, 0.5), random.uniform(0, 1))


class ListOrders:
    """A list scheduler of tasks under caps. It schedules steps: an op with its R, if it has one."""

    def __init__(self, tasks: Tasks, caps: Sequence[float]) -> None:
        self.tasks, self.caps = tasks, caps
        # 1) Facts of each step, by its index: the op of the step that a schedule names is its last one, behind an R.
        self.steps = [(track, step) for track, steps in enumerate(tasks.tracks) for step in steps]
        step_by_op = {op: step_index for step_index, (_, step) in enumerate(self.steps) for op in step}
        last_ops = [tasks.ops[step[-1]] for _, step in self.steps]
        self.rank = [op.rank for op in last_ops]
        self.microbatch = [op.microbatch or 0 for op in last_ops]
        self.kind = [0 if op.kind == "F" else 2 if op.kind == "W" else 1 for op in last_ops]
        # How many stages the microbatch has passed: upwards in the forward, then down again.
        both_passes = 2 * tasks.program.stages
        self.depth = [(op.stage or 0) if op.kind == "F" else both_passes - (op.stage or 0) for op in last_ops]
        self.takes = [sum(tasks.takes[op] for op in step) for _, step in self.steps]
        self.drops = [sum(tasks.drops[op] for op in step) for _, step in self.steps]
        # 2) What each step waits for, and how long.
        needs: list[dict[int, float]] = []
        on_exchange_lane = tasks.on_exchange_lane or [False for _ in tasks.ops]
        # `list_schedule` knows one lane a rank. So an exchange takes no time there, runs as soon as it is ready, and
        # its seconds are added to the delay of whoever reads it.
        timed_lanes = zip(tasks.seconds, on_exchange_lane, strict=True)
        exchange_seconds = [seconds if is_exchange else 0.0 for seconds, is_exchange in timed_lanes]
        self.runs_first = [on_exchange_lane[step[-1]] for _, step in self.steps]
        for step_index, (_, step) in enumerate(self.steps):
            op_needs = (need for op in step for need in tasks.needs[op] if need[0] >= 0)
            sources = [(step_by_op[source], delay + exchange_seconds[source]) for source, delay in op_needs]
            # Sorted by delay: of several needs of one step the longest delay is written last, and stays.
            sources.sort(key=itemgetter(1))
            needs.append({source: delay for source, delay in sources if source != step_index})
        # The ops of a track run in the order of their microbatches.
        for steps in tasks.tracks:
            for earlier_step, later_step in pairwise(step_by_op[step[0]] for step in steps):
                needs[later_step].setdefault(earlier_step, 0.0)
        seconds = [sum(tasks.seconds[op] - exchange_seconds[op] for op in step) for _, step in self.steps]
        self.graph = TaskGraph.of(tasks.ranks, self.rank, seconds, needs)
        self.residuals_by_rank = [sum(self._takes_of_first_microbatch(rank)) for rank in range(tasks.ranks)]

    def _takes_of_first_microbatch(self, rank: int) -> list[float]:
        """Return the residuals that each forward of a rank's first microbatch adds."""
        taking_steps = [step for step, step_rank in enumerate(self.rank) if step_rank == rank and self.takes[step]]
        first_microbatch = min((self.microbatch[step] for step in taking_steps), default=0)
        return [self.takes[step] for step in taking_steps if self.microbatch[step] == first_microbatch]

    def order(self, rule: Rule, leaves_room: str = ROOM_FOR_ALL, ahead: float = math.inf) -> Rows | None:
        """Return the order by a rule, or None if it deadlocks under the caps.

        Args:
            rule: the priorities.
            leaves_room: `ROOM_FOR_ALL`, `ROOM_FOR_OLDEST`, or `ROOM_FROM_ENTRY`, which mostly deadlocks without a pace.
            ahead: microbatches enter at the pace of the busiest rank, and at most so many ahead of it. One that enters
                as early as it can holds room that others need: with 8 ranks and a tight cap on a V, paced orders began
                at 59.5 where unpaced ones began at 65.
        """
        # 1) When microbatches enter, and the priority of each step. Exchanges run as soon as they are ready.
        pace = max(self.tasks.work_by_rank) / self.tasks.program.microbatches
        entry_times = [max(0.0, pace * (microbatch - ahead)) for microbatch in self.microbatch]
        priorities = [
            -math.inf if is_exchange else rule.kinds[kind] + rule.stage * depth + rule.microbatch * microbatch
            for is_exchange, kind, depth, microbatch in zip(
                self.runs_first, self.kind, self.depth, self.microbatch, strict=True
            )
        ]
        # 2) What each rank holds.
        held_by_rank = [0.0] * self.tasks.ranks
        # For each rank: microbatch -> residuals that its later forwards on this rank will add.
        missing_by_rank: list[dict[int, float]] = [{} for _ in held_by_rank]
        # What the running step of each rank frees at its end, which is when the rank picks again.
        freed = [0.0] * self.tasks.ranks

        def pick(rank: int, time: float, ready: list[int]) -> int:
            held_by_rank[rank] -= freed[rank]
            freed[rank] = 0.0
            best, missing = NOTHING, missing_by_rank[rank]
            for step in ready:
                amount, microbatch = self.takes[step], self.microbatch[step]
                if amount:
                    room = self._needed_room(missing, rank, microbatch, amount, leaves_room, held_by_rank[rank])
                    if room > self.caps[rank]:
                        continue
                if best < 0 or (priorities[step], step) < (priorities[best], best):
                    best = step
            if best >= 0:
                held_by_rank[rank] += self.takes[best]
                freed[rank] = self.drops[best]
                if self.takes[best]:
                    remaining = missing.pop(self.microbatch[best], self.residuals_by_rank[rank]) - self.takes[best]
                    if remaining > 1e-9:
                        missing[self.microbatch[best]] = remaining
            return best

        return self._rows_of(list_schedule(self.graph, pick, entry_times))

    def _needed_room(
        self, missing: dict[int, float], rank: int, microbatch: int, amount: float, leaves_room: str, residuals: float
    ) -> float:
        """Return the residuals that a rank needs room for if a forward of a microbatch adds this amount now.

        `missing` has, for each microbatch that has begun on the rank, what its other forwards there will add.
        """
        whole_microbatch = self.residuals_by_rank[rank]
        missing = missing if microbatch in missing else {**missing, microbatch: whole_microbatch}
        if leaves_room == ROOM_FOR_ALL:
            return residuals + sum(missing.values())
        oldest = min(missing)
        if microbatch == oldest:
            return residuals + amount
        if leaves_room == ROOM_FOR_OLDEST:
            return residuals + amount + missing[oldest]
        # Microbatches before the oldest incomplete one need no more room, and will free theirs.
        younger = sum(whole_microbatch - remaining for index, remaining in missing.items() if index != oldest)
        return max(residuals, younger + whole_microbatch) + amount

    def with_weights_in_gaps(self, rows: Rows) -> Rows | None:
        """Return the order with each W moved to where its rank would wait or needs room; None if that deadlocks.

        Forwards and input gradients keep their order. A published order has its W where F = I = W leaves gaps; other
        costs leave gaps elsewhere.
        """
        tasks, caps = self.tasks, self.caps
        is_weight = [tasks.ops[steps[0][-1]].kind == "W" for steps in tasks.tracks]
        remaining_tracks = [[track for track in reversed(row) if not is_weight[track]] for row in rows]
        held_by_rank, freed = [0.0] * tasks.ranks, [0.0] * tasks.ranks

        def pick(rank: int, time: float, ready: list[int]) -> int:
            held_by_rank[rank] -= freed[rank]
            freed[rank] = 0.0
            next_track = remaining_tracks[rank][-1] if remaining_tracks[rank] else NOTHING
            best = next((step for step in ready if self.steps[step][0] == next_track), NOTHING)
            if best >= 0 and held_by_rank[rank] + self.takes[best] <= caps[rank]:
                remaining_tracks[rank].pop()
            else:
                weights = [step for step in ready if is_weight[self.steps[step][0]]]
                best = min(weights, key=self.microbatch.__getitem__, default=NOTHING)
            if best >= 0:
                held_by_rank[rank] += self.takes[best]
                freed[rank] = self.drops[best]
            return best

        return self._rows_of(list_schedule(self.graph, pick))

    def _rows_of(self, schedule: ListSchedule) -> Rows | None:
        if any(schedule.stuck) or sum(map(len, schedule.rows)) < len(self.steps):
            return None
        return [[self.steps[step][0] for step in row] for row in schedule.rows]


def limits_of(tasks: Tasks, cap: float, costs: Costs) -> list[float]:
    """Return the residuals that each rank may hold, in the unit of `Tasks.takes`.

    If peaks are microbatches, this is counting. If they are bytes, a rank holds more than residuals: how much more is
    measured on two orders, one that holds little and one that holds everything. The caller simulates the orders that it
    finds under these limits, and calls `tighten_limits` if they were too wide.
    """
    if cap == math.inf:
        return [math.inf for _ in tasks.rows]
    if costs.bytes is None:
        return [math.floor(cap * share + 1e-9) for share in tasks.residuals_per_microbatch]
    # Frugal: the program's own order. Greedy: every forward before any backward, and W last.
    frugal_rows = tasks.rows
    unlimited = ListOrders(tasks, [math.inf for _ in frugal_rows])
    greedy_rows = unlimited.order(Rule((0, 1000, 2000), 0, 0.01)) or frugal_rows
    extra_by_rank = [0.0 for _ in frugal_rows]
    for rows in (frugal_rows, greedy_rows):
        for rank, amount in enumerate(simulate(tasks.apply(rows), costs).peak):
            extra_by_rank[rank] = max(extra_by_rank[rank], amount - tasks.peak_of(tasks.ops_of_row(rows[rank])))
    return [(cap - extra_amount) * (1 + 1e-12) for extra_amount in extra_by_rank]


def tighten_limits(tasks: Tasks, rows: Rows, limits: list[float], peak: Sequence[float], cap: float) -> list[float]:
    """Lower the limit of each rank whose peak exceeds the cap: to its residuals in this order less the excess."""
    held_by_rank = [tasks.peak_of(tasks.ops_of_row(row)) for row in rows]
    return [
        min(limit, held_amount - (amount - cap)) if amount > cap * (1 + 1e-9) else limit
        for limit, held_amount, amount in zip(limits, held_by_rank, peak, strict=True)
    ]


def microbatches_that_fit(tasks: Tasks, limits: Sequence[float]) -> float:
    """Return the number of microbatches that every rank has room for."""
    residuals_by_rank, count = [0.0] * tasks.ranks, tasks.program.microbatches
    for op, takes in zip(tasks.ops, tasks.takes, strict=True):
        residuals_by_rank[op.rank] += takes
    pairs = zip(limits, residuals_by_rank, strict=True)
    return min((limit * count / residuals for limit, residuals in pairs if residuals), default=math.inf)
