"""Merge the orders of all ranks into the one global order of a program, by a clock and by data dependencies.

A schedule names only some ops: F, B, I and W (and others, if it likes). The rest are placed by their data: SPLIT, R,
RECV and LOAD stand just before their first reader; ADD, SCALE, MERGE, REDUCE, SEND and OFFLOAD as soon as their inputs
are there. "As soon as" is measured by a clock on which F, B, I, W and R take one tick and all other ops none:

    rank 0   0F0 0F1  .   .  0B0 0B1                      0F0 0F1 1F0 1F1 1B0 1B1 ADD(sum[1,1]) 0B0 0B1 ADD(sum[0,1])
    rank 1    .  1F0 1B0 1F1 1B1             -->          (start on the clock; within it, data; then the rank)

The clock is also the test for deadlock: when no rank can go on, there is no global order, and the error draws where
each rank is stuck. The result is a function of the ops and of the ranks' orders alone. So equal schedules give equal
lists whatever transforms led to them, and transforms commute.

This clock is separate from those that simulate (`timing/lanes.py`, `timing/simulate.py`): they walk down a global
order, which is made here, and need none of its rules for ops that no row names. `schedules/list_scheduler.py` chooses
the order that is given here; to replay given rows takes it 1.4-1.7 times as long (26,000 ops), and it places no such
ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, compress, groupby
from operator import itemgetter

from fpipe.program import KINDS, Input, Op, Output, Program, Sources, building, parts_of
from fpipe.wording import cycle_error, deadlock_error, state_order_error

# Levels within one tick: first ops as soon as their inputs are there, then those anchored to a reader, last OFFLOADs. A
# LOAD (anchored) comes before an OFFLOAD, since both share one lane, and only the LOAD is waited for.
_ANCHORED_LEVEL = 1 << 24


def scheduled_kinds() -> frozenset[str]:
    """Return the kinds that a schedule always names: F, B, I, W, PAIR and kinds registered with position="table"."""
    return frozenset(name for name, kind in KINDS.items() if kind.position == "table")


def fixed_kinds(program: Program) -> frozenset[str]:
    """Return the kinds whose order a rewrite has to keep: F, B, I, W, and kinds that a table placed against their data.

    Ops of other kinds stand where their data put them, and are placed anew after each rewrite.
    """
    kinds: frozenset[str] | None = program.__dict__.get("fixed_kinds")
    if kinds is None:
        basic = scheduled_kinds()
        optional_kinds = {op.kind for op in program.ops} & {"R", "SEND", "RECV", "OFFLOAD", "LOAD", "GATHER"}

        # The program itself does not say what its table named. So arrange it with fewer fixed kinds: if every rank
        # keeps its order, those kinds stand where the data put them, and need not be fixed.
        def keeps_order(kinds: frozenset[str]) -> bool:
            arranged = arrange(program.inputs, program.ops, program.outputs, kinds)
            return ops_by_rank(arranged.ops) == ops_by_rank(program.ops)

        kinds = basic if not optional_kinds or keeps_order(basic) else basic | optional_kinds
        # Kind by kind: a LOAD that stands early does not fix the place of an R.
        for kind in sorted(kinds & optional_kinds):
            kinds = kinds - {kind} if keeps_order(kinds - {kind}) else kinds
        program.__dict__["fixed_kinds"] = kinds
    return kinds


def ops_by_rank(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Return the ops of each rank, in order."""
    rows: defaultdict[int, list[Op]] = defaultdict(list)
    for op in ops:
        rows[op.rank].append(op)
    return dict(rows)


