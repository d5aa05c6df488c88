"""Cut the batch: one training step becomes one for each microbatch.

    0F0 1F0 1B0 0B0        --> split(2) -->        0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1

Each stage that takes from the batch gets a SPLIT of its own, which writes its slice; where there is a loss, it also
writes the microbatch's weight in the mean. Sizes are fixed only when a step sees a batch: the first n mod m of n rows
in m microbatches are one larger. Nothing is joined: every result is there per microbatch until `merge` joins it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeVar

from fpipe.limits import LARGEST_SIZE, MOST_OPS, whole
from fpipe.program import Op, Output, Program, ProgramError, Sources, Value, kind_of
from fpipe.transforms._rewrite import Transform, rebuilt, refuse_updated, transforming
from fpipe.transforms.slice_sequence import slice_sequence
from fpipe.transforms.specs import batch_spec_text

_How = tuple[tuple[str, object], ...]


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
    count, how = _sizes(microbatches, size, rows, allow_fewer)
    slice_sequences = slice_sequence(slices)
    if spec is not None:
        how = (*how, ("spec", batch_spec_text(spec)))
    if presplit:
        if size is not None or rows is not None:
            raise ValueError("microbatches that are cut already have their own rows: say presplit=True without rows=.")
        how = (*how, ("presplit", True))

    @transforming
    def transform(program: Program) -> Program:
        refuse_updated(program, "split")
        if any(op.kind == "SPLIT" for op in program.ops) or program.microbatches > 1:
            found = f"{program.microbatches} microbatches already"
            raise ProgramError(f"this program is split into {found}; split it once.")
        if any(kind_of(op.kind).lane != "main" for op in program.ops):
            raise ProgramError("this program has its transfers already; put fpipe.split() before fpipe.communicate().")
        if program.ranks > 1 or any(op.parts for op in program.ops):
            raise ProgramError(
                f"this program has an order of its own already, on {program.ranks} ranks: its microbatches would "
                "follow each other and overlap nowhere. Put fpipe.split() before fpipe.place() and the schedule."
            )
        size = len(program.ops) * slices
        if count * size > MOST_OPS:
            raise ProgramError(f"{count} microbatches of {size} ops are more than the {MOST_OPS} ops of a program.")
        ops, outputs, sources = _copies(program, count, how)
        if all(kind_of(op.kind).time for op in program.ops):  # each copy is in order, and they follow each other
            return slice_sequences(Program.trusted(program.inputs, tuple(ops), outputs, sources))
        return slice_sequences(rebuilt(program, ops, outputs=outputs, sources=sources))

    return transform


def _sizes(count: int | None, size: int | None, rows: int | None, allow_fewer: bool) -> tuple[int, _How]:
    if (count is None) == (size is None):
        raise ValueError("say either the number of microbatches, split(8), or their size, split(size=4, rows=32).")
    for word, number in (("microbatches", count), ("size", size), ("rows", rows)):
        if number is not None:
            whole(word, number, most=LARGEST_SIZE if word == "microbatches" else math.inf)
    if rows is None and (allow_fewer or size is not None):
        option = "allow_fewer" if size is None else f"split(size={size})"
        raise ValueError(f"{option} needs rows=, the rows of a batch: a program has a fixed number of ops.")
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
_BATCH = {"inputs": "x", "target": "t"}
_T = TypeVar("_T")


def _copies(program: Program, count: int, how: _How) -> tuple[list[Op], tuple[Output, ...], list[Sources]]:
    """Copy the ops of one microbatch for all, with the SPLITs that they need: ops, results and sources.

    Copies are made a column at a time: what one name or one op becomes in each microbatch. A program of a million ops
    is made here; to rename its values one by one would take 9 us an op, columns take 1. SCALE is left out: gradients
    per microbatch are of totals; `merge` divides once, by the count of them all.
    """
    weighed = {op.stage for op in program.ops if any(value.name == "loss" for value in op.writes)}
    base = [op for old in program.ops if old.kind != "SCALE" for op in _with_split(old, weighed)]
    columns = _Columns(base, count, how)
    return (
        list(_by_microbatch(map(columns.ops, base))),
        tuple(chain.from_iterable(map(columns.results, _unscaled(program)))),
        list(_by_microbatch(map(columns.sources, base))),
    )


def _by_microbatch(columns: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """The ops of all columns; each is made whole first, and so lies together in memory: 1.0 us an op, not 1.6."""
    return chain.from_iterable(zip(*map(list, columns), strict=True))


class _Columns:
    """Names and ops of the base program in each microbatch, by iterators of C: no Python runs for each op."""

    def __init__(self, base: Sequence[Op], count: int, how: _How) -> None:
        self.count, self.size = count, len(base)
        self.microbatches = list(range(count))
        self.how_of_splits = [(("index", index), ("count", count), *how) for index in range(count)]
        self.writer = {value: position for position, op in enumerate(base) for value in op.writes}
        self.columns: dict[Value, tuple[list[Value], list[int]]] = {}

    def ops(self, op: Op) -> Iterable[Op]:
        """An op in each microbatch."""
        kind, stage, microbatch, piece, rank, reads, writes, _, how = op
        microbatches = repeat(None) if microbatch is None else self.microbatches
        hows = self.how_of_splits if kind == "SPLIT" else repeat(how, self.count)
        values = [self._rows([self.column(value)[0] for value in row]) for row in (reads, writes)]
        place = (repeat(kind), repeat(stage), microbatches, repeat(piece), repeat(rank))
        return map(_new, repeat(Op), zip(*place, *values, repeat(()), hows, strict=False))

    def column(self, value: Value) -> tuple[list[Value], list[int]]:
        """A value in each microbatch, and where each is written: -1 for an input."""
        if value not in self.columns:
            name, stage, microbatch, *rest = value
            state, writer = value._replace(microbatch=0), self.writer.get(value)
            values, places = [value] * self.count, [-1] * self.count
            if microbatch is not None:
                fields = zip(repeat(name), repeat(stage), self.microbatches, *map(repeat, rest), strict=False)
                values = list(map(_new, repeat(Value), fields))
                places = places if writer is None else list(range(writer, self.size * self.count, self.size))
            elif name == "state" and state in self.writer:  # what the microbatch before left
                states, writers = self.column(state)
                values, places = [value, *states[:-1]], [-1, *writers[:-1]]
            self.columns[value] = values, places
        return self.columns[value]

    def sources(self, op: Op) -> Iterable[Sources]:
        return self._rows([self.column(value)[1] for value in op.reads])

    def _rows(self, columns: Sequence[Sequence[_T]]) -> Iterable[tuple[_T, ...]]:
        return zip(*columns, strict=True) if columns else repeat((), self.count)

    def results(self, end: Output) -> Iterable[Output]:
        """A result in each microbatch; of a state only the last."""
        (name, stage, _, _, port, _), value, homes = end
        values, _ = self.column(value)
        if name == "state":
            return [Output(Value(name, stage, port=port), values[-1], homes)]
        names, _ = self.column(Value(name, stage, 0, port=port))
        return map(_new, repeat(Output), zip(names, values, repeat(homes), strict=False))


def _unscaled(program: Program) -> Iterator[Output]:
    """The results, a gradient as it is before it is scaled."""
    for end in program.outputs:
        writer = program.ops[program.writer[end.value]]
        yield end._replace(value=writer.reads[0]) if writer.kind == "SCALE" else end


def _with_split(op: Op, weighed: set[int | None]) -> Iterator[Op]:
    """An op that takes from the batch, and before it the SPLIT that it needs."""
    batch = [value for value in op.reads if value.name in _BATCH]
    slices = {value: Value(_BATCH[value.name], op.stage, 0, op.slice) for value in batch}
    weight = [Value("w", op.stage, 0)] if op.stage in weighed else []
    if (batch or weight) and op.kind == "F":
        reads = [*batch, *([Value("target")] if weight and Value("target") not in batch else [])]
        yield Op("SPLIT", op.stage, 0, op.slice, op.rank, tuple(reads), (*slices.values(), *weight))
    reads = [slices.get(value, value) for value in op.reads] + (weight if op.kind in "BI" else [])
    yield op._replace(reads=tuple(reads))
