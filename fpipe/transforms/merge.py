"""Join the results of microbatches: add gradients, average the loss, concatenate outputs.

    g[0,0]  g[0,1]  g[0,2]        --> merge() -->        sum[0,1] = g[0,0] + g[0,1],  sum[0,2] = sum[0,1] + g[0,2]

Floating-point addition is not associative, so the order of additions is part of the result's bits. It is fixed:
microbatches ascending (within a microbatch the last slice first, as its backward goes), then the uses of a tied leaf
by stage. A schedule may compute gradients in any order; an early gradient waits for its place in the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, as_transform, map_parts, place_and_rebuild
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
    options = () if spec is None else (("spec", spec_text(spec)),)
    options += () if aux is None or aux == "stream" else (("aux", spec_text(aux)),)
    streams = {"losses"} | {name for name, option in (("outputs", outputs), ("aux", aux)) if option == "stream"}

    @as_transform
    def transform(program: Program) -> Program:
        # 1) Sort the outputs: those that stay as they are, and for each joined result its parts, one a microbatch.
        parts_by_result: defaultdict[Value, list[Output]] = defaultdict(list)
        results: list[Output] = []
        for output in program.outputs:
            name = output.name
            if name.name == "outputs" and not outputs:
                continue
            if name.microbatch is None or name.name in streams:
                results.append(output)
            else:
                parts_by_result[_new(Value, (*name[:2], None, None, *name[4:]))].append(output)
        sequences: list[Op] = []
        if "outputs" in streams and program.slices > 1:
            results, sequences = _join_slices(program, results)
        if losses and not parts_by_result and not any(output.name.name == "losses" for output in results):
            raise ProgramError("losses are merged already; say losses=True in the first merge().")
        # A merged loss means that merge() was called before, and whatever is still per microbatch stays so.
        if any(output.name == Value("loss") for output in program.outputs):
            results += [part for name in ("outputs", "aux") for part in parts_by_result.pop(Value(name), [])]
        if losses:
            loss_parts = parts_by_result.get(Value("loss"), [])
            results += [part._replace(name=part.name._replace(name="losses")) for part in loss_parts]
        if any(len({part.name for part in parts}) < len(parts) for parts in parts_by_result.values()):
            raise ProgramError("results travel to several homes already; merge before communicate().")
        # 2) Add gradients in a chain of ADDs; join loss, counts and outputs by one MERGE.
        adder = _Adder(program, order)
        means = [name for name in parts_by_result if name.name not in ("grads", "input_grads")]
        has_aux = Value("aux") in parts_by_result
        merge_options = options if has_aux else tuple(option for option in options if option[0] != "aux")
        merges = _join_microbatches(means, parts_by_result, (*merge_options, *_sequence_options(program)))
        count = Value("count") if Value("count") in parts_by_result else None
        for name, parts in parts_by_result.items():
            values = [output.value for output in parts]
            if name.name == "grads":
                value = adder.add_up(name, values, count) if grads == "sum" else adder.join_rows(name, values)
            else:
                value = adder.join_input_grads(values, count) if name.name == "input_grads" else name
            results.append(Output(name, value, parts[0].homes))
        # 3) Put the new ops behind the others, without the sums that they replace.
        other_ops = (op for op in program.ops if op.kind != "ADD" or op.writes[0] not in adder.replaced_sums)
        merges += sequences
        ops = [*_with_weights_written(other_ops, merges), *adder.ops, *merges]
        return place_and_rebuild(program, ops if outputs else _drop_unread_outputs(ops, results), results)

    return transform


def _join_microbatches(
    names: Sequence[Value], outputs_by_result: dict[Value, list[Output]], options: tuple[tuple[str, object], ...]
) -> list[Op]:
    """Return one MERGE for the loss (by weight), the counts and the outputs, on the stage that writes the loss."""
    if not names:
        return []
    # A model without a loss has outputs alone.
    first_name, *further_names = sorted(names, key=lambda name: name != Value("loss"))
    values = [output.value for output in outputs_by_result[first_name]]
    weights = [Value("w", *value[1:4]) for value in values]
    other_values = [output.value for name in further_names for output in outputs_by_result[name]]
    return [Op("MERGE", values[0].stage, None, None, 0, (*values, *weights, *other_values), tuple(names), (), options)]


def _join_slices(program: Program, outputs: Iterable[Output]) -> tuple[list[Output], list[Op]]:
    """Join the outputs of slices to one output a microbatch, each by a MERGE."""
    outputs_by_name: defaultdict[Value, list[Output]] = defaultdict(list)
    other_outputs: list[Output] = []
    for output in outputs:
        if output.name.name == "outputs" and output.name.slice is not None:
            outputs_by_name[output.name._replace(slice=None)].append(output)
        else:
            other_outputs.append(output)
    merges: list[Op] = []
    for name, slice_outputs in outputs_by_name.items():
        slice_values = [output.value for output in sorted(slice_outputs, key=lambda output: output.name.slice or 0)]
        reads = (*(Value("w", *value[1:4]) for value in slice_values), *slice_values)
        options = _sequence_options(program)
        merges.append(Op("MERGE", slice_values[0].stage, name.microbatch, None, 0, reads, (name,), (), options))
    joined_outputs = [Output(name, name, parts[0].homes) for name, parts in outputs_by_name.items()]
    return [*other_outputs, *joined_outputs], merges


def _sequence_options(program: Program) -> tuple[tuple[str, object], ...]:
    """Return the options by which SPLIT cuts sequences, which a MERGE needs to join them; () without slices."""
    options = next((op.options for op in program.ops if op.kind == "SPLIT" and op.slice is not None), ())
    return tuple((option, value) for option, value in options if option in ("slices", "dim"))


def _with_weights_written(ops: Iterable[Op], merges: Sequence[Op]) -> Iterator[Op]:
    """Let each SPLIT write the weight that a MERGE reads."""
    # In a program without gradients no backward has read a weight, so `forward_only` dropped it from its SPLIT.
    read_weights = {value for op in merges for value in op.reads if value.name == "w"}
    for op in ops:
        if op[0] == "SPLIT" and (weight := Value("w", *op[1:4])) in read_weights and weight not in op.writes:
            op = op._replace(writes=(*op.writes, weight))
        yield op


def _drop_unread_outputs(ops: Sequence[Op], results: Iterable[Output]) -> list[Op]:
    read_values = {output.value for output in results}

    def without_outputs(op: Op) -> Op:
        reads = tuple(value for value in op.reads if value.name != "y")
        return op._replace(reads=reads, writes=tuple(value for value in op.writes if value.name != "outputs"))

    if Value("outputs") not in read_values:
        ops = [without_outputs(op) if op.kind == "MERGE" and op.microbatch is None else op for op in ops]
    read_values.update(value for op in ops for value in op.reads if value.name == "y")

    def without_unread(op: Op) -> Op:
        return op._replace(writes=tuple(value for value in op.writes if value.name != "y" or value in read_values))

    return [map_parts(without_unread, op) if op.kind in ("F", "PAIR") else op for op in ops]


class _Adder:
    """Maker of the ADD, SCALE and MERGE ops of gradients, which adds in microbatch or in schedule order."""

    def __init__(self, program: Program, order: str) -> None:
        self.program, self.order = program, order
        self.ops: list[Op] = []
        self.replaced_sums: set[Value] = set()  # per microbatch, the sum over the uses of a tied leaf

    def add_up(self, name: Value, values: list[Value], count: Value | None) -> Value:
        """Sum a parameter bundle's gradient over uses and microbatches; divide by the count if there is one."""
        # Uses are summed last: microbatch after microbatch for each use, then over the uses. So the sums of a use can
        # be made on its own rank, and only one sum of each use travels to the home of the tied leaf.
        uses = zip(*(self._gradients_of_uses(value) for value in values), strict=True)
        sums = [self._add_microbatches(list(use)) for use in uses]
        total = self._add_values(name._replace(name="sum"), sums)
        if count is None:
            return total
        scaled = name._replace(name="scaled")
        self.ops.append(Op("SCALE", name.stage, None, None, 0, (total, count), (scaled,)))
        return scaled

    def join_rows(self, name: Value, values: list[Value]) -> Value:
        joined_rows = name._replace(name="rows")
        values = sorted(values, key=lambda value: value.microbatch or 0)
        self.ops.append(Op("MERGE", name.stage, None, None, 0, tuple(values), (joined_rows,)))
        return joined_rows

    def join_input_grads(self, values: list[Value], count: Value | None) -> Value:
        """Join the gradients of the inputs as the batch was cut; divide by the count if there is one."""
        split_options = next((op.options for op in self.program.ops if op.kind == "SPLIT"), ())
        names = ("spec", "presplit", "slices", "dim", "sequence")
        options = tuple(option for option in split_options if option[0] in names)
        values = sorted(values, key=lambda value: (value.microbatch or 0, value.slice or 0))
        stage, joined = values[0].stage, Value("dinputs" if count else "input_grads")
        self.ops.append(Op("MERGE", stage, None, None, 0, (Value("inputs"), *values), (joined,), (), options))
        if count is not None:
            self.ops.append(Op("SCALE", stage, None, None, 0, (joined, count), (Value("input_grads"),)))
        return Value("input_grads")

    def _gradients_of_uses(self, value: Value) -> tuple[Value, ...]:
        if value.name != "sum":
            return (value,)
        self.replaced_sums.add(value)
        return self.program.ops[self.program.writer[value]].reads

    def _add_microbatches(self, values: list[Value]) -> Value:
        if self.order == "microbatch":
            return self._add_in_sequence(sorted(values, key=lambda value: (value.microbatch or 0, -(value.slice or 0))))
        writer, ops = self.program.writer, self.program.ops
        replicas: defaultdict[int, list[Value]] = defaultdict(list)
        for value in sorted(values, key=writer.__getitem__):
            replicas[ops[writer[value]].rank].append(value)
        sums = [self._add_in_sequence(replicas[rank]) for rank in sorted(replicas)]
        return self._add_values(values[0]._replace(name="replicas", microbatch=None, slice=None), sums)

    def _add_in_sequence(self, values: list[Value]) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self._add_values(_new(Value, ("sum", *value[1:])), (total, value))
        return total

    def _add_values(self, total: Value, values: Sequence[Value]) -> Value:
        if len(values) == 1:
            return values[0]
        self.ops.append(_new(Op, ("ADD", *total[1:4], 0, tuple(values), (total,), (), ())))
        return total
