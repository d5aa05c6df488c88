"""Record when each op of a step runs, and the bytes of storages on each rank that are not the caller's.

    row 0: 0F0    from 0.1 to 3.2    + y, res        --> timeline -->        0F0 from 0.1 to 3.2, rank 0 holds 8192

A step only notes the end of each row, where the next row of that rank starts. On an accelerator notes are events in its
stream, so nothing waits for them. Bytes are counted in the first step alone: later ones run the same rows on the same
shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fpipe.program import Op, Program, Value
from fpipe.timing.memory import Account
from fpipe.timing.timeline import Timeline
from fpipe.torch_internals import StorageWeakRef

Storages = dict[Hashable, int]
"""The bytes of each storage, by a key of the storage."""


class RecordedRow(NamedTuple):
    """A row of a runtime's instructions: ops that run as one, the values they write, and those freed after them."""

    ops: Sequence[Op]
    values_written: Sequence[Value]
    values_freed: Sequence[Value]


def in_range(ops: Iterable[Op], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that profilers see as a range named after its ops, such as `fpipe 2B1 + ADD(sum[2,1])`."""
    # The decorator of torch is not annotated.
    decorate: Callable[..., Any] = record_function(f"fpipe {' + '.join(op.cell for op in ops)}")
    return decorate(function)


class HeldBytes(NamedTuple):
    """The most bytes on each rank, and all changes as (index of the time, rank, bytes, holder).

    The start of row n has index 2n, its end 2n + 1.
    """

    peak: tuple[float, ...]
    changes: list[tuple[int, int, int, int]]


class Notes:
    """Start and end of each row of one step, and the storages that it wrote.

    Args:
        rows: the number of rows.
        devices: accelerators whose work a row has to wait for.
        caller_tensors: the step's arguments, whose storages do not count; None if no storages are to be noted.
    """

    def __init__(self, rows: int, devices: Iterable[torch.device], caller_tensors: Iterable[Tensor] | None) -> None:
        self.times = [0.0] * (2 * rows)
        self.devices = devices
        self.caller_storages = None if caller_tensors is None else storages_of(caller_tensors)
        self.storages_by_row: list[list[Storages]] = [[]] * rows
        self.step_start = time.perf_counter()

    def note_row(self, row: int, leaves_by_value: Iterable[Iterable[Any]], started: float) -> None:
        """Note a row that has just run, and the leaves of each value that it wrote."""
        for device in self.devices:  # kernels are asynchronous: an op ends when its work does
            torch.accelerator.synchronize(device)
        self.times[2 * row : 2 * row + 2] = started, time.perf_counter()
        self.note_storages(row, leaves_by_value)

    def note_rows(self, rows: Sequence[int], ticks: Sequence[float], waiting_rows: Collection[int]) -> None:
        """Note rows of one rank: `ticks` are the start of the first and the end of each; `waiting_rows` did no work."""
        times, started = self.times, ticks[0]
        for row, end in zip(rows, ticks[1:], strict=True):
            times[2 * row] = end if row in waiting_rows else started
            times[2 * row + 1] = started = end

    def note_storages(self, row: int, leaves_by_value: Iterable[Iterable[Any]]) -> None:
        """Note the storages that a row wrote, if storages are counted."""
        if self.caller_storages is not None:
            self.storages_by_row[row] = [*map(storages_of, leaves_by_value)]


class StreamClock:
    """A clock of the host, or of the current stream of an accelerator."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.tick: Callable[[], Any] = time.perf_counter
        if device is not None:
            stream = torch.accelerator.current_stream(device)
            self.tick = lambda: stream.record_event(torch.Event(device, enable_timing=True))

    def seconds(self, ticks: Sequence[Any]) -> Sequence[float]:
        """Return ticks as seconds of the host's clock, after waiting for events; host times are returned unchanged."""
        if self.device is None:
            return ticks
        for tick in ticks:
            if not isinstance(tick, float):
                tick.synchronize()
        # Events measure only time to one another: the last one is now, and the others count back from it.
        host_now, last_tick = time.perf_counter(), ticks[-1]
        return [tick if isinstance(tick, float) else host_now - tick.elapsed_time(last_tick) / 1e3 for tick in ticks]


class AsyncNotes:
    """Times of asynchronous work that rows of a rank start: when it ended, and when rows that waited went on.

    Nothing is noted if `notes` is None.
    """

    def __init__(self, notes: Notes | None, device: torch.device | None) -> None:
        self.notes, self._clock = notes, StreamClock(device)
        self._tick_by_index: dict[int, Any] = {}

    def note_end(self, row: int, tick: Any = None) -> None:
        """Note the end of work that a row has started: now, or at a given event or host time."""
        if self.notes is not None:
            self._tick_by_index[2 * row + 1] = self._clock.tick() if tick is None else tick

    def note_end_if_missing(self, row: int) -> None:
        """Note now as the end of work that a row has started, unless its end is noted already."""
        if self.notes is not None and 2 * row + 1 not in self._tick_by_index:
            self.note_end(row)

    def note_copy(self, row: int, start_event: torch.Event, end_event: torch.Event) -> None:
        """Note the events before and after a copy."""
        self._tick_by_index[2 * row], self._tick_by_index[2 * row + 1] = start_event, end_event

    def note_future_done(self, row: int, _: Any) -> None:
        """Note now as the end of a row's collective; the callback of its future."""
        self.note_end(row, time.perf_counter())

    def note_resumption(self, row: int) -> None:
        """Note that a row has waited for asynchronous work and starts now."""
        if self.notes is not None:
            self._tick_by_index[2 * row] = self._clock.tick()

    def write_to_notes(self, posted: Iterable[int] = ()) -> None:
        """Write all times into the notes of rows that have run; work of `posted` rows starts when these have ended."""
        if self.notes is None:
            return
        # Work that a row only posts starts when the rank is done with the row, which is noted as the row's end so far.
        times, start_by_row = self.notes.times, {row: self.notes.times[2 * row + 1] for row in posted}
        # A copy: a thread of the process group may still add to the dict.
        tick_by_index = [*self._tick_by_index.items()]
        seconds = self._clock.seconds([*(tick for _, tick in tick_by_index), self._clock.tick()])
        for (index, _), second in zip(tick_by_index, seconds, strict=False):
            times[index] = second
        for row, second in start_by_row.items():
            times[2 * row] = min(second, times[2 * row + 1])


class Recorder:
    """Makes timelines of the steps that run a program's rows; counts bytes in the first step.

    The rows are those of the program `with_transfers`, so that a copy counts on its rank even where `program` has no
    RECV; SENDs and RECVs that `program` lacks are not in its timeline. The first op of a row takes the row's time; the
    others (an ADD that is part of its B) end with it and take none, since a rank is never in two ops at once.
    """

    def __init__(self, program: Program, rows: Sequence[RecordedRow]) -> None:
        self.rows, self.ranks = rows, program.ranks
        all_ops = (*program.ops, *(part for op in program.ops for part in op.parts))
        op_by_written = {(op.kind, value): op for op in all_ops for value in op.writes}
        recorded_ops = [
            (recorded[0], number, index)
            for number, row in enumerate(rows)
            for index, op in enumerate(row.ops)
            if (recorded := [op_by_written[op.kind, value] for value in op.writes if (op.kind, value) in op_by_written])
        ]
        self.ops = tuple(op for op, *_ in recorded_ops)
        # Index 2n is the start of row n, 2n + 1 its end; all ops of a row but the first start at its end.
        self._starts = [2 * number + (index > 0) for _, number, index in recorded_ops]
        self._ends = [2 * number + 1 for _, number, _ in recorded_ops]
        self._changes: tuple[Sequence[Any], ...] = ()
        self._devices: set[torch.device] = set()
        self.held: HeldBytes | None = None

    def begin(self, leaves_read: Iterable[Any]) -> Notes:
        """Return notes for a step that starts with these leaves as arguments."""
        if self.held is not None:
            return Notes(len(self.rows), self._devices, None)
        leaves = [leaf for leaf in leaves_read if isinstance(leaf, Tensor)]
        self._devices = {leaf.device for leaf in leaves if leaf.device.type not in ("cpu", "meta")}
        return Notes(len(self.rows), self._devices, leaves)

    def count_bytes(self, notes: Notes) -> HeldBytes:
        """Return the bytes that the rows of the first step hold, counted in the order of the rows."""
        if self.held is None:
            account, changes = Account(self.ranks, notes.caller_storages or ()), list[tuple[int, int, int, int]]()
            for number, (row, storages) in enumerate(zip(self.rows, notes.storages_by_row, strict=True)):
                if storages or row.values_freed:
                    # Not strict: in this process a row of another rank has written nothing.
                    pairs = zip(row.values_written, storages, strict=False)
                    changes_by_side = account.record_op(row.ops[0].rank, pairs, row.values_freed)
                    changes += [(2 * number + side, *change) for side in (0, 1) for change in changes_by_side[side]]
            self.held = HeldBytes(tuple(map(float, account.peak)), changes)
        return self.held

    def timeline(self, notes: Notes) -> Timeline:
        """Return the timeline of a step, with its ops in the program's order and the most bytes of each rank."""
        peak, changes = self.count_bytes(notes)
        step_start = notes.step_start
        time_of = [second - step_start for second in notes.times].__getitem__
        starts, ends = tuple(map(time_of, self._starts)), tuple(map(time_of, self._ends))
        if not self._changes:
            columns = [(ticks, float(ticks), rank, float(size), holder) for ticks, rank, size, holder in changes]
            self._changes = tuple(zip(*columns, strict=True)) or ((),) * 5
        ticks, *columns_after = self._changes
        memory_changes = [*zip(map(time_of, ticks), *columns_after, strict=True)]
        return Timeline(self.ops, starts, ends, self.ranks, peak, peak, memory_changes=memory_changes)


def storages_of(leaves: Iterable[Any]) -> Storages:
    """Return the bytes of each distinct storage of tensors, by a weak reference."""
    # By address a new storage could be taken for a freed one; while a weak reference exists its address is not reused.
    bytes_by_storage: Storages = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            bytes_by_storage[StorageWeakRef(storage)] = storage.nbytes()
    return bytes_by_storage
