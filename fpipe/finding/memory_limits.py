"""How much of residuals each rank may hold, so that it keeps to a cap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fpipe.finding.list_orders import ListOrders, Rule
from fpipe.finding.tasks import Rows, Tasks
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate


def limits_of(tasks: Tasks, cap: float, costs: Costs) -> list[float]:
    """Residuals that each rank may hold, in the unit of `Tasks.takes`.

    Where peaks are microbatches that is a matter of counting. Where they are bytes, a rank holds more than residuals:
    how much more is measured on two orders, one that holds as little as can be and one that holds all. The caller
    simulates what it finds under these limits, and has them `tightened` where they were too wide.
    """
    if cap == math.inf:
        return [math.inf for _ in tasks.rows]
    if costs.bytes is None:
        return [math.floor(cap * share + 1e-9) for share in tasks.shares]
    least = tasks.rows
    most = ListOrders(tasks, [math.inf for _ in least]).order(Rule((0, 1000, 2000), 0, 0.01)) or least
    beside = [0.0 for _ in least]
    for rows in (least, most):
        for rank, amount in enumerate(simulate(tasks.ordered(rows), costs).peak):
            beside[rank] = max(beside[rank], amount - tasks.held(tasks.flat(rows[rank])))
    return [(cap - more) * (1 + 1e-12) for more in beside]


def tightened(tasks: Tasks, rows: Rows, limits: list[float], peak: Sequence[float], cap: float) -> list[float]:
    """The limits, less what each rank holds too much in this order."""
    held = [tasks.held(tasks.flat(row)) for row in rows]
    return [
        min(limit, now - (amount - cap)) if amount > cap * (1 + 1e-9) else limit
        for limit, now, amount in zip(limits, held, peak, strict=True)
    ]


def room(tasks: Tasks, limits: Sequence[float]) -> float:
    """For how many microbatches every rank has room."""
    whole, count = [0.0] * tasks.ranks, tasks.program.microbatches
    for op, takes in zip(tasks.ops, tasks.takes, strict=True):
        whole[op.rank] += takes
    return min((limit * count / held for limit, held in zip(limits, whole, strict=True) if held), default=math.inf)
