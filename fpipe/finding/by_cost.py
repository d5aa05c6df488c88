"""Answer a schedule that is told costs: search on its placement, under its cap, from the published orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fpipe.finding.search import search_for
from fpipe.finding.wanted import Wanted
from fpipe.program import Program, is_exchange, parts_of
from fpipe.schedules.registry import about, names
from fpipe.schedules.search_request import SearchRequest
from fpipe.timing.amounts import NamedBytes
from fpipe.timing.costs import Costs
from fpipe.timing.waiting import way
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

SECONDS = 0.6
"""The effort, in seconds of `fpipe.search`."""
_WHOLE = 10**6  # bytes that stand for the residuals of a stage, where a W needs only a share of them


def order_by_cost(program: Program, request: SearchRequest) -> Program:
    """Order a program as a schedule asks that was told costs or a memory cap."""
    placed = place(request.placement)(split_backward()(program) if request.split_backward else program)
    costs, cap = _in_ticks(placed, request.costs), request.memory_cap
    if request.kept < 1:  # only peaks in bytes tell what an I drops from what its W drops
        sizes = {"res": _WHOLE, "wres": request.kept * _WHOLE}
        costs, cap = replace(costs, bytes=NamedBytes(sizes)), cap * _WHOLE * program.stages / request.ranks
    wanted = Wanted(
        request.ranks,
        costs,
        cap,
        request.objective,
        (tuple(request.placement),),
        free=False,
        halves=request.split_backward,
        seed=0,
        without=frozenset(name for name in names() if not about(name).searches),
        microbatches=program.microbatches,
        starts=tuple((f"drawn {number}", start) for number, start in enumerate(request.starts)),
    )
    return search_for(program, wanted, SECONDS).program


_FIELDS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward", "R": "recompute"}


def _in_ticks(program: Program, costs: Costs) -> Costs:
    """Costs of a placed program as whole numbers of a common unit, by stage and link, each value alone on its link.

    Sums of whole numbers are exact, so an order does not depend on the unit that costs are told in: in seconds two ways
    of the same length differ in their last bits, by which a search would choose among them. Without bytes, peaks are
    microbatches.
    """
    seconds: dict[tuple[str, int], float] = {}
    links: dict[tuple[int, int], float] = {}
    for op in parts_of(program.ops):
        word = "exchange" if is_exchange(op) else _FIELDS.get(op.kind)
        if word is not None:
            key = word, op.stage or 0
            seconds[key] = max(seconds.get(key, 0.0), costs.seconds(op if word == "exchange" else op._replace(how=())))
    for op, sources in zip(program.ops, program.sources, strict=True):
        for value, source in zip(op.reads, sources, strict=True):
            if source >= 0 and program.ops[source].rank != op.rank:
                link = program.ops[source].rank, op.rank
                links[link] = max(links.get(link, 0.0), way(costs, value, *link))
    ticks = iter(_whole_numbers([*seconds.values(), *links.values()]))
    tables: dict[str, Any] = {}
    for (word, stage), tick in zip(seconds, ticks, strict=False):
        tables.setdefault(word, [0.0] * program.stages)[stage] = tick
    return Costs(**tables, transfer=dict(zip(links, ticks, strict=True)))


def _whole_numbers(seconds: Sequence[float]) -> list[float]:
    """Costs as whole numbers of their common unit, if they have one; else in a fine grid.

    >>> _whole_numbers([1e-5, 1.2e-5, 0.8e-5]), _whole_numbers([1.0, 1.2, 0.8])
    ([5.0, 6.0, 4.0], [5.0, 6.0, 4.0])
    """
    most = max(seconds, default=0.0)
    shares = [Fraction(cost / most).limit_denominator(10**6) if most else Fraction(0) for cost in seconds]
    unit = min(2**30, math.lcm(*(share.denominator for share in shares)))
    return [float(round(share * unit)) for share in shares]