def arrange(
    inputs: tuple[Input, ...],
    ops: Sequence[Op],
    outputs: tuple[Output, ...],
    named_kinds: frozenset[str] | None = None,
    sources: list[Sources] | None = None,
    rows: list[list[int]] | None = None,
) -> Program:
    """Put ops into the one global order, in which ops of `named_kinds` keep their given order on each rank.

    Naming further kinds changes nothing if their given order is the one that the data put them in.

    Args:
        named_kinds: the kinds whose order is given; those that a schedule always names by default.
        sources: those of `ops`, if they are known; to look them up is a quarter of the work on a million ops.
        rows: for each rank the positions of its named ops, if not those of `ops` in their order.
    """
    basic = scheduled_kinds()
    named_kinds = basic if named_kinds is None else named_kinds
    with building():
        sources = find_sources(inputs, ops) if sources is None else sources
        rows = _rows_of_kinds(ops, named_kinds) if rows is None else rows
        refuse_state_order(inputs, map(ops.__getitem__, chain.from_iterable(rows)))
        # A table may name R or SEND where their data put them anyway. Then the program is the natural one, equal to
        # that of a table that does not name them, and later rewrites may move them with their data.
        if named_kinds != basic and not _has_late_gather(ops, sources, rows):
            natural = arrange(inputs, ops, outputs, sources=sources)
            natural_rows = [
                list(map(natural.ops.__getitem__, row)) for row in _rows_of_kinds(natural.ops, named_kinds) if row
            ]
            if natural_rows == [list(map(ops.__getitem__, row)) for row in rows if row]:
                return natural
        order = _RankClock(ops, rows, sources).run()
        arranged = Program.trusted(inputs, tuple(map(ops.__getitem__, order)), outputs, permute_sources(sources, order))
    if named_kinds == basic:
        arranged.__dict__["fixed_kinds"] = named_kinds
    return arranged


def refuse_state_order(inputs: Iterable[Input], ops: Iterable[Op]) -> None:
    """Raise a `StateOrderError` for a stage with module state whose forwards are not in microbatch order on one rank.

    A forward reads the state that the previous microbatch's forward wrote.
    """
    stateful = {program_input.value.stage for program_input in inputs if program_input.value.name == "state"}
    latest_forward: dict[int | None, Op] = {}
    for op in parts_of([*ops]) if stateful else ():
        if op.kind != "F" or op.stage not in stateful:
            continue
        earlier_op = latest_forward.get(op.stage, op)
        if earlier_op.rank != op.rank:
            order = f"{earlier_op.cell} is on rank {earlier_op.rank} and {op.cell} on rank {op.rank}"
            raise state_order_error(op.stage or 0, order)
        if (earlier_op.microbatch or 0, earlier_op.slice or 0) > (op.microbatch or 0, op.slice or 0):
            raise state_order_error(op.stage or 0, f"{earlier_op.cell} comes before {op.cell} on rank {op.rank}")
        latest_forward[op.stage] = op


def _has_late_gather(ops: Sequence[Op], sources: Sequence[Sources], rows: Iterable[Iterable[int]]) -> bool:
    """Whether a GATHER of an input stands behind an op that takes time.

    Its data would put it at the very start, so such a table differs from the default, and no comparison is needed.
    """
    for row in rows:
        has_started = False
        for position in row:
            if has_started and ops[position][0] == "GATHER" and sources[position] == (-1,):
                return True
            has_started = has_started or KINDS[ops[position][0]].time > 0
    return False


def _rows_of_kinds(ops: Sequence[Op], named: frozenset[str]) -> list[list[int]]:
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for position, op in enumerate(ops):
        if op[0] in named:
            rows[op[4]].append(position)
    return [rows[rank] for rank in range(1 + max(rows, default=-1))]


def permute_sources(sources: list[Sources], order: Sequence[int]) -> list[Sources]:
    """Return the sources of reordered ops, where `order[i]` is the old position of the i-th op."""
    new_position = [0] * len(order) + [-1]  # an input stays -1
    for position, old_position in enumerate(order):
        new_position[old_position] = position
    find = new_position.__getitem__
    return [tuple(map(find, sources[old_position])) for old_position in order]


def find_sources(inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources]:
    """Return the sources of ops in any order, in which a writer may stand behind its readers."""
    writer = {program_input.value: -1 for program_input in inputs}
    writer |= {value: position for position, op in enumerate(ops) for value in op[6]}
    return [tuple(map(writer.__getitem__, op[5])) for op in ops]


