"""Write what torch's runtime does on each rank: ops of a program, transfers, care of sharded weights, ends of sends.

0F0   -->   0F0 0SEND_F0 0RECV_B0 0B0   -->   0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_SEND_F0 0REDUCE_GRAD 0RESHARD
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from fpipe.interop._torch_read import COMPUTE, Action
from fpipe.program import Op, Program, ProgramError, Value, parts_of
from fpipe.timing.costs import Ticks
from fpipe.timing.simulate import simulate

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
    todo: list[Iterator[Op | Action]] = [_marked(*pair) for pair in zip(rows, gaps, strict=True)]
    heads = {rank: next(items, None) for rank, items in enumerate(todo)}
    done: list[list[str]] = [[] for _ in rows]
    in_flight: set[Value] = set()
    while any(heads.values()):
        for rank, head in heads.items():
            if head is None or (isinstance(head, Op) and any(v in sends and v not in in_flight for v in reads[head])):
                continue
            done[rank].append(_text(head))
            for value in head.writes if isinstance(head, Op) else ():
                in_flight.add(value)
                if value in sends:
                    done[rank].append(str(sends[value]))
                    done[readers[value]].append(str(received(sends[value])))
            heads[rank] = next(todo[rank], None)
    return [*map(_with_waits, done)] if waits else done


def _marked(row: list[Op], gaps: list[list[Action]]) -> Iterator[Op | Action]:
    for op, gap in zip_longest(row, gaps):
        yield from gap
        if op is not None:
            yield op


def transfers(program: Program) -> dict[Value, Action]:
    """Each value that another rank reads, with torch's name of its SEND; refused but to the stage next to its own."""
    origin = _origins(program)
    writer = {value: op for op in program.ops for value in op.writes}
    found: dict[Value, Action] = {}
    for op in parts_of(program.ops):
        if op.kind not in COMPUTE:
            continue
        for value in op.reads:
            value = origin.get(value, value)
            made = writer.get(value)
            if made is None or made.rank == op.rank:
                continue
            forward = value.name == "y"
            ahead = 1 if forward else -1
            if value.name not in ("y", "dx") or value.stage is None or op.stage != value.stage + ahead:
                raise ProgramError(
                    f"{op.cell} reads {value}, which {made.cell} makes on rank {made.rank}; torch's runtime sends "
                    "from a stage to the ones next to it only."
                )
            found[value] = Action(value.stage, "SEND_F" if forward else "SEND_B", value.microbatch)
    return found


def received(send: Action) -> Action:
    """The RECV at the other end of a SEND."""
    forward = send.kind == "SEND_F"
    return Action(send.stage + (1 if forward else -1), "RECV_F" if forward else "RECV_B", send.microbatch)


def _origins(program: Program) -> dict[Value, Value]:
    """For each copy that a RECV writes, the value that it is a copy of."""
    return {op.writes[0]: program.ops[program.writer[op.reads[0]]].reads[0] for op in program.ops if op.kind == "RECV"}


def _weight_actions(row: list[Op], waits: bool) -> list[list[Action]]:
    """FSDP's actions before each op of a row, and after the last: weights of the stages that come next are gathered,
    others dropped to make room, gradients reduced (and where said waited for) once the last of a stage is there."""
    reduce = ("REDUCE_GRAD", "WAIT_REDUCE_GRAD") if waits else ("REDUCE_GRAD",)
    stages = [[part.stage or 0 for part in op.parts or (op,)] for op in row]
    last = {part.stage or 0: at for at, op in enumerate(row) for part in op.parts or (op,) if part.kind in "BW"}
    active: set[int] = set()
    gaps: list[list[Action]] = []
    for position in range(len(row) + 1):
        due = [Action(stage, kind, None) for stage, at in last.items() if at == position - 1 for kind in reduce]
        ahead = _next(stages[position:])
        due += [Action(stage, "RESHARD", None) for stage in sorted(active) if stage not in ahead]
        due += [Action(stage, "UNSHARD", None) for stage in ahead if stage not in active]
        active = set(ahead)
        gaps.append(due)
    return gaps


def _actions_of_shards(program: Program, waits: bool) -> list[list[list[Action]]]:
    """Such actions on each rank, where a program gathers and scatters by itself. Torch has one copy of a stage, kept
    while one of ours is."""
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
            of = value.stage or 0
            live[of] -= not copies[value]
            due[-1] += [] if copies[value] or live[of] else [Action(of, "RESHARD", None)]
    return gaps


def _next(stages: Sequence[list[int]]) -> list[int]:
    """The next stages that compute, at most three, or one more where two overlap."""
    found: list[int] = []
    for group in stages:
        found += [stage for stage in group if stage not in found]
        if len(found) >= _ACTIVE:
            break
    return found


def _with_waits(row: Sequence[str]) -> list[str]:
    """A rank's cells with the waits of torch 2.15: a forward's send is over when its backward is, others at the end.

    >>> _with_waits(["1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"])
    ['1F0', '1SEND_F0', '1RECV_B0', '1B0', '1WAIT_SEND_F0', '1SEND_B0', '1WAIT_SEND_B0']
    """
    done: list[str] = []
    in_flight: dict[str, str] = {}
    for cell in row:
        done.append(cell)
        if _SEND.fullmatch(cell):
            in_flight[cell] = cell.replace("SEND", "WAIT_SEND")
        over = [f"{stage}SEND_F{microbatch}" for stage, microbatch in _BACKWARD.findall(cell)]
        done += [in_flight.pop(send) for send in over if send in in_flight]
    return [*done, *in_flight.values()]
