"""Record a step as it runs: when each op did, and the bytes of distinct storages on each rank, the caller's aside.

    row 0: 0F0    from 0.1 to 3.2    + y, res        --> timeline -->        0F0 from 0.1 to 3.2, rank 0 holds 8192

A step only notes times, one as each row ends: the next of that rank starts then. On an accelerator they are events in
its stream, for which nothing waits. What is held is counted in the first step: the next run the same rows for the same
shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.program import Op, Program, Value
from fpipe.timing.memory import Account
from fpipe.timing.timeline import Timeline
from fpipe.torch_internals import StorageWeakRef

Storages = dict[Hashable, int]
"""Bytes of storages, each under what tells it from the others."""


class RecordedRow(NamedTuple):
    """A row runs as one: its ops, the values that it writes, and those that nobody reads after it."""

    ops: Sequence[Op]
    written: Sequence[Value]
    dead: Sequence[Value]


class Held(NamedTuple):
    """The most bytes on each rank, and every change: at which time (the start of row n is 2n, its end 2n + 1), on which
    rank, and by how much."""

    peak: tuple[float, ...]
    changes: list[tuple[int, int, int]]


class Notes:
    """Notes of one step: for each row when it started and ended, side by side, and, if asked, the storages that it
    wrote, where those that were `given` do not count."""

    def __init__(self, rows: int, devices: Iterable[torch.device], given: Iterable[Tensor] | None) -> None:
        self.times = [0.0] * (2 * rows)
        self.devices = devices
        self.given = None if given is None else storages(given)
        self.seen: list[list[Storages]] = [[]] * rows
        self.began = time.perf_counter()

    def note(self, row: int, written: Iterable[Iterable[Any]], started: float) -> None:
        """A row that has just run, and the leaves of each value that it wrote."""
        for device in self.devices:  # an op is over when its work is
            torch.accelerator.synchronize(device)
        self.times[2 * row : 2 * row + 2] = started, time.perf_counter()
        self.see(row, written)

    def ended(self, rows: Sequence[int], ticks: Sequence[float], waits: Collection[int]) -> None:
        """Rows of one rank that have run: when it began, and when each ended. Those that only `waits` did no work."""
        times, started = self.times, ticks[0]
        for row, ended in zip(rows, ticks[1:], strict=True):
            times[2 * row] = ended if row in waits else started
            times[2 * row + 1] = started = ended

    def see(self, row: int, written: Iterable[Iterable[Any]]) -> None:
        """Note the storages that a row wrote, where they are counted."""
        if self.given is not None:
            self.seen[row] = [*map(storages, written)]


class StreamClock:
    """Time of the host, or of the current stream of an accelerator."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.tick: Callable[[], Any] = time.perf_counter
        if device is not None:
            stream = torch.accelerator.current_stream(device)
            self.tick = lambda: stream.record_event(torch.Event(device, enable_timing=True))

    def seconds(self, ticks: Sequence[Any]) -> Sequence[float]:
        """Ticks as times of the host, once all have come, of which some may be its own."""
        if self.device is None:
            return ticks
        for tick in ticks:
            if not isinstance(tick, float):
                tick.synchronize()
        now, last = time.perf_counter(), ticks[-1]
        return [tick if isinstance(tick, float) else now - tick.elapsed_time(last) / 1e3 for tick in ticks]


