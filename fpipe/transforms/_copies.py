"""Stamp out the ops of all microbatches from those of one, by number instead of by name.

    x[0,0] = SPLIT, y[0,0] = F x[0,0]        --> copies(3) -->        the same for microbatches 0, 1 and 2

A program of a million ops is made here: names would take 9 us an op, numbers take 1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from fpipe.program import Op, Output, Program, Sources, Value, pair, parts_of

_new = tuple.__new__
_BATCH = {"inputs": "x", "target": "t"}
_T = TypeVar("_T")
_Label = tuple[str, "int | None", int, int, tuple[int, ...]]
"""A result's name, stage and port, the number of its value, and its homes."""


class _Form(NamedTuple):
    """An op of the base program with numbers for its values."""

    kind: str
    stage: int | None
    indexed: bool
    slice: int | None
    rank: int
    reads: list[int]
    writes: list[int]
    parts: tuple[_Form, ...] = ()
    how: tuple[tuple[str, Any], ...] = ()


class _Stamp:
    """The values of one microbatch after another, by number: from 0 on those of the microbatch itself, and from -1 down
    those that are the same for all and those of the microbatch before."""

    def __init__(self) -> None:
        self.numbers: dict[Value, int] = {}
        self.own: list[Value] = []
        self.others: list[Value] = []

    def number(self, value: Value) -> int:
        """The number of a value of the base program."""
        if value not in self.numbers:
            if value.microbatch is None:
                self.others.append(value)
                self.numbers[value] = -len(self.others)
            else:
                self.numbers[value] = len(self.own)
                self.own.append(value)
        return self.numbers[value]

    def before(self, value: Value) -> int | None:
        """For a value of the microbatch before (a state that was handed in, for the first), the number it has there."""
        return self.numbers.get(value._replace(microbatch=0)) if value.name == "state" else None

    def values(self) -> Iterator[list[Value]]:
        """All values, microbatch by microbatch."""
        names, stages, _, pieces, ports, places = zip(*self.own, strict=True)
        last: list[Value] = []
        for index in count():
            own = map(_new, repeat(Value), zip(names, stages, repeat(index), pieces, ports, places, strict=False))
            values = [*own, *reversed(self.others)]
            for number, other in enumerate(self.others, 1):
                twin = self.before(other)
                if last and twin is not None:
                    values[-number] = last[twin]
            yield values
            last = values