class _RankClock:
    """A clock that walks along the rows of all ranks at once and gives each op its start and end, in ticks.

    Positions are indices into `ops`. A time below 0 is not known yet. A function that returns a time returns
    `~position`, which is below 0, if it has to wait for the op at that position. Unnamed ops are those in no row; an
    unnamed op that stands just before its first reader is anchored to it, and starts when the reader does.
    """

    def __init__(self, ops: Sequence[Op], rows: list[list[int]], sources: list[Sources]) -> None:
        self.ops, self.rows, self.sources = ops, rows, sources
        # Inputs have source -1, which is the last element of `is_unnamed` and `ends`: never unnamed, ended at tick 0.
        self.is_unnamed = bytearray(b"\1") * len(ops) + b"\0"
        for position in chain.from_iterable(rows):
            self.is_unnamed[position] = 0
        self.unnamed = list(compress(range(len(ops)), self.is_unnamed))
        ticks = {name: kind.time for name, kind in KINDS.items()}
        self.kinds, self.ranks = list(map(itemgetter(0), ops)), list(map(itemgetter(4), ops))
        self.ticks = list(map(ticks.__getitem__, self.kinds))
        self.starts, self.ends = [-1] * len(ops), [-1] * len(ops) + [0]
        self.anchored_by_reader: dict[int, list[int]] = {}
        self.reader_by_anchored: dict[int, int] = {}
        self.never_anchored: set[int] = set()
        self.instant_ops: list[int] = []  # ops without duration, in the order in which their times become known
        kinds = set(map(self.kinds.__getitem__, self.unnamed))
        self.anchors_take_time = any(KINDS[kind].time for kind in kinds)
        if any(KINDS[kind].position == "before" for kind in kinds):
            self.rows = [self._anchor_to_row(row) for row in self.rows]
        self.sources_with_anchored = self._effective_sources()

    def run(self) -> list[int]:
        """Return the positions of all ops in the one order."""
        # 1) Give every op its tick: the rows first, then unnamed ops for which no row waits.
        self._walk_rows()
        extra_positions: list[int] = []  # timed ops in no row: an R whose reader is on another rank
        for position in self.unnamed:
            if self.ends[position] < 0:
                self._time_unnamed(position)
            if self.is_unnamed[position] and self.ticks[position]:
                extra_positions.append(position)
        start, ticks, levels, ranks, kinds = self.starts, self.ticks, self._levels(), self.ranks, self.kinds
        positions_by_tick: list[list[int]] = [[] for _ in range(1 + max(start, default=0))]
        # 2) Sort the instant ops of a tick by level, then rank, then ADDs first. All three are one number, since a sort
        # by ints from a list makes no tuples; ties are rare, and sorted once more by stage.
        many_ranks, sort_keys = 1 + max(ranks, default=0), [0] * len(ticks)
        for position in self.instant_ops:
            sort_keys[position] = 2 * (levels[position] * many_ranks + ranks[position]) + (kinds[position] != "ADD")
            positions_by_tick[start[position]].append(position)
        for positions in positions_by_tick:
            positions.sort(key=sort_keys.__getitem__)
            if len(set(map(sort_keys.__getitem__, positions))) < len(positions):
                groups = [list(group) for _, group in groupby(positions, sort_keys.__getitem__)]
                positions[:] = chain.from_iterable(sorted(group, key=self._tie_breaker) for group in groups)
        # 3) Behind them the timed ops of the tick. Rows are walked rank by rank, so these go by rank.
        for row in (*self.rows, extra_positions):
            for position in row:
                if ticks[position]:
                    positions_by_tick[start[position]].append(position)
        return [position for positions in positions_by_tick for position in positions]

    def _anchor_to_row(self, row: list[int]) -> list[int]:
        """Anchor unnamed ops to their first reader in a row; return the row with the anchored ops that take time."""
        ops, sources, is_loose = self.ops, self.sources, self.is_unnamed
        full_row: list[int] = []

        def attach(position: int, reader: int) -> None:
            writers = sources[position]
            # An R first: it joins the row just before its reader, and then is the first reader of what both read.
            if self.anchors_take_time:
                writers = sorted(writers, key=lambda writer: writer >= 0 and not KINDS[ops[writer].kind].time)
            for writer in writers:
                if not is_loose[writer] or writer in self.reader_by_anchored or writer in self.never_anchored:
                    continue
                kind = KINDS[ops[writer].kind]
                if kind.position == "after":
                    self._never_anchor(writer)
                if kind.position != "before" or ops[writer].rank != ops[reader].rank:
                    continue
                self.reader_by_anchored[writer] = reader
                # An op that takes time joins the row, and what it reads is anchored to it. An instant op hands what it
                # reads on to its own reader: SPLIT, RECV and LOAD all stand before the same op of the row.
                if kind.time:
                    is_loose[writer] = 0
                    attach(writer, writer)
                    full_row.append(writer)
                else:
                    attach(writer, reader)
                    self.anchored_by_reader.setdefault(reader, []).append(writer)

        # A plain loop, and no call for rows whose ops read no unnamed op: most do not, and `any` over a generator is
        # slower here.
        for position in row:
            for source in sources[position]:
                if is_loose[source]:
                    attach(position, position)
                    break
            full_row.append(position)
        return full_row

    def _never_anchor(self, position: int) -> None:
        """Exclude an unnamed op, and all unnamed ops that it reads from, from anchoring.

        A row waits for this op, such as a sum of cotangents. Were its reads anchored to later readers, the sum would
        wait for these too.
        """
        self.never_anchored.add(position)
        for source in self.sources[position]:
            if self.is_unnamed[source] and source not in self.reader_by_anchored and source not in self.never_anchored:
                self._never_anchor(source)

    def _effective_sources(self) -> list[Sources]:
        """Return the sources of each op, in which an op anchored to it is replaced by that op's sources.

        An anchored op starts with its reader, so the reader starts when everything is there that either of them reads.
        """
        needs = self.sources
        if self.anchored_by_reader:
            needs = list(needs)
            for reader, anchored in self.anchored_by_reader.items():
                sources = [*needs[reader], *(source for op in anchored for source in self.sources[op])]
                needs[reader] = tuple([source for source in sources if source not in anchored])
        return needs

    def _walk_rows(self) -> None:
        """Let every rank run its row as far as the others allow, until all are done or none can move."""
        # A rank runs until an op reads a value whose time is not known. Then it waits in `waiting_ranks` for the op
        # that writes it, and is ready again when that op has its time. So each op is looked at once, and once more for
        # each wait. Loops are plain and attributes local: this is the inner loop of every rewrite.
        rows, needs, start, end, ticks = self.rows, self.sources_with_anchored, self.starts, self.ends, self.ticks
        is_loose, anchored = self.is_unnamed, self.anchored_by_reader
        next_cell, free_time = [0] * len(rows), [0] * len(rows)
        waiting_ranks: defaultdict[int, list[int]] = defaultdict(list)  # op -> ranks that wait for it
        ready_ranks = list(range(len(rows)))[::-1]
        blocking_op: dict[int, int] = {}
        while ready_ranks:
            rank = ready_ranks.pop()
            row, cell, rank_time = rows[rank], next_cell[rank], free_time[rank]
            while cell < len(row):
                position = row[cell]
                op_start = rank_time
                for source in needs[position]:
                    source_end = end[source]
                    if source_end < 0:
                        # Below 0: the complement of the op to wait for.
                        source_end = self._time_unnamed(source) if is_loose[source] else ~source
                        if source_end < 0:
                            break
                    if source_end > op_start:
                        op_start = source_end
                else:
                    start[position] = op_start
                    end[position] = rank_time = op_start + ticks[position]
                    if position in anchored:
                        for source in anchored[position]:
                            start[source] = end[source] = op_start
                            self.instant_ops.append(source)
                            ready_ranks.extend(waiting_ranks.pop(source, ()))
                    if position in waiting_ranks:
                        ready_ranks.extend(waiting_ranks.pop(position))
                    if not ticks[position]:
                        self.instant_ops.append(position)
                    cell += 1
                    continue
                waiting_ranks[~source_end].append(rank)
                blocking_op[rank] = ~source_end
                break
            next_cell[rank], free_time[rank] = cell, rank_time
        if any(cell < len(row) for cell, row in zip(next_cell, rows, strict=True)):
            raise deadlock_error(self.ops, self.rows, self.sources, self.reader_by_anchored, next_cell, blocking_op)

    def _time_unnamed(self, position: int) -> int:
        """Return the end of an unnamed op, or the complement of the op in a row that it waits for."""
        # Depth first along unnamed sources, by a path of our own and not by recursion: chains of ADDs are as long as
        # there are microbatches. An anchored op has no time before its reader, and is waited for like an op of a row.
        pending: dict[int, None] = {}  # a path, each op of which reads from the next
        while position not in self.reader_by_anchored:
            op_start = 0
            for source in self.sources[position]:
                source_end = self.ends[source]
                if source_end < 0:
                    if not self.is_unnamed[source]:
                        return ~source
                    pending[position] = None
                    if source in pending:
                        cycle = [*pending][[*pending].index(source) :]
                        raise cycle_error([self.ops[member] for member in cycle])
                    position = source
                    break
                op_start = max(op_start, source_end)
            else:
                self.starts[position] = op_start
                self.ends[position] = op_start + self.ticks[position]
                if not self.ticks[position]:
                    self.instant_ops.append(position)
                if not pending:
                    return self.ends[position]
                position, _ = pending.popitem()
        return ~position

    def _levels(self) -> list[int]:
        """Return a level for each instant op: one above the instant ops of its tick that it reads.

        Sorting by level puts writers before readers within one tick. Anchored ops have levels of their own above all
        others, and so stand last in their tick, just before the timed op that reads them; above them OFFLOADs.
        """
        levels = [-1] * (len(self.ops) + 1)  # below all levels: ops that take time, and inputs
        last_instant_by_rank = [-1] * len(self.rows)  # of each rank, the row's instant op before this one
        start, sources, kinds, ranks, is_loose = self.starts, self.sources, self.kinds, self.ranks, self.is_unnamed
        for position in self.instant_ops:
            op_start, predecessors, level = start[position], sources[position], 0
            if position in self.reader_by_anchored:
                level = _ANCHORED_LEVEL
            elif kinds[position] == "OFFLOAD":
                level = 2 * _ANCHORED_LEVEL
            elif not is_loose[position]:
                rank = ranks[position]
                predecessors = (*predecessors, last_instant_by_rank[rank])
                last_instant_by_rank[rank] = position
            for source in predecessors:
                if levels[source] >= level and start[source] == op_start:
                    level = levels[source] + 1
            levels[position] = level
        return levels

    def _tie_breaker(self, position: int) -> tuple[object, ...]:
        """Break ties within a level and rank: stage, then microbatch."""
        kind, stage, microbatch, slice_index, _, reads, writes, _, _ = self.ops[position]
        name, _, _, _, port, location = (writes or reads)[0]
        stage = -1 if stage is None else stage
        microbatch = -1 if microbatch is None else microbatch
        return (stage, microbatch, -1 if slice_index is None else slice_index, kind, name, port, location)


def sort_outputs(outputs: Iterable[Output]) -> tuple[Output, ...]:
    """Sort outputs, so that programs with the same ops are equal whatever transforms made them."""
    name_order = ("loss", "losses", "outputs", "aux", "count", "state", "grads")

    def key(output: Output) -> tuple[int, str, int, int, int, int]:
        name = output.name
        name_index = name_order.index(name.name) if name.name in name_order else len(name_order)
        stage = -1 if name.stage is None else name.stage
        return name_index, name.name, stage, name.microbatch or 0, name.slice or 0, name.port

    return tuple(sorted(outputs, key=key))
