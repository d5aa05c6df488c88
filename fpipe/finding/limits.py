"""How many residuals each rank may hold, so that it keeps to a cap."""

from __future__ import annotations

import math

from fpipe.finding.list_orders import ListOrders, Rule
from fpipe.finding.tasks import Rows, Tasks
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate


def limits_of(tasks: Tasks, cap: float, costs: Costs) -> list[float]:
    """Residuals that each rank may hold.

    Where peaks are microbatches that is a matter of counting. Where they are bytes, what a residual adds to a rank's
    peak is measured on two orders, one that holds as little as can be and one that holds all; the caller simulates what
    it finds under these limits, and has them `tightened` where they were too wide.
    """
    if cap == math.inf:
        return [math.inf for _ in tasks.rows]
    if costs.bytes is None:
        return [math.floor(cap * share + 1e-9) for share in tasks.shares]
    least = tasks.rows
    most = ListOrders(tasks, [math.inf for _ in least]).order(Rule((0, 1000, 2000), 0, 0.01)) or least
    found: list[float] = []
    peaks = [simulate(tasks.ordered(rows), costs).peak for rows in (least, most)]
    for rank, (few, many) in enumerate(zip(*peaks, strict=True)):
        held = [tasks.held(tasks.flat(rows[rank])) for rows in (least, most)]
        each = (many - few) / (held[1] - held[0]) if held[1] > held[0] else 0.0
        found.append(math.inf if not each else math.floor(held[0] + (cap - few) / each + 1e-9))
    return found


def tightened(tasks: Tasks, rows: Rows, limits: list[float], peak: tuple[float, ...], cap: float) -> list[float]:
    """The limits, less one on each rank that holds too much in this order."""
    held = [tasks.held(tasks.flat(row)) for row in rows]
    pairs = zip(limits, held, peak, strict=True)
    return [min(limit, now) - 1 if amount > cap * (1 + 1e-9) else limit for limit, now, amount in pairs]
