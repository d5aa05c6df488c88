"""Orders searched from the costs: many cheap ones are tried, the best are improved, and the best of all is taken.

They differ in how many forwards a rank runs ahead, which block is repeated, and when a W may wait. All are played on a
short step, and the best on the whole step. The effort is counted in played ops, so that no machine changes an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from fpipe.orders.linear_pipeline import NEVER, LinearPipeline, TrackRow, tracks_of, unit_pipeline
from fpipe.orders.tasks import later
from fpipe.schedules.blocks import (
    BuildingBlock,
    Follower,
    in_blocks,
    lattice,
    track_rows_of,
    v_block,
    v_blocks,
    v_half_cells,
)
from fpipe.schedules.hillclimb import (
    PATIENCE,
    Order,
    at_floor,
    best_of,
    climb,
    loosen,
    played,
    stretched,
    without_weights,
)


@lru_cache(maxsize=64)
def linear_order(pipeline: LinearPipeline, effort: int) -> list[TrackRow]:
    """The best order of one stage a rank, of so many played ops: how far each rank runs ahead."""
    short = replace(pipeline, microbatches=min(pipeline.microbatches, 3 * pipeline.ranks))
    mean = [sum(pipeline.seconds[at : at + pipeline.ranks]) / pipeline.ranks for at in (0, pipeline.ranks)]
    there_and_back = mean[0] + mean[1] + sum(pipeline.ways) / max(1, pipeline.ranks - 1)
    most = there_and_back / mean[0] if mean[0] else pipeline.microbatches
    steps = 6 if effort < 500_000 else 24
    likely = min(most, max(pipeline.caps) / pipeline.ranks)  # the cap is full when the first input gradient arrives
    hops = sorted((1 + (most - 0.7) * step / steps for step in range(steps + 1)), key=lambda hop: abs(hop - likely))
    family = [(hop, more) for hop in hops for more in (0, 1, 2)]
    found: list[tuple[tuple[float, float], float, int, float]] = []
    for per_hop, more in family:
        rows = _ahead(short, per_hop, more)
        found += [(played(short, rows, patience).value, per_hop, more, patience) for patience in (0.5, 0.0, 1.0)]
        if at_floor(short, min(found)[0]):
            break
    found.sort()
    best = played(pipeline, _ahead(pipeline, *found[0][1:3]), found[0][3])
    for _, per_hop, more, patience in found[1:3]:
        if not at_floor(pipeline, best.value):
            best = best_of([best, played(pipeline, _ahead(pipeline, per_hop, more), patience)])
    ops = 3 * pipeline.stages * pipeline.microbatches
    plays = max(0, effort - len(found) * 3 * short.stages * short.microbatches) // ops
    return climb(pipeline, best, min(plays, 20 * ops)).full(pipeline)


def _ahead(pipeline: LinearPipeline, per_hop: float, more: int) -> list[TrackRow]:
    """Each rank runs some forwards ahead for every rank behind it, and then takes I and F in turn."""
    stages, count = pipeline.stages, pipeline.microbatches
    rows: list[TrackRow] = []
    for stage, rank in enumerate(pipeline.placement):
        hops = pipeline.ranks - 1 - rank
        ahead = max(1, min(count, int(pipeline.caps[rank]), int(hops * per_hop + 1 + more + 1e-9)))
        inputs = stages + stage
        rows.append([stage] * ahead + [inputs, stage] * (count - ahead) + [inputs] * ahead)
    return rows


@lru_cache(maxsize=256)
def v_order(pipeline: LinearPipeline, effort: int, polish: int = 0) -> list[TrackRow]:
    """The best order of two chunks a rank on a V, of so many played ops: which block is repeated.

    With some more ops to `polish` it, the best of the short step is improved with a place of its own for every W.
    """
    pipeline, drawn = _no_longer_than_drawn(pipeline)
    if at_floor(pipeline, drawn.value):
        return drawn.full(pipeline)
    short, _ = _no_longer_than_drawn(replace(pipeline, microbatches=min(pipeline.microbatches, 2 * pipeline.ranks)))
    known = _of_a_short_step(short, effort, polish)
    if pipeline.microbatches == short.microbatches:
        orders, trials = [*known.orders], known.trials[:2]
    else:
        ways, trials = _ways(short, known), []
        if pipeline.microbatches > LONG * pipeline.ranks:
            ways = _likely(pipeline, ways)
        orders = [way(pipeline) for way in ways]
    found = [(order.value, order.full(pipeline)) for order in orders]
    found += [Follower(pipeline).order(*trial[1:]) for trial in trials]
    if polish and pipeline.microbatches <= LONG * pipeline.ranks:
        whole = [_in_published(cells, pipeline, as_drawn=True) for cells in _published_cells(pipeline)]
        found += [(order.value, order.full(pipeline)) for order in whole]
    return min(found, key=lambda one: one[0])[1]


LONG = 8
"""Microbatches a rank beyond which only the likely ways are followed for the whole step."""
LIKELY = 3
"""How many these are."""
Way = Callable[[LinearPipeline], Order]


def _ways(short: LinearPipeline, known: _Known) -> list[Way]:
    """Ways from a short step to longer ones: its orders stretched, and three that need no steady state."""
    ways: list[Way] = [partial(stretched, short, order) for order in known.orders]
    ways.append(lambda longer: _no_longer_than_drawn(longer)[1])
    ways.append(lambda longer: played(longer, _serial(longer), 0.0))
    ways.append(lambda longer: best_of(greedy(longer)))
    return ways


# When F down the V has its turn, F up, I of the way down, I of the way up: what loses least of all 24 permutations.
_TURNS = ((1, 0, 3, 2), (2, 1, 3, 0), (3, 1, 2, 0), (3, 2, 0, 1), (3, 2, 1, 0))


def greedy(pipeline: LinearPipeline, turns: Iterable[Sequence[int]] = _TURNS) -> list[Order]:
    """Orders on a V without a block: of what is ready and has room, a rank runs the leg whose turn comes first."""
    follower, each = Follower(pipeline, eager=True), list[list[TrackRow]]()
    weighs = any(pipeline.seconds[2 * pipeline.stages :])  # W, which is in no gap where backwards are full
    for legs in turns:
        offsets = tuple(pipeline.work * turn for turn in legs for _ in range(pipeline.ranks))
        for late in (0.0, 1e8) if weighs else (0.0,):
            rows = follower.order(BuildingBlock(offsets, pipeline.work * 1e-6), late, math.inf)[1]
            rows = without_weights(pipeline, rows)
            each += [] if rows in each else [rows]
    return [played(pipeline, rows, patience) for rows in each for patience in (PATIENCE if weighs else (0.0,))]


def _likely(pipeline: LinearPipeline, ways: list[Way]) -> list[Way]:
    """The ways that are best in the end, as told from two steps between: each microbatch more adds the same."""
    first = LONG // 2 * pipeline.ranks + pipeline.microbatches % (2 * pipeline.ranks)
    steps = [
        _no_longer_than_drawn(replace(pipeline, microbatches=count))[0] for count in (first, first + 2 * pipeline.ranks)
    ]
    more = (pipeline.microbatches - steps[1].microbatches) / (2 * pipeline.ranks)

    def told(way: Way) -> tuple[float, ...]:
        before, after = (way(step).value for step in steps)
        if NEVER in (before, after):
            return NEVER
        return tuple(later(one, last, more) for one, last in zip(before, after, strict=True))

    values = [told(way) for way in ways]
    return [ways[at] for at in sorted(range(len(ways)), key=values.__getitem__)[:LIKELY]]


FollowerTrial = tuple[tuple[float, float], BuildingBlock, float, int]


class _Known(NamedTuple):
    """Orders of a short step, and what a follower of a block found to be good."""

    orders: list[Order]
    trials: list[FollowerTrial]


@lru_cache(maxsize=64)
def _of_a_short_step(short: LinearPipeline, effort: int, polish: int) -> _Known:
    """Search a step that longer ones repeat, once for all of them."""
    plays = max(40, min(effort // 200, effort // (3 * short.stages * short.microbatches)))
    fixed = [_serial(short), without_weights(short, _one_after_the_other(short))]
    orders = [(played(short, rows, patience), None) for rows in fixed for patience in (0.0, 0.5, 1.0)]
    blocks = [block for block, _ in zip(v_blocks(short), range(plays // 8), strict=False)]
    orders += [(played(short, track_rows_of(short, block), 0.5), block) for block in blocks]
    orders += [(order, None) for order in greedy(short)]
    orders.sort(key=lambda one: one[0].value)
    blocks = [block for _, block in orders if block is not None]
    follower = Follower(short)
    trials = [
        (follower.order(block, late, ahead)[0], block, late, ahead)
        for block in blocks[: max(1, plays // 144)]
        for late in (0.0, 0.5, 100.0)
        for ahead in (0, 1, 3)
    ]
    trials.sort()
    best, known = [order for order, _ in orders[:2]], [_in_published(cells, short) for cells in _published_cells(short)]
    if not at_floor(short, min([*(order.value for order in best + known), *(trial[0] for trial in trials[:1])])):
        loose = dict.fromkeys([*blocks[:1], *(trial[1] for trial in trials[:1])])
        best += [loosen(short, block, 0.5, plays // 8) for block in loose]
        for trial in trials[:2]:
            rows = without_weights(short, follower.order(*trial[1:])[1])
            best.append(best_of(played(short, rows, one) for one in (0.0, 0.5, 1.0)))
        best.sort(key=lambda order: order.value)
        best += [climb(short, order, plays // 16, seed) for order in best[:3] for seed in (0, 1)]
        best.sort(key=lambda order: order.value)
        best += [climb(short, order, plays // 6, seed) for seed, order in enumerate(best[:3], 2)]
        best += [climb(short, order, plays // 16) for order in known]
        first = best_of(best)
        if polish and first.value != NEVER:
            start = played(short, first.full(short), 1.0)
            best.append(climb(short, start, polish // (3 * short.stages * short.microbatches)))
    return _Known([order for order in best + known if order.value != NEVER], trials)


def _published_cells(pipeline: LinearPipeline) -> list[tuple[int, ...]]:
    """The blocks of V-Half and V-Min."""
    return [v_half_cells(pipeline.ranks), *lattice(pipeline.ranks, 1)[:1]]


def _in_published(cells: tuple[int, ...], pipeline: LinearPipeline, *, as_drawn: bool = False) -> Order:
    """A block repeated and pulled tight, at both ends or at the start alone; `as_drawn`, its W are also tried in the
    gaps that F = I = W leaves, where they were published."""
    stages, count = pipeline.stages, pipeline.microbatches
    block = {("FB"[track // stages], track % stages): cell for track, cell in enumerate(cells)}
    tables = [in_blocks(block, 6, (1, 1), pipeline.placement, count, mirror=mirror) for mirror in (True, False)]
    drawn = [tracks_of(pipeline, table) for table in tables]
    orders = [played(pipeline, rows, patience) for rows in drawn for patience in (0.0, 0.5, 1.0)]
    if as_drawn:
        unit = replace(unit_pipeline(pipeline.placement, count, fused=False), caps=pipeline.caps)
        placed = [played(unit, rows, 1.0) for rows in drawn]
        orders += [played(pipeline, order.full(unit), 1.0) for order in placed if order.value != NEVER]
    return best_of(orders)


def _no_longer_than_drawn(pipeline: LinearPipeline) -> tuple[LinearPipeline, Order]:
    """The pipeline with the span of the published ZB-V as its limit, and the order that sets it."""
    drawn, pipeline = _one_after_the_other(pipeline), replace(pipeline, span=math.inf)
    published = played(pipeline, drawn, 1.0)
    bare = without_weights(pipeline, drawn)
    orders = [published, *(played(pipeline, bare, patience) for patience in (0.5, 0.0, 1.0))]
    if pipeline.objective == "span":
        return pipeline, best_of(orders)
    pipeline = replace(pipeline, span=published.value[1])
    return pipeline, min(orders, key=lambda order: pipeline.worth(order.value))


def _serial(pipeline: LinearPipeline) -> list[TrackRow]:
    """One microbatch after the other: what fits under every cap."""
    return [
        [track for track in pipeline.path if track % pipeline.stages in own] * pipeline.microbatches
        for own in map(set, pipeline.tracks)
    ]


def _one_after_the_other(pipeline: LinearPipeline) -> list[TrackRow]:
    """ZB-V as published: first chunks until the first second chunk is back, then each forward with a whole backward,
    and in the end input gradients first."""
    ranks, count, stages = pipeline.ranks, pipeline.microbatches, pipeline.stages
    rows: list[TrackRow] = []
    for rank in range(ranks):
        down, up, weight = rank, stages - 1 - rank, 2 * stages
        back, home = stages + up, stages + down
        turns = [down] * (2 * (ranks - rank) - 1) + [up, down] * rank + [up, back, weight] * (ranks - rank)
        turns += [down, home, weight, up, back, weight] * max(0, count - ranks)
        turns += [up] * count + [home, back] * rank + [home, weight] * (ranks - rank) + [back, home] * count
        left = {down: count, up: count, back: count, home: count, weight: 2 * count}
        row: TrackRow = []
        for track in turns:
            if left[track]:
                left[track] -= 1
                row.append(track)
        rows.append(row)
    return rows


def v_min_order(pipeline: LinearPipeline) -> list[TrackRow] | None:
    """The published block of V-Min: every leg goes from rank to rank without a wait; None where it needs more room."""
    cells = next(iter(lattice(pipeline.ranks, 1)), None)
    if cells is None:
        return None
    order = played(pipeline, track_rows_of(pipeline, v_block(pipeline, cells)), 1.0)
    return None if order.value == NEVER else order.full(pipeline)