def _getter(numbers: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """`values -> (values[n] for n in numbers)`, as fast as Python has it."""
    if len(numbers) == 1:
        only = numbers[0]
        return lambda values: (values[only],)
    return itemgetter(*numbers) if numbers else lambda values: ()


def copies(
    program: Program, many: int, how: tuple[tuple[str, object], ...]
) -> tuple[list[Op], tuple[Output, ...], list[Sources] | None]:
    """The ops of all microbatches, one after the other, each with a SPLIT before it where it takes from the batch,
    their results, and where each op finds what it reads.

    SCALE is left out: gradients per microbatch are of totals; `merge` divides once, by the count of them all.
    """
    stamp = _Stamp()
    weighed = {op.stage for op in parts_of(program.ops) if any(value.name == "loss" for value in op.writes)}
    forms = [form for op in program.ops if op.kind != "SCALE" for form in _forms(op, stamp, weighed)]
    values = list(islice(stamp.values(), many))
    rules = [(("index", index), ("count", many), *how) for index in range(many)]
    columns = [_column(form, values, rules) for form in forms]
    results = chain.from_iterable([_results(_label(program, end, stamp), values) for end in program.outputs])
    return list(_microbatch_by_microbatch(columns)), tuple(results), _sources(forms, stamp, many)


def _microbatch_by_microbatch(columns: Iterable[Iterable[_T]]) -> Iterator[_T]:
    """What one form makes of all microbatches, form by form, in the order of the list."""
    return chain.from_iterable(zip(*columns, strict=True))


def _column(form: _Form, values: list[list[Value]], rules: list[tuple[tuple[str, object], ...]]) -> Iterable[Op]:
    """The ops of one form for all microbatches. Every step is an iterator of C: no line of Python runs for each op."""
    many = len(values)
    if form.parts:
        return [_stamped_pair(form.parts, found, index) for index, found in enumerate(values)]
    at = range(many) if form.indexed else repeat(None, many)
    place = (repeat(form.kind), repeat(form.stage), at, repeat(form.slice), repeat(form.rank))
    reads, writes = map(_getter(form.reads), values), map(_getter(form.writes), values)
    said = rules if form.kind == "SPLIT" else repeat(form.how)
    if form.kind == "U" and form.how:  # an update that counts its microbatches
        said = [(("index", index), ("count", many)) for index in range(many)]
    return map(_new, repeat(Op), zip(*place, reads, writes, repeat(()), said, strict=False))


def _results(label: _Label, values: list[list[Value]]) -> Iterable[Output]:
    """One result of all microbatches; of a state only the last."""
    name, stage, port, number, homes = label
    if name == "state":
        return [Output(Value(name, stage, port=port), values[-1][number], homes)]
    fields = zip(repeat(name), repeat(stage), range(len(values)), repeat(None), repeat(port), repeat(""), strict=False)
    found = zip(map(_new, repeat(Value), fields), map(itemgetter(number), values), repeat(homes), strict=False)
    return map(_new, repeat(Output), found)


def _sources(forms: list[_Form], stamp: _Stamp, many: int) -> list[Sources] | None:
    """The sources of all copies, without looking up a single value: they lie as far apart in each copy."""
    if any(form.parts for form in forms):
        return None
    size = len(forms)
    writer = {number: at for at, form in enumerate(forms) for number in form.writes}
    twins = {-number: stamp.before(other) for number, other in enumerate(stamp.others, 1)}
    before = [writer[twin] - size for twin in twins.values() if twin is not None]  # written in the copy before
    place: dict[int, int] = {number: -1 for number, twin in twins.items() if twin is None}  # the last: an input
    place |= {number: size + at for at, number in enumerate(n for n, twin in twins.items() if twin is not None)}
    positions = [
        [*range(base, base + size), *[base + step if base else -1 for step in before], -1]
        for base in range(0, size * many, size)
    ]
    reads = [_getter([place.get(number, writer.get(number, -1)) for number in form.reads]) for form in forms]
    return list(_microbatch_by_microbatch([map(read, positions) for read in reads]))


def _label(program: Program, end: Output, stamp: _Stamp) -> _Label:
    """A result's name, and the number of its value in each microbatch; a gradient is taken before it is scaled."""
    value = end.value
    writer = program.ops[program.writer[value]]
    if writer.kind == "SCALE":
        value = writer.reads[0]
    return end.name.name, end.name.stage, end.name.port, stamp.number(value), end.homes


def _forms(op: Op, stamp: _Stamp, weighed: set[int | None]) -> Iterator[_Form]:
    """The form of an op, and before it that of the SPLIT it needs."""
    if op.parts:
        inner = [form for part in op.parts for form in _forms(part, stamp, weighed)]
        yield from (form for form in inner if form.kind == "SPLIT")
        yield _Form("PAIR", op.stage, True, op.slice, op.rank, [], [], tuple(f for f in inner if f.kind != "SPLIT"))
        return
    taken = [value for value in op.reads if value.name in _BATCH]
    slices = {value: Value(_BATCH[value.name], op.stage, 0, op.slice) for value in taken}
    weight = [Value("w", op.stage, 0)] if op.stage in weighed else []
    if (taken or weight) and op.kind == "F":
        made = [stamp.number(value) for value in (*slices.values(), *weight)]
        read = [*taken, *([Value("target")] if weight and Value("target") not in taken else [])]
        yield _Form("SPLIT", op.stage, True, op.slice, op.rank, [stamp.number(value) for value in read], made)
    reads = [slices.get(value, value) for value in op.reads] + (weight if op.kind in "BI" else [])
    numbers = [stamp.number(value) for value in reads], [stamp.number(value) for value in op.writes]
    yield _Form(op.kind, op.stage, op.microbatch is not None, op.slice, op.rank, *numbers, (), op.how)


def _stamped_pair(parts: tuple[_Form, ...], values: list[Value], index: int) -> Op:
    made: list[Op] = []
    for kind, stage, indexed, piece, rank, reads, writes, _, own in parts:
        read, written = _getter(reads)(values), _getter(writes)(values)
        made.append(Op(kind, stage, index if indexed else None, piece, rank, read, written, (), own))
    return pair(*made)
