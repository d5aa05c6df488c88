"""Rewrite a program so that each stage has every kind of op, to tell what each takes.

0F0 0B0        -->        0F0 0B0, and with a checkpoint and a split backward: 0F0 0R0 0I0 0W0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fpipe.program import Op, Program, Value, is_exchange, parts_of
from fpipe.timing.costs import adds_gradients
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.communicate import without_frees
from fpipe.transforms.split_backward import split_backward

Runs = dict[tuple[str, int], dict[tuple[Value, ...], list[float]]]
"""For a kind and a stage, the seconds of each op, by what it writes, run by run."""


def with_halves(program: Program, one_process: bool = True) -> Program:
    """The program with split backwards, each op by itself; in one process without ranks and transfers."""
    if one_process:
        return split_backward()(_alone(program))
    together = Program.trusted(program.inputs, tuple(parts_of(without_frees(program))), program.outputs)
    return split_backward()(together)


def variants_of(halves: Program) -> list[Program]:
    """Programs that have all kinds of op between them."""
    plain = _plain(halves)
    return [*dict.fromkeys((_joined(plain), checkpoint()(plain)))]


def note(runs: Runs, op: Op, seconds: float) -> None:
    """Another run of an op."""
    if op.kind == "REDUCE" and not adds_gradients(op):
        return
    kind = "exchange" if is_exchange(op) and op.kind != "W" else op.kind
    runs.setdefault((kind, op.stage or 0), {}).setdefault(op.writes, []).append(seconds)


def seconds_of(program: Program, runs: Runs, alone: bool) -> dict[str, Any]:
    """The seconds of each kind that `Costs` has, for each stage the mean of its ops: of the least of each where an op
    runs `alone`, else of those of one run, in the median of all runs: what keeps some ops longer than most keeps each
    step so."""

    def seconds(kind: str) -> list[float]:
        each = [[*runs.get((kind, stage), {}).values()] for stage in range(program.stages)]
        if alone:
            return [mean([*map(min, ops)]) for ops in each]
        return [statistics.median([*map(mean, zip(*ops, strict=True))] or [0.0]) for ops in each]

    def mean(times: Sequence[float]) -> float:
        return sum(times) / max(1, len(times))

    whole = any(("B", stage) in runs for stage in range(program.stages))
    kinds = {"forward": "F", "backward_input": "I", "backward_weight": "W", "recompute": "R"}
    made: dict[str, Any] = {word: seconds(kind) for word, kind in kinds.items()}
    seldom = {word: word.upper() for word in ("update", "gather", "scatter", "reduce")} | {"exchange": "exchange"}
    made |= {word: seconds(kind) for word, kind in seldom.items() if any(found == kind for found, _ in runs)}
    return made | {"backward": seconds("B") if whole else None}


def _alone(program: Program) -> Program:
    """The ops in their order, each by itself and without transfers: all that one process has to do."""
    moves = ("SEND", "RECV", "OFFLOAD", "LOAD", "FREE")
    ops = [
        op._replace(rank=0, reads=tuple(value._replace(at="") for value in op.reads))
        for op in parts_of(program.ops)
        if op.kind not in moves
    ]
    outputs = tuple(end._replace(value=end.value._replace(at="")) for end in program.outputs)
    return Program.trusted(program.inputs, tuple(ops), outputs)


def _plain(program: Program) -> Program:
    """The program without backwards that compute their stage again themselves: that is R's time."""
    ops = (op._replace(how=()) if op.kind in "FBI" and not is_exchange(op) else op for op in program.ops)
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def _joined(program: Program) -> Program:
    """Every I and W as one B, in the place of I."""
    weights = {op.reads[-1]: op for op in program.ops if op.kind == "W"}
    ops: list[Op] = []
    for op in program.ops:
        if op.kind == "I":
            *cotangents, handed = op.writes
            ops.append(op._replace(kind="B", writes=(*cotangents, *weights[handed].writes)))
        elif op.kind != "W":
            ops.append(op)
    return Program.trusted(program.inputs, tuple(ops), program.outputs)
