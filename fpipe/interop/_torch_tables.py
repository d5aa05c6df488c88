"""Read torch's tables cell by cell, and write the actions of its runtime on each rank: ops, transfers, shards, waits.

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
from fpipe.program import Op, Program, ProgramError, Value, parts_of, refuse_long_words
from fpipe.timing.costs import Ticks
from fpipe.timing.simulate import simulate
from fpipe.transforms.cells import parse_csv_line, read_text_file

Format = Literal["compute_only", "compute_comms"]

COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
WAITS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
_STAGE_ACTIONS = (*WEIGHTS, "WAIT_REDUCE_GRAD")

# At most nine digits, and no leading zeros, so that an action has one spelling.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_ACTION = re.compile(rf"{_NUMBER}({'|'.join((*WAITS, *TRANSFERS, *WEIGHTS, *COMPUTE))})(?:{_NUMBER})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """An action of torch's runtime: `2F0` is F of stage 2 for microbatch 0, `2RESHARD` has no microbatch."""

    stage: int
    kind: str
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell with its line and column, both from 1: one action, or several that overlap."""

    line: int
    column: int
    actions: tuple[Action, ...]

    @property
    def location(self) -> str:
        """The line and column, for errors."""
        return f"line {self.line}, column {self.column}"

    @property
    def compute(self) -> str | None:
        """The cell as fpipe's tables name it; None if it computes nothing."""
        if self.actions[0].kind not in COMPUTE:
            return None
        cells = ";".join(map(str, self.actions))
        return cells if len(self.actions) == 1 else f"({cells})"


Table = str | Path | Mapping[int, Sequence[object]]
"""CSV text, the path of a CSV file, or the `pipeline_order` of one of torch's schedules."""


def read_torch_table(table: Table, format: Format | None) -> list[list[Cell]]:
    """Return the cells of each rank without the idle ones, checked: each op once, stages and microbatches 0..n-1."""
    if format not in (None, "compute_only", "compute_comms"):
        raise ValueError(f"format is 'compute_only' or 'compute_comms', found {format!r}.")
    rows = [list(_cells(number, line, format)) for number, line in enumerate(_lines(table), 1)]
    if not any(rows):
        raise ProgramError("the table is empty; give each rank a line.")
    for line_number in (number for number, row in enumerate(rows, 1) if not row):
        raise ProgramError(f"line {line_number} has no cells; each rank has a line.")
    _refuse_repeats(rows)
    _refuse_gaps(rows)
    return rows


def actions_of(rows: Sequence[Sequence[Cell]], kinds: Sequence[str]) -> Iterator[tuple[Cell, Action]]:
    """Yield the actions of some kinds, each with its cell."""
    for cell in chain.from_iterable(rows):
        for action in cell.actions:
            if action.kind in kinds:
                yield cell, action


def _lines(table: Table) -> list[list[str]]:
    if isinstance(table, Mapping):
        return [["" if action is None else str(action) for action in table[rank]] for rank in sorted(table)]
    if isinstance(table, Path):
        table = read_text_file(table)
    if not isinstance(table, str):
        raise TypeError(f"a table is CSV text or a path, found {type(table).__name__}.")
    # A str is text: a path that was handed in as a str would be read as a wrong cell.
    if table.endswith(".csv") and "\n" not in table:
        raise ProgramError(f"{table!r} looks like a file name; pass pathlib.Path({table!r}).")
    return [parse_csv_line(line) for line in refuse_long_words(table).strip("\r\n").splitlines()]


