"""Copy values between a device and the host, or a partner, beside a rank's work: on a stream of its own.

    compute    0F0                  1B0              0B0        it waits for the LOAD
    copies         OFFLOAD(res[0,0])    LOAD(res[0,0])

An OFFLOAD keeps its source until the copy is over, of one at a time: where copies are slow, the next one waits. What
comes back has memory of the rank's own stream, and starts on its way beside the op before its place in the list.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import copied, to_host
from fpipe.program import Op, Value, kind_of
from fpipe.runtimes.lowering.abstract_tree import AbstractTree
from fpipe.runtimes.lowering.lowered import Instruction

Leaves = list[Any]
CPU = torch.device("cpu")
NEVER = sys.maxsize


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


class HostLane(threading.local):
    """Copies from and to the device of a rank; those of each thread are on streams of their own.

    Attributes:
        spans: of each value that went away or came back in this step, the events before and behind its copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.spans = device, dict[Value, tuple[torch.Event, torch.Event]]()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._waiting, self._coming = dict[Value, Parked](), dict[Value, tuple[Leaves, int]]()
        self._leaving, self._left = list[Leaving](), 0

    def begin(self) -> None:
        """A step starts; one before may have ended with an error."""
        for stream in self._streams.values():
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        self._waiting.clear()
        self._coming.clear()
        self._leaving.clear()
        self.spans.clear()

    def away(self, values: Sequence[Value], there: torch.device, *lists: Leaves) -> Sequence[Leaves]:
        """OFFLOAD: the leaves there, once they are copied."""
        made = list[Leaves]()
        for value, leaves in zip(values, lists, strict=True):
            self._let_go(self._left - 1)
            with self._copying(value, there):
                copy = to_host if there == CPU else partial(torch.Tensor.to, device=there, non_blocking=True)
                made.append(copied(leaves, self.device, copy))
            self._left += 1
            self._leaving.append(Leaving(leaves[:], self.spans[value][1], self._left))
            self._waiting[value] = Parked(made[-1][:], there)
            leaves.clear()
        return made

    def start(self, value: Value, source: Source, wait: bool = False) -> None:
        """A value starts on its way to the device, if it is there to start."""
        found = None if value in self._coming else source(wait)
        if found is None:
            return
        now = torch.accelerator.current_stream(self.device)

        def landing(flat: Tensor) -> Tensor:
            with now:  # memory of the reader's stream, which hands it out again
                place = torch.empty_like(flat, device=self.device)
            return place.copy_(flat, non_blocking=True)

        with self._copying(value, found.on):
            leaves = copied(found.leaves, found.on, landing)
        self._coming[value] = leaves, self._left

    def take(self, values: Sequence[Value], sources: Sequence[Source], *lists: Leaves) -> Sequence[Leaves]:
        """LOAD: the leaves, for whoever has `arrived`."""
        for value, source in zip(values, sources, strict=True):
            self.start(value, source, wait=True)
        for leaves in lists:
            leaves.clear()
        return [self._coming[value][0] for value in values]

    def receive(self, values: Sequence[Value], sources: Sequence[Source]) -> Sequence[Leaves]:
        """RECV from a rank on the host: the leaves, for which the rank's stream waits."""
        made = self.take(values, sources)
        for value in values:
            self.arrived(value)
        return made

    def arrived(self, value: Value) -> None:
        """Make the rank's stream wait for a value."""
        _, left = self._coming.pop(value)
        torch.accelerator.current_stream(self.device).wait_event(self.spans[value][1])
        self._let_go(left)

    def parked(self, value: Value) -> Source:
        """The source of a LOAD of a value that went away."""
        return lambda wait: self._waiting.pop(value, None)

    @contextmanager
    def _copying(self, value: Value, there: torch.device) -> Generator[None]:
        """Queue copies to or from there, behind what the rank has queued."""
        made = torch.accelerator.current_stream(self.device).record_event()
        with ExitStack() as entered:
            for device in (there, self.device):
                if device != CPU:
                    entered.enter_context(self._streams.setdefault(device, torch.Stream(device)))
            stream = self._streams[self.device]
            stream.wait_event(made)
            began = stream.record_event(self._timed())
            yield
            self.spans[value] = began, stream.record_event(self._timed())

    def _timed(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)

    def _let_go(self, number: int) -> None:
        """Let go of the sources that left up to this one, once their copies are over."""
        while self._leaving and self._leaving[0].number <= number:
            torch.accelerator.current_stream(self.device).wait_event(self._leaving[0].over)
            del self._leaving[0]


