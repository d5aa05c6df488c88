"""Orders searched from the costs: many cheap ones are tried, the best are improved, and the best of all is taken.

For a line of stages there are a few families of orders that are good if their numbers fit the costs: how many forwards
a rank runs ahead, which block is repeated, when a W may wait. A search plays all of them on a short step, improves the
best by small changes, and plays these on the whole step. How much is played is counted in ops, not in seconds, so the
same costs give the same order on every machine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from fpipe.schedules.blocks import Follower, lattice, v_block, v_blocks, words_of
from fpipe.schedules.hillclimb import Order, at_floor, climb, loosen, played, stretched
from fpipe.schedules.line import NEVER, Line, Word

Found = tuple[tuple[float, float], list[Word]]
"""Makespan and span, and the words with their W."""


@lru_cache(maxsize=64)
def linear_order(line: Line, effort: int) -> list[Word]:
    """The best order of one stage a rank: how far each rank runs ahead, searched from the costs.

    Args:
        effort: how many ops may be played.
    """
    short = line.with_microbatches(min(line.microbatches, 3 * line.ranks))
    mean = [sum(line.seconds[at : at + line.ranks]) / line.ranks for at in (0, line.ranks)]
    there_and_back = mean[0] + mean[1] + sum(line.ways) / max(1, line.ranks - 1)
    most = there_and_back / mean[0] if mean[0] else line.microbatches
    steps = 6 if effort < 500_000 else 24
    likely = min(most, max(line.caps) / line.ranks)  # the cap is full when the first input gradient arrives
    hops = sorted((1 + (most - 0.7) * step / steps for step in range(steps + 1)), key=lambda hop: abs(hop - likely))
    family = [(hop, more) for hop in hops for more in (0, 1, 2)]
    found: list[tuple[tuple[float, float], float, int, float]] = []
    for per_hop, more in family:
        words = _ahead(short, per_hop, more)
        found += [(played(short, words, patience).value, per_hop, more, patience) for patience in (0.5, 0.0, 1.0)]
        if at_floor(short, min(found)[0]):
            break
    found.sort()
    best = played(line, _ahead(line, *found[0][1:3]), found[0][3])
    for _, per_hop, more, patience in found[1:3]:
        if not at_floor(line, best.value):
            best = min(best, played(line, _ahead(line, per_hop, more), patience), key=lambda order: order.value)
    ops = 3 * line.stages * line.microbatches
    plays = max(0, effort - len(found) * 3 * short.stages * short.microbatches) // ops
    return climb(line, best, min(plays, 20 * ops)).full(line)


def _ahead(line: Line, per_hop: float, more: int) -> list[Word]:
    """Each rank runs some forwards ahead for every rank behind it, and then takes I and F in turn."""
    stages, count = line.stages, line.microbatches
    words: list[Word] = []
    for stage, rank in enumerate(line.placement):
        hops = line.ranks - 1 - rank
        ahead = max(1, min(count, int(line.caps[rank]), int(hops * per_hop + 1 + more + 1e-9)))
        inputs = stages + stage
        words.append([stage] * ahead + [inputs, stage] * (count - ahead) + [inputs] * ahead)
    return words


@lru_cache(maxsize=64)
def v_order(line: Line, effort: int, polish: int = 0) -> list[Word]:
    """The best order of two chunks a rank on a V: which block is repeated, searched from the costs and the caps.

    Args:
        effort: how many ops may be played to find it.
        polish: how many more to improve the best of the short step, in which then every W has a place of its own.
    """
    line, drawn = _no_longer_than_drawn(line)
    if at_floor(line, drawn.value):
        return drawn.full(line)
    short, _ = _no_longer_than_drawn(line.with_microbatches(min(line.microbatches, 2 * line.ranks)))
    plays = max(40, min(effort // 200, effort // (3 * short.stages * short.microbatches)))
    fixed = [_serial(short), _without_weights(short, _one_after_the_other(short))]
    orders = [(played(short, words, patience), None) for words in fixed for patience in (0.0, 0.5, 1.0)]
    blocks = [block for block, _ in zip(v_blocks(line), range(plays // 8), strict=False)]
    orders += [(played(short, words_of(short, block), 0.5), block) for block in blocks]
    orders.sort(key=lambda one: one[0].value)
    blocks = [block for _, block in orders if block is not None]
    follower = Follower(short)
    plans = [
        (follower.order(block, late, ahead)[0], block, late, ahead)
        for block in blocks[: max(1, plays // 144)]
        for late in (0.0, 0.5, 100.0)
        for ahead in (0, 1, 3)
    ]
    plans.sort()
    best = [order for order, _ in orders[:2]]
    if not at_floor(short, min([best[0].value, *(plan[0] for plan in plans[:1])])):
        for block in list(dict.fromkeys([*blocks[:1], *(plan[1] for plan in plans[:1])])):
            order, block = loosen(short, block, 0.5, plays // 8)
            best.append(order)
            blocks.append(block)
        for plan in plans[:2]:
            words = _without_weights(short, follower.order(*plan[1:])[1])
            best.append(min((played(short, words, one) for one in (0.0, 0.5, 1.0)), key=lambda order: order.value))
        best.sort(key=lambda order: order.value)
        best += [climb(short, order, plays // 16, seed) for order in best[:3] for seed in (0, 1)]
        best.sort(key=lambda order: order.value)
        best += [climb(short, order, plays // 6, seed) for seed, order in enumerate(best[:3], 2)]
        first = min(best, key=lambda order: order.value)
        if polish and first.value != NEVER:
            start = played(short, first.full(short), 1.0)
            best.append(climb(short, start, polish // (3 * short.stages * short.microbatches)))
    best = [order for order in best if order.value != NEVER]
    if line.microbatches > short.microbatches:
        best = [played(line, stretched(short, order, line), order.patience) for order in best]
        best += [played(line, words_of(line, block), 0.5) for block in blocks[-2:]]
        best += [drawn, played(line, _serial(line), 0.0)]
        follower = Follower(line)
    found = [(order.value, order.full(line)) for order in best]
    found += [follower.order(*plan[1:]) for plan in plans[:2]]
    return min(found, key=lambda one: one[0])[1]


def _no_longer_than_drawn(line: Line) -> tuple[Line, Order]:
    """A line on which an order with a longer span than the published one of ZB-V is worth little; and that order."""
    drawn, line = _one_after_the_other(line), replace(line, span=math.inf)
    published = played(line, drawn, 1.0)
    bare = _without_weights(line, drawn)
    orders = [published, *(played(line, bare, patience) for patience in (0.5, 0.0, 1.0))]
    line = replace(line, span=published.value[1])
    return line, min(orders, key=lambda order: line.worth(order.value))


def _serial(line: Line) -> list[Word]:
    """One microbatch after the other: what fits under every cap."""
    return [
        [lane for lane in line.path if lane % line.stages in own] * line.microbatches for own in map(set, line.lanes)
    ]


def _one_after_the_other(line: Line) -> list[Word]:
    """ZB-V as published: first chunks until the first second chunk is back, then each forward with a whole backward,
    and in the end input gradients first."""
    ranks, count, stages = line.ranks, line.microbatches, line.stages
    words: list[Word] = []
    for rank in range(ranks):
        down, up, weight = rank, stages - 1 - rank, 2 * stages
        back, home = stages + up, stages + down
        turns = [down] * (2 * (ranks - rank) - 1) + [up, down] * rank + [up, back, weight] * (ranks - rank)
        turns += [down, home, weight, up, back, weight] * max(0, count - ranks)
        turns += [up] * count + [home, back] * rank + [home, weight] * (ranks - rank) + [back, home] * count
        left = {down: count, up: count, back: count, home: count, weight: 2 * count}
        word: Word = []
        for lane in turns:
            if left[lane]:
                left[lane] -= 1
                word.append(lane)
        words.append(word)
    return words


def v_min_order(line: Line) -> list[Word] | None:
    """The published block of V-Min: every leg goes from rank to rank without a wait; None where it needs more room."""
    cells = next(iter(lattice(line.ranks, 1)), None)
    if cells is None:
        return None
    order = played(line, words_of(line, v_block(line, cells)), 1.0)
    return None if order.value == NEVER else order.full(line)


def _without_weights(line: Line, words: list[Word]) -> list[Word]:
    return [[lane for lane in word if lane < 2 * line.stages] for word in words]
