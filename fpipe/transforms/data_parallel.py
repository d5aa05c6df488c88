"""Add up gradients and losses over replicas of a pipeline that train on different rows.

    replica 0: grads[0] = sum[0,1]        -->        all[0] = REDUCE sum[0,1] {axis='dp'}, grads[0] = all[0]
    replica 1: grads[0] = sum[0,1]                   the same, and so the same gradients

The program stays that of one replica. SPLIT then weighs a microbatch by its share of the rows of all replicas, so
gradients and losses need only be added. Losses that are totals (`reduction="count"`) are divided once, by the count
over all replicas. With `shard` along another axis there are two sums, the one within a group first:
cut[0] = SCATTER sum[0,1], all[0] = REDUCE cut[0].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, as_transform, place_and_rebuild, refuse_transfers, refuse_updated


def data_parallel(axis: str = "dp") -> Transform:
    """Add up gradients and losses over replicas of the program, each with its share of the rows.

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
    if not re.fullmatch(r"\w+", axis):
        raise ValueError(f"axis names a mesh dimension, such as 'dp'; found {axis!r}.")
    if axis == "pp":
        raise ValueError("mesh dimension 'pp' has the program's ranks; name another.")

    @as_transform
    def transform(program: Program) -> Program:
        axes = replica_axes(program)
        if axis in axes:
            return program
        refuse_updated(program, "data_parallel")
        if axes and (len(axes) > 1 or not any(op.kind == "SCATTER" for op in program.ops)):
            refuse_third_axis(axes, axis)
        reduced = reduce_nested(program, axis, *axes) if axes else reduce_results(program, axis)
        return place_and_rebuild(program, *reduced)

    return transform


def reduce_results(program: Program, axis: str) -> tuple[list[Op], list[Output]]:
    """Return the ops and outputs with a REDUCE for each result, in no order yet."""
    mend = "put fpipe.split() (at least split(1)) and fpipe.merge() before fpipe.data_parallel()."
    if not any(op.kind == "SPLIT" for op in program.ops):
        raise ProgramError(f"replicas need the weights that SPLIT writes: {mend}")
    for name, value, _ in program.outputs:
        if name.name in ("loss", "grads") and name.microbatch is not None:
            raise ProgramError(f"{value} is of one microbatch, not merged: {mend}")
    refuse_transfers(program, "data_parallel")
    reducer = _Reducer(program, axis)
    outputs = [output._replace(value=reducer.reduce_result(output.name, output.value)) for output in program.outputs]
    return [*map(reducer.rewrite_op, program.ops), *reducer.reduces], outputs


def replica_axes(program: Program) -> tuple[str, ...]:
    """Return the axes of the program's replicas; of two axes, sums along the second are made first."""
    # A SPLIT carries the axes, joined by "+", since it weighs a microbatch among all replicas.
    options = next((dict(op.options) for op in program.ops if op.kind == "SPLIT"), {})
    return tuple(options["axis"].split("+")) if "axis" in options else ()


def refuse_third_axis(axes: Sequence[str], axis: str) -> NoReturn:
    """Raise ProgramError for one axis of replicas too many."""
    raise ProgramError(
        f"this program has replicas along {' and '.join(map(repr, axes))} already, and so none along {axis!r}: "
        "data_parallel() and shard() have one axis each."
    )


