"""A placed program as numbers, on which a search tries orders: duration, needs and residuals of each op.

Microbatches are alike, so the ops of one kind and stage run in the order of their microbatches. They form a *track*. A
*row*, the order of a rank, is then a list of tracks: each occurrence of a track is its next microbatch.

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

from fpipe.finding.play import Needs, NumberedOps, PlayedTimes, play
from fpipe.program import Op, Program, Value, is_exchange, kind_of
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import group_ops
from fpipe.timing.memory import residuals_stay_on_rank
from fpipe.timing.waiting import shortest_tails, waits_between_ops
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import apply_table
from fpipe.transforms.shard import forwards_per_microbatch

# How an order is stretched to more microbatches: find its steady state, and repeat it.
#
# Take two moments between which every track has advanced by the same number of microbatches. At both, each track leads
# each other by as many microbatches. So what ran between them can run again any number of times: it cannot deadlock,
# and no rank holds more. If a steady state has three microbatches and four more are asked for, it runs twice, and the
# last two microbatches are left out.

Rows = list[list[int]]
"""For each rank the tracks of its ops, in order."""


class SteadyState(NamedTuple):
    """A repeatable part of an order.

    Args:
        pace: seconds for each microbatch.
        microbatches: how many it advances each track.
        begins, ends: its slots on each rank, the end excluded.
    """

    pace: float
    microbatches: int
    begins: list[int]
    ends: list[int]


def steady_states(rows: Rows, starts: Sequence[Sequence[float]]) -> list[SteadyState]:
    """Return the steady states of an order whose ops start at these times, the fastest first.

    >>> steady_states([[0, 0, 1, 0, 1, 1]], [[0, 1, 2, 3, 4, 5]])[0]
    SteadyState(pace=2.0, microbatches=1, begins=[1], ends=[3])
    """
    pairs = enumerate(zip(rows, starts, strict=True))
    ops = sorted((start, rank, slot, row[slot]) for rank, (row, times) in pairs for slot, start in enumerate(times))
    # Walk over all ops by their start. `leads` says how far each track is ahead of the first one; two moments with the
    # same leads enclose a steady state. Only the last eight such moments are paired: all pairs would be quadratic.
    counts = dict.fromkeys((track for row in rows for track in row), 0)
    lead_track, slots_reached = next(iter(counts)), [0 for _ in rows]
    moments_by_lead: defaultdict[tuple[int, ...], list[tuple[float, int, list[int]]]] = defaultdict(list)
    states: list[SteadyState] = []
    moment = ops[0][0]
    for start, rank, _, track in ops:
        if start > moment:
            reached_microbatch, moment = counts[lead_track], start
            leads = tuple([count - reached_microbatch for count in counts.values()])
            for begin_time, count, begins_at in moments_by_lead[leads][-8:]:
                advance = reached_microbatch - count
                states.append(SteadyState((start - begin_time) / advance, advance, begins_at, slots_reached[:]))
            moments_by_lead[leads].append((start, reached_microbatch, slots_reached[:]))
        counts[track] += 1
        slots_reached[rank] += 1
    return sorted(states, key=lambda state: state[:2])


def stretch(rows: Rows, steady: SteadyState, extra_microbatches: int) -> Rows:
    """Return the order with its steady state repeated for this many more microbatches.

    >>> stretch([[0, 0, 1, 0, 1, 1]], SteadyState(2.0, 1, [1], [3]), 2)
    [[0, 0, 1, 0, 1, 0, 1, 0, 1, 1]]
    """
    repeats = -(-extra_microbatches // steady.microbatches)
    parts = zip(rows, steady.begins, steady.ends, strict=True)
    repeated = ([*row[:end], *(row[begin:end] * repeats), *row[end:]] for row, begin, end in parts)
    return [without_last_microbatches(row, repeats * steady.microbatches - extra_microbatches) for row in repeated]


def without_last_microbatches(row: list[int], count: int) -> list[int]:
    """Drop the last `count` microbatches of each track, which no other microbatch waits for."""
    seen_by_track, remaining = Counter[int](), list[int]()
    for track in reversed(row):
        seen_by_track[track] += 1
        if seen_by_track[track] > count:
            remaining.append(track)
    return remaining[::-1]


def extrapolate(first_value: float, second_value: float, steps: float) -> float:
    """Extrapolate linearly, `steps` beyond the second value: in a steady state each step adds the same."""
    return second_value + steps * (second_value - first_value)


TrackStep = tuple[int, ...]
"""The ops of one slot of a row: an op, behind its R if it has one."""


def count_residual(value: Value) -> float:
    """Return 1, the weight of a residual where the costs have no bytes."""
    return 1.0


def _bytes_of(costs: Costs, value: Value) -> float:
    return float(sum(costs.storages(value).values()))


@dataclass(frozen=True)
class Tasks:
    """The ops of a program that a schedule names; an op is known by its index in `ops`.

    Args:
        needs: the ops that each op waits for, with the delay of each transfer; -1 is the caller. Needs that follow from
            others are left out.
        takes, drops: the residuals that an op adds when it starts and frees when it ends: bytes where the costs have
            them (an I then keeps what its W needs), else a count.
        tracks: the steps of each track, by microbatch.
        rows: the order of the program itself.
        residuals_per_microbatch: for each rank how many residuals make one microbatch.
        residual_weight: bytes of a residual, or 1.
        on_exchange_lane: for each op whether it runs on the exchange lane; empty if none does.
    """

    program: Program
    ops: list[Op]
    seconds: list[float]
    needs: list[Needs]
    takes: list[float]
    drops: list[float]
    tracks: list[list[TrackStep]]
    rows: Rows
    residuals_per_microbatch: list[int]
    residual_weight: Callable[[Value], float] = count_residual
    on_exchange_lane: Sequence[bool] = ()

    @property
    def lanes_per_rank(self) -> float:
        """Lanes of a rank: playing an op of two lanes takes about twice as long."""
        return 2.0 if self.on_exchange_lane else 1.0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def numbered_ops(self) -> NumberedOps:
        """The ops in the form that `play` takes."""
        reader_ranks: list[set[int]] = [set() for _ in self.ops]
        for op, needs in zip(self.ops, self.needs, strict=True):
            for source, _ in needs:
                if source >= 0 and self.ops[source].rank != op.rank:
                    reader_ranks[source].add(op.rank)
        on_main_lane = [not on_exchange_lane for on_exchange_lane in self.on_exchange_lane] or [True for _ in self.ops]
        tails = shortest_tails(self.needs, self.seconds, on_main_lane)
        exchanges = (index for index, is_exchange in enumerate(self.on_exchange_lane) if is_exchange)
        exchange_needs = {index: self.needs[index] for index in exchanges}
        # `play` recognizes an exchange by its need of itself.
        needs = [((index, 0.0),) if index in exchange_needs else needs for index, needs in enumerate(self.needs)]
        return NumberedOps(self.seconds, needs, [tuple(sorted(ranks)) for ranks in reader_ranks], tails, exchange_needs)

    @cached_property
    def residuals(self) -> list[list[tuple[int, int, float]]]:
        """For each rank its residuals as (op that makes it, op that drops it, amount).

        An op may drop only a part of what another made, as an I does in bytes; the parts are separate residuals.
        """
        open_by_cell: dict[tuple[object, ...], list[tuple[int, float]]] = defaultdict(list)
        residuals_by_rank: list[list[tuple[int, int, float]]] = [[] for _ in self.rows]
        # `ops` lists each microbatch's ops with writers above readers, so whatever is dropped was opened before.
        for index, op in enumerate(self.ops):
            for part in op.parts or (op,):
                takes, remaining = residual_change(part, self.residual_weight)
                open_residuals = open_by_cell[part[1:4]]
                while remaining and open_residuals:
                    maker, size = open_residuals.pop()
                    dropped = min(remaining, size)
                    residuals_by_rank[op.rank].append((maker, index, dropped))
                    remaining -= dropped
                    if size > dropped:
                        open_residuals.append((maker, size - dropped))
                if takes:
                    open_residuals.append((index, takes))
        return residuals_by_rank

    def follows(self, op: int, earlier_op: int) -> bool:
        """Whether an op needs an earlier one, directly or through others."""
        worklist = [op]
        while worklist:
            sources = [source for source, _ in self.needs[worklist.pop()] if source >= 0]
            if earlier_op in sources:
                return True
            worklist += sources
        return False

    @cached_property
    def work_by_rank(self) -> list[float]:
        """Seconds of work of each rank."""
        seconds_by_rank = [0.0] * self.ranks
        for op, seconds in zip(self.ops, self.seconds, strict=True):
            seconds_by_rank[op.rank] += seconds
        return seconds_by_rank

    def steps_of_row(self, row: Sequence[int]) -> list[TrackStep]:
        """Return the steps of a row, in order."""
        next_step = {track: iter(self.tracks[track]).__next__ for track in set(row)}
        return [next_step[track]() for track in row]

    def ops_of_row(self, row: Sequence[int]) -> list[int]:
        """Return the ops of a row, in order."""
        return list(chain.from_iterable(self.steps_of_row(row)))

    def main_lane_places(self, rank_ops: Sequence[int]) -> Sequence[int]:
        """Return the slots of the ops on the main lane."""
        slots = range(len(rank_ops))
        return [slot for slot in slots if not self.on_exchange_lane[rank_ops[slot]]] if self.on_exchange_lane else slots

    def peak_of(self, rank_ops: Sequence[int]) -> float:
        """Return the most residuals that a rank holds at once when it runs its ops in this order."""
        amount = peak = 0.0
        for op in rank_ops:
            amount += self.takes[op]
            if amount > peak:
                peak = amount
            amount -= self.drops[op]
        return peak

    def play(
        self,
        ops_by_rank: Sequence[Sequence[int]],
        limit: float = math.inf,
        known_ends: Sequence[float] = (),
        known_counts: Sequence[int] = (),
    ) -> PlayedTimes:
        """Play the ops of each rank in order.

        >>> import fpipe
        >>> tasks = tasks_of(fpipe.schedules.one_f_one_b(2)(fpipe.split(4)(fpipe.program(2))), fpipe.Costs())
        >>> tasks.play([tasks.ops_of_row(row) for row in tasks.rows])[:2]
        (15.0, 15.0)
        """
        return play(self.numbered_ops, ops_by_rank, limit, known_ends, known_counts)

    def apply(self, rows: Rows) -> Program:
        """Return the program in another order."""
        # An R stands before its reader by itself, so the table names the last op of each step only.
        named_ops = [[self.ops[step[-1]] for step in self.steps_of_row(row)] for row in rows]
        cells: list[list[Key | str]] = [[op.cell if op.parts else op[:4] for op in row] for row in named_ops]
        return apply_table(self.program, cells, move=False)


def tasks_of(program: Program, costs: Costs) -> Tasks | None:
    """Return a program's named ops as numbers, or None for a program that rows of tracks cannot describe.

    Those are: residuals leave their rank, a table placed transfers, an R is not next to its reader, an exchange shares
    a step with another op, or a rank has no work.
    """
    groups = group_ops(program.ops)
    if not residuals_stay_on_rank(program, groups) or any(op.kind in ("SEND", "FREE") for op in groups.samples):
        return None
    positions, needs = waits_between_ops(
        program, costs, lambda op: kind_of(op.kind).position == "table" or op.kind == "R"
    )
    ops = [program.ops[index] for index in positions]
    # 1) Tracks and rows. An R waits in `unclaimed_by_rank` for the op behind it on its rank, and joins that op's step.
    #    The number of ops in the step belongs to the key of the track: a stage may be recomputed in some microbatches.
    tracks: dict[tuple[object, ...], int] = {}
    steps: list[list[TrackStep]] = []
    rows: Rows = [[] for _ in range(program.ranks)]
    unclaimed_by_rank: list[list[int]] = [[] for _ in range(program.ranks)]
    for index, op in enumerate(ops):
        unclaimed_by_rank[op.rank].append(index)
        if op.kind != "R":
            parts = [(part.kind, part.stage, part.slice) for part in op.parts or (op,)]
            key = (op.rank, *parts, len(unclaimed_by_rank[op.rank]))
            track = tracks.setdefault(key, len(tracks))
            if track == len(steps):
                steps.append([])
            steps[track].append(tuple(unclaimed_by_rank[op.rank]))
            rows[op.rank].append(track)
            unclaimed_by_rank[op.rank] = []
    # 2) Refuse what rows of tracks cannot describe.
    exchange_in_step = any(is_exchange(ops[op]) for track in steps for step in track if len(step) > 1 for op in step)
    working_ranks = {op.rank for op in ops if not is_exchange(op)}
    if any(unclaimed_by_rank) or exchange_in_step or working_ranks != {*range(program.ranks)}:
        return None
    # 3) Durations, needs and residuals.
    weight = count_residual if costs.bytes is None else partial(_bytes_of, costs)
    changes_by_op = [[residual_change(part, weight) for part in op.parts or (op,)] for op in ops]
    takes, drops = ([float(sum(part[index] for part in parts)) for parts in changes_by_op] for index in (0, 1))
    seconds = list(map(costs.seconds, ops))
    reduced_needs = necessary_needs(ops, seconds, needs)
    on_exchange_lane = [*map(is_exchange, ops)]
    lanes = on_exchange_lane if any(on_exchange_lane) else ()
    return Tasks(
        program, ops, seconds, reduced_needs, takes, drops, steps, rows, forwards_per_microbatch(program), weight, lanes
    )


def residual_change(op: Op, weight: Callable[[Value], float]) -> tuple[float, float]:
    """Return the residuals that an op adds to its rank and that it drops; one of the two is 0.

    Where residuals have bytes, an I that reads `res` and writes the smaller `wres` drops the difference.
    """
    added = sum(weight(value) for value in op.writes if value.name in ("res", "wres"))
    dropped = sum(weight(value) for value in op.reads if value.name in ("res", "wres"))
    return max(0.0, added - dropped), max(0.0, dropped - added)


def necessary_needs(ops: list[Op], seconds: list[float], needs: list[dict[int, float]]) -> list[Needs]:
    """Return the needs of each op without needs that follow from others.

    A transitive reduction with delays, which makes every play faster: an I reads the residuals of its F, but it also
    needs the I of the next stage, which needs that F. Lags are kept within a microbatch only.
    """
    reduced_needs: list[Needs] = []
    # For each op: source of the same microbatch -> the least seconds from its end to the start of the op.
    lags: list[dict[int, float]] = []
    for op, delays in zip(ops, needs, strict=True):
        lag_through_others: dict[int, float] = {}
        for source, delay in delays.items():
            if source >= 0:
                for ancestor, lag in lags[source].items():
                    lag_through_source = lag + seconds[source] + delay
                    lag_through_others[ancestor] = max(lag_through_others.get(ancestor, 0.0), lag_through_source)
        # Needed only if no path through another need is at least as long as the transfer itself.
        reduced_needs.append(
            tuple((source, delay) for source, delay in delays.items() if lag_through_others.get(source, -1.0) < delay)
        )
        direct_lags = {
            source: max(delay, lag_through_others.get(source, 0.0))
            for source, delay in delays.items()
            if source >= 0 and ops[source].microbatch == op.microbatch
        }
        lags.append(lag_through_others | direct_lags)
    return reduced_needs