def _cells(line_number: int, line: list[str], format: Format | None) -> Iterator[Cell]:
    for column, cell_text in enumerate(line, 1):
        if not cell_text.strip():
            continue
        try:
            actions = _actions(cell_text.strip())
        except ProgramError as error:
            raise ProgramError(f"line {line_number}, column {column}: {error}") from None
        cell = Cell(line_number, column, actions)
        if format == "compute_only" and cell.compute is None:
            raise ProgramError(
                f"{cell.location}: {actions[0]} does not compute; read this table with format='compute_comms'."
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
    # UNSHARD, RESHARD and REDUCE_GRAD are of a stage, all other actions of a microbatch.
    if match is None or (match[3] is None) == (match[2] not in _STAGE_ACTIONS):
        raise ProgramError(
            f"{shortened(text)!r} is not a cell of torch.distributed.pipelining, such as 2F0, (0F3;3B1)OVERLAP_F_B, "
            "2SEND_F0, 2WAIT_SEND_F0 or 2UNSHARD."
        )
    return Action(int(match[1]), match[2], None if match[3] is None else int(match[3]))


def _refuse_repeats(rows: list[list[Cell]]) -> None:
    first_cell_by_action: dict[Action, Cell] = {}
    for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS)):
        if action in first_cell_by_action:
            first_location = first_cell_by_action[action].location
            raise ProgramError(f"{cell.location}: {action} stands in {first_location} already; each stands once.")
        first_cell_by_action[action] = cell


def _refuse_gaps(rows: list[list[Cell]]) -> None:
    """Raise ProgramError for a stage or microbatch beyond 0..n-1."""
    # One wrong number, such as 7F0 for 0F7, would make seven stages without any op.
    for noun, field in (("stage", 0), ("microbatch", 2)):
        forward_numbers = {action[field] for _, action in actions_of(rows, ("F",))}
        first_missing = next(number for number in count() if number not in forward_numbers)
        for cell, action in actions_of(rows, (*COMPUTE, *TRANSFERS, *WEIGHTS, *WAITS)):
            number = action[field]
            if isinstance(number, int) and number >= first_missing:
                raise ProgramError(
                    f"{cell.location}: {action} names {noun} {number}, but the table has no forward of {noun} "
                    f"{first_missing}; it names all of 0..n-1."
                )


# Kinds that torch's runtime runs by itself, or that cost nothing: a table of computation names none of them.
KINDS_WITHOUT_CELL = frozenset(
    {"SPLIT", "ADD", "SCALE", "MERGE", "FREE", "SEND", "RECV", "GATHER", "SCATTER", "REDUCE"}
)
# The number of stages whose weights torch keeps gathered at once (`_add_unshard_reshard`).
_GATHERED_STAGES = 3
_BACKWARD = re.compile(r"(\d+)[BI](\d+)")
_SEND = re.compile(r"\d+SEND_[FB]\d+")


def refuse_unsupported_ops(program: Program) -> None:
    """Raise ProgramError for ops and placements that torch's tables cannot name."""
    for op in parts_of(program.ops):
        if op.kind == "R":
            raise ProgramError(
                f"{op.cell}: torch's tables have no recompute. Wrap the stages' modules in torch.utils.checkpoint "
                "instead of fpipe.checkpoint()."
            )
        if op.kind not in COMPUTE and op.kind not in KINDS_WITHOUT_CELL:
            raise ProgramError(f"{op.cell}: torch's tables have no {op.kind}.")
        if op.slice is not None:
            raise ProgramError(f"{op.cell}: torch's tables have no slices.")
    for stage, ranks in enumerate(program.placement):
        if isinstance(ranks, tuple):
            raise ProgramError(f"stage {stage} is on ranks {ranks}; torch's runtime has one rank a stage.")


def _cell_text(op: Op) -> str:
    return f"{op.cell}OVERLAP_F_B" if op.parts else op.cell


def cells_by_tick(program: Program) -> list[list[str]]:
    """Return the cells of each rank, one a tick of the clock; an idle cell is empty."""
    events = [event for event in simulate(program, Ticks()).events if event.end > event.start]
    columns = round(max((event.end for event in events), default=0))
    cells_by_rank = [[""] * columns for _ in range(program.ranks)]
    for op, start, _ in events:
        cells_by_rank[op.rank][round(start)] = _cell_text(op)
    return cells_by_rank