def reduce_nested(program: Program, outer_axis: str, inner_axis: str) -> tuple[list[Op], list[Output]]:
    """Put an outer axis around the axis of a program: each sum is made along the inner axis, then along the outer."""
    ops, total_by_sum = list[Op](), dict[Value, Value]()  # sum over the inner axis -> sum over both

    def reduce_outer(op: Op, inner_sum: Value, total: Value) -> Op:
        return op._replace(kind="REDUCE", reads=(inner_sum,), writes=(total,), options=(("axis", outer_axis),))

    for op in program.ops:
        if op.kind == "SPLIT":
            ops.append(_with_axis(op, f"{outer_axis}+{inner_axis}"))
        elif op.kind in ("REDUCE", "SCATTER") and op.writes[0].name.startswith("all"):
            (total,) = op.writes
            inner_sum = total._replace(name=total.name.replace("all", "cut", 1))
            ops += [_with_axis(op, inner_axis)._replace(writes=(inner_sum,)), reduce_outer(op, inner_sum, total)]
        else:
            ops.append(op)
    # With scatter="microbatch" each microbatch's gradient is summed over the inner axis, before they are added. Then no
    # REDUCE or SCATTER wrote the result, and the outer sum is added here, behind the last addition.
    for output in program.outputs:
        op = program.ops[program.writer[output.value]]
        inner_sum = op.reads[0] if op.kind == "SCALE" else output.value
        if output.name.name == "grads" and inner_sum.name != "all":
            total_by_sum[inner_sum] = output.name._replace(name="all")
            ops.append(reduce_outer(op, inner_sum, total_by_sum[inner_sum])._replace(microbatch=None, slice=None))
    ops = [op._replace(reads=_rename_values(op.reads, total_by_sum)) if op.kind == "SCALE" else op for op in ops]
    return ops, [output._replace(value=total_by_sum.get(output.value, output.value)) for output in program.outputs]


def _with_axis(op: Op, axis: str) -> Op:
    return op._replace(options=tuple((dict(op.options) | {"axis": axis}).items()))


def _rename_values(values: Sequence[Value], names: Mapping[Value, Value]) -> tuple[Value, ...]:
    return tuple(names.get(value, value) for value in values)


_COUNT, _COUNT_OF_ALL, _LOSS = Value("count"), Value("all_count"), Value("loss")


class _Reducer:
    """Rewriter of ops and results that adds a REDUCE for each sum over microbatches."""

    def __init__(self, program: Program, axis: str) -> None:
        self.program, self.axis_options = program, (("axis", axis),)
        self.has_count = any(output.name == _COUNT for output in program.outputs)
        self.reduces: list[Op] = []
        self.total_by_sum: dict[Value, Value] = {_COUNT: _COUNT_OF_ALL}  # sum of this replica -> sum of all

    def reduce_result(self, name: Value, value: Value) -> Value:
        # A SCALE divides by the count. The sums under it are added over replicas first, and `rewrite_op` lets it read
        # the sums over all replicas and their count; so its result keeps its name.
        op = self.program.ops[self.program.writer[value]]
        if name.name == "grads":
            replica_sum = op.reads[0] if op.kind == "SCALE" else value
            self.total_by_sum[replica_sum] = self.add_reduce(op, replica_sum, name._replace(name="all"))
            return value if op.kind == "SCALE" else self.total_by_sum[replica_sum]
        if name == _LOSS and self.has_count:
            total = self.add_reduce(op, Value("total"), Value("all_total"))
            self.reduces.append(Op("SCALE", op.stage, None, None, 0, (total, _COUNT_OF_ALL), (value,)))
            return value
        return self.add_reduce(op, value, Value(f"all_{name.name}")) if name in (_LOSS, _COUNT) else value

    def add_reduce(self, op: Op, value: Value, total: Value) -> Value:
        self.reduces.append(Op("REDUCE", op.stage, None, None, 0, (value,), (total,), (), self.axis_options))
        return total

    def rewrite_op(self, op: Op) -> Op:
        """Weigh microbatches by the rows of all replicas, and divide sums over replicas instead of local ones."""
        if op.kind == "SPLIT":
            return op._replace(options=(*op.options, *self.axis_options))
        if op.kind == "SCALE":
            return op._replace(reads=_rename_values(op.reads, self.total_by_sum))
        if op.kind == "MERGE" and self.has_count and _LOSS in op.writes:
            return op._replace(writes=tuple(Value("total") if value == _LOSS else value for value in op.writes))
        return op
