"""The pool of orders of a search: the most promising are improved in turn, and the weakest drop out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from fpipe.finding.climber import Climber
from fpipe.finding.play import OrderValue, order_value
from fpipe.finding.problem import recomputed_cells
from fpipe.finding.tasks import Rows, Tasks

Limits = list[float]
"""The residuals that each rank may hold, in the unit of `Tasks.takes`."""


@dataclass
class Contender:
    """An order of tasks under limits, with its value and the floor that no order of these tasks goes below."""

    tasks: Tasks
    limits: Limits
    rows: Rows
    value: OrderValue
    floor: float


def contenders_of(
    tasks: Tasks, limits: Limits, orders: Iterable[Rows], objective: str, floor: float
) -> list[Contender]:
    """Return a contender for each order that neither deadlocks nor exceeds the limits."""
    contenders: list[Contender] = []
    for rows in orders:
        ops_by_rank = [tasks.ops_of_row(row) for row in rows]
        if all(tasks.peak_of(rank_ops) <= limit for rank_ops, limit in zip(ops_by_rank, limits, strict=True)):
            played = tasks.play(ops_by_rank)
            if played.ends:
                contenders.append(Contender(tasks, limits, rows, order_value(played, objective), floor))
    return contenders


IMPROVED_AT_ONCE = 8
"""How many orders are improved in the same rounds."""
CHANGES_A_TURN = 400
"""The most changes of one order before the next order has its turn."""
MIN_ROUNDS = 120
"""The effort is spread over at least so many rounds; after half of them two of the eight orders are left."""
MAX_IDLE_CHANGES = 6000
"""After so many changes without success an order is replaced by the next start."""
OVERHEAD_OF_A_CHANGE = 80
"""Choosing and applying a change takes about as long as playing so many ops."""


def improve_pool(
    pool: Sequence[Contender], objective: str, effort: float, seed: int, report: Callable[[float, float], None]
) -> tuple[list[Contender], bool]:
    """Improve the best orders of a pool until `effort` ops are played; the field narrows to two.

    `report` is called with the effort so far and the best value. Returns a contender for each improved order, the best
    first, and whether Ctrl-C stopped it.
    """
    # Successive halving: many starts get a little effort, and the third of them that is worst drops out every third
    # round. The effort is counted in played ops, not seconds, so that the result depends on the seed alone.
    starts = diverse_starts(pool)
    climbers = [
        (start, Climber(start.tasks, start.rows, start.limits, objective, seed + index))
        for index, start in enumerate(starts[:IMPROVED_AT_ONCE])
    ]
    retired: list[tuple[Contender, Climber]] = []
    stopped = False
    try:
        remaining_effort, number, turn = effort, len(climbers), 0
        while climbers and remaining_effort > 0:
            turn += 1

            # 1) One turn of each order.
            for contender, climber in climbers:
                steps_before = climber.climb.steps
                # How many ops could be played in the time of one change.
                cost = contender.tasks.lanes_per_rank * len(contender.tasks.ops) + OVERHEAD_OF_A_CHANGE
                steps = min(CHANGES_A_TURN, 1 + int(effort / (MIN_ROUNDS * cost)), 1 + int(remaining_effort / cost))
                climber.run(steps, contender.floor * (1 + 1e-9))
                remaining_effort -= max(1, climber.climb.steps - steps_before) * cost
                if remaining_effort <= 0:
                    break

            # 2) Stop where the best order is optimal and no other placement could beat it.
            climbers.sort(key=lambda pair: pair[1].climb.best.value)
            best, floor = climbers[0][1].climb.best.value[0], climbers[0][0].floor
            report(effort - max(remaining_effort, 0.0), best)
            if best <= floor * (1 + 1e-9) and all(contender.floor >= best * (1 - 1e-9) for contender, _ in climbers):
                break

            # 3) Retire what cannot beat the best, the worst third of the rest, and what found nothing for long.
            finished = [pair for pair in climbers if pair[0].floor >= best * (1 - 1e-9)]
            running = [pair for pair in climbers if pair not in finished]
            if turn % 3 == 0 and len(running) > 2:
                drop = max(1, len(running) // 3)
                finished, running = [*finished, *running[-drop:]], running[:-drop]
            stuck = [
                pair
                for pair in running[1:] or running
                if pair[1].climb.steps - pair[1].climb.best_step > MAX_IDLE_CHANGES
            ]
            retired += [*finished, *stuck]
            climbers[:] = [pair for pair in running if pair not in stuck]

            # 4) A new start takes the place of each stuck order; the seed differs, so a start may come again.
            for _ in stuck or ([] if climbers else finished[:1]):
                start = starts[number % len(starts)]
                climbers.append((start, Climber(start.tasks, start.rows, start.limits, objective, seed + number)))
                number += 1
    except KeyboardInterrupt:
        stopped = True
    improved = [
        Contender(contender.tasks, contender.limits, climber.climb.best.rows, climber.climb.best.value, contender.floor)
        for contender, climber in [*retired, *climbers]
    ]
    return sorted(improved, key=lambda contender: contender.value), stopped


def diverse_starts(pool: Sequence[Contender]) -> list[Contender]:
    """Return the pool with the best of each group first, then the second best of each, and so on.

    A group is a placement and a choice of what is recomputed. Of orders with the same value in a group one is kept.
    """
    groups: dict[tuple[object, ...], dict[OrderValue, Contender]] = {}
    for contender in sorted(pool, key=lambda contender: contender.value):
        program = contender.tasks.program
        group = groups.setdefault((program.placement, recomputed_cells(program)), {})
        group.setdefault(contender.value, contender)
    placements = zip_longest(*(group.values() for group in groups.values()))
    return [contender for equally_placed in placements for contender in equally_placed if contender is not None]
