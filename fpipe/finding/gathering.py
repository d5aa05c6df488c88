"""Choose when sharded parameters are gathered, and search under a cap that leaves room for them.

found under 4 GiB, "step": 5 GiB, "use": 4.5 GiB        --> searched again under 3.5 GiB -->        "use": 4 GiB
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fpipe.finding.problem import SearchProblem
from fpipe.finding.search_result import SearchResult
from fpipe.program import ProgramError
from fpipe.timing.amounts import format_exact_amount
from fpipe.timing.simulate import simulate
from fpipe.transforms.shard import shard

MAX_CAPS = 4
"""The most searches for one policy, each under a smaller cap."""


def search_with_gathers(
    search: Callable[[float], SearchResult], policies: Sequence[Any], problem: SearchProblem
) -> SearchResult:
    """Return the best result of a search with one of the policies of gathering parameters.

    Gathered parameters count under the cap, but the search does not know them. If they exceed it, the search is
    repeated under a cap that is smaller by the excess.

    Raises:
        ProgramError: nothing fits.
    """
    result_by_cap: dict[float, SearchResult] = {}
    results: list[SearchResult] = []
    smallest_peak = math.inf
    for policy in policies:
        cap = problem.cap
        for _ in range(MAX_CAPS):
            try:
                result = result_by_cap[cap] if cap in result_by_cap else result_by_cap.setdefault(cap, search(cap))
            except ProgramError:
                # If the first search fails, the program does not fit even without gathered parameters.
                if not result_by_cap:
                    raise
                break
            program = shard(gather=policy)(result.program)
            timeline = simulate(program, problem.costs)
            peak = max(timeline.peak)
            if peak <= problem.cap * (1 + 1e-9):
                results.append(replace(result, program=program, timeline=timeline, gather=policy))
                break
            smallest_peak = min(smallest_peak, peak)
            cap = max(result.timeline.peak) - (peak - problem.cap)
            if cap <= 0:
                break
    if not results:
        in_bytes = problem.costs.bytes is not None
        cap, smallest_peak = (format_exact_amount(amount, in_bytes) for amount in (problem.cap, smallest_peak))
        raise ProgramError(
            f"nothing fits memory_cap={cap} with what is gathered: the least that was found is {smallest_peak}; "
            'fpipe.shard(gather="use", lead=0) holds less.'
        )
    return min(results, key=lambda result: problem.value(result.timeline))
