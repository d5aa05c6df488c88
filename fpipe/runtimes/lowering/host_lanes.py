"""Copy values between a device and the host, or another rank's device, on a stream next to the computation.

    compute    0F0                  1B0              0B0        0B0 waits for the LOAD
    copies         OFFLOAD(res[0,0])    LOAD(res[0,0])

An OFFLOAD keeps its source alive until the copy is done. At most two sources wait: where copies are slow, the next
OFFLOAD waits for the one before the last. A LOAD starts next to the op before it in the rank's order, and writes into
memory of the compute stream, so that only its reader waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import copy_tensors, copy_to_pinned
from fpipe.program import Value, kind_of
from fpipe.runtimes.lowering.lane import Lane, Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import AbstractTree, Instruction

Leaves = list[Any]
CPU = torch.device("cpu")
NOT_NOTED = -1
"""The row of a copy that is a RECV, which a record does not show."""


class Parked(NamedTuple):
    """Leaves that are parked on the host or on another device, and that device."""

    leaves: Leaves
    device: torch.device


Source = Callable[[bool], Parked | None]
"""Returns a parked value, or None if it has not arrived yet; with True as argument it waits for it instead."""


class OutgoingCopy(NamedTuple):
    """Sources of a copy away from the device, the event behind the copy, and its number among the offloads."""

    leaves: Leaves
    done_event: torch.Event
    number: int


class IncomingCopy(NamedTuple):
    """Leaves of a copy to the device, the event behind the copy, and how many offloads were queued before it."""

    leaves: Leaves
    done_event: torch.Event
    offload_count: int


class HostLane(Lane):
    """The lane of a rank's copies from and to its device, with copy streams for each thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream_by_device: dict[torch.device, torch.Stream] = {}
        super().__init__(self._make_stream_wait, on_streams=False)

    def begin(self, watch: Watch | None) -> None:
        """Start a step."""
        super().begin(watch)
        # A step before this one may have ended with an error, and left copies behind.
        for stream in self._stream_by_device.values():
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        self._parked, self._incoming = dict[Value, Parked](), dict[Value, IncomingCopy]()
        self._outgoing, self._offload_count = list[OutgoingCopy](), 0

    def offload(self, row: int, values: Sequence[Value], target: torch.device, *lists: Leaves) -> Sequence[Leaves]:
        """Start copying values to another device, and return their leaves there."""
        results = list[Leaves]()
        for value, leaves in zip(values, lists, strict=True):
            # A source lives until its copy is done. Wait for the one before the last: then two are alive at most, and
            # the copy that is queued now can start as soon as the one before it is done.
            self._release_sources(self._offload_count - 1)
            with self._copying(target, row) as events:
                copy = copy_to_pinned if target == CPU else partial(torch.Tensor.to, device=target, non_blocking=True)
                results.append(copy_tensors(leaves, self.device, copy))
            self._offload_count += 1
            self._outgoing.append(OutgoingCopy(leaves[:], events[1], self._offload_count))
            self._parked[value] = Parked(results[-1][:], target)
            leaves.clear()
        return results

    def start(self, row: int, value: Value, source: Source, wait: bool = False) -> None:
        """Start copying a value to the device, if it is parked already or `wait` says to wait for it."""
        parked = None if value in self._incoming else source(wait)
        if parked is None:
            return
        stream = torch.accelerator.current_stream(self.device)

        def copy_to_device(flat: Tensor) -> Tensor:
            # The allocator gives memory back to the stream that it was taken on: take it on the reader's.
            with stream:
                target = torch.empty_like(flat, device=self.device)
            return target.copy_(flat, non_blocking=True)

        with self._copying(parked.device, row) as events:
            leaves = copy_tensors(parked.leaves, parked.device, copy_to_device)
        self._incoming[value] = IncomingCopy(leaves, events[1], self._offload_count)

    def load(
        self, row: int, values: Sequence[Value], sources: Sequence[Source], works: list[Launched], *lists: Leaves
    ) -> Sequence[Leaves]:
        """Return the leaves of a LOAD, whose reader waits for them."""
        for value, source in zip(values, sources, strict=True):
            self.start(row, value, source, wait=True)
        for leaves in lists:
            leaves.clear()
        incoming = [self._incoming.pop(value) for value in values]
        works += [
            Launched(done_event, None, leaves, partial(self._release_sources, offload_count))
            for leaves, done_event, offload_count in incoming
        ]
        return [leaves for leaves, _, _ in incoming]

    def receive(self, values: Sequence[Value], sources: Sequence[Source]) -> Sequence[Leaves]:
        """Return the leaves of a RECV from a rank on the host; the compute stream waits for the copy."""
        works = list[Launched]()
        results = self.load(NOT_NOTED, values, sources, works)
        for launched in works:
            self._make_stream_wait(launched, "")
            assert launched.finish is not None
            launched.finish()
        return results

    def parked(self, value: Value) -> Source:
        """Return the source of a LOAD: the value that an OFFLOAD parked."""
        return lambda wait: self._parked.pop(value, None)

    def _make_stream_wait(self, launched: Launched, cell: str) -> None:
        torch.accelerator.current_stream(self.device).wait_event(launched.work)

    @contextmanager
    def _copying(self, remote: torch.device, row: int) -> Generator[list[torch.Event]]:
        """Queue copies to or from a device behind the rank's work; yields a list for the events before and after."""
        computed, events = torch.accelerator.current_stream(self.device).record_event(), list[torch.Event]()
        with ExitStack() as entered:
            for device in (remote, self.device):
                if device != CPU:
                    entered.enter_context(self._stream_by_device.setdefault(device, torch.Stream(device)))
            stream = self._stream_by_device[self.device]
            stream.wait_event(computed)
            events.append(stream.record_event(torch.Event(self.device, enable_timing=True)))
            yield events
            events.append(stream.record_event(torch.Event(self.device, enable_timing=True)))
            if row != NOT_NOTED:
                self.notes.note_copy(row, *events)

    def _release_sources(self, number: int) -> None:
        """Let go of the sources of offloads up to this number, behind their copies on the compute stream."""
        while self._outgoing and self._outgoing[0].number <= number:
            torch.accelerator.current_stream(self.device).wait_event(self._outgoing[0].done_event)
            del self._outgoing[0]