def cells_with_transfers(program: Program, waits: bool) -> list[list[str]]:
    """Return the cells of each rank as torch itself lowers a table: with weights, transfers, and waits if wanted."""
    # 1. Each rank's ops in order, and the actions on weights before each.
    sends, original_by_copy = sends_of(program), _original_by_copy(program)
    ops_by_rank: list[list[Op]] = [[] for _ in range(program.ranks)]
    for op in program.ops:
        if op.parts or op.kind in COMPUTE:
            ops_by_rank[op.rank].append(op)
    if any(op.kind == "GATHER" for op in program.ops):
        weight_actions = _shard_actions_by_rank(program, waits)
    else:
        weight_actions = [_weight_actions(rank_ops, waits) for rank_ops in ops_by_rank]
    operands_by_op = {
        op: [original_by_copy.get(value, value) for value in op.reads] for rank_ops in ops_by_rank for op in rank_ops
    }
    reader_rank = {value: op.rank for op, operands in operands_by_op.items() for value in operands}
    # 2. Ranks in turn do one step each, if its operands from other ranks have been sent. A value is sent and received
    # as soon as it is written: torch matches the messages between two ranks by their order, so both need the same.
    pending_by_rank = [_interleave(*pair) for pair in zip(ops_by_rank, weight_actions, strict=True)]
    head_by_rank = {rank: next(pending, None) for rank, pending in enumerate(pending_by_rank)}
    cells: list[list[str]] = [[] for _ in ops_by_rank]
    sent_values: set[Value] = set()
    while any(head_by_rank.values()):
        for rank, head in head_by_rank.items():
            operands = operands_by_op[head] if isinstance(head, Op) else ()
            if head is None or any(operand in sends and operand not in sent_values for operand in operands):
                continue
            cells[rank].append(_cell_text(head) if isinstance(head, Op) else str(head))
            for value in head.writes if isinstance(head, Op) else ():
                sent_values.add(value)
                if value in sends:
                    cells[rank].append(str(sends[value]))
                    cells[reader_rank[value]].append(str(matching_receive(sends[value])))
            head_by_rank[rank] = next(pending_by_rank[rank], None)
    return [*map(_with_waits, cells)] if waits else cells


def _interleave(rank_ops: list[Op], actions_before_ops: list[list[Action]]) -> Iterator[Op | Action]:
    # There is one more list of actions than ops: what follows the last op.
    for op, actions in zip_longest(rank_ops, actions_before_ops):
        yield from actions
        if op is not None:
            yield op


def sends_of(program: Program) -> dict[Value, Action]:
    """Return each value that another rank reads, with torch's name of its SEND.

    Raises:
        ProgramError: a value that does not go to the stage next to its own.
    """
    original_by_copy = _original_by_copy(program)
    writer = {value: op for op in program.ops for value in op.writes}
    sends: dict[Value, Action] = {}
    for op in parts_of(program.ops):
        if op.kind not in COMPUTE:
            continue
        for value in (original_by_copy.get(value, value) for value in op.reads):
            source = writer.get(value)
            if source is None or source.rank == op.rank:
                continue
            # Activations go one stage up and their gradients one stage down: torch has no cell for anything else.
            is_forward = value.name == "y"
            stage_step = 1 if is_forward else -1
            if value.name not in ("y", "dx") or value.stage is None or op.stage != value.stage + stage_step:
                raise ProgramError(
                    f"{op.cell} reads {value} of {source.cell} on rank {source.rank}; torch's runtime sends to "
                    "adjacent stages only."
                )
            sends[value] = Action(value.stage, "SEND_F" if is_forward else "SEND_B", value.microbatch)
    return sends


def matching_receive(send: Action) -> Action:
    """Return the receive of a send: outputs go one stage up, gradients one stage down."""
    is_forward = send.kind == "SEND_F"
    return Action(send.stage + (1 if is_forward else -1), "RECV_F" if is_forward else "RECV_B", send.microbatch)


def _original_by_copy(program: Program) -> dict[Value, Value]:
    return {op.writes[0]: program.ops[program.writer[op.reads[0]]].reads[0] for op in program.ops if op.kind == "RECV"}


