"""Tasks of more microbatches, and the orders of them that repeat a steady state of a shorter step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from fpipe.orders.stretch import Rows, Steady, steady_states, stretch
from fpipe.orders.tasks import Tasks

T = TypeVar("T", bound=Tasks)


def longer(tasks: Tasks, rows: Rows, more: int) -> Iterator[Rows]:
    """Orders of `more` microbatches more, by the steady states of an order, the fastest first.

    Args:
        tasks: the ops of the shorter step, in whose tracks every microbatch is alike.
        rows: their order.
        more: microbatches to add.
    """
    return (stretch(rows, steady, more) for steady in _steady(tasks, rows))


def pace(tasks: Tasks, rows: Rows) -> float:
    """Seconds for each microbatch more: of the fastest steady state, or of the busiest rank where there is none."""
    found = _steady(tasks, rows)
    return found[0].pace if found else max(tasks.work) / max(1, tasks.program.microbatches)


def _steady(tasks: Tasks, rows: Rows) -> list[Steady]:
    ends = tasks.play([tasks.flat(row) for row in rows]).ends
    firsts = [[step[0] for step in tasks.steps(row)] for row in rows]
    return steady_states(rows, [[ends[op] - tasks.seconds[op] for op in row] for row in firsts])


def lengthened(tasks: T, more: int) -> T | None:
    """The tasks of `more` microbatches more, each like the first; None where they are not all alike."""
    count = tasks.program.microbatches
    if any(len(steps) != count or len({*map(len, steps)}) > 1 for steps in tasks.tracks):
        return None
    if any(op.parts for op in tasks.ops):
        return None
    tracks = sorted((op, track, at) for track, steps in enumerate(tasks.tracks) for at, op in enumerate(steps[0]))
    each = [[tasks.tracks[track][turn][at] for _, track, at in tracks] for turn in range(count)]
    first, many, total = each[0], len(tracks), count + more
    place = {op: at for row in each for at, op in enumerate(row)} | {-1: -1}

    def facts(at: int) -> tuple[object, ...]:
        op, needs = tasks.ops[at], [(place[source], way) for source, way in tasks.needs[at]]
        return op.kind, op.stage, op.rank, tasks.seconds[at], needs

    alike = [list(map(facts, row)) for row in each]
    if any(row != alike[0] for row in alike[1:]):
        return None
    steps = [[place[op] for op in steps[0]] for steps in tasks.tracks]
    return replace(
        tasks,
        ops=[tasks.ops[op]._replace(microbatch=turn) for turn in range(total) for op in first],
        seconds=[tasks.seconds[op] for op in first] * total,
        needs=[
            tuple((turn * many + place[one] if one >= 0 else -1, way) for one, way in tasks.needs[op])
            for turn in range(total)
            for op in first
        ],
        takes=[tasks.takes[op] for op in first] * total,
        drops=[tasks.drops[op] for op in first] * total,
        tracks=[[tuple(turn * many + at for at in track) for turn in range(total)] for track in steps],
        rows=[[] for _ in tasks.rows],
    )
