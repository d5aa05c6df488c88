"""Copy values between a device and the host, or a partner, next to a rank's work: on a stream of its own.

    compute    0F0                  1B0              0B0        it waits for the LOAD
    copies         OFFLOAD(res[0,0])    LOAD(res[0,0])

An OFFLOAD keeps its source until the copy is over, of one at a time: where copies are slow, the next one waits. What
comes back has memory of the rank's own stream, and starts on its way next to the op before its place in the list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import copied, to_host
from fpipe.program import Value, kind_of
from fpipe.runtimes.lowering.lane import Lane, Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import AbstractTree, Instruction

Leaves = list[Any]
CPU = torch.device("cpu")
NEVER = sys.maxsize
NOT_NOTED = -1
"""The row of a copy that is a RECV, which a record does not show."""


class Parked(NamedTuple):
    """Leaves that wait elsewhere for a device, and the device that those are on which are to go there."""

    leaves: Leaves
    on: torch.device


Source = Callable[[bool], Parked | None]
"""Gives a value that is to come to a device; None if it is not there yet, unless it is told to wait."""


class Leaving(NamedTuple):
    """Leaves that are being copied, the event behind the copy, and how many left before."""

    leaves: Leaves
    over: torch.Event
    number: int


class Arriving(NamedTuple):
    """Leaves that are being copied to the device, the event behind the copy, and how many had left before it."""

    leaves: Leaves
    over: torch.Event
    left: int


class HostLane(Lane):
    """Copies from and to the device of a rank; those of each thread are on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream_by_device: dict[torch.device, torch.Stream] = {}
        super().__init__(self._make_stream_wait, on_streams=False)

    def begin(self, watch: Watch | None) -> None:
        """Start a step; one before may have ended with an error."""
        super().begin(watch)
        for stream in self._stream_by_device.values():
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        self._parked, self._arriving = dict[Value, Parked](), dict[Value, Arriving]()
        self._leaving, self._left = list[Leaving](), 0

    def offload(self, row: int, values: Sequence[Value], there: torch.device, *lists: Leaves) -> Sequence[Leaves]:
        """Start copies to another device, and return the leaves there."""
        made = list[Leaves]()
        for value, leaves in zip(values, lists, strict=True):
            self._release_sources(self._left - 1)
            with self._copying(there, row) as events:
                copy = to_host if there == CPU else partial(torch.Tensor.to, device=there, non_blocking=True)
                made.append(copied(leaves, self.device, copy))
            self._left += 1
            self._leaving.append(Leaving(leaves[:], events[1], self._left))
            self._parked[value] = Parked(made[-1][:], there)
            leaves.clear()
        return made

    def start(self, row: int, value: Value, source: Source, wait: bool = False) -> None:
        """Start to copy a value to the device, if it is there to start."""
        parked = None if value in self._arriving else source(wait)
        if parked is None:
            return
        stream = torch.accelerator.current_stream(self.device)

        def landing(flat: Tensor) -> Tensor:
            with stream:  # memory of the reader's stream, which hands it out again
                place = torch.empty_like(flat, device=self.device)
            return place.copy_(flat, non_blocking=True)

        with self._copying(parked.on, row) as events:
            leaves = copied(parked.leaves, parked.on, landing)
        self._arriving[value] = Arriving(leaves, events[1], self._left)

    def load(
        self, row: int, values: Sequence[Value], sources: Sequence[Source], works: list[Launched], *lists: Leaves
    ) -> Sequence[Leaves]:
        """Return the leaves of a LOAD, whose reader waits for them."""
        for value, source in zip(values, sources, strict=True):
            self.start(row, value, source, wait=True)
        for leaves in lists:
            leaves.clear()
        arriving = [self._arriving.pop(value) for value in values]
        works += [Launched(over, None, leaves, partial(self._release_sources, left)) for leaves, over, left in arriving]
        return [leaves for leaves, _, _ in arriving]

    def receive(self, values: Sequence[Value], sources: Sequence[Source]) -> Sequence[Leaves]:
        """Return the leaves of a RECV from a rank on the host, for which the rank's stream waits."""
        works = list[Launched]()
        made = self.load(NOT_NOTED, values, sources, works)
        for launched in works:
            self._make_stream_wait(launched, "")
            assert launched.finish is not None
            launched.finish()
        return made

    def parked(self, value: Value) -> Source:
        """Return the source of a LOAD of a value that went away."""
        return lambda wait: self._parked.pop(value, None)

    def _make_stream_wait(self, launched: Launched, cell: str) -> None:
        torch.accelerator.current_stream(self.device).wait_event(launched.work)

    @contextmanager
    def _copying(self, there: torch.device, row: int) -> Generator[list[torch.Event]]:
        """Queue copies to or from there, behind what the rank has queued; then the events before and behind them are
        in the list."""
        computed, events = torch.accelerator.current_stream(self.device).record_event(), list[torch.Event]()
        with ExitStack() as entered:
            for device in (there, self.device):
                if device != CPU:
                    entered.enter_context(self._stream_by_device.setdefault(device, torch.Stream(device)))
            stream = self._stream_by_device[self.device]
            stream.wait_event(computed)
            events.append(stream.record_event(torch.Event(self.device, enable_timing=True)))
            yield events
            events.append(stream.record_event(torch.Event(self.device, enable_timing=True)))
            if row != NOT_NOTED:
                self.notes.copied(row, *events)

    def _release_sources(self, number: int) -> None:
        """Release the sources that left up to this one, once their copies are over."""
        while self._leaving and self._leaving[0].number <= number:
            torch.accelerator.current_stream(self.device).wait_event(self._leaving[0].over)
            del self._leaving[0]


