"""Small changes by which a climb makes the order of a pipeline better, and its steady state repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from fpipe.orders.linear_pipeline import NEVER, LinearPipeline, TrackRow, cells_of, play, tracks_of
from fpipe.orders.play import Climb, Value
from fpipe.orders.tasks import steady_states, stretch
from fpipe.schedules.blocks import BuildingBlock, track_rows_of
from fpipe.transforms.cells import Key

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)


class Order(NamedTuple):
    """An order of a pipeline, and how good it is: the smaller, the better."""

    value: tuple[float, float]
    rows: list[TrackRow]
    patience: list[float]

    def full(self, pipeline: LinearPipeline) -> list[TrackRow]:
        """The rows with their W."""
        made: list[TrackRow] = [[] for _ in self.rows]
        play(pipeline, self.rows, self.patience, made)
        return made


def played(pipeline: LinearPipeline, rows: list[TrackRow], patience: float | Sequence[float]) -> Order:
    """Rows and what they are worth."""
    each: list[float] = list(patience) if isinstance(patience, Sequence) else [patience] * pipeline.ranks
    return Order(pipeline.worth(play(pipeline, rows, each)), rows, each)


def best_of(orders: Iterable[Order]) -> Order:
    """The best order, of equal ones the first."""
    return min(orders, key=lambda order: order.value)


def without_weights(pipeline: LinearPipeline, rows: list[TrackRow]) -> list[TrackRow]:
    """Rows without their W, which then fill gaps."""
    return [[track for track in row if track < 2 * pipeline.stages] for row in rows]


def in_gaps(pipeline: LinearPipeline, tables: Iterable[list[list[Key]]]) -> Iterator[list[list[Key]]]:
    """Tables whose W fill the gaps that the costs leave, patiently or not, instead of standing where they are drawn."""
    for table in tables:
        rows = without_weights(pipeline, tracks_of(pipeline, table))
        orders = (played(pipeline, rows, patience) for patience in (0.0, 0.5, 1.0))
        yield from (cells_of(pipeline, order.full(pipeline)) for order in orders if order.value != NEVER)


@lru_cache(maxsize=16)
def floor(pipeline: LinearPipeline) -> tuple[float, float]:
    """A lower bound on the makespan and span of any order of a pipeline.

    A rank works from when the first forward reaches it. Until its first input gradient can start it has only forwards
    to do, as many as it may hold; and after its last one those of the stages before still follow, and a W, for which
    the first rank has to stay.
    """
    stages, seconds, count = pipeline.stages, pipeline.seconds, pipeline.microbatches
    heads, tails = [0.0] * stages, [seconds[2 * stages]] * stages
    for stage in range(1, stages):
        heads[stage] = heads[stage - 1] + seconds[stage - 1] + pipeline.ways[stage]
        tails[stage] = tails[stage - 1] + seconds[stages + stage - 1] + pipeline.ways[stages + stage - 1]
    back = heads[-1] + seconds[stages - 1] + pipeline.ways[2 * stages - 1] + seconds[2 * stages - 1] + tails[-1]
    makespan = span = 0.0
    for rank, own in enumerate(pipeline.tracks):
        chain = count * sum(seconds[stage] + seconds[stages + stage] for stage in own)
        work = chain + count * sum(seconds[2 * stages + stage] for stage in own)
        whole = heads[own[0]] + chain + tails[own[0]]
        alone = back - heads[own[0]] - tails[own[-1]] - seconds[stages + own[-1]]
        work += max(0.0, alone - min(count * len(own), int(pipeline.caps[rank])) * max(seconds[stage] for stage in own))
        makespan = max(makespan, heads[own[0]] + work, whole)
        span = max(span, work, whole)
    return makespan, span


def at_floor(pipeline: LinearPipeline, value: tuple[float, float]) -> bool:
    """Whether there is nothing left to gain."""
    least = pipeline.worth(floor(pipeline))
    return all(found <= best * (1 + 1e-9) for found, best in zip(value, least, strict=True))


def climb(pipeline: LinearPipeline, order: Order, plays: int, seed: int = 0) -> Order:
    """Move one op of one rank, or change a rank's patience, so many times; the same seed gives the same order."""
    random = Random(seed)

    def change(now: Order, late: Value) -> Order | None:
        rank = random.randrange(pipeline.ranks)
        rows, patience, row = now.rows[:], now.patience[:], now.rows[rank]
        if random.random() < 0.08:
            patience[rank] = random.choice(PATIENCE)
        else:
            take = random.randrange(len(row))
            put = take + random.choice((-4, -3, -2, -1, -1, 1, 1, 2, 3, 4))
            if random.random() < 0.05:
                put = random.randrange(len(row))
            if not 0 <= put < len(row) or set(row[min(take, put) : max(take, put) + 1]) == {row[take]}:
                return None
            rows[rank] = row[:]
            rows[rank].insert(put, rows[rank].pop(take))
        return played(pipeline, rows, patience)

    climb = Climb(order)
    climb.on(plays, change, lambda value: value == NEVER or at_floor(pipeline, value))
    return climb.now


