"""Actions of torch's runtime for weights that are sharded, and for the end of a send.

0F0 0SEND_F0 0RECV_B0 0B0   -->   0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_SEND_F0 0REDUCE_GRAD 0RESHARD
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fpipe.interop._torch_read import COMPUTE, Action
from fpipe.program import Op, Program

_ACTIVE = 3  # stages whose weights are gathered at once: torch's own number
_BACKWARD = re.compile(r"(\d+)[BI](\d+)")
_SEND = re.compile(r"\d+SEND_[FB]\d+")


def weight_actions(row: list[Op], waits: bool) -> list[list[Action]]:
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


def actions_of_shards(program: Program, waits: bool) -> list[list[list[Action]]]:
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


def with_waits(row: Sequence[str]) -> list[str]:
    """A rank's cells with the waits of torch 2.15: a forward's send is over when its backward is, others at the end.

    >>> with_waits(["1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"])
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
