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
from operator import itemgetter
from typing import NamedTuple

from fpipe.orders.play import NEVER, Needs, Numbers, Played, play
from fpipe.orders.stretch import Rows
from fpipe.orders.tasks import Tasks
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


class _Copy(NamedTuple):
    """An OFFLOAD or a LOAD: before which place of its rank's row it stands, and the op that made the residual."""

    before: int
    is_load: bool
    maker: int


Moves = list[dict[int, int]]
"""On each rank the ops whose residuals leave, and before which place of its row each is loaded."""


@dataclass(frozen=True)
class OffloadedTasks(Tasks):
    """Tasks whose residuals may wait on the host, so that each rank keeps to its `room`."""

    room: Sequence[float] = ()
    costs: Costs = field(default_factory=Costs)

    @property
    def price(self) -> float:
        """Price of playing an op, in those whose residuals stay."""
        return 6.0

    @cached_property
    def residual_of(self) -> dict[int, Residual]:
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
        """Play an order with its copies; and the residuals that leave."""
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
        for maker, stay in self.residual_of.items():
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
        """The times of an order with its copies, which are ops on a row of their own, and the most each rank holds."""
        numbers = self.numbers
        seconds, needs = [*numbers.seconds], [*numbers.needs]
        wakes, tails = [*numbers.wakes], [*numbers.tails]
        rows = [*flats]
        copies = [self._copies(row, move) for row, move in zip(flats, moves, strict=True)]
        left = {copy.maker: copy.maker for row in copies for copy in row}  # the op after which a residual has left
        loaded: dict[int, Needs] = {}  # what a LOAD waits for
        for rank, (flat, row) in enumerate(zip(flats, copies, strict=True)):
            lane: list[int] = []
            for at, is_load, maker in row:
                residual, waits = self.residual_of[maker], [(maker, 0.0)]
                if is_load:  # no earlier than the op before it
                    before = [(op, 0.0) for op in flat[max(0, at - 2) : at - 1]]
                    waits = [(left[maker], 0.0), *before, *needs[flat[at - 1]]]
                cost, number = residual.back if is_load else residual.out, len(seconds)
                if cost:
                    waits += [(op, 0.0) for op in lane[-1:]]
                    for source, _ in waits:
                        if source >= 0:
                            wakes[source] = (*wakes[source], len(rows))
                    lane.append(number)
                    seconds.append(cost)
                    needs.append(waits)
                    wakes.append((rank,))
                    tails.append(0.0)
                if is_load:
                    loaded[maker] = waits
                    needs[residual.reader] = (*needs[residual.reader], (number if cost else left[maker], 0.0))
                elif cost:
                    left[maker] = number
            rows += [lane] if lane else []
        played = play(Numbers(seconds, needs, wakes, tails), rows, limit)
        if not played.ends:
            return NEVER, []
        ends = played.ends
        back = {maker: max(ends[op] + way for op, way in waits) for maker, waits in loaded.items()}
        gone = {maker: ends[op] for maker, op in left.items()}
        return played, [self._peak(row, move, ends, gone, back) for row, move in zip(flats, moves, strict=True)]

    def _copies(self, flat: Sequence[int], move: dict[int, int]) -> list[_Copy]:
        """The copies of a rank, in order: before which place of its row, and of what; a LOAD before an OFFLOAD."""
        if not move:
            return []
        behind = [_Copy(at + 1, False, op) for at, op in enumerate(flat) if op in move]
        loads = [_Copy(before, True, maker) for maker, before in move.items()]
        return sorted([*loads, *behind], key=itemgetter(0))

    def _peak(
        self,
        row: Sequence[int],
        move: dict[int, int],
        ends: Sequence[float],
        out: dict[int, float],
        back: dict[int, float],
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
                changes.append((back[op], move[op] - 0.6, self.takes[op]))
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
            row = self._copies(flat, move)[::-1]
            made = list[Key | str]()
            for at, op in enumerate(flat):
                while row and row[-1].before == at:
                    copy = row.pop()
                    made.append(copies["LOAD" if copy.is_load else "OFFLOAD", *self.ops[copy.maker][1:3]])
                if self.ops[op].kind != "R":
                    made.append(self.ops[op][:4])
            cells.append(made)
        return by_table(moving, cells, move=False)


def may_leave(tasks: Tasks) -> bool:
    """Whether residuals of these tasks can be moved: each op by itself on its rank's lane, and some that no R makes."""
    return not (tasks.beside or any(op.parts for op in tasks.ops)) and any(
        op.kind == "F" and takes for op, takes in zip(tasks.ops, tasks.takes, strict=True)
    )
