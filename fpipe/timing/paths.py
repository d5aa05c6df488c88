"""Longest paths through a program's data, whatever the order of its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

from fpipe.program import Op, Program, Value
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import is_work
from fpipe.timing.value_bytes import carried

Waits = Sequence[tuple[int, float]]
"""The ops that an op reads from, each with the seconds on the way; -1 is the caller."""


def way(costs: Costs, value: Value, source: int, target: int) -> float:
    """Seconds that a value takes from one rank to another, alone on its link."""
    return costs.latency(source, target) + costs.carrying(value, source, target) if source != target else 0.0


def waits_of(program: Program, costs: Costs) -> list[list[tuple[int, float]]]:
    """For each op what it reads; what the caller has on its rank is there from the start, and left out."""
    homes = {end.value: end.homes for end in program.inputs}

    def waits(op: Op, sources: Sequence[int]) -> Iterator[tuple[int, float]]:
        for value, source in zip(op.reads, sources, strict=True):
            if op.kind == "RECV":
                sender = program.ops[source]
                yield source, way(costs, carried(sender), sender.rank, op.rank)
                continue
            where = homes[value] if source < 0 else (program.ops[source].rank,)
            taken = 0.0 if op.rank in where else way(costs, value, min(where), op.rank)
            if source >= 0 or taken:
                yield source, taken

    pairs = zip(program.ops, program.sources, strict=True)
    return [[] if op.kind == "FREE" else [*waits(op, sources)] for op, sources in pairs]


def named_waits(
    program: Program, costs: Costs, named: Callable[[Op], bool]
) -> tuple[list[int], list[dict[int, float]]]:
    """The places of the named ops, and for each the named ops that it waits for, through all others."""
    number: dict[int, int] = {}
    through: dict[int, dict[int, float]] = {-1: {-1: 0.0}}
    found: list[dict[int, float]] = []
    for at, (op, waits) in enumerate(zip(program.ops, waits_of(program, costs), strict=True)):
        own: dict[int, float] = {}
        for source, way in waits:
            for one, more in ({number[source]: 0.0} if source in number else through[source]).items():
                own[one] = max(own.get(one, 0.0), more + way)
        if named(op):
            number[at] = len(number)
            found.append(own)
        else:
            through[at] = own
    return [*number], found


def heads_of(waits: Sequence[Waits], seconds: Sequence[float]) -> list[float]:
    """When each op can start at the earliest."""
    starts: list[float] = []
    for own in waits:
        ready = (way + (starts[at] + seconds[at] if at >= 0 else 0.0) for at, way in own)
        starts.append(max(ready, default=0.0))
    return starts


def tails_of(waits: Sequence[Waits], seconds: Sequence[float], works: Sequence[bool]) -> list[float]:
    """Seconds from the end of each op to the end of the last work that needs it, at the least."""
    tails = [float("-inf")] * len(seconds)  # no work needs it
    for at in reversed(range(len(seconds))):
        left = max(tails[at], 0.0) if works[at] else tails[at]
        for source, way in waits[at]:
            if source >= 0:
                tails[source] = max(tails[source], way + seconds[at] + left)
    return [max(tail, 0.0) for tail in tails]


class DataGraph:
    """The ops of a program with what they cost and how long data are on their way, whatever the order of ranks."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.ops = program.ops
        self.seconds = [0.0 if op.kind in ("SEND", "RECV", "FREE") else costs.seconds(op) for op in self.ops]
        self.needs = waits_of(program, costs)
        works = [is_work(op, seconds) for op, seconds in zip(self.ops, self.seconds, strict=True)]
        self.starts, self.tails = heads_of(self.needs, self.seconds), tails_of(self.needs, self.seconds, works)
        self.rows: defaultdict[int, list[int]] = defaultdict(list)
        for at in compress(range(len(self.ops)), works):
            self.rows[self.ops[at].rank].append(at)

    def window(self, rank: int, without_weights: bool = False) -> tuple[float, float, float]:
        """The earliest start, the work and the shortest tail of a rank's ops."""
        row = [at for at in self.rows[rank] if not (without_weights and self.ops[at].kind == "W")]
        if not row:
            return 0.0, 0.0, 0.0
        work = sum(self.seconds[at] for at in row)
        if work:  # any of its ops have a window; the narrower, the better
            row = [at for at in row if self.seconds[at]]
        return min(self.starts[at] for at in row), work, min(self.tails[at] for at in row)

    def around(self, rank: int) -> float:
        """Seconds before the first and after the last of all a rank's ops, those of no time too."""
        row = self.rows[rank]
        return min((self.starts[at] for at in row), default=0.0) + min((self.tails[at] for at in row), default=0.0)
