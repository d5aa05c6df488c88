"""Leave a backward whole where cutting it in two gains nothing.

1I0 1W0 1F1 1I1        --> fused() -->        1B0 1F1 1I1            if it takes no longer
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from fpipe.finding.hunt import Candidate
from fpipe.program import Program, ProgramError, kind_of
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import by_table

TRIED = 24
"""Programs that are made at most; each takes as long as to simulate one."""


def fused(base: Program, best: Candidate, judged: Callable[[Program], Candidate | None]) -> Candidate:
    """The best with full backwards, as `base` has them, wherever an I stands just before its W and that is judged as
    good."""
    rows: list[list[Key]] = [[] for _ in range(best.program.ranks)]
    for op in best.program.ops:
        if op.parts:
            return best
        if kind_of(op.kind).place == "table":
            rows[op.rank].append(op[:4])
    pairs = [
        (rank, one[1:])
        for rank, row in enumerate(rows)
        for one, other in pairwise(row)
        if one[0] == "I" and other == ("W", *one[1:])
    ]
    whole = {op[1:4] for op in base.ops if op.kind == "B"}
    pairs = [pair for pair in pairs if pair[1] in whole]
    kept: set[tuple[int, tuple[int | None, ...]]] = set()
    tried = 0
    parts = [pairs] if pairs else []
    while parts and tried < TRIED:
        part = parts.pop()
        tried += 1
        made = _with(base, rows, kept | {*part})
        found = made and judged(made)
        if found is not None:
            kept |= {*part}
            best = found
        elif len(part) > 1:
            parts += [part[: len(part) // 2], part[len(part) // 2 :]]
    return best


def _with(base: Program, rows: list[list[Key]], whole: set[tuple[int, tuple[int | None, ...]]]) -> Program | None:
    made: list[list[Key]] = []
    where: defaultdict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        kept = [key for key in row if key[0] != "W" or (rank, key[1:]) not in whole]
        made.append([("B", *key[1:]) if key[0] == "I" and (rank, key[1:]) in whole else key for key in kept])
        for key in kept:
            where[key[1] or 0].add(rank)
    replicas = any(len(ranks) > 1 for ranks in where.values())
    homes = {stage: sorted(ranks) for stage, ranks in where.items()} if replicas else None
    try:
        return by_table(base, made, move=True, homes=homes)
    except ProgramError:  # what waits for the I alone would now wait for ever
        return None
