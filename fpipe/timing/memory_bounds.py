"""Bounds from memory: how long a rank waits, and a microbatch is held, where only so many residuals fit.

rank r   | forwards that fit |  nothing to do  | first backward ...        at most k microbatches of life L: L m/k
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fpipe.program import Op
from fpipe.timing.lanes import is_work
from fpipe.timing.paths import DataGraph


def makes(op: Op) -> bool:
    """Whether an op makes residuals."""
    return op.kind in "FR" and any(value.name == "res" for value in op.writes)


def bounds_of_memory(graph: DataGraph, most: Sequence[int]) -> tuple[list[float], list[float]] | None:
    """For each rank what holding at most so many residuals asks for: of its span, and of the makespan. None where that
    takes too long."""
    groups: defaultdict[int | None, list[int]] = defaultdict(list)
    for at, op in enumerate(graph.ops):
        groups[op.microbatch].append(at)
    first_backward = [float("inf")] * len(most)
    lives: list[list[tuple[float, float, float]]] = [[] for _ in most]
    shapes = [_shape(graph, group) for group in groups.values()]
    if sum(len(shape) ** 2 for shape in {*shapes}) > _MOST_PAIRS:
        return None
    within = {shape: _within(shape) for shape in {*shapes}}
    for group, shape in zip(groups.values(), shapes, strict=True):
        since, until = within[shape]
        for place, seconds in since.items():
            rank = graph.ops[group[place]].rank
            first_backward[rank] = min(first_backward[rank], seconds)
        for place, seconds in until.items():
            tail = min(graph.tails[group[user]] for user in shape[place].users)
            lives[shape[place].rank].append((seconds, graph.starts[group[place]], tail))
    spans = [_span(graph, rank, most[rank], first) for rank, first in enumerate(first_backward)]
    return spans, [_lifespan(row, most[rank]) for rank, row in enumerate(lives)]


_MOST_PAIRS = 20_000_000  # of ops of a microbatch; a million take .2 s


class _OwnOp(NamedTuple):
    """An op among those of its microbatch, of which it names others by their place."""

    rank: int
    seconds: float
    backward: bool
    works: bool
    needs: tuple[tuple[int, float], ...]
    users: tuple[int, ...]


_Shape = tuple[_OwnOp, ...]


def _shape(graph: DataGraph, group: Sequence[int]) -> _Shape:
    """The ops of a microbatch, equal for microbatches that are alike."""
    ops, seconds = graph.ops, graph.seconds
    places = {at: place for place, at in enumerate(group)}
    users = _users(graph, group)
    return tuple(
        _OwnOp(
            ops[at].rank,
            seconds[at],
            any(part.kind in "BI" for part in ops[at].parts or (ops[at],)),
            bool(seconds[at]) and is_work(ops[at], seconds[at]),
            tuple((places[source], way) for source, way in graph.needs[at] if source in places),
            tuple(places[user] for user in users.get(at, ())),
        )
        for at in group
    )


def _within(shape: _Shape) -> tuple[dict[int, float], dict[int, float]]:
    """For each backward how long after the first op of its rank that it needs it can start, and for each op that makes
    residuals how long they live."""
    since = {place: 0.0 for place, step in enumerate(shape) if step.backward}
    until: dict[int, float] = {}
    for place, step in enumerate(shape):
        if step.works:
            after = _after(shape, place)
            for other in since:
                if shape[other].rank == step.rank and other in after:
                    since[other] = max(since[other], after[other])
            held = [after[user] + shape[user].seconds for user in step.users if user in after]
            if held:
                until[place] = max(held)
    return since, until


def _after(shape: _Shape, start: int) -> dict[int, float]:
    """How long after the start of one op each op of its microbatch that needs it can start."""
    found = {start: 0.0}
    for place in range(start + 1, len(shape)):
        ways = [found[source] + shape[source].seconds + way for source, way in shape[place].needs if source in found]
        if ways:
            found[place] = max(ways)
    return found


def _users(graph: DataGraph, group: Sequence[int]) -> dict[int, list[int]]:
    """For each op that makes residuals, those that hold them to their end: B, or the W of an I."""
    parts = _parts(graph, group)
    weights = {part[1:4]: at for part, at in parts if part.kind == "W"}
    made = {value: at for part, at in parts if makes(part) for value in part.writes if value.name == "res"}
    users: defaultdict[int, list[int]] = defaultdict(list)
    for part, at in parts:
        if part.kind in "BI":
            until = weights.get(part[1:4], at) if part.kind == "I" else at
            for value in part.reads:
                if value in made:
                    users[made[value]].append(until)
    return users


def _parts(graph: DataGraph, places: Sequence[int]) -> list[tuple[Op, int]]:
    """The ops at some places, a PAIR as its parts, each with its place."""
    return [(part, at) for at in places for part in graph.ops[at].parts or (graph.ops[at],)]


def _span(graph: DataGraph, rank: int, most: int, first_backward: float) -> float:
    """The work of a rank, and how long it has nothing to do before its first backward can start."""
    ops, seconds, row = graph.ops, graph.seconds, graph.rows[rank]
    work = sum(seconds[at] for at in row)
    if first_backward == float("inf"):
        return work
    parts = _parts(graph, row)
    own = {part[1:4] for part, _ in parts if part.kind == "I"}
    behind = {at for part, at in parts if part.kind in "BI" or (part.kind == "W" and part[1:4] in own)}
    holding = sorted((seconds[at] for at in row if makes(ops[at])), reverse=True)
    others = sum(seconds[at] for at in row if at not in behind and not makes(ops[at]))
    return work + max(0.0, first_backward - sum(holding[:most]) - others)


def _lifespan(lives: list[tuple[float, float, float]], most: int) -> float:
    """How long it takes to hold so many residuals for so long, if only `most` fit at once.

    Of any n that live L seconds or more, ceil(n/most) follow each other; and all together fill `most` places.
    """
    if not lives:
        return 0.0
    head, tail = min(start for _, start, _ in lives), min(tail for _, _, tail in lives)
    longest = sorted((life for life, _, _ in lives), reverse=True)
    last = [n for n, (life, shorter) in enumerate(pairwise([*longest, -1.0]), 1) if life > shorter]
    rows = max(longest[n - 1] * -(-n // most) for n in last)
    return head + max(rows, sum(longest) / most) + tail
