"""Run a list of instructions one after the other: all of a program, or the part that one rank has in it.

    rank 0: 0F0 SEND(y)   rank 1: RECV(y) 1F0        --> of_rank(.., 1) -->        RECV(y) 1F0

A part numbers its slots anew. What it sends and receives goes through functions of its own: all else of an instruction
is the same in every runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class RankPart:
    """Instructions, each with the way to what it reads.

    Attributes:
        begins: the slots, as the whole program numbers them, of what is there before the first instruction.
        at: for each slot of the whole program that this part has, its own number of it.
        rows: the number of each instruction among all of the whole program.
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
        self.begins = [*self.at][: len(self.at) - sum(len(one.writes) for one in instructions)]
        self._waits = {row for row, one in zip(self.rows, instructions, strict=True) if one.ops[0].kind == "RECV"}
        self._code = [(one.run, _taking(one.reads, one.shared)) for one in instructions]
        self._left = iter(self._code)

    def now(self) -> Instruction:
        """The instruction that runs, or ran last: who asks is another thread, and who runs them does nothing for it."""
        return self.instructions[max(-1 - length_hint(self._left), -len(self.instructions))]

    def run(self, slots: Slots, watch: Watch | None = None) -> None:
        """The instructions, one after the other. Each writes the slots behind those that are there."""
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
    """The part of a rank in a program in which every transfer is an op.

    Args:
        instructions: those of all ranks.
        model: the stages they are about.
        rank: whose part it is.
        send: for a SEND, and what it makes of the lists of leaves that it reads, the function that sends this.
        receive: for a RECV the function that waits for what was sent, and gives it.
        around: for instructions of the rank, and their `rows`, those that run in their place.
        lanes: by rank, where it has one.
    """
    here = {row: one for row, one in enumerate(instructions) if one.ops[0].rank == rank}
    own: Sequence[Instruction] = [
        one._replace(run=send(one.ops[0], one.run), writes=(), written=())
        if one.ops[0].kind == "SEND"
        else one._replace(run=receive(one.ops[0]), reads=(), shared=())
        if one.ops[0].kind == "RECV"
        else one
        for one in here.values()
    ]
    own = around(own, rows=[*here])
    written = [slot for one in own for slot in one.writes]
    begins = sorted({slot for one in own for slot in one.reads}.difference(written))
    at: dict[int, int] = {slot: place for place, slot in enumerate((*begins, *written))}
    moved = [
        one._replace(reads=tuple(at[slot] for slot in one.reads), writes=tuple(at[slot] for slot in one.writes))
        for one in own
    ]
    return RankPart(moved, model, at, [*here], [lanes[rank]] if rank in lanes else [])


def _taking(reads: Sequence[int], shared: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Take from the slots the lists that an instruction reads: copies of those that others will read, too."""
    if len(reads) > 1 and not shared:
        return itemgetter(*reads)
    if len(reads) == 1:
        (slot,) = reads
        return (lambda slots: (slots[slot][:],)) if shared else lambda slots: (slots[slot],)
    places = [(slot, at in shared) for at, slot in enumerate(reads)]
    return lambda slots: [slots[k][:] if copied else slots[k] for k, copied in places]
