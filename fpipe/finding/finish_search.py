"""Finish a search: restore full backwards where splitting gains nothing, and leave room for gathered parameters.

1I0 1W0 1F1 1I1        --> fuse_backwards -->        1B0 1F1 1I1            if it takes no longer

found under 4 GiB, "step": 5 GiB, "use": 4.5 GiB        --> searched again under 3.5 GiB -->        "use": 4 GiB"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fpipe.finding.local_search import Candidate
from fpipe.finding.problem import SearchProblem
from fpipe.finding.search_result import SearchResult
from fpipe.program import Program, ProgramError, kind_of
from fpipe.timing.amounts import format_exact_amount
from fpipe.timing.simulate import simulate
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import apply_table
from fpipe.transforms.shard import shard

MAX_PROGRAMS = 24
"""The most programs to build and simulate."""


def fuse_backwards(base: Program, best: Candidate, judge: Callable[[Program], Candidate | None]) -> Candidate:
    """Return the best candidate with a full backward for each I that stands just before its W, where that is as good.

    Args:
        base: the program with its full backwards.
        best: a candidate whose backwards are split.
        judge: simulates a program; None if it is worse or does not fit.
    """
    # Bisection: try all pairs at once, and halve what is rejected: a few programs can settle hundreds of
    # pairs. MAX_PROGRAMS bounds the time.
    rows: list[list[Key]] = [[] for _ in range(best.program.ranks)]
    for op in best.program.ops:
        if op.parts:
            return best
        if kind_of(op.kind).position == "table":
            rows[op.rank].append(op[:4])
    neighbours = ((rank, *keys) for rank, row in enumerate(rows) for keys in pairwise(row))
    pairs = [(rank, key[1:]) for rank, key, next_key in neighbours if key[0] == "I" and next_key == ("W", *key[1:])]
    full_backwards = {op[1:4] for op in base.ops if op.kind == "B"}
    pairs = [pair for pair in pairs if pair[1] in full_backwards]
    fused_pairs: set[tuple[int, tuple[int | None, ...]]] = set()
    tried = 0
    worklist = [pairs] if pairs else []
    while worklist and tried < MAX_PROGRAMS:
        pairs_tried = worklist.pop()
        tried += 1
        program = with_full_backwards(base, rows, fused_pairs | {*pairs_tried})
        candidate = program and judge(program)
        if candidate is not None:
            fused_pairs |= {*pairs_tried}
            best = candidate
        elif len(pairs_tried) > 1:
            worklist += [pairs_tried[: len(pairs_tried) // 2], pairs_tried[len(pairs_tried) // 2 :]]
    return best


def with_full_backwards(
    base: Program, rows: list[list[Key]], fused_pairs: set[tuple[int, tuple[int | None, ...]]]
) -> Program | None:
    """Return the program with B in place of I and W for these (rank, cell) pairs, or None if that deadlocks."""
    fused_rows: list[list[Key]] = []
    ranks_by_stage: defaultdict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        kept_keys = [key for key in row if key[0] != "W" or (rank, key[1:]) not in fused_pairs]
        fused_rows.append(
            [("B", *key[1:]) if key[0] == "I" and (rank, key[1:]) in fused_pairs else key for key in kept_keys]
        )
        for key in kept_keys:
            ranks_by_stage[key[1] or 0].add(rank)
    is_replicated = any(len(ranks) > 1 for ranks in ranks_by_stage.values())
    homes = {stage: sorted(ranks) for stage, ranks in ranks_by_stage.items()} if is_replicated else None
    try:
        return apply_table(base, fused_rows, move=True, homes=homes)
    except ProgramError:
        # An op between I and W on another rank needs the I, and W needs that op: B cannot stand for both.
        return None


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