class _InBlocks(NamedTuple):
    """The order of a repeated block."""

    value: Value
    order: Order
    block: BuildingBlock


def loosen(pipeline: LinearPipeline, block: BuildingBlock, patience: float, plays: int) -> Order:
    """Move offsets of a block by sixths of its interval: a track, all that follow it, or a leg that goes slower."""
    random, path, ranks = Random(0), pipeline.path, pipeline.ranks

    def repeated(block: BuildingBlock, patience: float | Sequence[float]) -> _InBlocks:
        order = played(pipeline, track_rows_of(pipeline, block), patience)
        return _InBlocks(order.value, order, block)

    def change(now: _InBlocks, late: Value) -> _InBlocks:
        offsets, interval, each = list(now.block.offsets), now.block.interval, now.order.patience
        chance = random.random()
        if chance < 0.1:
            each = [random.choice(PATIENCE)] * ranks
        elif chance < 0.2:
            interval *= random.choice((0.9, 0.95, 0.98, 1.02, 1.05, 1.1))
        else:
            step = random.choice((-3, -2, -1, -0.5, 0.5, 1, 2, 3)) * pipeline.work / 6
            at = random.randrange(len(path))
            kind = random.random()
            if kind < 0.25:
                offsets[path[at]] += step
            elif kind < 0.75:
                until = len(path) if kind < 0.5 else at + 1 + random.randrange(ranks)
                for track in path[at:until]:
                    offsets[track] += step
            else:
                leg = at - at % ranks
                for slope, track in enumerate(path[leg:]):
                    offsets[track] += step * min(1.0, slope / max(1, ranks - 1))
        return repeated(BuildingBlock(tuple(offsets), interval), each)

    climb = Climb(repeated(block, patience))
    climb.on(plays, change, lambda value: at_floor(pipeline, value))
    return climb.now.order


STATES = 3
"""Steady states of an order that are tried, the fastest first."""


def stretched(pipeline: LinearPipeline, order: Order, longer: LinearPipeline) -> Order:
    """An order for more microbatches, by its best steady state; worth `NEVER` where it has none."""
    times: list[list[float]] = [[] for _ in range(2 * pipeline.stages)]
    play(pipeline, order.rows, order.patience, None, times)
    rows = [[track for track in row if track < len(times)] for row in order.rows]
    ends = [iter(each) for each in times]
    starts = [[next(ends[track]) - pipeline.seconds[track] for track in row] for row in rows]
    more, states = longer.microbatches - pipeline.microbatches, steady_states(rows, starts)[:STATES]
    found = [played(longer, stretch(rows, state, more), order.patience) for state in states]
    return best_of(found or [Order(NEVER, rows, order.patience)])
