"""Timelines as trace events, for https://ui.perfetto.dev or chrome://tracing: a process a rank, a thread a lane.

Times are in microseconds, as the format wants them. Waits stand on the lane they leave empty, a transfer is a flow from
the op that writes to the op that reads, what a rank holds is a counter. Format: "Trace Event Format" of the Chromium
project.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fpipe.pictures.panel import Panel, awaited
from fpipe.pictures.style import PLAIN, Style
from fpipe.program import LANES, Value, lane_of
from fpipe.timing.waiting import Event

Entry = dict[str, Any]
_THREADS = {lane: number for number, lane in enumerate(LANES)}


def perfetto(panels: Sequence[Panel], style: Style = PLAIN) -> str:
    """The panels as JSON; the ranks of the second come after those of the first."""
    style.only("a trace", "memory", "waits", "arrows", "window", "ranks")
    entries: list[Entry] = []
    first = 0
    for panel in panels:
        entries += [*_names(panel, first), *_ops(panel, first)]
        entries += _waits(panel, first) if style.waits else ()
        entries += _flows(panel, first, len(entries)) if style.arrows is not False else ()
        entries += _held(panel, first) if style.memory else ()
        first += panel.ranks
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
    lines = ",\n".join(map(encode, entries))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _names(panel: Panel, first: int) -> Iterator[Entry]:
    lanes = {(event.op.rank, lane_of(event.op)) for event in panel.events}
    for rank in range(panel.ranks):
        pid = first + rank
        name = f"{panel.name}, {panel.rank_name(rank)}".removeprefix(", ")
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for lane, tid in _THREADS.items():
            if (rank, lane) in lanes:
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}


def _ops(panel: Panel, first: int) -> Iterator[Entry]:
    for op, start, end in panel.events:
        place = {"stage": op.stage, "microbatch": op.microbatch, "slice": op.slice}
        args: Entry = {word: number for word, number in place.items() if number is not None}
        args |= {"reads": " ".join(map(str, op.reads)), "writes": " ".join(map(str, op.writes))}
        yield _slice(op.cell, op.kind, first + op.rank, lane_of(op), start, end) | {"args": args}


def _waits(panel: Panel, first: int) -> Iterator[Entry]:
    for wait in panel.waits:
        yield _slice(f"waits {awaited(wait)}".rstrip(), "wait", first + wait.rank, "main", wait.start, wait.end)


def _slice(name: str, category: str, pid: int, lane: str, start: float, end: float) -> Entry:
    place = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": _THREADS[lane]}
    return place | {"ts": start * 1e6, "dur": (end - start) * 1e6}


def _flows(panel: Panel, first: int, number: int) -> Iterator[Entry]:
    """An arrow binds to what is open at its ends: the middle of the op that writes, the start of the one that reads."""
    writers: dict[tuple[Value, int], list[Event]] = defaultdict(list)
    readers: dict[tuple[tuple[object, ...], int], list[Event]] = defaultdict(list)  # of a value wherever it is
    for event in panel.events:
        if event.op.kind in ("SEND", "RECV"):
            continue
        for value in event.op.writes:
            writers[value, event.op.rank].append(event)
        for value in event.op.reads:
            readers[value[:-1], event.op.rank].append(event)
    for number, sent in enumerate(panel.transfers, number):  # noqa: B020
        before = [event for event in writers[sent.value, sent.source] if event.end <= sent.start * _ALMOST]
        after = [event for event in readers[sent.value[:-1], sent.target] if event.start >= sent.end / _ALMOST]
        for phase, event in (("s", before[-1]), ("f", after[0])) if before and after else ():
            flow: Entry = {"ph": phase, "name": str(sent.value), "cat": "transfer", "id": number}
            flow |= {"pid": first + event.op.rank, "tid": _THREADS[lane_of(event.op)]}
            flow |= {"ts": (event.start + event.end) / 2 * 1e6}
            yield flow | ({"bp": "e"} if phase == "f" else {})


_ALMOST = 1 + 1e-9


def _held(panel: Panel, first: int) -> Iterator[Entry]:
    unit = "bytes" if panel.timeline.in_bytes else "microbatches"
    for rank in range(panel.ranks):
        for time, amount in panel.held(rank):
            yield {"ph": "C", "name": "held", "pid": first + rank, "tid": 0, "ts": time * 1e6, "args": {unit: amount}}
