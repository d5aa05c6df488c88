"""Order a program for a schedule with costs: search on its placement, under its cap, from the published orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fpipe.finding.problem import SearchProblem
from fpipe.finding.search import search_for
from fpipe.program import Program, is_exchange, parts_of
from fpipe.schedules.registry import about, names
from fpipe.schedules.search_request import SearchRequest
from fpipe.timing.amounts import NamedBytes
from fpipe.timing.costs import Costs
from fpipe.timing.waiting import travel_seconds
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

SECONDS = 0.6
"""The effort, in seconds of `fpipe.search`."""
BYTES_OF_RESIDUALS = 10**6
"""Bytes that stand for the residuals of a stage if a W needs only a share of them."""


def order_by_cost(program: Program, request: SearchRequest) -> Program:
    """Return the program in the order that a search finds for a schedule's request."""
    placed = place(request.placement)(split_backward()(program) if request.split_backward else program)
    costs, cap = _in_ticks(placed, request.costs), request.memory_cap
    # Peaks in microbatches count residuals until their W. Only in bytes can an I free a part of them.
    if request.wres_share < 1:
        sizes = {"res": BYTES_OF_RESIDUALS, "wres": request.wres_share * BYTES_OF_RESIDUALS}
        costs, cap = replace(costs, bytes=NamedBytes(sizes)), cap * BYTES_OF_RESIDUALS * program.stages / request.ranks
    problem = SearchProblem(
        request.ranks,
        costs,
        cap,
        request.objective,
        (tuple(request.placement),),
        any_placement=False,
        split_backward=request.split_backward,
        seed=0,
        excluded=frozenset(name for name in names() if not about(name).searches),
        microbatches=program.microbatches,
        starts=tuple((f"drawn {number}", start) for number, start in enumerate(request.starts)),
    )
    return search_for(program, problem, SECONDS).program


_FIELDS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward", "R": "recompute"}


def _in_ticks(program: Program, costs: Costs) -> Costs:
    """Return the costs of a placed program as whole numbers of a common unit, without bytes and without contention.

    Sums of whole numbers are exact, so the order does not depend on the unit of the costs. In seconds, two paths of the
    same length differ in their last bits, and a search would choose by these. Without bytes, peaks are microbatches.
    """
    seconds: dict[tuple[str, int], float] = {}
    seconds_by_ranks: dict[tuple[int, int], float] = {}
    for op in parts_of(program.ops):
        field = "exchange" if is_exchange(op) else _FIELDS.get(op.kind)
        if field is not None:
            key = field, op.stage or 0
            seconds[key] = max(
                seconds.get(key, 0.0), costs.seconds(op if field == "exchange" else op._replace(options=()))
            )
    for op, sources in zip(program.ops, program.sources, strict=True):
        for value, source in zip(op.reads, sources, strict=True):
            if source >= 0 and program.ops[source].rank != op.rank:
                ranks = program.ops[source].rank, op.rank
                seconds_by_ranks[ranks] = max(seconds_by_ranks.get(ranks, 0.0), travel_seconds(costs, value, *ranks))
    ticks = iter(_whole_numbers([*seconds.values(), *seconds_by_ranks.values()]))
    ticks_by_field: dict[str, Any] = {}
    for (field, stage), tick in zip(seconds, ticks, strict=False):
        ticks_by_field.setdefault(field, [0.0] * program.stages)[stage] = tick
    return Costs(**ticks_by_field, transfer=dict(zip(seconds_by_ranks, ticks, strict=True)))


def _whole_numbers(seconds: Sequence[float]) -> list[float]:
    """Return costs as whole numbers of their common unit if they have one, else on a fine grid.

    >>> _whole_numbers([1e-5, 1.2e-5, 0.8e-5]), _whole_numbers([1.0, 1.2, 0.8])
    ([5.0, 6.0, 4.0], [5.0, 6.0, 4.0])
    """
    longest = max(seconds, default=0.0)
    shares = [Fraction(cost / longest).limit_denominator(10**6) if longest else Fraction(0) for cost in seconds]
    unit = min(2**30, math.lcm(*(share.denominator for share in shares)))
    return [float(round(share * unit)) for share in shares]
