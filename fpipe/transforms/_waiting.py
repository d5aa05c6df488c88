"""Residuals that wait on a rank for their backward, from step to step, and the fewest that must leave under a cap.

steps of a rank     0F0 0F1 0F2 0B0 0B1 0B2
res[0,2]                    |---------------|        left behind 0F2, back for 0B2, and away in between
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, count
from math import ceil
from typing import Literal, NamedTuple

from fpipe.program import Op, Program, ProgramError, Value, kind_of
from fpipe.transforms.shard import shares

Policy = Literal["always", "worthwhile"] | Callable[[int, int], bool]
LATE = frozenset("BIWR")


class Stay(NamedTuple):
    """A value on its rank, in steps of the rank's main lane: `left` by its forward, held `until` its last reader.

    Its OFFLOAD runs beside the step after `left`; it is `back` when the step before its LOAD starts.
    """

    value: Value
    left: int
    back: int
    until: int
    load: int  # the position in the program before which its LOAD stands
    may: bool  # leave

    @property
    def away(self) -> int:
        """Steps for which it would be away."""
        return self.back - self.left - 1


def waiting(program: Program, names: frozenset[str], lead: int, policy: Policy) -> dict[int, list[Stay]]:
    """For each rank the values of these names that wait there for a backward or a recompute."""
    rows: defaultdict[int, list[int]] = defaultdict(list)  # the positions of timed ops
    steps: list[int] = []
    weights: dict[tuple[int | None, ...], int] = {}
    readers: defaultdict[Value, list[tuple[int, Op]]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        steps.append(len(rows[op.rank]))
        if kind_of(op.kind).time:
            rows[op.rank].append(position)
        for part in op.parts or (op,):
            if part.kind == "W":
                weights[part[1:4]] = steps[-1]
            for value in part.reads:
                if value.name in names:
                    readers[value].append((position, part))
    found: defaultdict[int, list[Stay]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        for value in op.writes if op.kind not in ("OFFLOAD", "LOAD") else ():
            late = [(at, reader) for at, reader in readers.get(value, ()) if reader.kind in LATE]
            early = [(at, reader) for at, reader in readers.get(value, ()) if reader.kind not in LATE]
            if not late or any(reader.rank != op.rank for _, reader in late):
                continue
            at, reader = late[0]
            left = max([steps[position], *(steps[at] for at, other in early if other.rank == op.rank)])
            step = max(left + 1, steps[at] - lead)
            until = weights.get(reader[1:4], steps[at]) if reader.kind == "I" else steps[late[-1][0]]
            out = op.kind == "R" or any(other.kind == "OFFLOAD" for _, other in early)
            stay = Stay(value, left, max(left, step - 1), until, rows[op.rank][step], not out)
            found[op.rank].append(stay if stay.may and _chosen(stay, policy) else stay._replace(may=False))
    return found


def _chosen(stay: Stay, policy: Policy) -> bool:
    if callable(policy):
        return policy(stay.value.stage or 0, stay.value.microbatch or 0)
    return policy == "always" or stay.away > 0


def enough(program: Program, rows: Mapping[int, list[Stay]], cap: float) -> list[Stay]:
    """As few values as keep every rank at `cap`."""
    units = shares(program)
    chosen = {rank: _leaving(row, int(cap * units[rank] + 1e-9)) for rank, row in rows.items()}
    if None in chosen.values():
        least = {
            rank: next(room for room in count(1) if _leaving(row, room) is not None) / units[rank]
            for rank, row in rows.items()
        }
        worst = max(least, key=least.__getitem__)
        raise ProgramError(
            f"cap={cap:g} is less than rank {worst} can keep to in this order: the least is "
            f"{ceil(least[worst] * 1000) / 1000:g} microbatches."
        )
    return [stay for row in chosen.values() for stay in row or ()]


def _leaving(row: list[Stay], room: int) -> list[Stay] | None:
    """Which values leave for `room`: the one that is back last, or two that pass each other; None if that fails."""
    out: set[Stay] = set()
    there: list[Stay] = []
    coming = sorted(row, key=lambda stay: stay.left, reverse=True)
    for step in sorted({step for stay in row for step in (stay.left, stay.left + 1, stay.back)}):
        while coming and coming[-1].left <= step:
            there.append(coming.pop())
        there = [stay for stay in there if stay.until >= step]
        free = sorted((stay for stay in there if stay.may and stay not in out), key=lambda stay: -stay.back)
        held = _held(there, out, step)
        for leaving in (*((stay,) for stay in free), *combinations(free, 2)) if held > room else ():
            if held > room and out.isdisjoint(leaving) and (now := _held(there, out.union(leaving), step)) < held:
                out.update(leaving)
                held = now
        if held > room:
            return None
    return [stay for stay in row if stay in out]


def _held(there: Iterable[Stay], out: set[Stay], step: int) -> int:
    """How many values a rank holds in a step; the lane moves one after the other, so that none leaves as one comes."""
    held = leaving = coming = 0
    for stay in there:
        if stay not in out or stay.left == step or step > stay.back:
            held += 1
        elif step == stay.left + 1:
            leaving += 1
        elif step == stay.back:
            coming += 1
    return held + max(leaving, coming)
