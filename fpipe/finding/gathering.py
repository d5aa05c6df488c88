"""Choose when parameters that replicas share out are gathered, for an order that is searched for.

found under 4 GiB, "step": 5 GiB, "use": 4.5 GiB        --> searched again under 3.5 GiB -->        "use": 4 GiB
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fpipe.finding.found import Found
from fpipe.finding.wanted import Wanted
from fpipe.program import ProgramError
from fpipe.timing.amounts import exact_amount
from fpipe.timing.simulate import simulate
from fpipe.transforms.shard import shard

_TRIES = 4
"""Searches for one policy, each under a smaller cap."""


def gathered(search: Callable[[float], Found], policies: Sequence[Any], wanted: Wanted) -> Found:
    """The best of what a search finds and each policy then makes of it. Where that holds too much, the search goes on
    under a cap that is smaller by as much.

    Raises:
        ProgramError: nothing fits.
    """
    known: dict[float, Found] = {}
    made: list[Found] = []
    least = math.inf
    for policy in policies:
        cap = wanted.cap
        for _ in range(_TRIES):
            try:
                found = known[cap] if cap in known else known.setdefault(cap, search(cap))
            except ProgramError:
                if not known:  # it does not fit even without what is gathered
                    raise
                break
            program = shard(gather=policy)(found.program)
            timeline = simulate(program, wanted.costs)
            most = max(timeline.peak)
            if most <= wanted.cap * (1 + 1e-9):
                made.append(replace(found, program=program, timeline=timeline, gather=policy))
                break
            least = min(least, most)
            cap = max(found.timeline.peak) - (most - wanted.cap)
            if cap <= 0:
                break
    if not made:
        cap, least = (exact_amount(one, wanted.costs.bytes is not None) for one in (wanted.cap, least))
        raise ProgramError(
            f"nothing fits memory_cap={cap} with what is gathered: the least that was found is {least}. "
            'fpipe.shard(gather="use", lead=0) behind the order of a search without shard= holds the least.'
        )
    return min(made, key=lambda one: wanted.value(one.timeline))