def _weight_actions(rank_ops: list[Op], waits: bool) -> list[list[Action]]:
    """Return FSDP's actions before each op of a rank, and after the last.

    Weights of the next stages are gathered, and others dropped to make room. Gradients are reduced (and with `waits`
    waited for) behind the last op of a stage.
    """
    reduce_kinds = ("REDUCE_GRAD", "WAIT_REDUCE_GRAD") if waits else ("REDUCE_GRAD",)
    stages_by_op = [[part.stage or 0 for part in op.parts or (op,)] for op in rank_ops]
    last_position = {
        part.stage or 0: position
        for position, op in enumerate(rank_ops)
        for part in op.parts or (op,)
        if part.kind in "BW"
    }
    gathered_stages: set[int] = set()
    actions_before_ops: list[list[Action]] = []
    for position in range(len(rank_ops) + 1):
        finished = [stage for stage, last_op in last_position.items() if last_op == position - 1]
        actions = [Action(stage, kind, None) for stage in finished for kind in reduce_kinds]
        # In torch's order: reduce, then make room, then gather.
        upcoming = _next_stages(stages_by_op[position:])
        actions += [Action(stage, "RESHARD", None) for stage in sorted(gathered_stages) if stage not in upcoming]
        actions += [Action(stage, "UNSHARD", None) for stage in upcoming if stage not in gathered_stages]
        gathered_stages = set(upcoming)
        actions_before_ops.append(actions)
    return actions_before_ops


def _shard_actions_by_rank(program: Program, waits: bool) -> list[list[list[Action]]]:
    """Return the weight actions before each op of each rank, for a program with GATHER and SCATTER."""
    # A program may gather a stage several times at once. Torch has one copy, so it is kept while any of ours lives.
    actions_by_rank: list[list[list[Action]]] = [[[]] for _ in range(program.ranks)]
    read_counts = Counter(value for op in program.ops for part in op.parts or (op,) for value in part.reads)
    reads_left_by_copy = {op.writes[0]: read_counts[op.writes[0]] for op in program.ops if op.kind == "GATHER"}
    live_copies: Counter[int] = Counter()
    for op in program.ops:
        rank_actions, stage = actions_by_rank[op.rank], op.stage or 0
        if op.kind == "GATHER":
            rank_actions[-1] += [] if live_copies[stage] else [Action(stage, "UNSHARD", None)]
            live_copies[stage] += 1
        elif op.kind == "SCATTER":
            rank_actions[-1] += [Action(stage, kind, None) for kind in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD")[: 1 + waits]]
        elif op.parts or op.kind in COMPUTE:
            rank_actions.append([])
        for value in (value for part in op.parts or (op,) for value in part.reads if value in reads_left_by_copy):
            reads_left_by_copy[value] -= 1
            stage = value.stage or 0
            live_copies[stage] -= not reads_left_by_copy[value]
            is_dropped = not reads_left_by_copy[value] and not live_copies[stage]
            rank_actions[-1] += [Action(stage, "RESHARD", None)] if is_dropped else []
    return actions_by_rank


def _next_stages(stages_by_op: Sequence[list[int]]) -> list[int]:
    """Return the next three stages that compute, or four if the last two overlap."""
    upcoming: list[int] = []
    for op_stages in stages_by_op:
        upcoming += [stage for stage in op_stages if stage not in upcoming]
        if len(upcoming) >= _GATHERED_STAGES:
            break
    return upcoming


def _with_waits(cells_of_rank: Sequence[str]) -> list[str]:
    """Add the waits of torch 2.15 to a rank's cells: for a forward's send behind its backward, for others at the end.

    >>> _with_waits(["1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"])
    ['1F0', '1SEND_F0', '1RECV_B0', '1B0', '1WAIT_SEND_F0', '1SEND_B0', '1WAIT_SEND_B0']
    """
    cells: list[str] = []
    in_flight: dict[str, str] = {}
    for cell in cells_of_rank:
        cells.append(cell)
        if _SEND.fullmatch(cell):
            in_flight[cell] = cell.replace("SEND", "WAIT_SEND")
        # A backward of microbatch i has received its gradient, so the next stage had received the output before.
        finished_sends = [f"{stage}SEND_F{microbatch}" for stage, microbatch in _BACKWARD.findall(cell)]
        cells += [in_flight.pop(send) for send in finished_sends if send in in_flight]
    return [*cells, *in_flight.values()]
