"""Read torch's tables cell by cell, and write what its runtime does on each rank: ops, transfers, shards, waits.

0F0   -->   0F0 0SEND_F0 0RECV_B0 0B0   -->   0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_SEND_F0 0REDUCE_GRAD 0RESHARD
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from fpipe.limits import shortened
from fpipe.program import Op, Program, ProgramError, Value, parts_of, readable
from fpipe.timing.costs import Ticks
from fpipe.timing.simulate import simulate
from fpipe.transforms.cells import csv_cells, text_of

Format = Literal["compute_only", "compute_comms"]

COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
_OF_A_STAGE = (*WEIGHTS, "WAIT_REDUCE_GRAD")

_N = "(0|[1-9][0-9]{0,8})"
_ACTION = re.compile(rf"{_N}({'|'.join((*WAITS, *TRANSFERS, *WEIGHTS, *COMPUTE))})(?:{_N})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One thing torch's runtime does: `2F0` is F of stage 2 for microbatch 0, `2RESHARD` has no microbatch."""

    stage: int
    kind: str
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell with its line and column, both from 1: one action, or the two that overlap."""

    line: int
    column: int
    actions: tuple[Action, ...]

    @property
    def place(self) -> str:
        """Where it stands, for errors."""
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> str | None:
        """The cell as a table of ours names it, or None if it computes nothing."""
        if self.actions[0].kind not in COMPUTE:
            return None
        cells = ";".join(map(str, self.actions))
        return cells if len(self.actions) == 1 else f"({cells})"


Table = str | Path | Mapping[int, Sequence[object]]
"""CSV text, the path of a CSV file, or what torch's schedules have as their `pipeline_order`."""


def read(table: Table, format: Format | None) -> list[list[Cell]]:
    """The cells of each rank, idle ones left out; each op once, of stages and microbatches 0..n-1."""
    if format not in (None, "compute_only", "compute_comms"):
        raise ValueError(f"format is 'compute_only' or 'compute_comms', found {format!r}.")
    rows = [list(_cells(number, line, format)) for number, line in enumerate(_lines(table), 1)]
    if not any(rows):
        raise ProgramError("the table is empty; give one line of cells for each rank.")
    for empty in (number for number, row in enumerate(rows, 1) if not row):
        raise ProgramError(f"line {empty} has no cells: ranks are 0..n-1, and each has a row.")
    _refuse_repeats(rows)
    _refuse_gaps(rows)
    return rows


def actions_of(rows: Sequence[Sequence[Cell]], kinds: Sequence[str]) -> Iterator[tuple[Cell, Action]]:
    """The actions of some kinds, with the cells they stand in."""
    for cell in chain.from_iterable(rows):
        for action in cell.actions:
            if action.kind in kinds:
                yield cell, action


def _lines(table: Table) -> list[list[str]]:
    if isinstance(table, Mapping):
        return [["" if action is None else str(action) for action in table[rank]] for rank in sorted(table)]
    if isinstance(table, Path):
        table = text_of(table)
    if not isinstance(table, str):
        raise TypeError(f"a table is CSV text or the path of a CSV file, found {type(table).__name__}.")
    if table.endswith(".csv") and "\n" not in table:
        raise ProgramError(f"{table!r} is the name of a file, it seems; hand in pathlib.Path({table!r}).")
    return [csv_cells(line) for line in readable(table).strip("\r\n").splitlines()]


def _cells(number: int, line: list[str], format: Format | None) -> Iterator[Cell]:
    for column, text in enumerate(line, 1):
        if not text.strip():
            continue
        try:
            actions = _actions(text.strip())
        except ProgramError as error:
            raise ProgramError(f"line {number}, column {column}: {error}") from None
        cell = Cell(number, column, actions)
        if format == "compute_only" and cell.compute is None:
            raise ProgramError(
                f"{cell.place}: {actions[0]} does not compute, and the format is 'compute_only'; read this table with "
                "format='compute_comms'."
            )
        yield cell


def _actions(text: str) -> tuple[Action, ...]:
    overlap = _OVERLAP.fullmatch(text)
    if not overlap:
        return (_action(text),)
    actions = tuple(_action(part.strip()) for part in overlap[1].split(";"))
    if len(actions) < 2 or any(action.kind not in COMPUTE for action in actions):
        raise ProgramError(f"{shortened(text)!r} is to overlap two ops of computation, as in (0F3;3B1)OVERLAP_F_B.")
    return actions


def _action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or (match[3] is None) == (match[2] not in _OF_A_STAGE):
        raise ProgramError(
            f"{shortened(text)!r} is not a cell of torch.distributed.pipelining. Cells read 2F0 (F, B, I or W) or "
            "(0F3;3B1)OVERLAP_F_B; with transfers also 2SEND_F0, 2RECV_F0, 2SEND_B0, 2RECV_B0, 2WAIT_SEND_F0, "
            "2WAIT_SEND_B0, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD and 2WAIT_REDUCE_GRAD."
        )
    return Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))


