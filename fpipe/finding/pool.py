"""The orders that a search works on: the most promising are improved in turn, and the others fall out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from fpipe.finding.climber import Climber
from fpipe.finding.op_facts import again_of
from fpipe.finding.play import Value, worth
from fpipe.finding.tasks import Rows, Tasks

Limits = list[float]
"""Residuals that each rank may hold."""


@dataclass
class Entry:
    """An order of some tasks under some limits, its value, and the floor that no order of these tasks goes below."""

    tasks: Tasks
    limits: Limits
    rows: Rows
    value: Value
    floor: float


def entries(tasks: Tasks, limits: Limits, orders: Iterable[Rows], objective: str, floor: float) -> list[Entry]:
    """The orders that come to an end and keep to the limits."""
    found: list[Entry] = []
    for rows in orders:
        flats = [tasks.flat(row) for row in rows]
        if all(tasks.held(flat) <= limit for flat, limit in zip(flats, limits, strict=True)):
            played = tasks.play(flats)
            if played.ends:
                found.append(Entry(tasks, limits, rows, worth(played, objective), floor))
    return found


WIDTH = 8
"""How many orders are improved side by side."""
ROUND = 400
"""Changes of an order before it is the turn of the next, at most."""
ROUNDS = 120
"""Rounds that the effort is enough for, at least: half of them leave two orders of the eight."""
IDLE = 6000
"""Changes without success after which another order takes an order's place."""


def improve(
    pool: Sequence[Entry],
    objective: str,
    effort: float,
    seed: int,
    told: Callable[[float, float], None],
) -> tuple[list[Entry], bool]:
    """Improve orders for so many played ops: the best ones, of which in the end only two are left.

    `told` hears now and then the effort so far and the best value. Returns an entry for each order that was
    improved, the best first; and whether Ctrl-C stopped it.
    """
    starts = _different(pool)
    climbers = [
        (entry, Climber(entry.tasks, entry.rows, entry.limits, objective, seed + at))
        for at, entry in enumerate(starts[:WIDTH])
    ]
    done: list[tuple[Entry, Climber]] = []
    stopped = False
    try:
        left, number, turn = effort, len(climbers), 0
        while climbers and left > 0:
            turn += 1
            for entry, climber in climbers:
                before = climber.climb.steps
                price = _price(entry)
                steps = min(ROUND, 1 + int(effort / (ROUNDS * price)), 1 + int(left / price))
                climber.on(steps, entry.floor * (1 + 1e-9))
                left -= max(1, climber.climb.steps - before) * price
                if left <= 0:
                    break
            climbers.sort(key=lambda one: one[1].climb.best.value)
            best, floor = climbers[0][1].climb.best.value[0], climbers[0][0].floor
            told(effort - max(left, 0.0), best)
            if best <= floor * (1 + 1e-9) and all(entry.floor >= best * (1 - 1e-9) for entry, _ in climbers):
                break
            out = [one for one in climbers if one[0].floor >= best * (1 - 1e-9)]
            rest = [one for one in climbers if one not in out]
            if turn % 3 == 0 and len(rest) > 2:
                drop = max(1, len(rest) // 3)
                out, rest = [*out, *rest[-drop:]], rest[:-drop]
            tired = [one for one in rest[1:] or rest if one[1].climb.steps - one[1].climb.since > IDLE]
            done += [*out, *tired]
            climbers[:] = [one for one in rest if one not in tired]
            for _ in tired or ([] if climbers else out[:1]):
                entry = starts[number % len(starts)]
                climbers.append((entry, Climber(entry.tasks, entry.rows, entry.limits, objective, seed + number)))
                number += 1
    except KeyboardInterrupt:
        stopped = True
    found = [
        Entry(entry.tasks, entry.limits, climber.climb.best.rows, climber.climb.best.value, entry.floor)
        for entry, climber in [*done, *climbers]
    ]
    return sorted(found, key=lambda entry: entry.value), stopped


def _different(pool: Sequence[Entry]) -> list[Entry]:
    """The best of each placement and choice of what is recomputed, then the second best of each, and so on, without
    those that are worth the same."""
    groups: dict[tuple[object, ...], dict[Value, Entry]] = {}
    for entry in sorted(pool, key=lambda entry: entry.value):
        groups.setdefault((entry.tasks.program.placement, again_of(entry.tasks.program)), {}).setdefault(
            entry.value, entry
        )
    turns = zip_longest(*(group.values() for group in groups.values()))
    return [entry for turn in turns for entry in turn if entry is not None]


def _price(entry: Entry) -> float:
    """Price of a change, in played ops: to play those it has, and as long as 80 take to make it."""
    return len(entry.tasks.ops) * entry.tasks.price + 80