def lanes_of(
    instructions: Iterable[Instruction], trees: Mapping[Value, AbstractTree], devices: Sequence[torch.device]
) -> dict[int, HostLane]:
    """Return a copy lane for each rank on an accelerator, which `devices` name, or the values that it offloads."""
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
    """Replace OFFLOADs by asynchronous copies, and start LOADs, and RECVs from `sources`, one op early.

    An index counts `instructions`; a row counts the whole program, by which all threads and records go.

    Args:
        instructions: the instructions of a program or of one rank.
        lane_by_rank: the copy lane of each rank that has one.
        devices: the device of each rank, if build was told.
        sources: for a value that a thread receives from a host rank: the row behind which to wait, and its source.
        rows: the row of each instruction in the program, where these are not all of it.
    """
    replaced = [*instructions]
    row_by_index = rows or range(len(replaced))
    wait_row_by_value = {value: row for value, (row, _) in (sources or {}).items()}
    source_by_value = {value: source for value, (_, source) in (sources or {}).items()}
    launches: dict[int, dict[int, Launch]] = {rank: {} for rank in lane_by_rank}
    # Copies to a device start at the index of the rank's op before them.
    copy_starters = defaultdict[int, list[Callable[[], None]]](list)
    last_timed_index: dict[int, int] = {}

    def may_wait_at(index: int, value: Value) -> bool:
        # Between threads an early start may come before the value does. It may wait for it only if the row behind which
        # to wait is before this one: then no circle of waits can come up. What this rank has parked needs no wait.
        return value in wait_row_by_value and wait_row_by_value[value] < row_by_index[index]

    for index, instruction in enumerate(replaced):
        op = instruction.ops[0]
        lane, row = lane_by_rank.get(op.rank), row_by_index[index]
        if lane is None:
            continue
        # 1. An OFFLOAD becomes the start of a copy. One that casts computes, and stays as it is.
        is_plain_offload = op.kind == "OFFLOAD" and not op.options
        target = _parking_device(op.writes[0], lane.device, devices) if is_plain_offload else lane.device
        if target != lane.device:
            replaced[index] = instruction._replace(run=partial(lane.offload, row, op.writes, target))
            source_by_value |= {value: lane.parked(value) for value in op.writes}
        # 2. A LOAD, or a RECV from a host rank, waits for a copy that has started next to the op before it.
        if op.kind in ("LOAD", "RECV") and op.reads[0] in source_by_value:
            op_sources = [source_by_value[value] for value in op.reads]
            if op.kind == "LOAD":
                launches[op.rank][index] = Launch(partial(lane.load, row, op.writes, op_sources), op.writes)
            else:
                replaced[index] = instruction._replace(run=partial(lane.receive, op.writes, op_sources))
            start_index = last_timed_index.get(op.rank, index)
            noted_row = row if op.kind == "LOAD" else NOT_NOTED
            copy_starters[start_index] += [
                partial(lane.start, noted_row, copy, source, may_wait_at(start_index, original))
                for copy, original, source in zip(op.writes, op.reads, op_sources, strict=True)
            ]
        if kind_of(op.kind).time:
            last_timed_index[op.rank] = index
    # 3. Let the op before each copy start it. A LOAD without an op before it starts in its own place.
    for index, starters in copy_starters.items():
        if index not in launches[replaced[index].ops[0].rank]:
            replaced[index] = replaced[index]._replace(run=partial(_run_after_starters, starters, replaced[index].run))
    # 4. Let readers wait.
    for rank, lane in lane_by_rank.items():
        replaced = lane.made_async(replaced, rank, launches[rank], rows)
    return replaced


def _run_after_starters(starters: Sequence[Callable[[], None]], run: Callable[..., Any], *lists: Leaves) -> Any:
    for start in starters:
        start()
    return run(*lists)


def _parking_device(parked: Value, local: torch.device, devices: Sequence[torch.device]) -> torch.device:
    """Return the device on which an offloaded value is parked: the host, or another rank's device."""
    location = parked.location.rpartition("@")[2]
    return CPU if location == "host" else devices[int(location)] if devices else local


def _is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")
