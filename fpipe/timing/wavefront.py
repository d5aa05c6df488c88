"""Simulate rows of runs: all ranks at once, one step of the wavefront after the other.

Each op gets a step: one after the op before it on its rank, and after the op of another rank that it reads. A turn of a
run takes a fixed number of steps, so its ops stand at regular distances from those that they read, and what the ranks
do at each step is a plan that comes round and seldom changes. A step is then a few operations on vectors with a number
for each rank: fetch what is read, add the way, take the larger of that and the rank's own time, add the cost. These are
the sums of `simulate` in its order, so that times agree to the last bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fpipe.timing.costs import Costs
from fpipe.timing.runs import Run, cell_seconds

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 32
"""Steps for which what is read seldom waits in the window of recent times; beyond, it is kept apart."""


class Fronts(NamedTuple):
    """For each rank the start of its first op and the end of its last, in seconds."""

    first: list[float]
    last: list[float]


def fronts(rows: Sequence[Sequence[Run]], costs: Costs) -> Fronts:
    """When each rank starts and ends, exactly as `simulate` says of a chain of stages with these rows."""
    return _Plan(_Steps(rows), costs).walk()


def of_ranks(costs: Costs) -> None:
    """Refuse costs that ask for more than ranks, stages and one latency."""
    for word, odd in (
        ("a transfer of each link", not isinstance(costs.transfer, int | float)),
        ("a busy sender", costs.sender == "busy"),
        ("bytes", costs.bytes is not None),
        ("a pair that costs f(op)", callable(costs.pair)),
    ):
        if odd:
            raise ValueError(
                f"a schedule in runs knows ranks, stages and one latency for all links; found {word}. Simulate "
                "a program of a smaller size, or leave it out."
            )


class _Made(NamedTuple):
    """Which cell of which run writes a stretch of microbatches."""

    low: int
    high: int
    step: int
    run: int
    slot: int


class _Need(NamedTuple):
    """What a part (0, or 1 of a PAIR) of a cell reads from another rank, from some turn of its run to another.

    `lag`: how many steps it comes after what it reads at the first of these turns, were both runs to begin at once;
    `more`: by how many that grows from each of these turns to the next.
    """

    slot: int
    part: int
    turns: range
    run: int
    lag: int
    more: int


class _Steps:
    """The runs of all ranks with the step at which each begins, and what each reads from other ranks."""

    def __init__(self, rows: Sequence[Sequence[Run]]) -> None:
        self.ranks = len(rows)
        self.runs = [run for row in rows for run in row]
        self.rank_of = [rank for rank, row in enumerate(rows) for _ in row]
        lengths = {len(cells) for cells, count in self.runs if count > 1} or {1}
        common = math.lcm(*lengths)
        self.cycle = common if common <= 2 * max(lengths) else max(lengths)
        fits = [next(n for n in range(length, self.cycle + 1) if self.cycle % n == 0) for length in lengths]
        whole = dict(zip(lengths, fits, strict=True))
        self.size = [len(cells) if count == 1 else whole[len(cells)] for cells, count in self.runs]
        self.made: defaultdict[tuple[bool, int], list[_Made]] = defaultdict(list)
        for number, (cells, count) in enumerate(self.runs):
            for slot, cell in enumerate(cells):
                for kind, stage, first, step in cell:
                    if kind != "W":
                        known = _Made(first, first + (count - 1) * step, step, number, slot)
                        self.made[kind == "F", stage].append(known)
        self.needs = [list(self._needs(number, run)) for number, run in enumerate(self.runs)]
        self.begins = self._begins()

    def _needs(self, number: int, run: Run) -> Iterator[_Need]:
        rank, size, count = self.rank_of[number], self.size[number], run.turns
        for slot, cell in enumerate(run.cells):
            for part, (kind, stage, first, step) in enumerate(cell):
                if kind == "W":
                    continue
                forward = kind == "F"
                for low, high, pace, source, at in self.made.get((forward, stage - 1 if forward else stage + 1), ()):
                    if high < first or low > first + (count - 1) * step or self.rank_of[source] == rank:
                        continue
                    turn = max(0, -((first - low) // step))
                    last = min(count - 1, (high - first) // step)
                    every = math.lcm(step, pace) // step
                    while turn <= last and (first + turn * step - low) % pace:
                        turn += 1
                    if turn > last:
                        continue
                    there = self.size[source]
                    lag = turn * size + slot - (first + turn * step - low) // pace * there - at
                    more = every * size - every * step // pace * there
                    yield _Need(slot, part, range(turn, last + 1, every), source, lag, more)

    def _begins(self) -> list[int]:
        """The step at which each run begins: the least at which all its cells come after what they read."""
        before: list[list[tuple[int, int]]] = [[] for _ in self.runs]
        after: list[list[int]] = [[] for _ in self.runs]
        waits = [0] * len(self.runs)
        for number in range(1, len(self.runs)):
            if self.rank_of[number] == self.rank_of[number - 1]:
                before[number].append((number - 1, self.size[number - 1] * self.runs[number - 1].turns))
                after[number - 1].append(number)
                waits[number] += 1
        for number, needs in enumerate(self.needs):
            for _, _, turns, run, lag, more in needs:
                before[number].append((run, 1 - min(lag, lag + (len(turns) - 1) * more)))
                if turns[0] == 0:  # what its first turn reads has begun before
                    after[run].append(number)
                    waits[number] += 1
        order = [number for number, count in enumerate(waits) if not count]
        for number in order:
            for other in after[number]:
                waits[other] -= 1
                if not waits[other]:
                    order.append(other)
        order += [number for number, count in enumerate(waits) if count]
        begins, most = [0] * len(self.runs), 2 * sum(map(_steps_of, self.size, self.runs))
        changed = True
        while changed:
            changed = False
            for number in order:
                least = max([begins[run] + distance for run, distance in before[number]], default=0)
                if least > begins[number]:
                    if least > most:
                        raise ValueError("these rows have no common period: turns of their runs overtake each other.")
                    begins[number], changed = least, True
            order.reverse()  # what a run overtakes far behind is found on the way back
        return begins


def _steps_of(size: int, run: Run) -> int:
    return size * run.turns


class _Changes:
    """Changes of a plan, as columns: at which step, of which place of the plan, to what."""

    def __init__(self) -> None:
        self.when, self.place = list[int](), list[int]()
        self.values: tuple[list[Any], list[Any]] = [], []

    def put(self, when: range, places: Iterable[int], first: Any, second: Any = 0) -> None:
        """At each of some steps, one place to the same."""
        count = len(when)
        self.when += when
        self.place += places
        self.values[0].extend([first] * count)
        self.values[1].extend([second] * count)


class _Plan:
    """What each rank does at each step of a cycle, and when that changes."""

    def __init__(self, steps: _Steps, costs: Costs) -> None:
        self.steps, self.costs = steps, costs
        self.ranks, self.cycle = steps.ranks, steps.cycle
        self.spends, self.reads = _Changes(), (_Changes(), _Changes())
        self.first: list[tuple[int, int]] = []
        self.parked: list[tuple[int, int, int, int]] = []
        self.depth = 1
        self.paired = any(len(cell) > 1 for cells, _ in steps.runs for cell in cells)
        seconds: dict[tuple[tuple[str, int], ...], float] = {}
        free, cycle = [-1] * self.ranks, self.cycle
        for number, (cells, count) in enumerate(steps.runs):
            rank, begin, size = steps.rank_of[number], steps.begins[number], steps.size[number]
            if free[rank] < 0:
                free[rank] = 0
                self.first.append((begin, rank))
            self._idle(range(free[rank], min(begin, free[rank] + cycle)), rank)
            free[rank] = begin + size * count
            often = min(count, max(1, cycle // size))
            reads = {(need.slot, need.part) for need in steps.needs[number]}
            for slot, cell in enumerate(cells):
                names = tuple([part[:2] for part in cell])
                if names not in seconds:
                    seconds[names] = cell_seconds(cell, rank, costs)
                now = range(begin + slot, begin + slot + often * size, size)
                places = self._places(now, rank)
                self.spends.put(now, places, seconds[names])
                for part in (0, 1) if self.paired else (0,):
                    if (slot, part) not in reads:
                        self.reads[part].put(now, places, 1, self.ranks)
            for slot in range(len(cells), size):
                self._idle(range(begin + slot, begin + slot + often * size, size), rank)
            for need in steps.needs[number]:
                self._read(need, rank, begin, size, often)
        self.total = max(free)
        for rank in range(self.ranks):
            self._idle(range(free[rank], min(self.total, free[rank] + cycle)), rank)

    def _places(self, steps: Iterable[int], rank: int) -> list[int]:
        return [step % self.cycle * self.ranks + rank for step in steps]

    def _idle(self, steps: range, rank: int) -> None:
        places = self._places(steps, rank)
        self.spends.put(steps, places, 0.0)
        self.reads[0].put(steps, places, 1, self.ranks)
        if self.paired:
            self.reads[1].put(steps, places, 1, self.ranks)

    def _read(self, need: _Need, rank: int, begin: int, size: int, often: int) -> None:
        slot, part, turns, run, lag, more = need
        source = self.steps.rank_of[run]
        lag += begin - self.steps.begins[run]
        if not more and turns.step == 1 and (lag <= NEAR or len(turns) > often):
            self.depth = max(self.depth, lag)
            now = range(begin + slot + turns[0] * size, begin + slot + (turns[0] + min(often, len(turns))) * size, size)
            self.reads[part].put(now, self._places(now, rank), lag, source)
            return
        for number, turn in enumerate(turns):
            step, own = begin + slot + turn * size, lag + number * more
            now = range(step, step + 1)
            if own > NEAR:
                self.parked.append((step - own, source, step, rank))
                self.reads[part].put(now, self._places(now, rank), 1, self.ranks)
            else:
                self.depth = max(self.depth, own)
                self.reads[part].put(now, self._places(now, rank), own, source)

    def walk(self) -> Fronts:
        """Step by step."""
        import torch

        with torch.inference_mode():
            ranks, depth, way = self.ranks, self.depth, float(cast("float", self.costs.transfer))
            room, width = max(256, depth // 4), ranks + 1
            recent = torch.zeros(depth + room, width, dtype=torch.float64)
            recent[:, ranks] = -math.inf  # for ops that read nothing from another rank
            windows = [recent[at : at + depth].view(-1) for at in range(room)]
            rows = [recent[at, :ranks] for at in range(depth + room)]
            spending = _Changing(self, self.spends, torch.tensor(self.spends.values[0], dtype=torch.float64))
            reading = list[_Changing]()
            for changes in self.reads[: 1 + self.paired]:
                lags, sources = map(torch.tensor, changes.values)
                reading.append(_Changing(self, changes, (depth - lags).mul_(width).add_(sources)))
            got = torch.empty(ranks, dtype=torch.float64)
            parking, unparking, starting = (defaultdict[int, list[int]](list) for _ in range(3))
            for number, (made, _, read, _) in enumerate(self.parked):
                parking[made].append(number)
                unparking[read].append(number)
            for step, rank in self.first:
                starting[step].append(rank)
            first, parked = [0.0] * ranks, [0.0] * len(self.parked)
            at = 0
            for step in range(self.total):
                if at == room:
                    for low in range(0, depth, room):
                        recent[low : min(low + room, depth)] = recent[low + room : min(low + 2 * room, depth + room)]
                    at = 0
                before, now = rows[at + depth - 1], rows[at + depth]
                for one in reading:
                    torch.index_select(windows[at], 0, one.at(step), out=got)
                    before = torch.maximum(before, got.add_(way) if way else got, out=now)
                for number in unparking.get(step, ()):
                    rank = self.parked[number][3]
                    now[rank] = max(float(now[rank]), parked[number] + way)
                for rank in starting.get(step, ()):
                    first[rank] = float(now[rank])
                now.add_(spending.at(step))
                for number in parking.get(step, ()):
                    parked[number] = float(now[self.parked[number][1]])
                at += 1
            return Fronts(first, rows[at + depth - 1].tolist())


class _Changing:
    """A plan that changes from step to step: for each step of the cycle a row with a number for each rank."""

    def __init__(self, plan: _Plan, changes: _Changes, values: Tensor) -> None:
        import torch

        when, order = torch.tensor(changes.when).sort(stable=True)
        self.ends: list[int] = torch.searchsorted(when, torch.arange(plan.total + 1)).tolist()
        self.places, self.values = torch.tensor(changes.place)[order], values[order]
        self.now = torch.zeros(plan.cycle * plan.ranks, dtype=values.dtype)
        self.rows, self.cycle = list(self.now.view(plan.cycle, plan.ranks)), plan.cycle

    def at(self, step: int) -> Tensor:
        """The row of a step; steps are asked for in turn."""
        low, high = self.ends[step], self.ends[step + 1]
        if low < high:
            self.now.index_copy_(0, self.places[low:high], self.values[low:high])
        return self.rows[step % self.cycle]
