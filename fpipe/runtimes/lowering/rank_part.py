"""Run a list of instructions in order: the whole program, or the part of one rank.

    rank 0: 0F0 SEND(y)   rank 1: RECV(y) 1F0        --> part_of_rank(.., 1) -->        RECV(y) 1F0

A part numbers its slots from 0 again. Only SENDs and RECVs get functions of the runtime: every other instruction is the
same in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter, length_hint
from typing import Any

from fpipe.meaning.recorder import Notes, StreamClock, in_range
from fpipe.meaning.walk import describe_op, leaves_with_saved, refuse_infinite
from fpipe.model import Model
from fpipe.program import Op
from fpipe.runtimes.lowering.lane import Lane, See, Watch
from fpipe.runtimes.lowering.lowered import Instruction
from fpipe.torch_internals import is_profiled

Leaves = list[Any]
Slots = list[Any]
Tap = Callable[[Op, Callable[..., Any]], Callable[..., Any]]
"""Returns the function to run instead of an op's function, for one step."""


class RankPart:
    """The instructions of a program or of one rank, ready to run.

    Attributes:
        initial_slots: the slots, as the whole program numbers them, that are full before the first instruction.
        local_slots: the slot of this part for each slot of the whole program that it has.
        rows: the row in the whole program of each instruction.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        model: Model,
        local_slots: dict[int, int] | None = None,
        row_numbers: Sequence[int] | None = None,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.instructions, self.model, self.local_slots, self._lanes = instructions, model, local_slots or {}, lanes
        self.rows = range(len(instructions)) if row_numbers is None else row_numbers
        # Slots that are full at the start come first, and instructions write the others.
        self.initial_slots = [*self.local_slots][: len(self.local_slots) - sum(len(i.writes) for i in instructions)]
        self._waits = {row for row, i in zip(self.rows, instructions, strict=True) if i.ops[0].kind == "RECV"}
        self._code = [(i.run, _make_slot_reader(i.reads, i.shared)) for i in instructions]
        self._remaining = iter(self._code)

    def with_tap(self, tap: Tap) -> RankPart:
        """Return a copy of this part that runs the functions of `tap` instead, for one step."""
        part = copy(self)
        part._code = [(tap(i.ops[0], run), take) for i, (run, take) in zip(self.instructions, self._code, strict=True)]
        return part

    def current_instruction(self) -> Instruction:
        """Return the instruction that runs, or ran last; safe to ask from another thread."""
        # How much of the iterator is left tells the position, so the loop of `run` pays nothing for this.
        return self.instructions[max(-1 - length_hint(self._remaining), -len(self.instructions))]

    def run(self, slots: Slots, watch: Watch | None = None) -> None:
        """Run the instructions in order; each appends its results to the slots."""
        for lane in self._lanes:
            lane.begin(watch)
        if watch is not None:
            # Notes without storages of the caller count no memory: they need times alone, from a loop that does less.
            counts_memory = watch.notes is not None and watch.notes.caller_storages is not None
            looks_at_leaves = watch.check_finite or watch.see is not None or counts_memory or watch.notes is None
            self._run_watched(slots, *watch[:3]) if looks_at_leaves else self._run_timed(slots, watch)
            for lane in self._lanes:
                lane.notes.write_to_notes()
            return
        # The hot loop: three calls an instruction, and no name that is looked up in an object.
        remaining, extend = self._restart(), slots.extend
        try:
            for function, take in remaining:
                extend(function(*take(slots)))
        # Ctrl-C too: where a step was interrupted is worth a note.
        except BaseException as error:
            self._add_place(error, self.instructions[-1 - length_hint(remaining)])
            raise

    def _run_timed(self, slots: Slots, watch: Watch) -> None:
        clock = StreamClock(watch.device)
        tick, remaining, extend = clock.tick, self._restart(), slots.extend
        ticks = [tick()]
        note = ticks.append
        try:
            for function, take in remaining:
                extend(function(*take(slots)))
                note(tick())
        except BaseException as error:
            self._add_place(error, self.instructions[-1 - length_hint(remaining)])
            raise
        assert watch.notes is not None
        watch.notes.note_rows(self.rows, clock.seconds(ticks), self._waits)

    def _run_watched(self, slots: Slots, notes: Notes | None, check_finite: bool, see: See | None) -> None:
        for instruction, row, (function, take) in zip(self.instructions, self.rows, self._restart(), strict=True):
            try:
                started = time.perf_counter()
                results = function(*take(slots))
                # What a LOAD brings was checked when it left, and is still on its way.
                is_checked = instruction.ops[0].kind != "LOAD"
                for op in instruction.ops if check_finite and is_checked else ():
                    pairs = zip(instruction.written_values, results, strict=True)
                    refuse_infinite(op, (pair for pair in pairs if pair[0] in op.writes))
            except BaseException as error:
                self._add_place(error, instruction)
                raise
            if see is not None and is_checked:
                for value, leaves in zip(instruction.written_values, results, strict=True):
                    see(value, leaves)
            if notes is not None:
                # A RECV mostly waits, and waiting is no work.
                if instruction.ops[0].kind == "RECV":
                    started = time.perf_counter()
                notes.note_row(row, [leaves_with_saved(leaves) for leaves in results], started)
            slots.extend(results)

    def _restart(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        code = self._code
        # One look a step: without a profiler the hot loop pays nothing for ranges.
        if is_profiled():
            code = [(in_range(i.ops, run), take) for i, (run, take) in zip(self.instructions, code, strict=True)]
        self._remaining = remaining = iter(code)
        return remaining

    def _add_place(self, error: BaseException, instruction: Instruction) -> None:
        op = instruction.ops[0]
        error.add_note(f"in {op.cell}: {describe_op(op, self.model)}")


def part_of_rank(
    instructions: Iterable[Instruction],
    model: Model,
    rank: int,
    send: Callable[[Op, Callable[..., Any]], Callable[..., Any]],
    receive: Callable[[Op], Callable[..., Any]],
    rewrite: Callable[..., Sequence[Instruction]],
    lanes: Mapping[int, Lane],
) -> RankPart:
    """Return the part of a rank in a program in which every transfer is an op.

    Args:
        instructions, model: the instructions of all ranks, and their model.
        rank: the rank.
        send: `send(op, run)` returns the function of a SEND, whose `run` makes what is sent.
        receive: `receive(op)` returns the function of a RECV, which waits for what was sent.
        rewrite: `rewrite(instructions, rows=)` returns the instructions to run, such as asynchronous ones.
        lanes: the copy lane of each rank that has one.
    """
    by_row = {row: instruction for row, instruction in enumerate(instructions) if instruction.ops[0].rank == rank}
    for row, instruction in by_row.items():
        op = instruction.ops[0]
        if op.kind == "SEND":
            by_row[row] = instruction._replace(run=send(op, instruction.run), writes=(), written_values=())
        elif op.kind == "RECV":
            by_row[row] = instruction._replace(run=receive(op), reads=(), shared=())
    # Renumber the slots: those that are full at the start, then those that this rank's instructions write, in order.
    rank_instructions = rewrite([*by_row.values()], rows=[*by_row])
    written_slots = [slot for i in rank_instructions for slot in i.writes]
    initial_slots = sorted({slot for i in rank_instructions for slot in i.reads}.difference(written_slots))
    local_slots: dict[int, int] = {slot: index for index, slot in enumerate((*initial_slots, *written_slots))}

    def local(slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(local_slots[slot] for slot in slots)

    renumbered = [i._replace(reads=local(i.reads), writes=local(i.writes)) for i in rank_instructions]
    return RankPart(renumbered, model, local_slots, [*by_row], [lanes[rank]] if rank in lanes else [])


def _make_slot_reader(reads: Sequence[int], shared: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that reads an instruction's lists from the slots, and copies lists with later readers."""
    # Most instructions share nothing, and an itemgetter picks their lists without running Python.
    if len(reads) > 1 and not shared:
        return itemgetter(*reads)
    if len(reads) == 1:
        (slot,) = reads
        return (lambda slots: (slots[slot][:],)) if shared else lambda slots: (slots[slot],)
    copy_flags = [(slot, index in shared) for index, slot in enumerate(reads)]
    return lambda slots: [slots[k][:] if copied else slots[k] for k, copied in copy_flags]
