"""Cut the batch into microbatches: the ops of one step are copied for each.

    0F0 1F0 1B0 0B0        --> split(2) -->        0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1

Each stage that reads the batch gets a SPLIT of its own, which writes the stage's slice; where there is a loss, it also
writes the microbatch's weight in the mean. Sizes are fixed only when a step sees a batch: of n rows in m microbatches
the first n mod m have one row more. Nothing is joined: every result stays per microbatch until `merge` joins it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeVar

from fpipe.limits import LARGEST_SIZE, MOST_OPS, check_whole_number
from fpipe.program import Op, Output, Program, ProgramError, Sources, Value, kind_of
from fpipe.transforms._rewrite import Transform, as_transform, rebuild, refuse_updated
from fpipe.transforms.slice_sequence import slice_sequence
from fpipe.transforms.specs import batch_spec_text

_Options = tuple[tuple[str, object], ...]


def split(
    microbatches: int | None = None,
    spec: object = None,
    *,
    size: int | None = None,
    rows: int | None = None,
    allow_fewer: bool = False,
    slices: int = 1,
    presplit: bool = False,
) -> Transform:
    """Cut the batch into microbatches.

    Args:
        microbatches: how many.
        spec: how leaves are cut: None (rows of dim 0; scalars and non-tensors go to every microbatch), `Chunk(dim)`,
            `Replicate()`, a function of a leaf that says one of these and has a name (`register_spec`), or a prefix
            tree of them for the inputs and the target as a pair.
        size: rows of a microbatch, instead of their number; needs `rows`.
        rows: rows of a batch, if they are known.
        allow_fewer: with `rows`, make at most one microbatch per row instead of refusing.
        slices: how many slices the sequences (dim 1) of each microbatch are cut into; `slice_sequence` says more.
        presplit: whether the batch is cut already: a step then takes two streams `(inputs, target)`, each a list with
            an entry for each microbatch, or a list of pairs. Their shapes may differ, and so may the rows of leaves of
            one microbatch, such as `cu_seqlens`: it weighs by the rows of its target's first leaf that has some.

    Raises:
        ValueError: neither or both of `microbatches` and `size`; fewer rows than microbatches; not positive.
        ProgramError: the program is split already, is on several ranks, or frees its values.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1B0 0B0
    >>> print(fpipe.plot(fpipe.split(2)(program)))
    rank 0 | 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    microbatch_count, options = _check_sizes(microbatches, size, rows, allow_fewer)
    slice_sequences = slice_sequence(slices)
    if spec is not None:
        options = (*options, ("spec", batch_spec_text(spec)))
    if presplit:
        if size is not None or rows is not None:
            raise ValueError("presplit=True goes without size= and rows=.")
        options = (*options, ("presplit", True))

    @as_transform
    def transform(program: Program) -> Program:
        refuse_updated(program, "split")
        if any(op.kind == "SPLIT" for op in program.ops) or program.microbatches > 1:
            state = f"{program.microbatches} microbatches already"
            raise ProgramError(f"this program is split into {state}; split it once.")
        if any(kind_of(op.kind).lane != "main" for op in program.ops):
            raise ProgramError("this program has its transfers already; put fpipe.split() before fpipe.communicate().")
        if program.ranks > 1 or any(op.parts for op in program.ops):
            raise ProgramError(
                f"this program has an order of its own already, on {program.ranks} ranks. Put fpipe.split() before "
                "fpipe.place() and the schedule."
            )
        op_count = len(program.ops) * slices
        if microbatch_count * op_count > MOST_OPS:
            raise ProgramError(
                f"{microbatch_count} microbatches of {op_count} ops are more than the {MOST_OPS} ops of a program."
            )
        ops, outputs, sources = _copy_microbatches(program, microbatch_count, options)
        # Without ops that are placed by their data, the copies one behind the other are in the one order already.
        if all(kind_of(op.kind).time for op in program.ops):
            return slice_sequences(Program.trusted(program.inputs, tuple(ops), outputs, sources))
        return slice_sequences(rebuild(program, ops, outputs=outputs, sources=sources))

    return transform


