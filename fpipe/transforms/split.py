"""Cut the batch: one training step becomes one for each microbatch.

    0F0 1F0 1B0 0B0        --> split(2) -->        0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1

Each stage that takes from the batch gets a SPLIT of its own, which writes its slice; where the target is taken, it also
writes the microbatch's weight in the mean. Sizes are fixed only when a step sees a batch: the first n mod m of n rows
in m microbatches are one larger. Nothing is joined: every result is there per microbatch until `merge` joins it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fpipe.program import Op, Output, Program, ProgramError, Value, building, kind_of, pair, parts_of
from fpipe.transforms._rewrite import Transform, rebuilt

_new = tuple.__new__
_BATCH = {"inputs": "x", "target": "t"}


def split(
    microbatches: int | None = None,
    spec: object = None,
    *,
    size: int | None = None,
    rows: int | None = None,
    allow_fewer: bool = False,
) -> Transform:
    """Cut the batch into microbatches.

    Args:
        microbatches: how many.
        spec: how leaves are cut: None (rows of dim 0; scalars and non-tensors go to every microbatch), `Chunk(dim)`,
            `Replicate()`, or a prefix tree of them for the inputs and the target as a pair.
        size: rows of a microbatch, instead of their number; needs `rows`.
        rows: rows of a batch, if they are known.
        allow_fewer: with `rows`, make at most one microbatch per row instead of refusing.

    Raises:
        ValueError: neither or both of `microbatches` and `size`; fewer rows than microbatches; not positive.
        ProgramError: the program is split already, or frees its values.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.split(2)(fpipe.program(2))))
    rank 0 | 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    count, how = _sizes(microbatches, size, rows, allow_fewer)
    if spec is not None:
        how = (*how, ("spec", spec))

    def transform(program: Program) -> Program:
        if any(op.kind == "SPLIT" for op in program.ops) or program.microbatches > 1:
            raise ProgramError(
                f"this program is split into {program.microbatches} microbatches already; split it once."
            )
        with building():
            outputs = tuple([made for end in program.outputs for made in _labels(program, end, count)])
            ops = _copies(program, count, how)
        if program.ranks == 1 and all(kind_of(op.kind).time for op in program.ops):
            # One rank and nothing but timed ops: each copy is in order, and they follow each other.
            return Program.trusted(program.inputs, tuple(ops), outputs)
        return rebuilt(program, ops, outputs=outputs)

    return transform


def _sizes(
    count: int | None, size: int | None, rows: int | None, allow_fewer: bool
) -> tuple[int, tuple[tuple[str, object], ...]]:
    if (count is None) == (size is None):
        raise ValueError("say either the number of microbatches, split(8), or their size, split(size=4, rows=32).")
    for word, given in (("microbatches", count), ("size", size), ("rows", rows)):
        if given is not None and given < 1:
            raise ValueError(f"{word} is at least 1, found {given}.")
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


class _Stamp:
    """The values of one microbatch after another, by number: those of the base program renamed, and the SPLITs'.

    Numbers instead of names, since a program of a million ops is stamped out here: 1.7 us an op against 9 us.
    """

    def __init__(self) -> None:
        self.numbers: dict[Value, int] = {}
        self.shapes: list[tuple[str, int | None, int | None, int, str, int]] = []  # a value, its microbatch left out
        self.fixed: list[Value] = []  # values that are the same for all microbatches

    def number(self, value: Value, shift: int = 0) -> int:
        """The number of a value of the base program; `shift` -1 for the same value of the microbatch before."""
        key = value._replace(microbatch=None if value.microbatch is None else shift)
        if key not in self.numbers:
            self.numbers[key] = len(self.shapes)
            microbatch = 1 if value.microbatch is None else shift
            self.shapes.append((value.name, value.stage, value.slice, value.port, value.at, microbatch))
            self.fixed.append(value._replace(microbatch=None) if shift < 0 else value)
        return self.numbers[key]

    def values(self, index: int) -> list[Value]:
        """All values of one microbatch."""
        return [
            fixed if shift > 0 or index + shift < 0 else _new(Value, (name, stage, index + shift, piece, port, at))
            for (name, stage, piece, port, at, shift), fixed in zip(self.shapes, self.fixed, strict=True)
        ]


