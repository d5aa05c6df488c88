"""Limits of residuals on each rank, derived from a cap of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fpipe.finding.list_orders import ListOrders, Rule
from fpipe.finding.tasks import Rows, Tasks
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate


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
