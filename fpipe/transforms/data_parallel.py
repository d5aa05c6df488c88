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
    """Return the ops and results over replicas along an axis, in no order yet."""
    before = "put fpipe.split() (at least split(1)) and fpipe.merge() before fpipe.data_parallel()."
    if not any(op.kind == "SPLIT" for op in program.ops):
        raise ProgramError(f"replicas share the weight of a batch as SPLIT writes it, which is missing: {before}")
    for name, value, _ in program.outputs:
        if name.name in ("loss", "grads") and name.microbatch is not None:
            raise ProgramError(f"replicas add up what is merged, and {value} is of one microbatch: {before}")
    refuse_sent(program, "data_parallel")
    reducer = _Reducer(program, axis)
    ends = [end._replace(value=reducer.result_of_all(end.name, end.value)) for end in program.outputs]
    return [*map(reducer.over_all, program.ops), *reducer.reduces], ends


def axes_of(program: Program) -> tuple[str, ...]:
    """The axes of replicas, as SPLITs say them; of two, the replicas along the second add up first."""
    how = next((dict(op.how) for op in program.ops if op.kind == "SPLIT"), {})
    return tuple(how["axis"].split("+")) if "axis" in how else ()


def refuse_more(known: Sequence[str], axis: str) -> NoReturn:
    """Refuse replicas along one more axis."""
    raise ProgramError(
        f"this program has replicas along {' and '.join(map(repr, known))} already, and so none along {axis!r}: there "
        "is one axis of fpipe.data_parallel(), and one of fpipe.shard()."
    )


def nested(program: Program, outer: str, inner: str) -> tuple[list[Op], list[Output]]:
    """Put an outer axis around the axis of a program: each sum is made along `inner`, then along `outer`."""
    ops, totals = list[Op](), dict[Value, Value]()  # the sum over both axes by that over one

    def reduce_outer(op: Op, part: Value, total: Value) -> Op:
        return op._replace(kind="REDUCE", reads=(part,), writes=(total,), how=(("axis", outer),))

    for op in program.ops:
        if op.kind == "SPLIT":
            ops.append(_along(op, f"{outer}+{inner}"))
        elif op.kind in ("REDUCE", "SCATTER") and op.writes[0].name.startswith("all"):
            (total,) = op.writes
            part = total._replace(name=total.name.replace("all", "cut", 1))
            ops += [_along(op, inner)._replace(writes=(part,)), reduce_outer(op, part, total)]
        else:
            ops.append(op)
    for end in program.outputs:  # each microbatch's gradients were added up over the inner axis, and their sum is not
        op = program.ops[program.writer[end.value]]
        part = op.reads[0] if op.kind == "SCALE" else end.value
        if end.name.name == "grads" and part.name != "all":
            totals[part] = end.name._replace(name="all")
            ops.append(reduce_outer(op, part, totals[part])._replace(microbatch=None, slice=None))
    ops = [op._replace(reads=_renamed(op.reads, totals)) if op.kind == "SCALE" else op for op in ops]
    return ops, [end._replace(value=totals.get(end.value, end.value)) for end in program.outputs]


def _along(op: Op, axis: str) -> Op:
    return op._replace(how=tuple((dict(op.how) | {"axis": axis}).items()))


def _renamed(values: Sequence[Value], names: Mapping[Value, Value]) -> tuple[Value, ...]:
    return tuple(names.get(value, value) for value in values)


_COUNT, _COUNT_OF_ALL, _LOSS = Value("count"), Value("all_count"), Value("loss")


class _Reducer:
    """Makes a REDUCE for each result that is a sum over microbatches."""

    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.how = program, (("axis", axis),)
        self.has_count = any(end.name == _COUNT for end in program.outputs)
        self.reduces: list[Op] = []
        self.totals: dict[Value, Value] = {_COUNT: _COUNT_OF_ALL}  # by the sum of this replica

    def result_of_all(self, name: Value, value: Value) -> Value:
        op = self.program.ops[self.program.writer[value]]
        if name.name == "grads":
            part = op.reads[0] if op.kind == "SCALE" else value
            self.totals[part] = self.reduce(op, part, name._replace(name="all"))
            return value if op.kind == "SCALE" else self.totals[part]
        if name == _LOSS and self.has_count:
            total = self.reduce(op, Value("total"), Value("all_total"))
            self.reduces.append(Op("SCALE", op.stage, None, None, 0, (total, _COUNT_OF_ALL), (value,)))
            return value
        return self.reduce(op, value, Value(f"all_{name.name}")) if name in (_LOSS, _COUNT) else value

    def reduce(self, op: Op, value: Value, total: Value) -> Value:
        self.reduces.append(Op("REDUCE", op.stage, None, None, 0, (value,), (total,), (), self.how))
        return total

    def over_all(self, op: Op) -> Op:
        """Weigh a part of the batch among all replicas, or divide what was added up over all."""
        if op.kind == "SPLIT":
            return op._replace(how=(*op.how, *self.how))
        if op.kind == "SCALE":
            return op._replace(reads=_renamed(op.reads, self.totals))
        if op.kind == "MERGE" and self.has_count and _LOSS in op.writes:
            return op._replace(writes=tuple(Value("total") if value == _LOSS else value for value in op.writes))
        return op
