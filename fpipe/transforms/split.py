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

# Copy the ops of one microbatch for all of them, a column at a time: what one name or one op becomes in each.
#
# A program of a million ops is made here. To rename its values one by one would take 9 us an op, columns take 1.

_new = tuple.__new__
_BATCH = {"inputs": "x", "target": "t"}
_T = TypeVar("_T")
_How = tuple[tuple[str, object], ...]


def copies(program: Program, many: int, how: _How) -> tuple[list[Op], tuple[Output, ...], list[Sources]]:
    """The ops of all microbatches, one after the other, with the SPLITs that they need; their results; and sources.

    SCALE is left out: gradients per microbatch are of totals; `merge` divides once, by the count of them all.
    """
    weighed = {op.stage for op in program.ops if any(value.name == "loss" for value in op.writes)}
    base = [op for old in program.ops if old.kind != "SCALE" for op in _with_split(old, weighed)]
    columns = _Columns(base, many, how)
    return (
        list(_microbatch_by_microbatch(map(columns.ops, base))),
        tuple(chain.from_iterable(map(columns.results, _unscaled(program)))),
        list(_microbatch_by_microbatch(map(columns.sources, base))),
    )


def _microbatch_by_microbatch(columns: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """The ops of all columns; each is made whole first, and so lies together in memory: 1.0 us an op, not 1.6."""
    return chain.from_iterable(zip(*map(list, columns), strict=True))


class _Columns:
    """Names and ops of the base program in each microbatch, by iterators of C: no Python runs for each op."""

    def __init__(self, base: Sequence[Op], many: int, how: _How) -> None:
        self.many, self.size = many, len(base)
        self.index = list(range(many))
        self.split = [(("index", index), ("count", many), *how) for index in range(many)]
        self.writer = {value: at for at, op in enumerate(base) for value in op.writes}
        self.known: dict[Value, tuple[list[Value], list[int]]] = {}

    def ops(self, op: Op) -> Iterable[Op]:
        """An op in each microbatch."""
        kind, stage, microbatch, piece, rank, reads, writes, _, how = op
        at = repeat(None) if microbatch is None else self.index
        said = self.split if kind == "SPLIT" else repeat(how, self.many)
        values = [self._tuples([self.of(value)[0] for value in found]) for found in (reads, writes)]
        place = (repeat(kind), repeat(stage), at, repeat(piece), repeat(rank))
        return map(_new, repeat(Op), zip(*place, *values, repeat(()), said, strict=False))

    def of(self, value: Value) -> tuple[list[Value], list[int]]:
        """A value in each microbatch, and where each is written: -1 for an input."""
        if value not in self.known:
            name, stage, microbatch, *rest = value
            after, at = value._replace(microbatch=0), self.writer.get(value)
            values, places = [value] * self.many, [-1] * self.many
            if microbatch is not None:
                fields = zip(repeat(name), repeat(stage), self.index, *map(repeat, rest), strict=False)
                values = list(map(_new, repeat(Value), fields))
                places = places if at is None else list(range(at, self.size * self.many, self.size))
            elif name == "state" and after in self.writer:  # what the microbatch before left
                left, there = self.of(after)
                values, places = [value, *left[:-1]], [-1, *there[:-1]]
            self.known[value] = values, places
        return self.known[value]

    def sources(self, op: Op) -> Iterable[Sources]:
        """Where an op in each microbatch finds what it reads."""
        return self._tuples([self.of(value)[1] for value in op.reads])

    def _tuples(self, columns: Sequence[Sequence[_T]]) -> Iterable[tuple[_T, ...]]:
        return zip(*columns, strict=True) if columns else repeat((), self.many)

    def results(self, end: Output) -> Iterable[Output]:
        """A result in each microbatch; of a state only the last."""
        (name, stage, _, _, port, _), value, homes = end
        values, _ = self.of(value)
        if name == "state":
            return [Output(Value(name, stage, port=port), values[-1], homes)]
        names, _ = self.of(Value(name, stage, 0, port=port))
        return map(_new, repeat(Output), zip(names, values, repeat(homes), strict=False))


def _unscaled(program: Program) -> Iterator[Output]:
    """The results, a gradient as it is before it is scaled."""
    for end in program.outputs:
        writer = program.ops[program.writer[end.value]]
        yield end._replace(value=writer.reads[0]) if writer.kind == "SCALE" else end


def _with_split(op: Op, weighed: set[int | None]) -> Iterator[Op]:
    """An op that takes from the batch, and before it the SPLIT it needs."""
    taken = [value for value in op.reads if value.name in _BATCH]
    slices = {value: Value(_BATCH[value.name], op.stage, 0, op.slice) for value in taken}
    weight = [Value("w", op.stage, 0)] if op.stage in weighed else []
    if (taken or weight) and op.kind == "F":
        read = [*taken, *([Value("target")] if weight and Value("target") not in taken else [])]
        made = (*slices.values(), *weight)
        yield Op("SPLIT", op.stage, 0, op.slice, op.rank, tuple(read), made)
    reads = [slices.get(value, value) for value in op.reads] + (weight if op.kind in "BI" else [])
    yield op._replace(reads=tuple(reads))


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
            an entry for each microbatch, or a list of pairs. Their shapes may differ.

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
    many, how = _sizes(microbatches, size, rows, allow_fewer)
    sliced = slice_sequence(slices)
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
            raise ProgramError(
                f"this program is split into {program.microbatches} microbatches already; split it once."
            )
        if any(kind_of(op.kind).lane != "main" for op in program.ops):
            raise ProgramError("this program has its transfers already; put fpipe.split() before fpipe.communicate().")
        if program.ranks > 1 or any(op.parts for op in program.ops):
            raise ProgramError(
                f"this program has an order of its own already, on {program.ranks} ranks: its microbatches would "
                "follow each other and overlap nowhere. Put fpipe.split() before fpipe.place() and the schedule."
            )
        if len(program.ops) * many * slices > MOST_OPS:
            each = len(program.ops) * slices
            raise ProgramError(f"{many} microbatches of {each} ops are more than the {MOST_OPS} ops of a program.")
        ops, outputs, sources = copies(program, many, how)
        if all(kind_of(op.kind).time for op in program.ops):  # each copy is in order, and they follow each other
            return sliced(Program.trusted(program.inputs, tuple(ops), outputs, sources))
        return sliced(rebuilt(program, ops, outputs=outputs, sources=sources))

    return transform


def _sizes(
    count: int | None, size: int | None, rows: int | None, allow_fewer: bool
) -> tuple[int, tuple[tuple[str, object], ...]]:
    if (count is None) == (size is None):
        raise ValueError("say either the number of microbatches, split(8), or their size, split(size=4, rows=32).")
    for word, given in (("microbatches", count), ("size", size), ("rows", rows)):
        if given is not None:
            whole(word, given, most=LARGEST_SIZE if word == "microbatches" else math.inf)
    if size is not None:
        if rows is None:
            raise ValueError(
                f"split(size={size}) needs rows=, the rows of a batch: a program has a fixed number of ops."
            )
        return -(-rows // size), (("size", size),)
    assert count is not None
    if allow_fewer and rows is None:
        raise ValueError("allow_fewer needs rows=, the rows of a batch: a program has a fixed number of ops.")
    if rows is not None and rows < count:
        if not allow_fewer:
            raise ValueError(f"{rows} rows cannot fill {count} microbatches; use at most {rows}, or allow_fewer=True.")
        count = rows
    return count, ()