def _refuse_repeats(rows: list[list[Cell]]) -> None:
    first: dict[Action, Cell] = {}
    for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS)):
        if action in first:
            raise ProgramError(f"{cell.place}: {action} stands in {first[action].place} already; each stands once.")
        first[action] = cell


def _refuse_gaps(rows: list[list[Cell]]) -> None:
    """Refuse numbers beyond 0..n-1: a wrong one would make many stages or microbatches with nothing in them."""
    for word, field in (("stage", 0), ("microbatch", 2)):
        known = {action[field] for _, action in actions_of(rows, ("F",))}
        first = next(number for number in count() if number not in known)
        for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS, *WEIGHTS, *WAITS)):
            number = action[field]
            if isinstance(number, int) and number >= first:
                raise ProgramError(
                    f"{cell.place}: {action} names {word} {number}, but the table has no forward of {word} "
                    f"{first}; it names all of 0..n-1."
                )


_SILENT = frozenset({"SPLIT", "ADD", "SCALE", "MERGE", "FREE", "SEND", "RECV", "GATHER", "SCATTER", "REDUCE"})
_ACTIVE = 3  # stages whose weights are gathered at once: torch's own number
_BACKWARD = re.compile(r"(\d+)[BI](\d+)")
_SEND = re.compile(r"\d+SEND_[FB]\d+")


def refuse_what_torch_lacks(program: Program) -> None:
    """Torch's tables know F, B, I, W and pairs of them, one rank a stage, and values that go to the next stage."""
    for op in parts_of(program.ops):
        if op.kind == "R":
            raise ProgramError(
                f"{op.cell}: torch's tables have no recompute. Write the program without fpipe.checkpoint(), and wrap "
                "the stages' modules in torch.utils.checkpoint."
            )
        if op.kind not in COMPUTE and op.kind not in _SILENT:
            raise ProgramError(f"{op.cell}: torch's tables have no {op.kind}; they know F, B, I, W and transfers.")
        if op.slice is not None:
            raise ProgramError(f"{op.cell} is of a sequence slice; torch's tables have microbatches only.")
    for stage, ranks in enumerate(program.placement):
        if isinstance(ranks, tuple):
            raise ProgramError(f"stage {stage} is on ranks {ranks}; torch's runtime has each stage on one rank.")


def _text(item: Op | Action) -> str:
    """An op of computation as torch writes it, or an action."""
    if isinstance(item, Action):
        return str(item)
    return f"{item.cell}OVERLAP_F_B" if item.parts else item.cell


def ticks(program: Program) -> list[list[str]]:
    """One column a tick of the clock; an idle cell is empty."""
    events = [event for event in simulate(program, Ticks()).events if event.end > event.start]
    columns = round(max((event.end for event in events), default=0))
    rows = [[""] * columns for _ in range(program.ranks)]
    for op, start, _ in events:
        rows[op.rank][round(start)] = _text(op)
    return rows


def with_transfers(program: Program, waits: bool) -> list[list[str]]:
    """The actions of each rank as torch itself lowers a table: care of the weights, transfers, and waits if wanted.

    Ranks in turn do one thing each, if what it reads from elsewhere has been posted: a value is sent and received as
    soon as it is there, since torch matches the messages between two ranks by their order.
    """
    sends, origin = transfers(program), _origins(program)
    rows: list[list[Op]] = [[] for _ in range(program.ranks)]
    for op in program.ops:
        if op.parts or op.kind in COMPUTE:
            rows[op.rank].append(op)
    sharded = any(op.kind == "GATHER" for op in program.ops)
    gaps = _actions_of_shards(program, waits) if sharded else [_weight_actions(row, waits) for row in rows]
    reads = {op: [origin.get(value, value) for value in op.reads] for row in rows for op in row}
    readers = {value: op.rank for op, values in reads.items() for value in values}
    todo = [_interleaved(*pair) for pair in zip(rows, gaps, strict=True)]
    heads = {rank: next(items, None) for rank, items in enumerate(todo)}
    cells: list[list[str]] = [[] for _ in rows]
    in_flight: set[Value] = set()
    while any(heads.values()):
        for rank, head in heads.items():
            if head is None or (isinstance(head, Op) and any(v in sends and v not in in_flight for v in reads[head])):
                continue
            cells[rank].append(_text(head))
            for value in head.writes if isinstance(head, Op) else ():
                in_flight.add(value)
                if value in sends:
                    cells[rank].append(str(sends[value]))
                    cells[readers[value]].append(str(received(sends[value])))
            heads[rank] = next(todo[rank], None)
    return [*map(_with_waits, cells)] if waits else cells


def _interleaved(row: list[Op], gaps: list[list[Action]]) -> Iterator[Op | Action]:
    for op, gap in zip_longest(row, gaps):
        yield from gap
        if op is not None:
            yield op


