"""Train on several copies of a pipeline at once: each takes rows of its own, and all add their gradients up.

    replica 0: grads[0] = sum[0,1]        -->        all[0] = REDUCE sum[0,1] {axis='dp'}, grads[0] = all[0]
    replica 1: grads[0] = sum[0,1]                   the same, and so the same gradients

The program stays that of one replica. SPLIT then weighs a microbatch among those of all replicas, so gradients and
losses are only added; what counts its rows (`reduction="count"`) is divided once, by the count over all. With `shard`
along another axis those within a group add up first: cut[0] = SCATTER sum[0,1], all[0] = REDUCE cut[0].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, refuse_sent, refuse_updated, settled, transforming


def data_parallel(axis: str = "dp") -> Transform:
    """Add up gradients and losses over replicas of the program, each of which has rows of its own.

    A REDUCE stands behind the last addition of its stage, on its stage's home, and runs while others still compute.
    Outputs, auxiliary results, `losses` and module state stay those of one replica, as DistributedDataParallel leaves
    batch norms. Random numbers are those of one device with the microbatches of all replicas, one replica after the
    other.

    Args:
        axis: the dimension of the mesh whose processes are replicas; `build(runtime="distributed", mesh=)` takes it.
            The other runtimes run one replica, whose sum is its own.

    Returns:
        A transform, behind `merge` anywhere in a chain. What has replicas along this axis already it leaves as it is.
        Before or behind `shard` along another axis (HSDP) those that share parameters out add up first, among
        themselves, and then over this axis.

    Raises:
        ProgramError: the program is not split and merged, has its transfers already, or has replicas along another
            axis that are no shards.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.merge(outputs=False))(fpipe.program(1))
    >>> program.table(comms=True)
    [['SPLIT(x[0,0])', '0F0', '0B0', 'SPLIT(x[0,1])', '0F1', 'MERGE(loss)', '0B1', 'ADD(sum[0,1])']]
    >>> program = fpipe.data_parallel()(program)
    >>> program.table(comms=True)[0][5:]
    ['MERGE(loss)', 'REDUCE(all_loss)', '0B1', 'ADD(sum[0,1])', 'REDUCE(all[0])']
    >>> print(*program.outputs, sep="\\n")
    loss = all_loss @ 0
    grads[0] = all[0] @ 0
    """
    if not isinstance(axis, str) or not re.fullmatch(r"\w+", axis):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"an axis is the name of a dimension of the mesh, such as 'dp'; found {axis!r}.")
    if axis == "pp":
        raise ValueError("dimension 'pp' of the mesh has the ranks of a program; replicas need one of their own.")

    @transforming
    def transform(program: Program) -> Program:
        known = axes_of(program)
        if axis in known:
            return program
        refuse_updated(program, "data_parallel")
        if known and (len(known) > 1 or not any(op.kind == "SCATTER" for op in program.ops)):
            refuse_more(known, axis)
        return settled(program, *(nested(program, axis, *known) if known else reduced(program, axis)))

    return transform


def reduced(program: Program, axis: str) -> tuple[list[Op], list[Output]]:
    """The ops and results over replicas along an axis, in no order yet."""
    _refuse_unmerged(program)
    refuse_sent(program, "data_parallel")
    return _Reducer(program, axis).reduced()


def axes_of(program: Program) -> tuple[str, ...]:
    """The axes of replicas, as SPLITs say them; of two, the replicas along the second add up first."""
    said = next((dict(op.how) for op in program.ops if op.kind == "SPLIT"), {})
    return tuple(said["axis"].split("+")) if "axis" in said else ()


def refuse_more(known: Sequence[str], axis: str) -> NoReturn:
    """Refuse replicas along one more axis."""
    raise ProgramError(
        f"this program has replicas along {' and '.join(map(repr, known))} already, and so none along {axis!r}: there "
        "is one axis of fpipe.data_parallel(), and one of fpipe.shard()."
    )


def nested(program: Program, outer: str, inner: str) -> tuple[list[Op], list[Output]]:
    """The ops and results over two axes, of a program with one: each sum is made along `inner`, then along `outer`."""
    ops, now = list[Op](), dict[Value, Value]()

    def across(op: Op, part: Value, made: Value) -> Op:
        return op._replace(kind="REDUCE", reads=(part,), writes=(made,), how=(("axis", outer),))

    for op in program.ops:
        if op.kind == "SPLIT":
            ops.append(_along(op, f"{outer}+{inner}"))
        elif op.kind in ("REDUCE", "SCATTER") and op.writes[0].name.startswith("all"):
            (whole,) = op.writes
            part = whole._replace(name=whole.name.replace("all", "cut", 1))
            ops += [_along(op, inner)._replace(writes=(part,)), across(op, part, whole)]
        else:
            ops.append(op)
    for end in program.outputs:  # each microbatch's gradients were added up over the inner axis, and their sum is not
        op = program.ops[program.writer[end.value]]
        total = op.reads[0] if op.kind == "SCALE" else end.value
        if end.name.name == "grads" and total.name != "all":
            now[total] = end.name._replace(name="all")
            made = across(op, total, now[total])
            ops = [one._replace(reads=_renamed(one.reads, now)) if one.kind == "SCALE" else one for one in ops]
            ops.append(made._replace(microbatch=None, slice=None))
    return ops, [end._replace(value=now.get(end.value, end.value)) for end in program.outputs]


def _along(op: Op, axis: str) -> Op:
    return op._replace(how=tuple((dict(op.how) | {"axis": axis}).items()))


def _renamed(values: Sequence[Value], now: Mapping[Value, Value]) -> tuple[Value, ...]:
    return tuple(now.get(value, value) for value in values)


def _refuse_unmerged(program: Program) -> None:
    before = "put fpipe.split() (at least split(1)) and fpipe.merge() before fpipe.data_parallel()."
    if not any(op.kind == "SPLIT" for op in program.ops):
        raise ProgramError(f"replicas share the weight of a batch as SPLIT writes it, which is missing: {before}")
    for name, value, _ in program.outputs:
        if name.name in ("loss", "grads") and name.microbatch is not None:
            raise ProgramError(f"replicas add up what is merged, and {value} is of one microbatch: {before}")


_COUNT, _OF_ALL, _LOSS = Value("count"), Value("all_count"), Value("loss")


class _Reducer:
    """Makes a REDUCE for each result that is a sum over microbatches."""

    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.how = program, (("axis", axis),)
        self.counted = any(end.name == _COUNT for end in program.outputs)
        self.reduces: list[Op] = []
        self.now: dict[Value, Value] = {_COUNT: _OF_ALL}  # what a SCALE reads in place of a sum of this replica

    def reduced(self) -> tuple[list[Op], list[Output]]:
        """The ops and results over all replicas."""
        ends = [end._replace(value=self.of_all(end.name, end.value)) for end in self.program.outputs]
        return [*map(self.reading, self.program.ops), *self.reduces], ends

    def of_all(self, name: Value, value: Value) -> Value:
        """A result over all replicas."""
        op = self.program.ops[self.program.writer[value]]
        if name.name == "grads":
            total = op.reads[0] if op.kind == "SCALE" else value
            self.now[total] = self.reduce(op, total, name._replace(name="all"))
            return value if op.kind == "SCALE" else self.now[total]
        if name == _LOSS and self.counted:
            total = self.reduce(op, Value("total"), Value("all_total"))
            self.reduces.append(Op("SCALE", op.stage, None, None, 0, (total, _OF_ALL), (value,)))
            return value
        return self.reduce(op, value, Value(f"all_{name.name}")) if name in (_LOSS, _COUNT) else value

    def reduce(self, op: Op, value: Value, made: Value) -> Value:
        """The sum over all replicas of what an op writes."""
        self.reduces.append(Op("REDUCE", op.stage, None, None, 0, (value,), (made,), (), self.how))
        return made

    def reading(self, op: Op) -> Op:
        """An op that weighs its part of the batch among all, or divides what was added up over all."""
        if op.kind == "SPLIT":
            return op._replace(how=(*op.how, *self.how))
        if op.kind == "SCALE":
            return op._replace(reads=_renamed(op.reads, self.now))
        if op.kind == "MERGE" and self.counted and _LOSS in op.writes:
            return op._replace(writes=tuple(Value("total") if value == _LOSS else value for value in op.writes))
        return op