def _copies(program: Program, count: int, how: tuple[tuple[str, object], ...]) -> list[Op]:
    """The ops of all microbatches, one after the other, each with a SPLIT before it where it takes from the batch.

    SCALE is left out: gradients per microbatch are of totals; `merge` divides once, by the count of them all.
    """
    stamp = _Stamp()
    targets = {op.stage for op in parts_of(program.ops) if any(value.name == "target" for value in op.reads)}
    forms = [form for op in program.ops if op.kind != "SCALE" for form in _forms(op, stamp, targets)]
    ops: list[Op] = []
    for index in range(count):
        values = stamp.values(index)
        rule = (("index", index), ("count", count), *how)
        for form in forms:
            kind, stage, indexed, piece, rank, reads, writes, parts, own = form
            made = (
                kind,
                stage,
                index if indexed else None,
                piece,
                rank,
                tuple([values[number] for number in reads]),
                tuple([values[number] for number in writes]),
                parts,
                rule if kind == "SPLIT" else own,
            )
            ops.append(_new(Op, made) if not parts else _stamped_pair(parts, values, index))
    return ops


_Form = tuple[str, "int | None", bool, "int | None", int, list[int], list[int], tuple[Any, ...], tuple[Any, ...]]


def _forms(op: Op, stamp: _Stamp, targets: set[int | None]) -> Iterator[_Form]:
    """An op with numbers for its values, and before it the SPLIT it needs."""
    if op.parts:
        inner = [form for part in op.parts for form in _forms(part, stamp, targets)]
        yield from (form for form in inner if form[0] == "SPLIT")
        parts = tuple(form for form in inner if form[0] != "SPLIT")
        yield ("PAIR", op.stage, True, op.slice, op.rank, [], [], parts, ())
        return
    taken = [value for value in op.reads if value.name in _BATCH]
    slices = {value: Value(_BATCH[value.name], op.stage, 0, op.slice) for value in taken}
    weight = [Value("w", op.stage, 0)] if op.stage in targets else []
    if taken and op.kind == "F":
        made = [stamp.number(value) for value in (*slices.values(), *weight)]
        yield ("SPLIT", op.stage, True, op.slice, op.rank, [stamp.number(value) for value in taken], made, (), ())
    if op.kind not in "BI":
        weight = []

    def number(value: Value) -> int:
        if value.name == "state" and value.microbatch is None:
            return stamp.number(value._replace(microbatch=0), -1)
        return stamp.number(slices.get(value, value))

    reads = [*map(number, op.reads), *map(stamp.number, weight)]
    writes = [stamp.number(value) for value in op.writes]
    yield (op.kind, op.stage, op.microbatch is not None, op.slice, op.rank, reads, writes, (), op.how)


def _stamped_pair(parts: tuple[_Form, ...], values: list[Value], index: int) -> Op:
    made: list[Op] = []
    for kind, stage, indexed, piece, rank, reads, writes, _, own in parts:
        read, written = tuple([values[number] for number in reads]), tuple([values[number] for number in writes])
        made.append(Op(kind, stage, index if indexed else None, piece, rank, read, written, (), own))
    return pair(*made)


def _labels(program: Program, end: Output, count: int) -> Iterator[Output]:
    """A result of each microbatch, where the base program has one; a gradient before it is divided by the count."""
    name, value, homes = end
    if value.name == "scaled":
        value = program.ops[program.index.writer[value]].reads[0]
    if value.name == "state":
        yield Output(name, value._replace(microbatch=count - 1), homes)
        return
    first, rest, last, ends = name[:2], name[3:], value[:2], value[3:]
    for index in range(count):
        yield _new(Output, (_new(Value, (*first, index, *rest)), _new(Value, (*last, index, *ends)), homes))