def transfers(program: Program) -> dict[Value, Action]:
    """Return each value that another rank reads, with torch's name of its SEND.

    Raises:
        ProgramError: a value that does not go to the stage next to its own.
    """
    origin = _origins(program)
    writer = {value: op for op in program.ops for value in op.writes}
    sends: dict[Value, Action] = {}
    for op in parts_of(program.ops):
        if op.kind not in COMPUTE:
            continue
        for value in op.reads:
            value = origin.get(value, value)
            source = writer.get(value)
            if source is None or source.rank == op.rank:
                continue
            forward = value.name == "y"
            step = 1 if forward else -1
            if value.name not in ("y", "dx") or value.stage is None or op.stage != value.stage + step:
                raise ProgramError(
                    f"{op.cell} reads {value}, which {source.cell} makes on rank {source.rank}; torch's runtime sends "
                    "from a stage to the ones next to it only."
                )
            sends[value] = Action(value.stage, "SEND_F" if forward else "SEND_B", value.microbatch)
    return sends


def received(send: Action) -> Action:
    forward = send.kind == "SEND_F"
    return Action(send.stage + (1 if forward else -1), "RECV_F" if forward else "RECV_B", send.microbatch)


def _origins(program: Program) -> dict[Value, Value]:
    """Return the value that each RECV's copy is of."""
    return {op.writes[0]: program.ops[program.writer[op.reads[0]]].reads[0] for op in program.ops if op.kind == "RECV"}


def _weight_actions(row: list[Op], waits: bool) -> list[list[Action]]:
    """Return FSDP's actions before each op of a row, and after the last.

    Weights of the stages that come next are gathered, others dropped to make room; gradients are reduced (and with
    `waits` waited for) behind the last op of a stage.
    """
    reduce = ("REDUCE_GRAD", "WAIT_REDUCE_GRAD") if waits else ("REDUCE_GRAD",)
    stages = [[part.stage or 0 for part in op.parts or (op,)] for op in row]
    last = {part.stage or 0: at for at, op in enumerate(row) for part in op.parts or (op,) if part.kind in "BW"}
    active: set[int] = set()
    gaps: list[list[Action]] = []
    for position in range(len(row) + 1):
        due = [Action(stage, kind, None) for stage, at in last.items() if at == position - 1 for kind in reduce]
        upcoming = _next_stages(stages[position:])
        due += [Action(stage, "RESHARD", None) for stage in sorted(active) if stage not in upcoming]
        due += [Action(stage, "UNSHARD", None) for stage in upcoming if stage not in active]
        active = set(upcoming)
        gaps.append(due)
    return gaps


def _actions_of_shards(program: Program, waits: bool) -> list[list[list[Action]]]:
    """Return the actions of weights on each rank of a program with GATHER and SCATTER. Torch has one copy of a stage,
    kept while one of ours is."""
    gaps: list[list[list[Action]]] = [[[]] for _ in range(program.ranks)]
    reads = Counter(value for op in program.ops for part in op.parts or (op,) for value in part.reads)
    copies = {op.writes[0]: reads[op.writes[0]] for op in program.ops if op.kind == "GATHER"}
    live: Counter[int] = Counter()
    for op in program.ops:
        due, stage = gaps[op.rank], op.stage or 0
        if op.kind == "GATHER":
            due[-1] += [] if live[stage] else [Action(stage, "UNSHARD", None)]
            live[stage] += 1
        elif op.kind == "SCATTER":
            due[-1] += [Action(stage, kind, None) for kind in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD")[: 1 + waits]]
        elif op.parts or op.kind in COMPUTE:
            due.append([])
        for value in (value for part in op.parts or (op,) for value in part.reads if value in copies):
            copies[value] -= 1
            stage = value.stage or 0
            live[stage] -= not copies[value]
            due[-1] += [] if copies[value] or live[stage] else [Action(stage, "RESHARD", None)]
    return gaps


def _next_stages(groups: Sequence[list[int]]) -> list[int]:
    """Return the next stages that compute, at most three, or one more where two overlap."""
    upcoming: list[int] = []
    for group in groups:
        upcoming += [stage for stage in group if stage not in upcoming]
        if len(upcoming) >= _ACTIVE:
            break
    return upcoming


def _with_waits(row: Sequence[str]) -> list[str]:
    """A rank's cells with the waits of torch 2.15: a forward's send is over when its backward is, others at the end.

    >>> _with_waits(["1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"])
    ['1F0', '1SEND_F0', '1RECV_B0', '1B0', '1WAIT_SEND_F0', '1SEND_B0', '1WAIT_SEND_B0']
    """
    cells: list[str] = []
    in_flight: dict[str, str] = {}
    for cell in row:
        cells.append(cell)
        if _SEND.fullmatch(cell):
            in_flight[cell] = cell.replace("SEND", "WAIT_SEND")
        over = [f"{stage}SEND_F{microbatch}" for stage, microbatch in _BACKWARD.findall(cell)]
        cells += [in_flight.pop(send) for send in over if send in in_flight]
    return [*cells, *in_flight.values()]
