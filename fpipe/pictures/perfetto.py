"""Write timelines as trace events for https://ui.perfetto.dev or chrome://tracing: a process a rank, a thread a lane.

Times are in microseconds, as the format wants them. Waits stand on the lane they leave empty, a transfer is a flow from
the op that writes to the op that reads, what a rank holds is a counter. Format: "Trace Event Format" of the Chromium
project.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fpipe.pictures.panel import Panel, awaited_op
from fpipe.pictures.style import PLAIN, Style
from fpipe.program import LANES, Value, lane_of
from fpipe.timing.waiting import Event

TraceEvent = dict[str, Any]
_THREAD_BY_LANE = {lane: number for number, lane in enumerate(LANES)}


def perfetto(panels: Sequence[Panel], style: Style = PLAIN) -> str:
    """Write panels as JSON; ranks are processes, numbered through all panels."""
    style.refuse_others("a trace", "memory", "waits", "arrows", "window", "ranks")
    events: list[TraceEvent] = []
    first_pid = 0
    for panel in panels:
        events += [*_name_events(panel, first_pid), *_op_events(panel, first_pid)]
        events += _wait_events(panel, first_pid) if style.waits else ()
        events += _flow_events(panel, first_pid, len(events)) if style.arrows is not False else ()
        events += _memory_events(panel, first_pid) if style.memory else ()
        first_pid += panel.ranks
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
    lines = ",\n".join(map(encode, events))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _name_events(panel: Panel, first_pid: int) -> Iterator[TraceEvent]:
    lanes = {(event.op.rank, lane_of(event.op)) for event in panel.events}
    for rank in range(panel.ranks):
        pid = first_pid + rank
        name = f"{panel.name}, {panel.rank_name(rank)}".removeprefix(", ")
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for lane, tid in _THREAD_BY_LANE.items():
            if (rank, lane) in lanes:
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _op_events(panel: Panel, first_pid: int) -> Iterator[TraceEvent]:
    for op, start, end in panel.events:
        numbers = {"stage": op.stage, "microbatch": op.microbatch, "slice": op.slice}
        args: TraceEvent = {name: number for name, number in numbers.items() if number is not None}
        args |= {"reads": " ".join(map(str, op.reads)), "writes": " ".join(map(str, op.writes))}
        yield _duration_event(op.cell, op.kind, first_pid + op.rank, lane_of(op), start, end) | {"args": args}


def _wait_events(panel: Panel, first_pid: int) -> Iterator[TraceEvent]:
    for wait in panel.waits:
        name = f"waits {awaited_op(wait)}".rstrip()
        yield _duration_event(name, "wait", first_pid + wait.rank, "main", wait.start, wait.end)


def _duration_event(name: str, category: str, pid: int, lane: str, start: float, end: float) -> TraceEvent:
    event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": _THREAD_BY_LANE[lane]}
    # The format counts in microseconds.
    return event | {"ts": start * 1e6, "dur": (end - start) * 1e6}


def _flow_events(panel: Panel, first_pid: int, flow_id: int) -> Iterator[TraceEvent]:
    """Yield the two ends of each transfer's arrow, in the middle of the writer and of the first reader."""
    # The format binds an end to the slice that is open at its time. SEND and RECV are left out: an arrow goes from the
    # last op that wrote the value before it left to the first that reads it after it arrived.
    writers: dict[tuple[Value, int], list[Event]] = defaultdict(list)
    readers: dict[tuple[tuple[object, ...], int], list[Event]] = defaultdict(list)  # of a value wherever it is
    for event in panel.events:
        if event.op.kind in ("SEND", "RECV"):
            continue
        for value in event.op.writes:
            writers[value, event.op.rank].append(event)
        for value in event.op.reads:
            readers[value[:-1], event.op.rank].append(event)
    for flow_id, transfer in enumerate(panel.transfers, flow_id):  # noqa: B020
        departure, arrival = transfer.start * _ROUNDING, transfer.end / _ROUNDING
        senders = [event for event in writers[transfer.value, transfer.source] if event.end <= departure]
        receivers = [event for event in readers[transfer.value[:-1], transfer.target] if event.start >= arrival]
        for phase, event in (("s", senders[-1]), ("f", receivers[0])) if senders and receivers else ():
            flow: TraceEvent = {"ph": phase, "name": str(transfer.value), "cat": "transfer", "id": flow_id}
            flow |= {"pid": first_pid + event.op.rank, "tid": _THREAD_BY_LANE[lane_of(event.op)]}
            flow |= {"ts": (event.start + event.end) / 2 * 1e6}
            yield flow | ({"bp": "e"} if phase == "f" else {})


_ROUNDING = 1 + 1e-9
"""Factor by which two times may differ that are the same but for rounding."""


def _memory_events(panel: Panel, first_pid: int) -> Iterator[TraceEvent]:
    for rank in range(panel.ranks):
        for time, amounts in panel.memory_by_holder(rank):
            # A counter with several numbers is drawn as layers; one that is missing would keep its last value.
            args = {holder: amounts.get(holder, 0.0) for holder in panel.holders}
            if not panel.timeline.in_bytes:
                args = {"microbatches": sum(amounts.values())}
            yield {"ph": "C", "name": "held", "pid": first_pid + rank, "tid": 0, "ts": time * 1e6, "args": args}
