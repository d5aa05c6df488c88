"""Read a measured timeline as costs: the seconds that each op keeps its rank, and the seconds to move a value.

    rank 1: RECV(y) ... |1F0|ADD|SEND(dx)|RECV(y) ... |1F1        1F0 keeps its rank from its start to that of SEND

The small ops behind an op that a schedule names, and the work of the runtime between them, count as that op's time.
SENDs and RECVs have a time of their own, and the time in which a rank waits counts for no op.
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


class TransferSeconds(NamedTuple):
    """Seconds to send a value, for its way to its reader's rank, and to receive it."""

    send: float
    transfer: float
    receive: float


def op_seconds(timeline: Timeline) -> list[tuple[Op, float]]:
    """Return the seconds for which each scheduled op keeps its rank, and each exchange or collective its lane.

    An op keeps its rank until the next one begins, less the time of SENDs, RECVs and waits between the two. The work to
    start an exchange is part of the op before it.
    """
    # `ends` has for each scheduled op so far: the op, the seconds counted, and since when it counts again. A SEND, RECV
    # or wait adds the time up to it, and the op counts on behind it.
    seconds_by_op = _lane_seconds(timeline)
    exchanged = {value for op, _ in seconds_by_op for value in op.writes}
    for row in _rows(timeline).values():
        ends: list[tuple[Op, float, float]] = []
        previous_end, lane_ends = row[0].start, set[float]()
        for op, start, end in row:
            waits_for_exchange = not exchanged.isdisjoint(op.reads)
            if _is_asynchronous(op):
                # A collective that starts right when another ends has waited for its lane; any other start is an event
                # of the rank, which was busy with it until then.
                if lane_of(op) == "wire" and start not in lane_ends:
                    previous_end = max(previous_end, start)
                lane_ends.add(end)
                continue
            if (op.kind in ("SEND", "RECV") or (waits_for_exchange and not is_scheduled(op.kind))) and ends:
                last_op, seconds, since = ends[-1]
                ends[-1] = last_op, seconds + previous_end - since, end if op.kind in ("SEND", "RECV") else start
            elif is_scheduled(op.kind):
                if ends:
                    last_op, seconds, since = ends[-1]
                    until = previous_end if waits_for_exchange else start
                    ends[-1] = last_op, seconds + until - since, until
                ends.append((op, 0.0, start))
            previous_end = end
        if ends:
            last_op, seconds, since = ends[-1]
            ends[-1] = last_op, seconds + previous_end - since, previous_end
        seconds_by_op += [(op, seconds) for op, seconds, _ in ends]
    return seconds_by_op


def transfer_seconds(timelines: Iterable[Timeline]) -> TransferSeconds:
    """Return the seconds to move a value, as medians over all timelines; 0 for times that no timeline shows.

    A RECV that was waiting when its SEND ended shows the way and its own time. One that started when the value had
    arrived shows its own time alone.
    """
    sends: list[float] = []
    received: list[tuple[float, float, float]] = []
    for timeline in timelines:
        sent_at_by_value: dict[Value, float] = {}
        receives: list[tuple[Value, float, float]] = []
        for row in _rows(timeline).values():
            previous_end = row[0].start
            for op, start, end in row:
                if lane_of(op) == "wire":
                    previous_end = max(previous_end, start)
                if _is_asynchronous(op):
                    continue
                if op.kind == "SEND":
                    sent_at_by_value.update((value, end) for value in op.writes)
                    sends.append(end - start)
                if op.kind == "RECV":
                    receives += [(value, previous_end, end) for value in op.reads]
                previous_end = end
        received += [
            (sent_at_by_value[value], since, end) for value, since, end in receives if value in sent_at_by_value
        ]
    way_and_receive = _median(end - sent_seconds for sent_seconds, since, end in received if since < sent_seconds)
    receive = _median(end - since for sent_seconds, since, end in received if since >= sent_seconds + way_and_receive)
    return TransferSeconds(_median(sends), max(0.0, way_and_receive - receive), receive)


def _median(seconds: Iterable[float]) -> float:
    return statistics.median([*seconds] or [0.0])


def _is_asynchronous(op: Op) -> bool:
    return lane_of(op) in ("wire", "exchange")