class NotesBeside:
    """Notes of what runs beside the rows of a rank: when it was over, and when rows went on that waited for it. There
    are none unless there are `notes` of the rows."""

    def __init__(self, notes: Notes | None, device: torch.device | None) -> None:
        self.notes, self._clock = notes, StreamClock(device)
        self._found: dict[int, Any] = {}

    def over(self, row: int, at: Any = None) -> None:
        """Note that what a row has started is over: now, or when an event is or a host says."""
        if self.notes is not None:
            self._found[2 * row + 1] = self._clock.tick() if at is None else at

    def over_by_now(self, row: int) -> None:
        """Note that what a row has started has been awaited, where nobody has noted its end."""
        if self.notes is not None and 2 * row + 1 not in self._found:
            self.over(row)

    def copied(self, row: int, began: torch.Event, ended: torch.Event) -> None:
        """Note the events before and behind a copy."""
        self._found[2 * row], self._found[2 * row + 1] = began, ended

    def ended(self, row: int, _: Any) -> None:
        """Note, when a collective's future is done, that what a row has started is over."""
        self.over(row, time.perf_counter())

    def resumed(self, row: int) -> None:
        """Note that a row has waited, and begins now."""
        if self.notes is not None:
            self._found[2 * row] = self._clock.tick()

    def add(self, posted: Iterable[int] = ()) -> None:
        """Put all into the notes of rows that have run. What is `posted` begins when its rank was done with that."""
        if self.notes is None:
            return
        times, begun = self.notes.times, {row: self.notes.times[2 * row + 1] for row in posted}
        found = [*self._found.items()]  # a thread of the group's may still add to it
        seconds = self._clock.seconds([*(at for _, at in found), self._clock.tick()])
        for (place, _), one in zip(found, seconds, strict=False):
            times[place] = one
        for row, one in begun.items():
            times[2 * row] = min(one, times[2 * row + 1])


class Recorder:
    """Timelines of the steps that run a program's rows, and, after the first one, the bytes that they hold.

    What runs is that program `with_transfers`, so that a copy counts on its rank whether its RECV is an op or not;
    SENDs and RECVs that it has not are not told. The first op of a row takes its time, the others (an ADD that is part
    of its B) end with it and take none: a rank is never in two ops at once.
    """

    def __init__(self, program: Program, rows: Sequence[RecordedRow]) -> None:
        self.rows, self.ranks = rows, program.ranks
        every = (*program.ops, *(part for op in program.ops for part in op.parts))
        told = {(op.kind, value): op for op in every for value in op.writes}
        found = [
            (known[0], number, place)
            for number, row in enumerate(rows)
            for place, op in enumerate(row.ops)
            if (known := [told[op.kind, value] for value in op.writes if (op.kind, value) in told])
        ]
        self.ops = tuple(op for op, *_ in found)
        self._starts = [2 * number + (place > 0) for _, number, place in found]
        self._ends = [2 * number + 1 for _, number, _ in found]
        self._changes: tuple[Sequence[Any], ...] = ()
        self._devices: set[torch.device] = set()
        self.held: Held | None = None

    def begin(self, given: Iterable[Any]) -> Notes:
        """A step starts, with the leaves that it was given."""
        if self.held is not None:
            return Notes(len(self.rows), self._devices, None)
        leaves = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self._devices = {leaf.device for leaf in leaves if leaf.device.type not in ("cpu", "meta")}
        return Notes(len(self.rows), self._devices, leaves)

    def counted(self, notes: Notes) -> Held:
        """Bytes that are held, in the order of the rows."""
        if self.held is None:
            account, changes = Account(self.ranks, notes.given or ()), list[tuple[int, int, int]]()
            for number, (row, seen) in enumerate(zip(self.rows, notes.seen, strict=True)):
                if seen or row.dead:
                    pairs = zip(row.written, seen, strict=False)  # another rank's row has written nothing here
                    both = account.note(row.ops[0].rank, pairs, row.dead)
                    changes += [(2 * number + at, rank, (size, -size)[at]) for at in (0, 1) for rank, size in both[at]]
            self.held = Held(tuple(map(float, account.peak)), changes)
        return self.held

    def timeline(self, notes: Notes) -> Timeline:
        """When each op ran, in the order of the program, and the most bytes each rank held."""
        peak, changes = self.counted(notes)
        began = notes.began
        time_of = [now - began for now in notes.times].__getitem__
        starts, ends = tuple(map(time_of, self._starts)), tuple(map(time_of, self._ends))
        if not self._changes:
            columns = [(at, float(at), rank, float(size)) for at, rank, size in changes]
            self._changes = tuple(zip(*columns, strict=True)) or ((),) * 4
        at, *rest = self._changes
        steps = [*zip(map(time_of, at), *rest, strict=True)]
        return Timeline(self.ops, starts, ends, self.ranks, peak, peak, steps=steps)


def storages(leaves: Iterable[Any]) -> Storages:
    """The distinct storages of tensors, each under a weak reference, so that none is taken for one that was there."""
    found: Storages = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            found[StorageWeakRef(storage)] = storage.nbytes()
    return found