def lanes_of(
    instructions: Iterable[Instruction], trees: Mapping[Value, AbstractTree], devices: Sequence[torch.device]
) -> dict[int, HostLane]:
    """The lane of each rank that computes on an accelerator: of those that offload, and of all that have `devices`."""
    found = {rank: device for rank, device in enumerate(devices) if _is_accelerator(device)}
    for op in (one.ops[0] for one in instructions):
        facts = (leaf for value in op.reads for leaf in trees[value].leaves if isinstance(leaf, Fact))
        at = next((leaf.aval.device for leaf in facts), CPU) if op.kind == "OFFLOAD" else CPU
        if _is_accelerator(at):
            found.setdefault(op.rank, at)
    return {rank: HostLane(device) for rank, device in found.items()}


def beside(
    instructions: Iterable[Instruction],
    lanes: Mapping[int, HostLane],
    devices: Sequence[torch.device] = (),
    sources: Mapping[Value, tuple[int, Source]] | None = None,
    rows: Sequence[int] = (),
) -> list[Instruction]:
    """Instructions of which OFFLOADs only start, and LOADs, and RECVs from `sources`, beside the op before them."""
    made = [*instructions]
    known, pending = {**(sources or {})}, set[Value]()  # what is parked is there or not: nobody waits for it
    first, last = dict[int, int](), dict[int, int]()
    starts: dict[int, list[tuple[Value, Source, bool]]] = {}
    arrives: dict[int, list[Value]] = {}
    for at, one in enumerate(made):
        op = one.ops[0]
        lane = lanes.get(op.rank)
        if lane is None:
            continue
        first.setdefault(op.rank, at)
        arrives[at] = [value for part in one.ops for value in part.reads if value in pending]
        pending.difference_update(arrives[at])
        there = _place(op.writes[0], lane.device, devices) if op.kind == "OFFLOAD" and not op.how else lane.device
        if there != lane.device:
            made[at] = one._replace(run=partial(lane.away, op.writes, there))
            known |= {value: (NEVER, lane.parked(value)) for value in op.writes}
        if op.kind in ("LOAD", "RECV") and op.reads[0] in known:
            each = [known[value][1] for value in op.reads]
            made[at] = one._replace(run=partial(lane.take if op.kind == "LOAD" else lane.receive, op.writes, each))
            before = last.get(op.rank, at)
            starts.setdefault(before, []).extend(
                (value, source, bool(rows) and known[read][0] < rows[before])
                for value, read, source in zip(op.writes, op.reads, each, strict=True)
            )
            pending.update(op.writes if op.kind == "LOAD" else ())
        if kind_of(op.kind).time:
            last[op.rank] = at
    for at, one in enumerate(made):
        lane = lanes.get(one.ops[0].rank)
        opens = first.get(one.ops[0].rank) == at
        if lane is not None and (opens or arrives[at] or at in starts):
            made[at] = one._replace(run=partial(_beside, lane, opens, arrives[at], starts.get(at, ()), one.run))
    return made


def span_of(lanes: Mapping[int, HostLane], op: Op) -> tuple[torch.Event, torch.Event] | None:
    """Events before and behind the copy of an OFFLOAD or LOAD, in the thread that ran it."""
    lane = lanes.get(op.rank)
    return None if lane is None else lane.spans.get(op.writes[0])


def _beside(
    lane: HostLane,
    opens: bool,
    arrives: Sequence[Value],
    starts: Sequence[tuple[Value, Source, bool]],
    run: Callable[..., Any],
    *lists: Leaves,
) -> Any:
    if opens:
        lane.begin()
    for value in arrives:
        lane.arrived(value)
    for value, source, waits in starts:
        lane.start(value, source, waits)
    return run(*lists)


def _place(away: Value, own: torch.device, devices: Sequence[torch.device]) -> torch.device:
    """Where a value waits: on the host, or on the device of another rank."""
    where = away.at.rpartition("@")[2]
    return CPU if where == "host" else devices[int(where)] if devices else own


def _is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")
