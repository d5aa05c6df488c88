"""Merge the orders of all ranks into the one global order of a program, by a clock and by data dependencies.

A schedule names only some ops: F, B, I and W (and others, if it likes). The rest keep to their data: SPLIT, R, RECV and
LOAD stand just before their first reader; ADD, SCALE, MERGE, REDUCE, SEND and OFFLOAD go as soon as their inputs are
there. "As soon as" is said by a clock on which F, B, I, W and R take one tick and all other ops none:

    rank 0   0F0 0F1  .   .  0B0 0B1                      0F0 0F1 1F0 1F1 1B0 1B1 ADD(sum[1,1]) 0B0 0B1 ADD(sum[0,1])
    rank 1    .  1F0 1B0 1F1 1B1             -->          (start on the clock; within it, data; then the rank)

The clock also is the test for deadlock: when no rank can go on, there is no global order, and the error draws where
each rank is stuck. Equal schedules give equal lists whatever road led to them, since the result is a function of the
ops and of the ranks' orders alone; that is why the transforms commute.

This clock is apart from those that simulate (`timing/lanes.py`, `timing/simulate.py`): they walk down a global order,
which is made here, and need none of its rules for ops that no row names. `schedules/list_scheduler.py` chooses the
order that is given here; to replay given rows takes it 1.4-1.7 times as long (26,000 ops), and it places no such ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, compress, groupby
from operator import itemgetter

from fpipe.program import KINDS, Input, Op, Output, Program, Sources, building, parts_of
from fpipe.wording import circle, state_order_error, stuck

# Levels within one tick: first the ops that are there at once, then those just before a reader, last OFFLOAD, since a
# LOAD in the same lane is waited for.
_ANCHORED = 1 << 24


def scheduled_kinds() -> frozenset[str]:
    """The kinds that a schedule always names."""
    return frozenset(name for name, kind in KINDS.items() if kind.place == "table")


def held_kinds(program: Program) -> frozenset[str]:
    """The kinds whose place a rewrite of this program has to keep: F, B, I, W, and what a table has placed besides.

    Ops of other kinds that stand as the data would put them are placed again after each rewrite.
    """
    held: frozenset[str] | None = program.__dict__.get("held")
    if held is None:
        basic = scheduled_kinds()
        others = {op.kind for op in program.ops} & {"R", "SEND", "RECV", "OFFLOAD", "LOAD", "GATHER"}

        def stands(held: frozenset[str]) -> bool:
            return by_rank(arrange(program.inputs, program.ops, program.outputs, held).ops) == by_rank(program.ops)

        held = basic if not others or stands(basic) else basic | others
        for kind in sorted(held & others):  # a LOAD that stands early holds no R
            held = held - {kind} if stands(held - {kind}) else held
        program.__dict__["held"] = held
    return held


def by_rank(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """The sub-sequence of ops of each rank."""
    rows: defaultdict[int, list[Op]] = defaultdict(list)
    for op in ops:
        rows[op.rank].append(op)
    return dict(rows)


def arrange(
    inputs: tuple[Input, ...],
    ops: Sequence[Op],
    outputs: tuple[Output, ...],
    named: frozenset[str] | None = None,
    sources: list[Sources] | None = None,
    rows: list[list[int]] | None = None,
) -> Program:
    """Put ops into the one global order. Those of the `named` kinds keep the order they have here on their rank.

    Naming more kinds than a schedule must changes nothing where these stand as the data would put them.

    Args:
        named: the kinds whose order is given; those that a schedule always names by default.
        sources: those of `ops`, if they are known; to look them up is a quarter of the work on a million ops.
        rows: for each rank the positions of its named ops, if not those of `ops` in their order.
    """
    basic = scheduled_kinds()
    named = basic if named is None else named
    with building():
        sources = unordered_sources(inputs, ops) if sources is None else sources
        rows = _rows(ops, named) if rows is None else rows
        refuse_state_order(inputs, map(ops.__getitem__, chain.from_iterable(rows)))
        if named != basic and not _has_late_gather(ops, sources, rows):
            natural = arrange(inputs, ops, outputs, sources=sources)
            natural_rows = [list(map(natural.ops.__getitem__, row)) for row in _rows(natural.ops, named) if row]
            if natural_rows == [list(map(ops.__getitem__, row)) for row in rows if row]:
                return natural
        order = _Clock(ops, rows, sources).run()
        arranged = Program.trusted(inputs, tuple(map(ops.__getitem__, order)), outputs, permuted(sources, order))
    if named == basic:
        arranged.__dict__["held"] = named
    return arranged


def refuse_state_order(inputs: Iterable[Input], ops: Iterable[Op]) -> None:
    """Raise a `StateOrderError` for a stage with module state whose forwards are not in microbatch order on one rank.

    A forward reads the state that the forward of the microbatch before has written.
    """
    stateful = {end.value.stage for end in inputs if end.value.name == "state"}
    latest: dict[int | None, Op] = {}
    for op in parts_of([*ops]) if stateful else ():
        if op.kind != "F" or op.stage not in stateful:
            continue
        before = latest.get(op.stage, op)
        if before.rank != op.rank:
            order = f"{before.cell} is on rank {before.rank} and {op.cell} on rank {op.rank}"
            raise state_order_error(op.stage or 0, order)
        if (before.microbatch or 0, before.slice or 0) > (op.microbatch or 0, op.slice or 0):
            raise state_order_error(op.stage or 0, f"{before.cell} comes before {op.cell} on rank {op.rank}")
        latest[op.stage] = op


def _has_late_gather(ops: Sequence[Op], sources: Sequence[Sources], rows: Iterable[Iterable[int]]) -> bool:
    """Whether a GATHER of an input stands behind an op that takes time, where its data would not put it."""
    for row in rows:
        has_started = False
        for position in row:
            if has_started and ops[position][0] == "GATHER" and sources[position] == (-1,):
                return True
            has_started = has_started or KINDS[ops[position][0]].time > 0
    return False


def _rows(ops: Sequence[Op], named: frozenset[str]) -> list[list[int]]:
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for position, op in enumerate(ops):
        if op[0] in named:
            rows[op[4]].append(position)
    return [rows[rank] for rank in range(1 + max(rows, default=-1))]


def permuted(sources: list[Sources], order: Sequence[int]) -> list[Sources]:
    """The sources of ops that stand in a new order, `order[i]` being the place where the i-th stood."""
    new_position = [0] * len(order) + [-1]  # an input stays -1
    for position, before in enumerate(order):
        new_position[before] = position
    find = new_position.__getitem__
    return [tuple(map(find, sources[before])) for before in order]


def unordered_sources(inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources]:
    """The sources of ops that are in no order yet."""
    writer = {end.value: -1 for end in inputs}
    writer |= {value: position for position, op in enumerate(ops) for value in op[6]}
    return [tuple(map(writer.__getitem__, op[5])) for op in ops]


class _Clock:
    """Walks along all ranks at once. Positions are places in `ops`; a time below 0 means not known yet."""

    def __init__(self, ops: Sequence[Op], rows: list[list[int]], sources: list[Sources]) -> None:
        self.ops, self.rows, self.sources = ops, rows, sources
        self.is_loose = bytearray(b"\1") * len(ops) + b"\0"  # in no row; the last is for inputs, which are at -1
        for position in chain.from_iterable(rows):
            self.is_loose[position] = 0
        self.loose = list(compress(range(len(ops)), self.is_loose))
        ticks = {name: kind.time for name, kind in KINDS.items()}
        self.kinds, self.ranks = list(map(itemgetter(0), ops)), list(map(itemgetter(4), ops))
        self.ticks = list(map(ticks.__getitem__, self.kinds))
        self.start, self.end = [-1] * len(ops), [-1] * len(ops) + [0]  # inputs are there from the start
        self.anchored: dict[int, list[int]] = {}  # row op -> the loose ops that stand just before it
        self.anchor: dict[int, int] = {}
        self.early: set[int] = set()  # loose ops that are never anchored
        self.instant: list[int] = []  # ops without duration, as their times become known
        kinds = set(map(self.kinds.__getitem__, self.loose))
        self.recomputes = any(KINDS[kind].time for kind in kinds)
        if any(KINDS[kind].place == "before" for kind in kinds):
            self.rows = [self._anchor_to(row) for row in self.rows]
        self.needs = self._needs()

    def run(self) -> list[int]:
        """Return the positions of all ops in the one order."""
        self._walk_rows()
        extra: list[int] = []  # timed ops in no row: an R whose reader is on another rank
        for position in self.loose:
            if self.end[position] < 0:
                self._settle(position)
            if self.is_loose[position] and self.ticks[position]:
                extra.append(position)
        start, ticks, levels, ranks, kinds = self.start, self.ticks, self._levels(), self.ranks, self.kinds
        columns: list[list[int]] = [[] for _ in range(1 + max(start, default=0))]
        # Instant ops of one tick go by level, then rank, then gradients first: all three as one number.
        many_ranks, places = 1 + max(ranks, default=0), [0] * len(ticks)
        for position in self.instant:
            places[position] = 2 * (levels[position] * many_ranks + ranks[position]) + (kinds[position] != "ADD")
            columns[start[position]].append(position)
        for column in columns:
            column.sort(key=places.__getitem__)
            if len(set(map(places.__getitem__, column))) < len(column):
                groups = [list(group) for _, group in groupby(column, places.__getitem__)]
                column[:] = chain.from_iterable(sorted(group, key=self._tie) for group in groups)
        for row in (*self.rows, extra):
            for position in row:
                if ticks[position]:
                    columns[start[position]].append(position)
        return [position for column in columns for position in column]

    def _anchor_to(self, row: list[int]) -> list[int]:
        """Anchor loose ops to the op of a row that is their first reader; return the row with those that take time."""
        ops, sources, is_loose = self.ops, self.sources, self.is_loose
        full_row: list[int] = []

        def attach(position: int, reader: int) -> None:
            writers = sources[position]
            if self.recomputes:  # an R first: it stands before its reader, and so does what both of them read
                writers = sorted(writers, key=lambda writer: writer >= 0 and not KINDS[ops[writer].kind].time)
            for writer in writers:
                if not is_loose[writer] or writer in self.anchor or writer in self.early:
                    continue
                kind = KINDS[ops[writer].kind]
                if kind.place == "after":
                    self._release(writer)
                if kind.place != "before" or ops[writer].rank != ops[reader].rank:
                    continue
                self.anchor[writer] = reader
                if kind.time:
                    is_loose[writer] = 0
                    attach(writer, writer)
                    full_row.append(writer)
                else:
                    attach(writer, reader)
                    self.anchored.setdefault(reader, []).append(writer)

        for position in row:
            for source in sources[position]:
                if is_loose[source]:
                    attach(position, position)
                    break
            full_row.append(position)
        return full_row

    def _release(self, position: int) -> None:
        """Never anchor what a loose op reads on which a row waits: a sum of cotangents needs its parts early."""
        self.early.add(position)
        for source in self.sources[position]:
            if self.is_loose[source] and source not in self.anchor and source not in self.early:
                self._release(source)

    def _needs(self) -> list[Sources]:
        """Sources of each op, with those anchored to itself replaced by theirs."""
        needs = self.sources
        if self.anchored:
            needs = list(needs)
            for reader, anchored in self.anchored.items():
                inner = [source for op in anchored for source in self.sources[op]]
                needs[reader] = tuple([source for source in (*needs[reader], *inner) if source not in anchored])
        return needs

    def _walk_rows(self) -> None:
        """Let every rank run its row as far as the others allow, until all are done or none can move."""
        rows, needs, start, end, ticks = self.rows, self.needs, self.start, self.end, self.ticks
        is_loose, anchored = self.is_loose, self.anchored
        at_cell, free = [0] * len(rows), [0] * len(rows)
        waiting: defaultdict[int, list[int]] = defaultdict(list)  # op -> ranks that wait for it
        ready = list(range(len(rows)))[::-1]
        blocked: dict[int, int] = {}
        while ready:
            rank = ready.pop()
            row, cell, now = rows[rank], at_cell[rank], free[rank]
            while cell < len(row):
                position = row[cell]
                begin = now
                for source in needs[position]:
                    time = end[source]
                    if time < 0:
                        time = self._settle(source) if is_loose[source] else ~source
                        if time < 0:
                            break
                    if time > begin:
                        begin = time
                else:
                    start[position] = begin
                    end[position] = now = begin + ticks[position]
                    if position in anchored:
                        for source in anchored[position]:
                            start[source] = end[source] = begin
                            self.instant.append(source)
                            ready.extend(waiting.pop(source, ()))
                    if position in waiting:
                        ready.extend(waiting.pop(position))
                    if not ticks[position]:
                        self.instant.append(position)
                    cell += 1
                    continue
                waiting[~time].append(rank)
                blocked[rank] = ~time
                break
            at_cell[rank], free[rank] = cell, now
        if any(cell < len(row) for cell, row in zip(at_cell, rows, strict=True)):
            raise stuck(self.ops, self.rows, self.sources, self.anchor, at_cell, blocked)

    def _settle(self, position: int) -> int:
        """Return the end of a loose op, or the complement of an op it still waits for."""
        path: dict[int, None] = {}  # each op waits for the next
        while position not in self.anchor:
            begin = 0
            for source in self.sources[position]:
                time = self.end[source]
                if time < 0:
                    if not self.is_loose[source]:
                        return ~source
                    path[position] = None
                    if source in path:
                        raise circle([self.ops[place] for place in [*path][[*path].index(source) :]])
                    position = source
                    break
                begin = max(begin, time)
            else:
                self.start[position] = begin
                self.end[position] = begin + self.ticks[position]
                if not self.ticks[position]:
                    self.instant.append(position)
                if not path:
                    return self.end[position]
                position, _ = path.popitem()
        return ~position

    def _levels(self) -> list[int]:
        """Put data first within one tick: an op's level is one above those of the instant ops that it reads."""
        levels = [-1] * (len(self.ops) + 1)  # below all levels: ops that take time, and inputs
        last = [-1] * len(self.rows)  # of each rank, the row's instant op before this one
        start, sources, kinds, ranks, is_loose = self.start, self.sources, self.kinds, self.ranks, self.is_loose
        for position in self.instant:
            now, before, level = start[position], sources[position], 0
            if position in self.anchor:
                level = _ANCHORED
            elif kinds[position] == "OFFLOAD":
                level = 2 * _ANCHORED
            elif not is_loose[position]:
                rank = ranks[position]
                before = (*before, last[rank])
                last[rank] = position
            for source in before:
                if levels[source] >= level and start[source] == now:
                    level = levels[source] + 1
            levels[position] = level
        return levels

    def _tie(self, position: int) -> tuple[object, ...]:
        """Break ties within a level and rank: stage, then microbatch."""
        kind, stage, microbatch, piece, _, reads, writes, _, _ = self.ops[position]
        name, _, _, _, port, at = (writes or reads)[0]
        stage = -1 if stage is None else stage
        microbatch = -1 if microbatch is None else microbatch
        return (stage, microbatch, -1 if piece is None else piece, kind, name, port, at)


def in_order(outputs: Iterable[Output]) -> tuple[Output, ...]:
    """Sort results, so that equal programs are equal whatever road led to them."""
    names = ("loss", "losses", "outputs", "aux", "count", "state", "grads")

    def key(end: Output) -> tuple[int, str, int, int, int, int]:
        name = end.name
        place = names.index(name.name) if name.name in names else len(names)
        stage = -1 if name.stage is None else name.stage
        return place, name.name, stage, name.microbatch or 0, name.slice or 0, name.port

    return tuple(sorted(outputs, key=key))
