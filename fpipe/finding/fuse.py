"""Restore full backwards where splitting them gains nothing.

1I0 1W0 1F1 1I1        --> fused() -->        1B0 1F1 1I1            if it takes no longer
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from fpipe.finding.local_search import Candidate
from fpipe.program import Program, ProgramError, kind_of
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import apply_table

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
        if kind_of(op.kind).place == "table":
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
