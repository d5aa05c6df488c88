"""Run a list of instructions one after the other: all of a program, or the part that one rank has in it.

    rank 0: 0F0 SEND(y)   rank 1: RECV(y) 1F0        --> of_rank(.., 1) -->        RECV(y) 1F0

A part numbers its slots anew. What it sends and receives goes through functions of its own: all else of an instruction
is the same in every runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter, length_hint
from typing import Any

from fpipe.meaning.recorder import Notes, StreamClock
from fpipe.meaning.walk import leaves_of, place_of, refuse_infinite
from fpipe.model import Model
from fpipe.program import Op
from fpipe.runtimes.lowering.lane import Lane, See, Watch
from fpipe.runtimes.lowering.lowered import Instruction

Leaves = list[Any]
Slots = list[Any]
Tap = Callable[[Op, Callable[..., Any]], Callable[..., Any]]
"""The function to run in the place of that of an op, for one step."""


class RankPart:
    """Instructions, each with the function that takes what it reads out of the slots.

    Attributes:
        begins: the slots, as the whole program numbers them, that are full before the first instruction.
        at: the slot of this part for each slot of the whole program that it has.
        rows: the number of each instruction in the whole program.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        model: Model,
        at: dict[int, int] | None = None,
        rows: Sequence[int] | None = None,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.instructions, self.model, self.at, self._lanes = instructions, model, at or {}, lanes
        self.rows = range(len(instructions)) if rows is None else rows
        self.begins = [*self.at][: len(self.at) - sum(len(i.writes) for i in instructions)]
        self._waits = {row for row, i in zip(self.rows, instructions, strict=True) if i.ops[0].kind == "RECV"}
        self._code = [(i.run, _taking(i.reads, i.shared)) for i in instructions]
        self._left = iter(self._code)

    def tapped(self, tap: Tap) -> RankPart:
        """Return this part with other functions in the place of those of its instructions, for one step."""
        part = copy(self)
        part._code = [
            (tap(i.ops[0], run), taken) for i, (run, taken) in zip(self.instructions, self._code, strict=True)
        ]
        return part

    def now(self) -> Instruction:
        """Return the instruction that runs, or ran last, for another thread; running them costs nothing for it."""
        return self.instructions[max(-1 - length_hint(self._left), -len(self.instructions))]

    def run(self, slots: Slots, watch: Watch | None = None) -> None:
        """Run the instructions one after the other. Each writes the slots behind those that are full."""
        for lane in self._lanes:
            lane.begin(watch)
        if watch is not None:
            looked = watch.check_finite or watch.see is not None or watch.notes is None or watch.notes.given is not None
            self._run_watched(slots, *watch[:3]) if looked else self._run_timed(slots, watch)
            for lane in self._lanes:
                lane.notes.add()
            return
        left, extend = self._begun(), slots.extend
        try:
            for function, taken in left:
                extend(function(*taken(slots)))
        except BaseException as error:  # Ctrl-C too
            self._add_place(error, self.instructions[-1 - length_hint(left)])
            raise

    def _run_timed(self, slots: Slots, watch: Watch) -> None:
        """Run the instructions, and note when each ends."""
        clock = StreamClock(watch.device)
        tick, left, extend = clock.tick, self._begun(), slots.extend
        ticks = [tick()]
        note = ticks.append
        try:
            for function, taken in left:
                extend(function(*taken(slots)))
                note(tick())
        except BaseException as error:
            self._add_place(error, self.instructions[-1 - length_hint(left)])
            raise
        assert watch.notes is not None
        watch.notes.ended(self.rows, clock.seconds(ticks), self._waits)

    def _run_watched(self, slots: Slots, notes: Notes | None, check_finite: bool, see: See | None) -> None:
        """Run the instructions, and look at what each writes."""
        for instruction, row, (function, taken) in zip(self.instructions, self.rows, self._begun(), strict=True):
            try:
                started = time.perf_counter()
                made = function(*taken(slots))
                looked_at = instruction.ops[0].kind != "LOAD"  # what is looked at already, and still on its way
                for op in instruction.ops if check_finite and looked_at else ():
                    pairs = zip(instruction.written, made, strict=True)
                    refuse_infinite(op, (pair for pair in pairs if pair[0] in op.writes))
            except BaseException as error:
                self._add_place(error, instruction)
                raise
            if see is not None and looked_at:
                for value, leaves in zip(instruction.written, made, strict=True):
                    see(value, leaves)
            if notes is not None:
                if instruction.ops[0].kind == "RECV":  # what it waited for is no work
                    started = time.perf_counter()
                notes.note(row, [leaves_of(leaves) for leaves in made], started)
            slots.extend(made)

    def _begun(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        self._left = left = iter(self._code)
        return left

    def _add_place(self, error: BaseException, instruction: Instruction) -> None:
        op = instruction.ops[0]
        error.add_note(f"in {op.cell}: {place_of(op, self.model)}")


def of_rank(
    instructions: Iterable[Instruction],
    model: Model,
    rank: int,
    send: Callable[[Op, Callable[..., Any]], Callable[..., Any]],
    receive: Callable[[Op], Callable[..., Any]],
    around: Callable[..., Sequence[Instruction]],
    lanes: Mapping[int, Lane],
) -> RankPart:
    """Return the part of a rank in a program in which every transfer is an op.

    Args:
        instructions, model: of all ranks.
        rank: whose part it is.
        send: `send(op, run)` returns the function of a SEND, whose `run` makes what is sent.
        receive: `receive(op)` returns the function of a RECV, which waits for what was sent.
        around: `around(instructions, rows=)` returns what runs in the place of the rank's instructions.
        lanes: by rank, where it has one.
    """
    by_row = {row: instruction for row, instruction in enumerate(instructions) if instruction.ops[0].rank == rank}
    for row, instruction in by_row.items():
        op = instruction.ops[0]
        if op.kind == "SEND":
            by_row[row] = instruction._replace(run=send(op, instruction.run), writes=(), written=())
        elif op.kind == "RECV":
            by_row[row] = instruction._replace(run=receive(op), reads=(), shared=())
    local = around([*by_row.values()], rows=[*by_row])
    written = [slot for i in local for slot in i.writes]
    begins = sorted({slot for i in local for slot in i.reads}.difference(written))
    at: dict[int, int] = {slot: place for place, slot in enumerate((*begins, *written))}
    renumbered = [
        i._replace(reads=tuple(at[slot] for slot in i.reads), writes=tuple(at[slot] for slot in i.writes))
        for i in local
    ]
    return RankPart(renumbered, model, at, [*by_row], [lanes[rank]] if rank in lanes else [])


def _taking(reads: Sequence[int], shared: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the lists of an instruction out of the slots, copies of those read again later."""
    if len(reads) > 1 and not shared:
        return itemgetter(*reads)
    if len(reads) == 1:
        (slot,) = reads
        return (lambda slots: (slots[slot][:],)) if shared else lambda slots: (slots[slot],)
    places = [(slot, at in shared) for at, slot in enumerate(reads)]
    return lambda slots: [slots[k][:] if copied else slots[k] for k, copied in places]
