"""Simulate a program fast where nothing but the main lanes matters: facts are looked up once for each group of ops.

Ops of one kind, stage, rank, parts and `how` are a group, of which there are a few thousand; what they cost, where they
run and how they change what is held are facts of a group.

`walk_plain` stands beside `lanes.walk`, which looks at each read and notes each transfer and takes 11-17 times as long
(26,000 ops): a million ops would take 5 s instead of less than one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from fpipe.program import Op, Program, lane_of
from fpipe.timing.amounts import varies
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import is_work

_Fact = TypeVar("_Fact")


class OpGroups(NamedTuple):
    """The groups of a program's ops: the number of every op's group, and an op of each group."""

    group: list[int]
    each: list[Op]

    def of(self, facts: Iterable[_Fact]) -> list[_Fact]:
        """A fact for every op, from one for each group."""
        return list(map(list(facts).__getitem__, self.group))


def op_groups(ops: Sequence[Op]) -> OpGroups:
    """The columns of ops, by iterators of C: ops lie scattered in memory, and a look at each takes 0.1 us."""
    numbers = defaultdict[Any, int](count().__next__)
    group = list(map(numbers.__getitem__, map(itemgetter(0, 1, 4, 7, 8), ops)))
    each: list[Op] = []
    first = 0
    for number in range(len(numbers)):
        first = group.index(number, first)
        each.append(ops[first])
    return OpGroups(group, each)


def is_plain(known: OpGroups, costs: Costs) -> bool:
    """Whether nothing but the main lanes and one latency for all links matters (a bandwidth has bytes), and the ops of
    a group cost the same."""
    constant = isinstance(costs.transfer, int | float) and not costs.busies and costs.bytes is None
    constant = constant and costs.cluster is None
    return constant and all(lane_of(op) == "main" and not varies(op.kind) for op in known.each)


def walk_plain(program: Program, costs: Costs, transfer: float, known: OpGroups) -> tuple[list[float], list[float]]:
    """The starts and ends of ops where `is_plain` says so: what `lanes.walk` gives.

    Costs are looked up once for each group; what is left is 0.5 us an op.
    """
    ops, seconds = program.ops, [costs.seconds(op) for op in known.each]
    took, ranks = known.of(seconds), known.of(op.rank for op in known.each)
    pairs = zip(known.each, seconds, strict=True)
    lanes = known.of(op.rank if is_work(op, cost) else -1 for op, cost in pairs)
    free = [0.0] * program.ranks
    starts: list[float] = []
    ends = [0.0] * (len(ops) + 1)  # the last is for inputs, which are at -1
    note = starts.append
    rows = enumerate(zip(program.sources, lanes, took, strict=True))
    if not transfer:
        for position, (sources, lane, cost) in rows:
            start = free[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if ready > start:
                    start = ready
            note(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free[lane] = end
    else:
        away = {end.value: end.homes for end in program.inputs if len(end.homes) < program.ranks}
        for position, (sources, lane, cost) in rows:
            rank = ranks[position]
            start = free[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if source >= 0 and ranks[source] != rank:
                    ready += transfer
                if ready > start:
                    start = ready
            if start < transfer and any(rank not in away.get(value, (rank,)) for value in ops[position][5]):
                start = transfer
            note(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free[lane] = end
    ends.pop()
    return starts, ends
