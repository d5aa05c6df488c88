"""Play an order of which some residuals wait on the host: what leaves, when it is back, and what that costs.

    main | 0F0 | 0F1 | 0F2 |  ..  | 1B0 | 0B0 |          OFFLOAD behind its F, LOAD beside as many ops before its
    copy       |0F0 ->|           |->0B0|                 reader as it takes

Which residuals leave follows from the order: as few as the memory asks for, and where there is a choice the one that is
back last. So a search moves ops as ever, over orders that hold more than there is room for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

from fpipe.orders.tasks import NEVER, Played, Rows, Tasks
from fpipe.program import Op, Program
from fpipe.timing.costs import Costs
from fpipe.transforms.cells import Key
from fpipe.transforms.offload import offload
from fpipe.transforms.reorder import by_table

TIGHTER = 3
"""How often what leaves is chosen again, for less room, where copies take longer than ops had promised."""


class Residual(NamedTuple):
    """A residual on its rank: the op that reads it first, those that drop a part of it, and seconds out and back."""

    reader: int
    drops: tuple[tuple[int, float], ...]
    out: float
    back: float


Moves = list[dict[int, int]]
"""On each rank the ops whose residuals leave, and before which place of its row each is loaded."""


@dataclass(frozen=True)
class AwayTasks(Tasks):
    """Tasks whose residuals may wait on the host.

    Args:
        room: what each rank may hold of residuals.
        costs: what copies take.
    """

    price: ClassVar[float] = 6.0
    room: Sequence[float] = ()
    costs: Costs = field(default_factory=Costs)

    @cached_property
    def stays(self) -> dict[int, Residual]:
        """The residuals, by the op that makes them; those that R makes are read at once, and stay."""
        drops: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for row in self.residuals:
            for maker, dropper, size in row:
                drops[maker].append((dropper, size))
        readers = {op[1:4]: at for at, op in reversed([*enumerate(self.ops)]) if op.kind in "BI"}
        found: dict[int, Residual] = {}
        for maker, parts in drops.items():
            op = self.ops[maker]
            if op.kind == "F":
                value = next(value for value in op.writes if value.name == "res")
                out, back = (self.costs.seconds(Op(kind, *op[1:5], (value,), (value,))) for kind in ("OFFLOAD", "LOAD"))
                found[maker] = Residual(readers[op[1:4]], tuple(parts), out, back)
        return found

    def play(
        self,
        flats: Sequence[Sequence[int]],
        limit: float = math.inf,
        known: Sequence[float] = (),
        done: Sequence[int] = (),
    ) -> Played:
        """The times of an order with its copies; never, where it cannot keep to the room."""
        return self.moving(flats, limit)[0]

    def moving(self, flats: Sequence[Sequence[int]], limit: float = math.inf) -> tuple[Played, Moves]:
        """The same, and what leaves."""
        room = list(self.room)
        for _ in range(TIGHTER):
            moves = [self._leaving(flat, most) for flat, most in zip(flats, room, strict=True)]
            if any(move is None for move in moves):
                break
            left = [move or {} for move in moves]
            played, peaks = self._with_copies(flats, left, limit)
            if not played.ends:
                break
            over = [peak - most for peak, most in zip(peaks, self.room, strict=True)]
            if max(over) <= 1e-9 * max(1.0, *peaks):
                return played, left
            room = [most - max(0.0, more) for most, more in zip(room, over, strict=True)]
        return NEVER, []

    def _leaving(self, flat: Sequence[int], room: float) -> dict[int, int] | None:
        """The residuals of a row that leave, and before which place each is loaded; None where that is not enough."""
        takes, drops, seconds = self.takes, self.drops, self.seconds
        held, now = list[float](), 0.0
        for op in flat:
            now += takes[op]
            held.append(now)
            now -= drops[op]
        if max(held, default=0.0) <= room:
            return {}
        place = {op: at for at, op in enumerate(flat)}
        gone: dict[int, int] = {}
        free: list[tuple[int, int, int, int]] = []  # when a residual is needed, its op, and where it would be away
        coming: list[tuple[int, int, int, int]] = []
        for maker, stay in self.stays.items():
            if maker not in place:
                continue
            left, reader = place[maker], place[stay.reader]
            until, time = left + 1, 0.0
            while until < reader and (time := time + seconds[flat[until]]) < stay.out * (1 - 1e-9):
                until += 1
            load, time = reader, 0.0
            while load > left + 1 and (load == reader or time < stay.back * (1 - 1e-9)):
                load -= 1
                time += seconds[flat[load]]
            if until + 1 < load:  # it is there until its copy has left, and again while it is copied back
                coming.append((until + 1, load, maker, reader))
        coming.sort(reverse=True)
        for at in range(len(flat)):
            while coming and coming[-1][0] <= at:
                begin, load, maker, reader = coming.pop()
                insort(free, (reader, maker, begin, load))
            while held[at] > room * (1 + 1e-12):
                reader, maker, begin, load = next((one for one in reversed(free) if one[3] > at), (-1, -1, 0, 0))
                if maker < 0:
                    return None
                free.remove((reader, maker, begin, load))
                gone[maker] = load + 1
                for step in range(begin, load):
                    held[step] -= takes[maker]
        return gone

    def _with_copies(self, flats: Sequence[Sequence[int]], moves: Moves, limit: float) -> tuple[Played, list[float]]:
        """The times of an order with its copies, and the most that each rank holds, by the clock."""
        seconds, needs, wakes, tails, stays = self.seconds, self.needs, self.wakes, self.tails, self.stays
        ranks = range(len(flats))
        ends, place = [-1.0] * len(seconds) + [0.0], [0 for _ in ranks]
        free, begun, copying = [0.0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
        loads: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        for rank, move in enumerate(moves):
            for maker, before in move.items():
                loads[rank][before].append(maker)
        out, back = dict[int, float](), dict[int, tuple[float, float]]()  # makers -> when it has left, and is back
        late = {stays[maker].reader: maker for move in moves for maker in move}
        behind: list[list[int]] = [[] for _ in ranks]  # makers whose OFFLOAD comes next, behind the LOADs there
        waits, todo = [-1 for _ in ranks], [*ranks]
        while todo:
            rank = todo.pop()
            row, now, move = flats[rank], free[rank], moves[rank]
            reached = len(row)
            for at in range(place[rank], reached):
                op = row[at]
                for maker in loads[rank].pop(at, ()):
                    cost = stays[maker].back
                    start = max(out[maker], begun[rank], copying[rank] if cost else 0.0)
                    back[maker] = start, start + cost
                    copying[rank] = max(copying[rank], start + cost) if cost else copying[rank]
                for maker in behind[rank]:
                    cost = stays[maker].out
                    out[maker] = max(ends[maker], copying[rank] if cost else 0.0) + cost
                    copying[rank] = out[maker] if cost else copying[rank]
                behind[rank].clear()
                for source, way in needs[op]:
                    there = ends[source]
                    if there < 0:
                        break
                    if there + way > now:
                        now = there + way
                else:
                    if op in late:
                        now = max(now, back[late[op]][1])
                    begun[rank] = now
                    ends[op] = now = now + seconds[op]
                    if now + tails[op] > limit:
                        return NEVER, []
                    if op in move:
                        behind[rank].append(op)
                    for other in wakes[op]:
                        if waits[other] == op:
                            waits[other] = -1
                            todo.append(other)
                    continue
                waits[rank], reached = source, at
                break
            place[rank], free[rank] = reached, now
        if any(map(int.__lt__, place, map(len, flats))):
            return NEVER, []
        starts = (ends[row[0]] - seconds[row[0]] if row else 0.0 for row in flats)
        span = max((end - start for end, start in zip(free, starts, strict=True)), default=0.0)
        peaks = [self._peak(row, move, ends, out, back) for row, move in zip(flats, moves, strict=True)]
        return Played(max(free, default=0.0), span, ends), peaks

    def _peak(
        self,
        row: Sequence[int],
        move: dict[int, int],
        ends: Sequence[float],
        out: dict[int, float],
        back: dict[int, tuple[float, float]],
    ) -> float:
        """The most that a rank holds: of two things at one moment, the first on the rank counts first."""
        if not move:
            return self.held(row)
        changes: list[tuple[float, float, float]] = []
        for at, op in enumerate(row):
            if self.takes[op]:
                changes.append((ends[op] - self.seconds[op], at, self.takes[op]))
            if self.drops[op]:
                changes.append((ends[op], at + 0.25, -self.drops[op]))
            if op in move:
                changes.append((out[op], at + 0.5, -self.takes[op]))
                changes.append((back[op][0], move[op] - 0.6, self.takes[op]))
        now = most = 0.0
        for _, _, change in sorted(changes):
            now += change
            if now > most:
                most = now
        return most

    def ordered(self, rows: Rows) -> Program:
        """The program in another order, with its copies."""
        return self.moved(super().ordered(rows), rows)

    def moved(self, program: Program, rows: Rows) -> Program:
        """A program in this order of its rows, with the copies that it needs."""
        flats = [self.flat(row) for row in rows]
        _, moves = self.moving(flats)
        gone = {self.ops[maker][1:3] for move in moves for maker in move}
        if not gone:
            return program
        moving = offload(lambda stage, microbatch: (stage, microbatch) in gone)(program)
        copies = {op[0:3]: op.cell for op in moving.ops if op.kind in ("OFFLOAD", "LOAD")}
        cells: list[list[Key | str]] = []
        for flat, move in zip(flats, moves, strict=True):
            loads = defaultdict[int, list[int]](list)
            for maker, before in move.items():
                loads[before].append(maker)
            made = list[Key | str]()
            for at, op in enumerate(flat):
                made += [copies["LOAD", *self.ops[maker][1:3]] for maker in loads[at]]
                if at and flat[at - 1] in move:
                    made.append(copies["OFFLOAD", *self.ops[flat[at - 1]][1:3]])
                if self.ops[op].kind != "R":
                    made.append(self.ops[op][:4])
            cells.append(made)
        return by_table(moving, cells, move=False)


def may_leave(tasks: Tasks) -> bool:
    """Whether residuals of these tasks can be moved: each op by itself, and some that no R makes."""
    return not any(op.parts for op in tasks.ops) and any(
        op.kind == "F" and takes for op, takes in zip(tasks.ops, tasks.takes, strict=True)
    )
