"""Copy the ops of one microbatch for all of them, a column at a time: what one name or one op becomes in each.

    x[0,0] = SPLIT, y[0,0] = F x[0,0]        --> copies(3) -->        the same for microbatches 0, 1 and 2

A program of a million ops is made here. To rename its values one by one would take 9 us an op, columns take 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeVar

from fpipe.program import Op, Output, Program, Sources, Value

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
