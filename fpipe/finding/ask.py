"""Let the solver go on where the search has stopped: from the best order, placement by placement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

from fpipe.finding.hunt import Hunt
from fpipe.finding.op_facts import kinds_of
from fpipe.finding.pool import Entry, entries
from fpipe.finding.solver import solve

SMALL = 800
"""Ops of an order beyond which the solver is asked only by name: within a minute it finds and proves nothing there."""
WORKERS = 2
"""Threads of the solver."""


def ask(hunt: Hunt, seconds: float, told: Callable[[float, float, float], None]) -> dict[Hashable, float]:
    """Let the solver search for some seconds, most of them in the best placement; its best order joins the hunt.

    `told` hears the share of the seconds, the best value and the bound. Returns which ops on which ranks were asked
    about, and what no order of them goes below.
    """
    wanted, began, proven = hunt.wanted, time.monotonic(), dict[Hashable, float]()
    best_of: dict[Hashable, Entry] = {}
    for entry in sorted(hunt.pool, key=lambda entry: entry.value):
        best_of.setdefault(kinds_of(entry.tasks.program), entry)
    for number, (kinds, entry) in enumerate(best_of.items(), 1):
        best = hunt.best.value[0] if hunt.best else math.inf
        left = seconds - (time.monotonic() - began)
        if left < 0.02 or entry.floor >= best * (1 - 1e-9):
            continue

        def heard(value: float, bound: float, best: float = best, floor: float = entry.floor) -> None:
            told(min(1.0, (time.monotonic() - began) / seconds), min(best, value), max(floor, bound))

        answer = solve(
            entry.tasks,
            entry.limits,
            wanted.objective,
            entry.rows,
            seconds=left if number == len(best_of) else left * 0.7,
            workers=WORKERS,
            seed=wanted.seed,
            found=heard,
        )
        if wanted.costs.bytes is None or wanted.cap == math.inf:  # how much of a cap in bytes is left for residuals is
            proven[kinds] = max(entry.floor, answer.bound)  # measured, and proves nothing
        if answer.rows is not None:
            floor = proven.get(kinds, entry.floor)
            better = entries(entry.tasks, entry.limits, [answer.rows], wanted.objective, floor)
            hunt.pool += better
            for one in better:
                hunt.judge(one)
    return proven