def _check_sizes(count: int | None, size: int | None, rows: int | None, allow_fewer: bool) -> tuple[int, _Options]:
    if (count is None) == (size is None):
        raise ValueError("say either split(8) or split(size=4, rows=32).")
    for name, number in (("microbatches", count), ("size", size), ("rows", rows)):
        if number is not None:
            check_whole_number(name, number, maximum=LARGEST_SIZE if name == "microbatches" else math.inf)
    if rows is None and (allow_fewer or size is not None):
        option = "allow_fewer" if size is None else f"split(size={size})"
        raise ValueError(f"{option} needs rows=, the number of rows of a batch.")
    if size is not None:
        assert rows is not None
        return -(-rows // size), (("size", size),)
    assert count is not None
    if rows is not None and rows < count:
        if not allow_fewer:
            raise ValueError(f"{rows} rows cannot fill {count} microbatches; use at most {rows}, or allow_fewer=True.")
        count = rows
    return count, ()


_new = tuple.__new__
_SLICE_NAME_BY_BATCH = {"inputs": "x", "target": "t"}
_T = TypeVar("_T")


def _copy_microbatches(
    program: Program, count: int, options: _Options
) -> tuple[list[Op], tuple[Output, ...], list[Sources]]:
    """Copy the ops of one microbatch for all, with the SPLITs that they need; return ops, outputs and sources.

    Copies are made a column at a time; a column is what one value or one op becomes in each microbatch. Programs of a
    million ops are made here: to rename values one by one takes 9 us an op, columns take 1. SCALE is left out, since
    gradients per microbatch are those of totals; `merge` divides once, by the count of all microbatches.
    """
    stages_with_loss = {op.stage for op in program.ops if any(value.name == "loss" for value in op.writes)}
    base_ops = [op for old_op in program.ops if old_op.kind != "SCALE" for op in _add_split(old_op, stages_with_loss)]
    columns = _Columns(base_ops, count, options)
    return (
        list(_by_microbatch(map(columns.ops, base_ops))),
        tuple(chain.from_iterable(map(columns.outputs, _unscaled_outputs(program)))),
        list(_by_microbatch(map(columns.sources, base_ops))),
    )


def _by_microbatch(columns: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """Yield row after row of all columns: all ops of microbatch 0, then all of microbatch 1."""
    # list: a column is made whole first, and so lies together in memory. That takes 1.0 us an op, not 1.6.
    return chain.from_iterable(zip(*map(list, columns), strict=True))


class _Columns:
    """Columns of the values, ops and sources of a base program, made by iterators of C: no Python runs for each op."""

    def __init__(self, base: Sequence[Op], count: int, options: _Options) -> None:
        self.count, self.size = count, len(base)
        self.microbatches = list(range(count))
        self.split_options = [(("index", index), ("count", count), *options) for index in range(count)]
        self.writer = {value: position for position, op in enumerate(base) for value in op.writes}
        self.columns: dict[Value, tuple[list[Value], list[int]]] = {}

    def ops(self, op: Op) -> Iterable[Op]:
        """Return the column of an op: the op in each microbatch."""
        kind, stage, microbatch, slice_index, rank, reads, writes, _, options = op
        microbatches = repeat(None) if microbatch is None else self.microbatches
        options_column = self.split_options if kind == "SPLIT" else repeat(options, self.count)
        value_columns = [self._rows([self.column(value)[0] for value in row]) for row in (reads, writes)]
        op_fields = (repeat(kind), repeat(stage), microbatches, repeat(slice_index), repeat(rank))
        return map(_new, repeat(Op), zip(*op_fields, *value_columns, repeat(()), options_column, strict=False))

    def column(self, value: Value) -> tuple[list[Value], list[int]]:
        """Return the column of a value, and the position of the writer of each: -1 for an input."""
        if value not in self.columns:
            name, stage, microbatch, *other_fields = value
            first_state, writer = value._replace(microbatch=0), self.writer.get(value)
            values, positions = [value] * self.count, [-1] * self.count
            if microbatch is not None:
                fields = zip(repeat(name), repeat(stage), self.microbatches, *map(repeat, other_fields), strict=False)
                values = list(map(_new, repeat(Value), fields))
                # Copies follow each other, `size` ops each, so the writer stands at the same place in each.
                positions = positions if writer is None else list(range(writer, self.size * self.count, self.size))
            elif name == "state" and first_state in self.writer:  # as the previous microbatch left it
                states, writers = self.column(first_state)
                values, positions = [value, *states[:-1]], [-1, *writers[:-1]]
            self.columns[value] = values, positions
        return self.columns[value]

    def sources(self, op: Op) -> Iterable[Sources]:
        return self._rows([self.column(value)[1] for value in op.reads])

    def _rows(self, columns: Sequence[Sequence[_T]]) -> Iterable[tuple[_T, ...]]:
        # An op without reads has no columns, and still an empty row for each microbatch.
        return zip(*columns, strict=True) if columns else repeat((), self.count)

    def outputs(self, output: Output) -> Iterable[Output]:
        """Return an output for each microbatch; of a module state only the last, which contains all updates."""
        (name, stage, _, _, port, _), value, homes = output
        values, _ = self.column(value)
        if name == "state":
            return [Output(Value(name, stage, port=port), values[-1], homes)]
        names, _ = self.column(Value(name, stage, 0, port=port))
        return map(_new, repeat(Output), zip(names, values, repeat(homes), strict=False))


def _unscaled_outputs(program: Program) -> Iterator[Output]:
    """Yield the outputs, with the gradients that SCALE reads instead of its results."""
    for output in program.outputs:
        writer = program.ops[program.writer[output.value]]
        yield output._replace(value=writer.reads[0]) if writer.kind == "SCALE" else output


def _add_split(op: Op, stages_with_loss: set[int | None]) -> Iterator[Op]:
    """Yield an op that reads its slice of the batch, and before a forward the SPLIT that writes the slice."""
    batch_values = [value for value in op.reads if value.name in _SLICE_NAME_BY_BATCH]
    slice_by_value = {value: Value(_SLICE_NAME_BY_BATCH[value.name], op.stage, 0, op.slice) for value in batch_values}
    weight = [Value("w", op.stage, 0)] if op.stage in stages_with_loss else []
    if (batch_values or weight) and op.kind == "F":
        reads = [*batch_values, *([Value("target")] if weight and Value("target") not in batch_values else [])]
        yield Op("SPLIT", op.stage, 0, op.slice, op.rank, tuple(reads), (*slice_by_value.values(), *weight))
    reads = [slice_by_value.get(value, value) for value in op.reads] + (weight if op.kind in "BI" else [])
    yield op._replace(reads=tuple(reads))