def _lane_seconds(timeline: Timeline) -> list[tuple[Op, float]]:
    """Return the seconds of each exchange and collective over replicas, from when its lane was free.

    Collectives before the first scheduled op of a rank include the time to start them.
    """
    seconds_by_op: list[tuple[Op, float]] = []
    for row in _rows(timeline).values():
        free_at_by_lane, has_scheduled = defaultdict[str, float](float), False
        for op, start, end in row:
            lane = lane_of(op)
            if _is_asynchronous(op):
                since = free_at_by_lane[lane]
                if has_scheduled or lane == "exchange":
                    since = max(since, start)
                seconds_by_op.append((op, max(0.0, end - since)))
                free_at_by_lane[lane] = max(free_at_by_lane[lane], end)
            has_scheduled = has_scheduled or (lane == "main" and is_scheduled(op.kind))
    return seconds_by_op


def _rows(timeline: Timeline) -> dict[int, list[Event]]:
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        op = event.op
        if is_scheduled(op.kind) or op.kind in ("SEND", "RECV") or _is_asynchronous(op) or event.end > event.start:
            rows[op.rank].append(event)
    return rows


# Rewrite a program so that each stage has every kind of op, and each kind can be measured.

Runs = dict[tuple[str, int], dict[tuple[Value, ...], list[float]]]
"""For a kind and a stage, the seconds of each op, run by run, by the values that it writes."""


def with_halves(program: Program, is_serial: bool = True) -> Program:
    """Split the backwards of a program, and joint ops; a serial run also has no ranks and transfers."""
    if is_serial:
        return split_backward()(_without_transfers(program))
    return split_backward()(_with_ops(program, parts_of(without_frees(program).ops)))


def variants_of(halves: Program) -> list[Program]:
    """Return programs that together have all kinds of op: F and B, then F, R, I and W."""
    # A backward that computes its stage again itself would count R's time.
    ops = (op._replace(options=()) if op.kind in "FBI" and not is_exchange(op) else op for op in halves.ops)
    plain = _with_ops(halves, ops)
    return [*dict.fromkeys((_join_backwards(plain), checkpoint()(plain)))]


def add_run(runs: Runs, op: Op, seconds: float) -> None:
    """Note the seconds of one run of an op."""
    if op.kind == "REDUCE" and not adds_gradients(op):
        return
    kind = "exchange" if is_exchange(op) and op.kind != "W" else op.kind
    runs.setdefault((kind, op.stage or 0), {}).setdefault(op.writes, []).append(seconds)


def mean_seconds(program: Program, runs: Runs, is_serial: bool) -> dict[str, Any]:
    """Return the seconds of each kind in `Costs`, for each stage the mean of its ops.

    In a serial run the least time of each op counts. Otherwise the mean over the ops of a run counts, and of these the
    median of all runs: what delays some ops in each step is part of the step.
    """

    def seconds(kind: str) -> list[float]:
        ops_by_stage = [[*runs.get((kind, stage), {}).values()] for stage in range(program.stages)]
        if is_serial:
            return [mean([*map(min, ops)]) for ops in ops_by_stage]
        return [_median(map(mean, zip(*ops, strict=True))) for ops in ops_by_stage]

    def mean(times: Sequence[float]) -> float:
        return sum(times) / max(1, len(times))

    kinds = {"forward": "F", "backward_input": "I", "backward_weight": "W", "recompute": "R"}
    costs: dict[str, Any] = {field: seconds(kind) for field, kind in kinds.items()}
    measured = {kind for kind, _ in runs}
    optional = {field: field.upper() for field in ("update", "gather", "scatter", "reduce")} | {"exchange": "exchange"}
    costs |= {field: seconds(kind) for field, kind in optional.items() if kind in measured}
    return costs | {"backward": seconds("B") if "B" in measured else None}


def _with_ops(program: Program, ops: Iterable[Op]) -> Program:
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def _without_transfers(program: Program) -> Program:
    """Return the program as one process runs it: without transfers, all on rank 0, in the same order."""
    # Without transfers a copy `y@1` of a value is the value itself.
    moves = ("SEND", "RECV", "OFFLOAD", "LOAD", "FREE")
    ops = [
        op._replace(rank=0, reads=tuple(value._replace(location="") for value in op.reads))
        for op in parts_of(program.ops)
        if op.kind not in moves
    ]
    outputs = tuple(end._replace(value=end.value._replace(location="")) for end in program.outputs)
    return Program.trusted(program.inputs, tuple(ops), outputs)


def _join_backwards(program: Program) -> Program:
    # An I and its W meet in `wres`, which the I writes last and the W reads last.
    weights = {op.reads[-1]: op for op in program.ops if op.kind == "W"}
    ops: list[Op] = []
    for op in program.ops:
        if op.kind == "I":
            *cotangents, for_weight = op.writes
            ops.append(op._replace(kind="B", writes=(*cotangents, *weights[for_weight].writes)))
        elif op.kind != "W":
            ops.append(op)
    return _with_ops(program, ops)
