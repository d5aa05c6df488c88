"""Launch work at its op and wait for it at its first reader: collectives, and copies between a device and the host.

    REDUCE(all[3])  1B1  ADD(sum[3])        -->        launch REDUCE(all[3])  1B1  wait for it, ADD(sum[3])

`Replicas`, `ExchangeLane` and `HostLane` say what is launched. `Lane` decides when it is awaited: a program names the
first reader of each value, so nobody else has to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fpipe.meaning.recorder import AsyncNotes, Notes
from fpipe.program import Value
from fpipe.runtimes.lowering.lowered import Instruction

Leaves = list[Any]
See = Callable[[Value, Any], None]


class Watch(NamedTuple):
    """The observers of what instructions write in one step.

    Attributes:
        notes: the notes of a step that is recorded.
        check_finite: whether each value is checked for finite numbers.
        see: a function that is called with each value and its leaves.
        device: the device whose clock counts; None for the host's.
    """

    notes: Notes | None
    check_finite: bool
    see: See | None
    device: torch.device | None = None


class Launched(NamedTuple):
    """Work in flight.

    Attributes:
        work: has `wait`, and `is_completed` where the host can ask.
        inputs, outputs: the tensors that it reads and writes. They live until it is awaited, so that nothing else gets
            their memory before.
        finish: a function to call after the wait, which makes the result from the outputs.
        group: the name of the process group that carries it.
    """

    work: Any
    inputs: Any
    outputs: Any
    finish: Callable[[], object] | None = None
    group: str = ""


class Flight(NamedTuple):
    """The works in flight that one instruction has launched.

    Attributes:
        row: the row of the instruction in the program.
        cell: its op as tables write it, for errors.
        works: the works, none once they have been awaited.
    """

    row: int
    cell: str
    works: list[Launched]


class Launch(NamedTuple):
    """The asynchronous form of an instruction: `run(works, *lists)` appends the works that write `values`."""

    run: Callable[..., Any]
    values: Sequence[Value]


class Lane(threading.local):
    """The work in flight of one rank in one step; `wait(launched, cell)` waits for one work.

    It is local to a thread: a step in one process may be called by several threads at once.
    """

    def __init__(self, wait: Callable[[Launched, str], None], on_streams: bool) -> None:
        self._wait, self._on_streams = wait, on_streams
        self._stream_by_group: dict[str, torch.Stream] = {}
        self.begin(None)

    def begin(self, watch: Watch | None) -> None:
        """Start a step with nothing in flight. If each value is checked, each launch waits at once."""
        self.notes = AsyncNotes(watch and watch.notes, watch and watch.device)
        self.waits_at_once = watch is not None and watch.check_finite
        self.flights: dict[Value, Flight] = {}
        self.last_by_group: dict[str, tuple[Any, str]] = {}

    def made_async(
        self, instructions: Iterable[Instruction], rank: int, launches: Mapping[int, Launch], rows: Sequence[int] = ()
    ) -> list[Instruction]:
        """Replace instructions by their launch, and each first reader of what these write by a wait and the read.

        Args:
            instructions: the instructions of a program, or of one rank.
            rank: the rank whose instructions are replaced.
            launches: the launch for the index of an instruction.
            rows: the row in the program of each instruction, if these are not all of it.
        """
        # `pending`: values in flight at this point of the rank's order. Their first reader takes them out.
        replaced, pending = list[Instruction](), set[Value]()
        for index, instruction in enumerate(instructions):
            op, row = instruction.ops[0], rows[index] if rows else index
            if op.rank == rank:
                awaited = [value for part in instruction.ops for value in part.reads if value in pending]
                pending.difference_update(awaited)
                if index in launches:
                    run, values = launches[index]
                    instruction = instruction._replace(run=partial(self._launch, row, op.cell, values, run))
                    pending.update(values)
                if awaited:
                    instruction = instruction._replace(run=partial(self._wait_and_run, row, awaited, instruction.run))
            replaced.append(instruction)
        return replaced

    def wait_for(self, value: Value) -> None:
        """Wait for the works that write a value, unless they have been awaited."""
        flight = self.flights.pop(value, None)
        if flight is not None:
            self.wait_for_flight(flight)

    def wait_for_flight(self, flight: Flight) -> None:
        """Wait for all works of an instruction, which may write several values."""
        for launched in flight.works:
            self._wait(launched, flight.cell)
            if launched.finish is not None:
                launched.finish()
        if flight.works:
            self.notes.note_end_if_missing(flight.row)
        flight.works.clear()

    def wait_for_all(self) -> None:
        """Wait for the works in flight that no instruction has read."""
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
        if self.waits_at_once:
            self.wait_for_flight(flight)
        return results

    def _wait_and_run(self, row: int, values: Sequence[Value], run: Callable[..., Any], *lists: Leaves) -> Any:
        for value in values:
            self.wait_for(value)
        self.notes.note_resumption(row)
        return run(*lists)

    def _note_end(self, row: int, launched: Launched) -> None:
        """Note when a work ends, by an event on a stream for which nothing waits, or by its future."""
        # On streams `wait` blocks no thread, it makes the current stream wait. A stream of its own has nothing else to
        # do, so the event behind the wait is recorded when the work is done.
        if self._on_streams:
            device = launched.inputs.device
            with self._stream_by_group.setdefault(launched.group, torch.Stream(device)) as stream:
                launched.work.wait()
                self.notes.note_end(row, stream.record_event(torch.Event(device, enable_timing=True)))
        elif hasattr(launched.work, "get_future"):
            launched.work.get_future().add_done_callback(partial(self.notes.note_future_done, row))
