"""Read a measured timeline as costs: for how long each op keeps its rank, and what it takes to move a value.

    rank 1: RECV(y) ... |1F0|ADD|SEND(dx)|RECV(y) ... |1F1        1F0 keeps its rank from its start to that of SEND

The small ops behind an op that a schedule names, and what the runtime does between them, are that op's time. SENDs and
RECVs have a time of their own, and what a rank waits for is nobody's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fpipe.program import Op, Program, Value, is_exchange, lane_of, parts_of
from fpipe.timing.costs import adds_gradients
from fpipe.timing.lanes import is_scheduled
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import Event
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.communicate import without_frees
from fpipe.transforms.split_backward import split_backward


class Moving(NamedTuple):
    """Seconds to send a value, for its way, and to receive it."""

    send: float
    transfer: float
    receive: float


def kept(timeline: Timeline) -> list[tuple[Op, float]]:
    """Return for how many seconds each scheduled op keeps its rank, and each exchange or collective its lane.

    An op keeps its rank until the next one begins, less what SENDs, RECVs and waits between the two take. What a rank
    does to start an exchange is part of the op before it.
    """
    seconds_by_op = _in_lanes(timeline)
    exchanged = {value for op, _ in seconds_by_op for value in op.writes}
    for row in _rows(timeline).values():
        ends: list[tuple[Op, float, float]] = []
        before, over = row[0].start, set[float]()
        for op, start, end in row:
            waits = not exchanged.isdisjoint(op.reads)
            if _is_asynchronous(op):
                if lane_of(op) == "wire" and start not in over:  # it has waited for its lane then
                    before = max(before, start)
                over.add(end)
                continue
            if (op.kind in ("SEND", "RECV") or (waits and not is_scheduled(op.kind))) and ends:
                last, seconds, since = ends[-1]
                ends[-1] = last, seconds + before - since, end if op.kind in ("SEND", "RECV") else start
            elif is_scheduled(op.kind):
                if ends:
                    last, seconds, since = ends[-1]
                    until = before if waits else start
                    ends[-1] = last, seconds + until - since, until
                ends.append((op, 0.0, start))
            before = end
        if ends:
            last, seconds, since = ends[-1]
            ends[-1] = last, seconds + before - since, before
        seconds_by_op += [(op, seconds) for op, seconds, _ in ends]
    return seconds_by_op


def moving(timelines: Iterable[Timeline]) -> Moving:
    """Seconds to move a value, by medians; 0 for what was not seen.

    A RECV that was waiting when its SEND ended tells from then on the way and its own time; one that came after all of
    that, its own time alone.
    """
    sends: list[float] = []
    received: list[tuple[float, float, float]] = []
    for timeline in timelines:
        sent: dict[Value, float] = {}
        taken: list[tuple[Value, float, float]] = []
        for row in _rows(timeline).values():
            before = row[0].start
            for op, start, end in row:
                if lane_of(op) == "wire":
                    before = max(before, start)
                if _is_asynchronous(op):
                    continue
                if op.kind == "SEND":
                    sent.update((value, end) for value in op.writes)
                    sends.append(end - start)
                if op.kind == "RECV":
                    taken += [(value, before, end) for value in op.reads]
                before = end
        received += [(sent[value], since, end) for value, since, end in taken if value in sent]
    both = _median(end - left for left, since, end in received if since < left)
    receive = _median(end - since for left, since, end in received if since >= left + both)
    return Moving(_median(sends), max(0.0, both - receive), receive)


def _median(seconds: Iterable[float]) -> float:
    return statistics.median([*seconds] or [0.0])


def _is_asynchronous(op: Op) -> bool:
    return lane_of(op) in ("wire", "exchange")


def _in_lanes(timeline: Timeline) -> list[tuple[Op, float]]:
    """Return the seconds of each exchange and collective over replicas, from when its lane was free.

    Those before the first scheduled op of a rank count with what it takes to start them.
    """
    seconds_by_op: list[tuple[Op, float]] = []
    for row in _rows(timeline).values():
        free, begun = defaultdict[str, float](float), False
        for op, start, end in row:
            lane = lane_of(op)
            if _is_asynchronous(op):
                since = max(start, free[lane]) if begun or lane == "exchange" else free[lane]
                seconds_by_op.append((op, max(0.0, end - since)))
                free[lane] = max(free[lane], end)
            begun = begun or (lane == "main" and is_scheduled(op.kind))
    return seconds_by_op


def _rows(timeline: Timeline) -> dict[int, list[Event]]:
    """Return the events of each rank, by time."""
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        op = event.op
        if is_scheduled(op.kind) or op.kind in ("SEND", "RECV") or _is_asynchronous(op) or event.end > event.start:
            rows[op.rank].append(event)
    return rows


# Rewrite a program so that each stage has every kind of op, to tell what each takes.

Runs = dict[tuple[str, int], dict[tuple[Value, ...], list[float]]]
"""For a kind and a stage, the seconds of each op, by what it writes, run by run."""


def with_halves(program: Program, one_process: bool = True) -> Program:
    """Split the backwards of a program, each op by itself; in one process without ranks and transfers."""
    if one_process:
        return split_backward()(_without_transfers(program))
    return split_backward()(_with_ops(program, parts_of(without_frees(program).ops)))


def variants_of(halves: Program) -> list[Program]:
    """Return programs that have all kinds of op between them."""
    # A backward that computes its stage again itself would count R's time.
    ops = (op._replace(how=()) if op.kind in "FBI" and not is_exchange(op) else op for op in halves.ops)
    plain = _with_ops(halves, ops)
    return [*dict.fromkeys((_joined(plain), checkpoint()(plain)))]


def note(runs: Runs, op: Op, seconds: float) -> None:
    """Add a run of an op."""
    if op.kind == "REDUCE" and not adds_gradients(op):
        return
    kind = "exchange" if is_exchange(op) and op.kind != "W" else op.kind
    runs.setdefault((kind, op.stage or 0), {}).setdefault(op.writes, []).append(seconds)


def seconds_of(program: Program, runs: Runs, alone: bool) -> dict[str, Any]:
    """Return the seconds of each kind in `Costs`, for each stage the mean of its ops.

    An op that runs `alone` counts with its least time. Otherwise a run's mean counts, in the median of all runs: what
    keeps some ops longer than most keeps each step so.
    """

    def seconds(kind: str) -> list[float]:
        ops_by_stage = [[*runs.get((kind, stage), {}).values()] for stage in range(program.stages)]
        if alone:
            return [mean([*map(min, ops)]) for ops in ops_by_stage]
        return [_median(map(mean, zip(*ops, strict=True))) for ops in ops_by_stage]

    def mean(times: Sequence[float]) -> float:
        return sum(times) / max(1, len(times))

    kinds = {"forward": "F", "backward_input": "I", "backward_weight": "W", "recompute": "R"}
    costs: dict[str, Any] = {word: seconds(kind) for word, kind in kinds.items()}
    measured = {kind for kind, _ in runs}
    optional = {word: word.upper() for word in ("update", "gather", "scatter", "reduce")} | {"exchange": "exchange"}
    costs |= {word: seconds(kind) for word, kind in optional.items() if kind in measured}
    return costs | {"backward": seconds("B") if "B" in measured else None}


def _with_ops(program: Program, ops: Iterable[Op]) -> Program:
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def _without_transfers(program: Program) -> Program:
    """Return all that one process has to do, in the same order."""
    moves = ("SEND", "RECV", "OFFLOAD", "LOAD", "FREE")
    ops = [
        op._replace(rank=0, reads=tuple(value._replace(at="") for value in op.reads))
        for op in parts_of(program.ops)
        if op.kind not in moves
    ]
    outputs = tuple(end._replace(value=end.value._replace(at="")) for end in program.outputs)
    return Program.trusted(program.inputs, tuple(ops), outputs)


def _joined(program: Program) -> Program:
    """Join every I and its W to one B, in the place of I."""
    weights = {op.reads[-1]: op for op in program.ops if op.kind == "W"}
    ops: list[Op] = []
    for op in program.ops:
        if op.kind == "I":
            *cotangents, for_weight = op.writes
            ops.append(op._replace(kind="B", writes=(*cotangents, *weights[for_weight].writes)))
        elif op.kind != "W":
            ops.append(op)
    return _with_ops(program, ops)
