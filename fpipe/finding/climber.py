"""Improve an order by hill climbing: one small change at a time, on the critical path.

    rank 1 | 1F0 1F1 1I0 [1W0 1I1] 1F2         1I1 is on the critical path and waits for 1W0 alone: swap them, or move
                                               an op of such a block to its front or its end

The same seed gives the same order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Generic, NamedTuple, Protocol, TypeVar

from fpipe.finding.play import OrderValue, PlayedTimes, order_value
from fpipe.finding.tasks import Rows, Tasks

PATTERN = 0.1
"""The share of changes that swap two tracks throughout a row."""

ACCEPTANCE_MEMORY = 60
"""How many steps back the order lies that a change must not be worse than."""


# Hill climbing with late acceptance (Burke and Bykov 2017): a change is accepted if it is no worse than the current
# order, or no worse than the order that was current ACCEPTANCE_MEMORY steps ago. The second rule lets the climb leave a
# local optimum, and needs no temperature that would have to be tuned to the costs.


class HasValue(Protocol):
    """An order with a value, less is better."""

    @property
    def value(self) -> OrderValue:
        """The makespan and the span, the objective first."""
        ...


S = TypeVar("S", bound=HasValue)


class Climb(Generic[S]):
    """A climb with late acceptance: the current order, the best one, the steps taken, and the step that found it.

    >>> from typing import NamedTuple
    >>> Point = NamedTuple("Point", [("value", tuple[float, float])])
    >>> climb = Climb(Point((9.0, 0.0)))
    >>> climb.run(50, lambda point, threshold: Point((abs(point.value[0] - 2.0), 0.0)), lambda value: value[0] < 1.5)
    >>> climb.best, climb.steps
    (Point(value=(1.0, 0.0)), 4)
    """

    def __init__(self, start: S, memory: int = 1) -> None:
        self.current = self.best = start
        self.recent_values = deque([start.value] * memory)
        self.steps = self.best_step = 0

    def run(
        self, steps: int, change: Callable[[S, OrderValue], S | None], is_enough: Callable[[OrderValue], bool]
    ) -> None:
        """Try up to `steps` changes; stop when the best value `is_enough`.

        `change` gets the current order and the threshold of acceptance, and returns a new order or None. It may give up
        on an order above the threshold early: that value is not looked at.
        """
        for _ in range(steps):
            if is_enough(self.best.value):
                break
            self.steps += 1
            threshold = max(self.current.value, self.recent_values[0])
            changed = change(self.current, threshold)
            if changed is None:
                continue
            if changed.value <= threshold:
                self.current = changed
                if changed.value < self.best.value:
                    self.best, self.best_step = changed, self.steps
            self.recent_values.popleft()
            self.recent_values.append(self.current.value)


class PlayedOrder(NamedTuple):
    """An order, its value, the ops of each rank in order, and their times."""

    value: OrderValue
    rows: Rows
    ops_by_rank: list[list[int]]
    played: PlayedTimes


class Block(NamedTuple):
    """A run of steps of one rank on the critical path, each waiting only for the one before.

    As in job-shop scheduling, no change makes an order shorter that leaves the blocks of a critical path as they are.
    """

    rank: int
    first_slot: int
    last_slot: int


class Climber:
    """A climb on the orders of some tasks, under a cap of residuals on each rank that the first order keeps.

    A slot is the index of a step in its rank's row, a place the index of an op among its rank's ops.
    """

    def __init__(self, tasks: Tasks, rows: Rows, caps: Sequence[float], objective: str, seed: int) -> None:
        self.tasks, self.caps, self.objective, self.random = tasks, caps, objective, Random(seed)
        ops_by_rank = [tasks.ops_of_row(row) for row in rows]
        played = tasks.play(ops_by_rank)
        self.climb = Climb(PlayedOrder(order_value(played, objective), rows, ops_by_rank, played), ACCEPTANCE_MEMORY)
        self.recomputes = any(len(steps[0]) > 1 for steps in tasks.tracks)
        self.takes = [max(tasks.takes[op] for op in steps[0]) for steps in tasks.tracks]
        self.drops = [sum(tasks.drops[op] for op in steps[0]) for steps in tasks.tracks]
        self._inspect(self.climb.current)

    def run(self, steps: int, floor: float) -> None:
        """Try up to `steps` changes, or until the order reaches `floor`, which no order goes below."""
        self.climb.run(steps, self._changed_order, lambda value: value[0] <= floor)

    def _changed_order(self, order: PlayedOrder, threshold: OrderValue) -> PlayedOrder | None:
        """Return the order with one change, or None; its play stops where it gets worse than `threshold`."""
        if order is not self.inspected:
            self._inspect(order)
        change = self._propose_change(order.rows)
        row = change and self._make_room(*change)
        if change is None or row is None:
            return None
        rank, rank_ops = change[0], self.tasks.ops_of_row(row)
        if rank_ops == order.ops_by_rank[rank]:
            return None
        ops_by_rank, rows = order.ops_by_rank[:], order.rows[:]
        ops_by_rank[rank], rows[rank] = rank_ops, row
        limit = threshold[0] * (1 + 1e-12) if self.objective == "makespan" else math.inf
        known_counts = self._count_unchanged(rank, order.ops_by_rank[rank], rank_ops)
        played = self.tasks.play(ops_by_rank, limit, order.played.ends, known_counts)
        return PlayedOrder(order_value(played, self.objective), rows, ops_by_rank, played)

    def _count_unchanged(self, rank: int, old_ops: list[int], new_ops: list[int]) -> list[int]:
        """Return how many ops of each rank keep their ends when one row changes.

        Nothing that starts before the earliest time of a change can notice it. Starts ascend along a row, so a
        bisection finds the first op of each rank that starts later.
        """
        pairs = enumerate(zip(old_ops, new_ops, strict=True))
        changed_place = next(index for index, (old_op, new_op) in pairs if old_op != new_op)
        ends, seconds = self.inspected.played.ends, self.tasks.seconds
        earliest_change = ends[old_ops[changed_place - 1]] if changed_place else 0.0
        # An exchange starts no earlier than the op above it on the main lane does, which may be before that op ends.
        if self.tasks.on_exchange_lane:
            ops_above = (op for op in reversed(old_ops[:changed_place]) if not self.tasks.on_exchange_lane[op])
            op_above = next(ops_above, -1)
            earliest_change = ends[op_above] - seconds[op_above] if op_above >= 0 else 0.0
        known_counts = [bisect_left(starts, earliest_change) for starts in self.starts_by_rank]
        known_counts[rank] = min(known_counts[rank], changed_place)
        return known_counts

    def _make_room(self, rank: int, row: list[int]) -> list[int] | None:
        """Repair a row that exceeds the cap: move an op without room behind the next op that frees some."""
        cap, takes, drops = self.caps[rank], self.takes, self.drops
        for _ in range(4):
            amount, full_slot = 0.0, -1
            for slot, track in enumerate(row):
                amount += takes[track]
                if amount > cap:
                    full_slot = slot
                    break
                amount -= drops[track]
            if full_slot < 0:
                return row
            later_slots = range(full_slot + 1, len(row))
            freeing_slot = next((slot for slot in later_slots if drops[row[slot]] > takes[row[slot]]), None)
            if freeing_slot is None:
                return None
            row = [*row[:full_slot], *row[full_slot + 1 : freeing_slot + 1], row[full_slot], *row[freeing_slot + 1 :]]
        return None

    def _propose_change(self, rows: Rows) -> tuple[int, list[int]] | None:
        """Return a rank and its row with one step moved, or None if the change would be none."""
        random = self.random
        # Most changes move a step of a block on the critical path, to the neighbour or an end of the block. The others
        # move any step of any rank by up to four slots.
        kind = random.random()
        if kind < PATTERN:
            return self._swap_throughout(rows)
        if self.blocks and kind < 0.8:
            rank, first_slot, last_slot = random.choice(self.blocks)
            row = rows[rank]
            source_slot = random.randint(first_slot, last_slot)
            chance = random.random()
            if chance < 0.4:
                target = source_slot + random.choice((-1, 1))
            elif chance < 0.6:
                target = first_slot
            elif chance < 0.8:
                target = last_slot
            else:
                target = random.randint(first_slot, last_slot)
        else:
            rank = random.randrange(len(rows))
            row = rows[rank]
            source_slot = random.randrange(len(row))
            target = source_slot + random.choice((-4, -3, -2, -1, 1, 2, 3, 4))
        if not 0 <= target < len(row):
            return None
        if {*row[min(source_slot, target) : max(source_slot, target) + 1]} == {row[source_slot]}:
            return None
        changed_row = row[:]
        changed_row.insert(target, changed_row.pop(source_slot))
        return rank, changed_row

    def _swap_throughout(self, rows: Rows) -> tuple[int, list[int]] | None:
        """Swap two neighbouring tracks wherever they are neighbours in a part of a row.

        A steady state repeats its pattern for every microbatch, so it has to change everywhere at once.
        """
        random = self.random
        rank = random.randrange(len(rows))
        row = rows[rank][:]
        first_slot = random.randrange(len(row) - 1) if len(row) > 1 else 0
        pair = row[first_slot : first_slot + 2]
        if len({*pair}) < 2:
            return None
        slot, last_slot = (
            (0, len(row) - 1) if random.random() < 0.3 else sorted((first_slot, random.randrange(len(row))))
        )
        while slot < last_slot:
            if row[slot : slot + 2] == pair:
                row[slot : slot + 2] = pair[1], pair[0]
                slot += 1
            slot += 1
        return rank, row

    def _inspect(self, order: PlayedOrder) -> None:
        """Note the blocks of the critical path and the starts of all ops, from which changes of an order begin."""
        ends, seconds = order.played.ends, self.tasks.seconds
        self.inspected = order
        self.starts_by_rank = [[ends[op] - seconds[op] for op in rank_ops] for rank_ops in order.ops_by_rank]
        # The starts of two lanes interleave; a running maximum makes them ascend, as the bisection needs.
        if self.tasks.on_exchange_lane:
            self.starts_by_rank = [[*accumulate(starts, max)] for starts in self.starts_by_rank]
        blocks = [self._block_of(order, *run) for run in self._critical_runs(order)]
        self.blocks = [block for block in blocks if block.last_slot > block.first_slot]

    def _critical_runs(self, order: PlayedOrder) -> Iterator[tuple[int, int, int]]:
        """Walk the critical path back; yield each run of at least two ops as its rank, first and last place.

        While an op waits for its rank, the run goes on at the op above. Else the run ends, and the path goes on at the
        writer, maybe on another rank, that arrives last.
        """
        tasks, ends = self.tasks, order.played.ends
        rank = self._critical_rank(order)
        rank_ops = order.ops_by_rank[rank]
        place = last_place = tasks.main_lane_places(rank_ops)[-1]
        while True:
            op = rank_ops[place]
            start = ends[op] - tasks.seconds[op]
            latest_end = start - 1e-9 * (start + 1)  # what ends at the start or later is waited for; 1e-9 for rounding
            place_above = self._place_awaited(rank_ops, place, latest_end)
            if place_above >= 0:
                place = place_above
                continue
            if last_place > place:
                yield rank, place, last_place
            writer = next((source for source, delay in tasks.needs[op] if ends[source] + delay >= latest_end), -1)
            if writer < 0:
                return
            rank = tasks.ops[writer].rank
            rank_ops = order.ops_by_rank[rank]
            place = last_place = rank_ops.index(writer)

    def _critical_rank(self, order: PlayedOrder) -> int:
        """Return the rank whose main lane ends last, or whose span is longest."""
        ends, seconds, is_span = order.played.ends, self.tasks.seconds, self.objective == "span"
        values: list[float] = []
        for rank_ops in order.ops_by_rank:
            places = self.tasks.main_lane_places(rank_ops)
            first_op, last_op = rank_ops[places[0]], rank_ops[places[-1]]
            values.append(ends[last_op] - ends[first_op] + seconds[first_op] if is_span else ends[last_op])
        return values.index(max(values))

    def _block_of(self, order: PlayedOrder, rank: int, first_place: int, last_place: int) -> Block:
        """Return the slots of a run of ops. An R shares the slot of its reader, so places and slots then differ."""
        if not self.recomputes:
            return Block(rank, first_place, last_place)
        slot_by_place = [slot for slot, track in enumerate(order.rows[rank]) for _ in self.tasks.tracks[track][0]]
        return Block(rank, slot_by_place[first_place], slot_by_place[last_place])

    def _place_awaited(self, rank_ops: Sequence[int], place: int, latest_end: float) -> int:
        """Return the place of the op that the one at `place` waits for on its own rank, or -1.

        That is the end of the op above on its lane. An exchange also waits for the start of the main-lane op above.
        """
        on_exchange_lane, ends, seconds = self.tasks.on_exchange_lane, self.inspected.played.ends, self.tasks.seconds
        if not on_exchange_lane:
            return place - 1 if place and ends[rank_ops[place - 1]] >= latest_end else -1
        is_exchange = on_exchange_lane[rank_ops[place]]
        for place_above in reversed(range(place)):
            op = rank_ops[place_above]
            if on_exchange_lane[op] == is_exchange:
                if ends[op] >= latest_end and (not is_exchange or seconds[op]):
                    return place_above
            elif is_exchange and ends[op] - seconds[op] >= latest_end:
                return place_above
        return -1
