"""Launch work at its op and wait for it at its first reader: collectives, and copies between a device and the host.

    REDUCE(all[3])  1B1  ADD(sum[3])        -->        launch REDUCE(all[3])  1B1  wait for it, ADD(sum[3])

`Replicas`, `ExchangeLane` and `HostLane` say what is launched; when it is awaited is decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fpipe.meaning.recorder import Notes, NotesBeside
from fpipe.program import Value
from fpipe.runtimes.lowering.lowered import Instruction

Leaves = list[Any]
See = Callable[[Value, Any], None]


class Watch(NamedTuple):
    """Who looks at what instructions write: notes, the check for finite numbers, `see`; and whose clock counts."""

    notes: Notes | None
    check_finite: bool
    see: See | None
    device: torch.device | None = None


class Launched(NamedTuple):
    """Work in flight.

    Attributes:
        work: has `wait`, and `is_completed` where the host can ask.
        sent, written: the tensors that it reads and writes, which live until it is awaited.
        finish: what makes the result of what was written.
        group: the name of the process group that carries it.
    """

    work: Any
    sent: Any
    written: Any
    finish: Callable[[], object] | None = None
    group: str = ""


class Flight(NamedTuple):
    """Works that an instruction, by its row and cell, has launched and nobody has awaited yet."""

    row: int
    cell: str
    works: list[Launched]


class Launch(NamedTuple):
    """How an instruction launches: `run(works, *lists)` appends to the works, and its `values` are written later."""

    run: Callable[..., Any]
    values: Sequence[Value]


class Lane(threading.local):
    """The flights of one rank in one step; `wait(launched, cell)` waits for a work.

    It is local to a thread: a step in one process may be called by several threads at once.
    """

    def __init__(self, wait: Callable[[Launched, str], None], on_streams: bool) -> None:
        self._wait, self._on_streams = wait, on_streams
        self._stream_by_group: dict[str, torch.Stream] = {}
        self.begin(None)

    def begin(self, watch: Watch | None) -> None:
        """Start a step with nothing in flight. Where each value is checked, it is awaited where it is made."""
        self.notes = NotesBeside(watch and watch.notes, watch and watch.device)
        self.at_once = watch is not None and watch.check_finite
        self.flights: dict[Value, Flight] = {}
        self.last_by_group: dict[str, tuple[Any, str]] = {}

    def made_async(
        self,
        instructions: Iterable[Instruction],
        rank: int,
        launches: Mapping[int, Launch],
        rows: Sequence[int] = (),
    ) -> list[Instruction]:
        """Replace the instructions at these places by their launch, and each first reader by a wait and the read.

        Args:
            instructions: those of a program, or of one rank, which are in these `rows` of the program.
            rank: whose they are.
            launches: by their place among the instructions.
        """
        replaced, pending = list[Instruction](), set[Value]()
        for place, instruction in enumerate(instructions):
            op, row = instruction.ops[0], rows[place] if rows else place
            if op.rank == rank:
                awaited = [value for part in instruction.ops for value in part.reads if value in pending]
                pending.difference_update(awaited)
                if place in launches:
                    run, values = launches[place]
                    instruction = instruction._replace(run=partial(self._launch, row, op.cell, values, run))
                    pending.update(values)
                if awaited:
                    instruction = instruction._replace(run=partial(self._read, row, awaited, instruction.run))
            replaced.append(instruction)
        return replaced

    def wait_for(self, value: Value) -> None:
        """Wait for what brings a value; nothing if that has been awaited."""
        flight = self.flights.pop(value, None)
        if flight is not None:
            self.wait_for_flight(flight)

    def wait_for_flight(self, flight: Flight) -> None:
        """Wait for all works of an instruction, of which several values may be."""
        for launched in flight.works:
            self._wait(launched, flight.cell)
            if launched.finish is not None:
                launched.finish()
        if flight.works:
            self.notes.over_by_now(flight.row)
        flight.works.clear()

    def wait_for_all(self) -> None:
        """Wait for what nobody has read."""
        for value in [*self.flights]:
            self.wait_for(value)

    def _launch(self, row: int, cell: str, values: Sequence[Value], run: Callable[..., Any], *lists: Leaves) -> Any:
        flight = Flight(row, cell, [])
        self.flights.update(dict.fromkeys(values, flight))
        results = run(flight.works, *lists)
        for launched in flight.works:
            if self._on_streams:
                self.last_by_group[launched.group] = launched.work, cell
            if self.notes.notes is not None:
                self._note_end(row, launched)
        if self.at_once:
            self.wait_for_flight(flight)
        return results

    def _read(self, row: int, values: Sequence[Value], run: Callable[..., Any], *lists: Leaves) -> Any:
        for value in values:
            self.wait_for(value)
        self.notes.resumed(row)
        return run(*lists)

    def _note_end(self, row: int, launched: Launched) -> None:
        """Note when a work is over, by an event in a stream for which nothing waits, or by its future."""
        if self._on_streams:
            device = launched.sent.device
            with self._stream_by_group.setdefault(launched.group, torch.Stream(device)) as stream:
                launched.work.wait()
                self.notes.over(row, stream.record_event(torch.Event(device, enable_timing=True)))
        elif hasattr(launched.work, "get_future"):
            launched.work.get_future().add_done_callback(partial(self.notes.ended, row))
