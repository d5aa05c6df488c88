"""Join what `split` cut: add gradients, reduce the loss, put the outputs together again.

    g[0,0]  g[0,1]  g[0,2]        --> merge() -->        sum[0,1] = g[0,0] + g[0,1],  sum[0,2] = sum[0,1] + g[0,2]

The order of additions is part of the result's bits, so it is fixed: microbatches ascending (of a sliced sequence the
last slice first, as its backward goes), and after that the uses of a tied leaf by stage. A schedule may compute
gradients in any order; the sums wait for their turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, on_parts, settled, transforming
from fpipe.transforms.specs import spec_text

_new = tuple.__new__


def merge(
    spec: object = None,
    *,
    order: Literal["microbatch", "schedule"] = "microbatch",
    outputs: bool | Literal["stream"] = True,
    losses: bool = False,
    aux: object = None,
    grads: Literal["sum", "rows"] = "sum",
) -> Transform:
    """Join the results of all microbatches; the inverse of `split`.

    Args:
        spec: how outputs are joined: None (rows of dim 0; 0-d tensors by weighted mean; equal non-tensors),
            `Chunk(dim)`, `Sum()` or a prefix tree of them.
        order: "microbatch" adds gradients in microbatch order, so that the bits do not depend on the schedule;
            "schedule" adds them as the program computes them, on each replica first, then across (apply it last).
        outputs: False drops the model's outputs, so that no logits are kept; "stream" leaves them per microbatch (the
            slices of a sequence are joined).
        losses: True also keeps the loss of each microbatch, as `Result.losses`; of each slice where sequences are cut.
        aux: how the auxiliary results of the loss are joined: a spec as for outputs, such as `Sum()`; "stream" leaves
            them as each call of the loss gave them: per microbatch, or per slice of one.
        grads: "sum" adds gradients up; "rows" puts those of `per_example` one behind the other, as the rows of the
            batch are.

    Returns:
        A transform. What is not split, or merged already, it leaves as it is.

    >>> import fpipe
    >>> program = fpipe.split(2)(fpipe.program(1))
    >>> program.table(comms=True)
    [['SPLIT(x[0,0])', '0F0', '0B0', 'SPLIT(x[0,1])', '0F1', '0B1']]
    >>> program = fpipe.merge(outputs=False)(program)
    >>> program.table(comms=True)
    [['SPLIT(x[0,0])', '0F0', '0B0', 'SPLIT(x[0,1])', '0F1', 'MERGE(loss)', '0B1', 'ADD(sum[0,1])']]
    >>> print(*program.outputs, sep="\\n")
    loss = loss @ 0
    grads[0] = sum[0,1] @ 0
    """
    if order not in ("microbatch", "schedule"):
        raise ValueError(f"order is 'microbatch' or 'schedule', found {order!r}.")
    if outputs not in (True, False, "stream"):
        raise ValueError(f"outputs is True, False or 'stream', found {outputs!r}.")
    if grads not in ("sum", "rows"):
        raise ValueError(f"grads is 'sum' or 'rows', found {grads!r}.")
    how = () if spec is None else (("spec", spec_text(spec)),)
    how += () if aux is None or aux == "stream" else (("aux", spec_text(aux)),)
    streams = {"losses"} | {name for name, option in (("outputs", outputs), ("aux", aux)) if option == "stream"}

    @transforming
    def transform(program: Program) -> Program:
        parts: defaultdict[Value, list[Output]] = defaultdict(list)  # result name -> its part of each microbatch
        ends: list[Output] = []
        for end in program.outputs:
            name = end.name
            if name.name == "outputs" and not outputs:
                continue
            if name.microbatch is None or name.name in streams:
                ends.append(end)
            else:
                parts[_new(Value, (*name[:2], None, None, *name[4:]))].append(end)
        sequences: list[Op] = []
        if "outputs" in streams and program.slices > 1:
            ends, sequences = _join_slices(program, ends)
        if losses and not parts and not any(end.name.name == "losses" for end in ends):
            raise ProgramError("the losses are merged already; say losses=True in the first merge().")
        if Value("loss") not in parts:  # merged already
            ends += [end for name in (Value("outputs"), Value("aux")) for end in parts.pop(name, [])]
        if losses:
            ends += [end._replace(name=end.name._replace(name="losses")) for end in parts.get(Value("loss"), [])]
        if any(len({end.name for end in part}) < len(part) for part in parts.values()):
            raise ProgramError("results of this program travel to several homes already; merge before communicate().")
        adder = _Adder(program, order)
        means = [name for name in parts if name.name not in ("grads", "input_grads")]
        how_aux = how if Value("aux") in parts else tuple(word for word in how if word[0] != "aux")
        merges = _join_microbatches(means, parts, (*how_aux, *_how_of_sequences(program)))
        count = Value("count") if Value("count") in parts else None
        for name, part in parts.items():
            values = [end.value for end in part]
            if name.name == "grads":
                value = adder.add_up(name, values, count) if grads == "sum" else adder.join_rows(name, values)
            else:
                value = adder.join_input_grads(values, count) if name.name == "input_grads" else name
            ends.append(Output(name, value, part[0].homes))
        rest = (op for op in program.ops if op.kind != "ADD" or op.writes[0] not in adder.replaced)
        merges += sequences
        ops = [*_with_weights(rest, merges), *adder.ops, *merges]
        return settled(program, ops if outputs else _without_unread(ops, ends), ends)

    return transform


def _join_microbatches(
    names: Sequence[Value], parts: dict[Value, list[Output]], how: tuple[tuple[str, object], ...]
) -> list[Op]:
    """Make one MERGE for the loss (by weight), the counts and the outputs, on the stage that writes the loss."""
    if not names:
        return []
    losses = [end.value for end in parts[Value("loss")]]
    weights = [Value("w", *loss[1:4]) for loss in losses]
    rest = [end.value for name in names if name != Value("loss") for end in parts[name]]
    return [Op("MERGE", losses[0].stage, None, None, 0, (*losses, *weights, *rest), tuple(names), (), how)]


def _join_slices(program: Program, ends: Iterable[Output]) -> tuple[list[Output], list[Op]]:
    """Join the outputs of slices to those of microbatches, by a MERGE for each."""
    slices: defaultdict[Value, list[Output]] = defaultdict(list)
    rest: list[Output] = []
    for end in ends:
        if end.name.name == "outputs" and end.name.slice is not None:
            slices[end.name._replace(slice=None)].append(end)
        else:
            rest.append(end)
    merges: list[Op] = []
    for name, of_slices in slices.items():
        parts = [end.value for end in sorted(of_slices, key=lambda end: end.name.slice or 0)]
        reads = (*(Value("w", *value[1:4]) for value in parts), *parts)
        how = _how_of_sequences(program)
        merges.append(Op("MERGE", parts[0].stage, name.microbatch, None, 0, reads, (name,), (), how))
    return [*rest, *(Output(name, name, of_slices[0].homes) for name, of_slices in slices.items())], merges


def _how_of_sequences(program: Program) -> tuple[tuple[str, object], ...]:
    """How the slices of a sequence are joined: as SPLIT cuts them."""
    how = next((op.how for op in program.ops if op.kind == "SPLIT" and op.slice is not None), ())
    return tuple((word, value) for word, value in how if word in ("slices", "dim"))


def _with_weights(ops: Iterable[Op], merges: Sequence[Op]) -> Iterator[Op]:
    """Let each SPLIT write the weight that a MERGE reads: without gradients no op did so far."""
    wanted = {value for op in merges for value in op.reads if value.name == "w"}
    for op in ops:
        if op[0] == "SPLIT" and (weight := Value("w", *op[1:4])) in wanted and weight not in op.writes:
            op = op._replace(writes=(*op.writes, weight))
        yield op


def _without_unread(ops: Sequence[Op], ends: Iterable[Output]) -> list[Op]:
    wanted = {end.value for end in ends}

    def without_outputs(op: Op) -> Op:
        reads = tuple(value for value in op.reads if value.name != "y")
        return op._replace(reads=reads, writes=tuple(value for value in op.writes if value.name != "outputs"))

    if Value("outputs") not in wanted:
        ops = [without_outputs(op) if op.kind == "MERGE" and op.microbatch is None else op for op in ops]
    wanted.update(value for op in ops for value in op.reads if value.name == "y")

    def without_unread(op: Op) -> Op:
        return op._replace(writes=tuple(value for value in op.writes if value.name != "y" or value in wanted))

    return [on_parts(without_unread, op) if op.kind in ("F", "PAIR") else op for op in ops]


class _Adder:
    """Makes the ADD (and SCALE) ops of gradients, in the order asked for."""

    def __init__(self, program: Program, order: str) -> None:
        self.program, self.order = program, order
        self.ops: list[Op] = []
        self.replaced: set[Value] = set()  # the sums per microbatch of a tied leaf's uses

    def add_up(self, name: Value, values: list[Value], count: Value | None) -> Value:
        """Sum a parameter bundle's gradient over uses and microbatches; divide by the count if there is one."""
        uses = zip(*(self._uses(value) for value in values), strict=True)
        sums = [self._add_microbatches(list(use)) for use in uses]
        total = self._add(name._replace(name="sum"), sums)
        if count is None:
            return total
        scaled = name._replace(name="scaled")
        self.ops.append(Op("SCALE", name.stage, None, None, 0, (total, count), (scaled,)))
        return scaled

    def join_rows(self, name: Value, values: list[Value]) -> Value:
        """Put the gradients of single rows one behind the other, microbatch after microbatch."""
        rows = name._replace(name="rows")
        values = sorted(values, key=lambda value: value.microbatch or 0)
        self.ops.append(Op("MERGE", name.stage, None, None, 0, tuple(values), (rows,)))
        return rows

    def join_input_grads(self, values: list[Value], count: Value | None) -> Value:
        """Join the gradients of the inputs as the batch was cut; divide by the count if there is one."""
        cut = next((op.how for op in self.program.ops if op.kind == "SPLIT"), ())
        how = tuple(word for word in cut if word[0] in ("spec", "presplit", "slices", "dim", "sequence"))
        values = sorted(values, key=lambda value: (value.microbatch or 0, value.slice or 0))
        stage, joined = values[0].stage, Value("dinputs" if count else "input_grads")
        self.ops.append(Op("MERGE", stage, None, None, 0, (Value("inputs"), *values), (joined,), (), how))
        if count is not None:
            self.ops.append(Op("SCALE", stage, None, None, 0, (joined, count), (Value("input_grads"),)))
        return Value("input_grads")

    def _uses(self, value: Value) -> tuple[Value, ...]:
        if value.name != "sum":
            return (value,)
        self.replaced.add(value)
        return self.program.ops[self.program.writer[value]].reads

    def _add_microbatches(self, values: list[Value]) -> Value:
        if self.order == "microbatch":
            return self._add_in_turn(sorted(values, key=lambda value: (value.microbatch or 0, -(value.slice or 0))))
        writer, ops = self.program.writer, self.program.ops
        replicas: defaultdict[int, list[Value]] = defaultdict(list)
        for value in sorted(values, key=writer.__getitem__):
            replicas[ops[writer[value]].rank].append(value)
        sums = [self._add_in_turn(replicas[rank]) for rank in sorted(replicas)]
        return self._add(values[0]._replace(name="replicas", microbatch=None, slice=None), sums)

    def _add_in_turn(self, values: list[Value]) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self._add(_new(Value, ("sum", *value[1:])), (total, value))
        return total

    def _add(self, total: Value, values: Sequence[Value]) -> Value:
        if len(values) == 1:
            return values[0]
        self.ops.append(_new(Op, ("ADD", *total[1:4], 0, tuple(values), (total,), (), ())))
        return total
