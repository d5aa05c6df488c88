"""Simulate rows of runs: all ranks at once, one step of the wavefront after the other.

What the ranks do at each step is a timetable that comes round and seldom changes. A step is a few operations on vectors
with a number for each rank: fetch what is read, add the way, take the larger of that and the rank's own time, add the
cost. These are the sums of `simulate` in its order, so that times agree to the last bit. It stands apart from
`orders/play.py` since no list of a hundred million ops can be made: it plays runs, which say them all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, cast

from fpipe.orders.cell_steps import Steps, spread
from fpipe.orders.runs import Columns
from fpipe.timing.costs import Costs

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 4
"""Steps for which what is read waits in the window of recent times; beyond, it is sent on as mail."""
ROOM = 32
"""Steps after which the window is moved back to the front of its memory."""


class Fronts(NamedTuple):
    """For each rank the start of its first op and the end of its last, in seconds."""

    first: list[float]
    last: list[float]


def fronts(known: Columns, costs: Costs) -> Fronts:
    """When each rank starts and ends, exactly as `simulate` says of a chain of stages with these rows."""
    import torch

    with torch.inference_mode():
        return _walk(_Timetable(Steps(known), costs), float(cast("float", costs.transfer)))


def of_ranks(costs: Costs) -> None:
    """Refuse costs that ask for more than ranks, stages and one latency."""
    for word, odd in (
        ("a rule of messages", costs.messages != "eager"),
        ("a transfer of each link", not isinstance(costs.transfer, int | float)),
        ("a cluster", costs.cluster is not None),
        ("a busy sender", costs.sender == "busy"),
        ("a send or a receive that takes time", costs.busies),
        ("bytes", costs.bytes is not None),
        ("a pair that costs f(op)", callable(costs.pair)),
    ):
        if odd:
            raise ValueError(
                f"a schedule in runs knows ranks, stages and one latency for all links; found {word}. Simulate "
                "a program of a smaller size, or leave it out."
            )


class _Mail(NamedTuple):
    """Times that are read long after they were made, in the order in which they are read."""

    made: Tensor
    source: Tensor
    read: Tensor
    column: Tensor


class _Timetable:
    """Work of each rank at each step of a cycle, and when that changes.

    Attributes:
        spends: the seconds of its cell.
        reads: for the first and second part of its cell, where what it reads lies in a window of recent times. A row of
            the window has the times of all ranks at a step, then -inf for what reads nothing, then the mail.
        mail: what is read from further back.
        first: at which step which ranks begin.
    """

    def __init__(self, steps: Steps, costs: Costs) -> None:
        import torch

        known, self.steps, self.cycle = steps.known, steps, steps.cycle
        self.ranks, self.near = known.ranks, max(NEAR, steps.cycle)
        ends = steps.begins + steps.size * known.turns
        self.total = int(ends.max())
        opens = torch.cat([torch.tensor([True]), known.rank[1:] != known.rank[:-1]])
        self.first: defaultdict[int, list[int]] = defaultdict(list)
        for step, rank in zip(steps.begins[opens].tolist(), known.rank[opens].tolist(), strict=True):
            self.first[step].append(rank)
        # each step of a run's turns, those without a cell too, for as many turns as a cycle has
        often = torch.minimum(known.turns, (self.cycle // steps.size).clamp(min=1))
        of_slot, slot = spread(steps.size)
        filled = slot < known.cells[of_slot]
        cell = (known.cells.cumsum(0) - known.cells)[of_slot] + slot
        seconds = torch.zeros(len(slot), dtype=torch.float64)
        seconds[filled] = known.seconds(costs)[cell[filled]]
        which, turn = spread(often[of_slot])
        when = (steps.begins[of_slot] + slot)[which] + turn * steps.size[of_slot][which]
        rank = known.rank[of_slot][which]
        # and where a rank waits, before a run and after its last
        close = torch.cat([opens[1:], torch.tensor([True])])
        since = torch.where(opens, 0, torch.cat([torch.tensor([0]), ends[:-1]]))
        since, until = (
            torch.cat([since, ends[close]]),
            torch.cat([steps.begins, torch.full_like(ends[close], self.total)]),
        )
        pause, more = spread((until - since).clamp(max=self.cycle))
        paused = torch.cat([known.rank, known.rank[close]])[pause], since[pause] + more
        idle = self._place(*paused)
        place = self._place(rank, when)
        self.spends = _Changes(
            torch.cat([when, paused[1]]),
            torch.cat([place, idle]),
            torch.cat([seconds[which], torch.zeros(len(idle), dtype=torch.float64)]),
        )
        reading = self._readings(often)
        self.reads: list[_Changes] = []
        for part in range(int(known.place.max()) + 1):
            mine = known.place[reading.part] == part
            reader = reading.part[mine]
            reads = torch.zeros(len(slot), dtype=torch.bool)
            reads[(steps.size.cumsum(0) - steps.size)[known.run[reader]] + known.slot[reader]] = True
            free = ~reads[which]
            nothing = torch.full((int(free.sum()) + len(idle),), self.nothing)
            self.reads.append(
                _Changes(
                    torch.cat([when[free], paused[1], reading.when[mine]]),
                    torch.cat([place[free], idle, self._place(known.rank[known.run[reader]], reading.when[mine])]),
                    torch.cat([nothing, reading.where[mine]]),
                )
            )

    def _place(self, rank: Tensor, when: Tensor) -> Tensor:
        return when % self.cycle * self.ranks + rank

    def _readings(self, often: Tensor) -> _Readings:
        """Where what is read lies. Sets the size of the window, and the mail."""
        import torch

        steps, known, needs = self.steps, self.steps.known, self.steps.needs
        run = known.run[needs.part]
        lag = needs.lag + steps.begins[run] - steps.begins[needs.source]
        steady = (needs.more == 0) & (needs.every == 1) & (lag <= self.near)
        which, number = spread(torch.where(steady, torch.minimum(often[run], needs.times), needs.times))
        part, run = needs.part[which], run[which]
        lag = lag[which] + number * needs.more[which]
        when = (
            steps.begins[run] + known.slot[part] + (needs.turn[which] + number * needs.every[which]) * steps.size[run]
        )
        source = known.rank[needs.source[which]]
        far = lag > self.near
        self.depth = max(1, int(lag[~far].max()) if (~far).any() else 1)
        order = when[far].argsort(stable=True)
        read = when[far][order]
        column = torch.arange(len(read)) - torch.searchsorted(read, read)
        self.mail = _Mail(read - lag[far][order], source[far][order], read, self.ranks + 1 + column)
        self.width = self.ranks + 1 + (int(column.max()) + 1 if len(column) else 0)
        self.nothing = (self.depth - 1) * self.width + self.ranks
        where = (self.depth - lag) * self.width + source
        where[far.nonzero()[:, 0][order]] = (self.depth - 1) * self.width + self.mail.column
        return _Readings(part, when, where)


class _Readings(NamedTuple):
    """At which step a part reads, and where that lies in the window."""

    part: Tensor
    when: Tensor
    where: Tensor


class _Changes(NamedTuple):
    """Changes of a timetable, as columns: at which step, of which place of the timetable, to what."""

    when: Tensor
    place: Tensor
    value: Tensor


def _walk(timetable: _Timetable, way: float) -> Fronts:
    """Step by step, a cycle at a time."""
    import torch

    ranks, depth, width, cycle = timetable.ranks, timetable.depth, timetable.width, timetable.cycle
    room = -(-ROOM // cycle) * cycle
    recent = torch.zeros(depth + room, width, dtype=torch.float64)
    recent[:, ranks] = -math.inf  # for ops that read nothing from another rank
    flat = recent.view(-1)
    windows = [recent[at : at + depth].view(-1) for at in range(room)]
    rows = [recent[at, :ranks] for at in range(depth + room)]
    spending = _Changing(timetable, timetable.spends, 0.0)
    reading = [_Changing(timetable, changes, timetable.nothing) for changes in timetable.reads]
    mail = _Mailing(timetable)
    got = torch.empty(ranks, dtype=torch.float64)
    first, at = [0.0] * ranks, 0
    for cycles in range(-(-timetable.total // cycle)):
        if at == room:
            for low in range(0, depth, room):
                recent[low : min(low + room, depth)] = recent[low + room : min(low + 2 * room, depth + room)]
            at = 0
        step = cycles * cycle
        base = (at + depth - step) * width
        mail.arrive(flat, cycles, base)
        spend, read = spending.at(cycles), [one.at(cycles) for one in reading]
        for turn in range(min(cycle, timetable.total - step)):
            before, now = rows[at + depth - 1], rows[at + depth]
            for each in read:
                torch.index_select(windows[at], 0, each[turn], out=got)
                before = torch.maximum(before, got.add_(way) if way else got, out=now)
            for rank in timetable.first.get(step + turn, ()):
                first[rank] = float(now[rank])
            now.add_(spend[turn])
            at += 1
        mail.leave(flat, cycles, base)
    return Fronts(first, rows[at + depth - 1].tolist())


class _Changing:
    """A timetable that changes from cycle to cycle: for each step of the cycle a row with a number for each rank."""

    def __init__(self, timetable: _Timetable, changes: _Changes, first: float) -> None:
        import torch

        order = changes.when.argsort(stable=True)
        self.place, self.value = changes.place[order], changes.value[order]
        self.ends = _ends(timetable, changes.when[order])
        self.now = torch.full((timetable.cycle * timetable.ranks,), first, dtype=changes.value.dtype)
        self.rows = list(self.now.view(timetable.cycle, timetable.ranks))

    def at(self, cycles: int) -> list[Tensor]:
        """The rows of a cycle; cycles are asked for in turn."""
        low, high = self.ends[cycles], self.ends[cycles + 1]
        if low < high:
            self.now.index_copy_(0, self.place[low:high], self.value[low:high])
        return self.rows


class _Mailing:
    """The mail on its way."""

    def __init__(self, timetable: _Timetable) -> None:
        import torch

        made, source, read, column = timetable.mail
        self.number = made.argsort(stable=True)
        self.leaves, self.arrives = _ends(timetable, made[self.number]), _ends(timetable, read)
        self.source = (made * timetable.width + source)[self.number]
        self.target = (read - 1) * timetable.width + column
        self.held = torch.zeros(len(read), dtype=torch.float64)

    def arrive(self, flat: Tensor, cycles: int, base: int) -> None:
        """Put what is read in a cycle where it is read, the row before."""
        low, high = self.arrives[cycles], self.arrives[cycles + 1]
        if low < high:
            flat.index_copy_(0, self.target[low:high] + base, self.held[low:high])

    def leave(self, flat: Tensor, cycles: int, base: int) -> None:
        """Keep what was made in a cycle."""
        low, high = self.leaves[cycles], self.leaves[cycles + 1]
        if low < high:
            self.held.index_copy_(0, self.number[low:high], flat.index_select(0, self.source[low:high] + base))


def _ends(timetable: _Timetable, when: Tensor) -> list[int]:
    """Where the steps of each cycle begin in a column that is sorted."""
    import torch

    return torch.searchsorted(when, torch.arange(-(-timetable.total // timetable.cycle) + 1) * timetable.cycle).tolist()