def lanes_of(
    instructions: Iterable[Instruction], trees: Mapping[Value, AbstractTree], devices: Sequence[torch.device]
) -> dict[int, HostLane]:
    """Return a lane for each rank on an accelerator: one among `devices`, or the one that it offloads from."""
    device_by_rank = {rank: device for rank, device in enumerate(devices) if _is_accelerator(device)}
    for op in (instruction.ops[0] for instruction in instructions):
        facts = (leaf for value in op.reads for leaf in trees[value].leaves if isinstance(leaf, Fact))
        device = next((leaf.aval.device for leaf in facts), CPU) if op.kind == "OFFLOAD" else CPU
        if _is_accelerator(device):
            device_by_rank.setdefault(op.rank, device)
    return {rank: HostLane(device) for rank, device in device_by_rank.items()}


def made_async(
    instructions: Iterable[Instruction],
    lane_by_rank: Mapping[int, HostLane],
    devices: Sequence[torch.device] = (),
    sources: Mapping[Value, tuple[int, Source]] | None = None,
    rows: Sequence[int] = (),
) -> list[Instruction]:
    """Replace OFFLOADs by the start of a copy, and start LOADs, and RECVs from `sources`, at the op before them."""
    replaced = [*instructions]
    # A value that is parked is there already: nobody waits for it.
    source_by_value, last = dict(sources or {}), dict[int, int]()
    starts: dict[int, list[Callable[[], None]]] = {}
    launches: dict[int, dict[int, Launch]] = {rank: {} for rank in lane_by_rank}
    for at, instruction in enumerate(replaced):
        op = instruction.ops[0]
        lane, row = lane_by_rank.get(op.rank), rows[at] if rows else at
        if lane is None:
            continue
        there = _place(op.writes[0], lane.device, devices) if op.kind == "OFFLOAD" and not op.how else lane.device
        if there != lane.device:
            replaced[at] = instruction._replace(run=partial(lane.offload, row, op.writes, there))
            source_by_value |= {value: (NEVER, lane.parked(value)) for value in op.writes}
        if op.kind in ("LOAD", "RECV") and op.reads[0] in source_by_value:
            from_ = [source_by_value[value][1] for value in op.reads]
            if op.kind == "LOAD":
                launches[op.rank][at] = Launch(partial(lane.load, row, op.writes, from_), op.writes)
            else:
                replaced[at] = instruction._replace(run=partial(lane.receive, op.writes, from_))
            before = last.get(op.rank, at)
            for value, read, source in zip(op.writes, op.reads, from_, strict=True):
                waits = bool(rows) and source_by_value[read][0] < rows[before]
                noted = row if op.kind == "LOAD" else NOT_NOTED
                starts.setdefault(before, []).append(partial(lane.start, noted, value, source, waits))
        if kind_of(op.kind).time:
            last[op.rank] = at
    for at, early in starts.items():
        if at not in launches[replaced[at].ops[0].rank]:  # a LOAD that no op stands before starts at its own place
            replaced[at] = replaced[at]._replace(run=partial(_after, early, replaced[at].run))
    for rank, lane in lane_by_rank.items():
        replaced = lane.made_async(replaced, rank, launches[rank], rows)
    return replaced


def _after(starts: Sequence[Callable[[], None]], run: Callable[..., Any], *lists: Leaves) -> Any:
    for start in starts:
        start()
    return run(*lists)


def _place(parked: Value, local: torch.device, devices: Sequence[torch.device]) -> torch.device:
    """Return where a value waits: on the host, or on the device of another rank."""
    where = parked.at.rpartition("@")[2]
    return CPU if where == "host" else devices[int(where)] if devices else local


def _is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")
