"""One search: gather orders from everywhere, improve them, let the solver go on, and keep the best that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from fpipe.finding.found import NamedRow
from fpipe.finding.list_orders import ALL, ENTRY, OLDEST, PACED_RULES, ListOrders, rules
from fpipe.finding.memory_limits import limits_of, tightened
from fpipe.finding.memory_limits import room as room_of
from fpipe.finding.named_starts import WITHOUT, named_starts
from fpipe.finding.op_facts import again_of, easier, full_are_cheaper, has, kinds_of, made, recomputing
from fpipe.finding.play import Value
from fpipe.finding.pool import Entry, entries, improve
from fpipe.finding.tasks import tasks_of
from fpipe.finding.wanted import Wanted
from fpipe.program import Op, Program
from fpipe.timing.bounds import bounds
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

RULES_TRIED = 24
"""Rules of list scheduling that are tried in each placement."""
WAYS = ((ALL, math.inf), (OLDEST, math.inf), (OLDEST, 2), (ENTRY, 1), (ENTRY, 2))
"""For what list scheduling leaves room, and how many microbatches may enter ahead of their pace."""
OTHER_PLACEMENTS = 12
"""Placements that no word says which are tried."""
CHOICE_RULES = 3
"""Rules of list scheduling by which a choice of what is recomputed is judged."""
ORDERING = 50
"""Price of list scheduling an op, in played ops."""
IMPROVED = 4
"""Improved orders that are simulated, the best first."""


@dataclass(frozen=True)
class Candidate:
    """A program that fits, and what it is worth."""

    program: Program
    timeline: Timeline
    value: Value


class Hunt:
    """A search that goes on. What it has found so far is there at any time.

    Args:
        bases: the programs to place and order: one, or one for each choice of what is recomputed.
        told: called with the ops played so far, the best value and the bound of the best.
    """

    def __init__(self, bases: Sequence[Program], wanted: Wanted, told: Callable[[float, float, float], None]) -> None:
        self.bases, self.wanted, self.told = bases, wanted, told
        self.best: Candidate | None = None
        self.named: dict[str, NamedRow] = {}
        self.least = math.inf  # the smallest peak of all that were seen
        self.pool: list[Entry] = []
        self.starts: dict[str, Transform] = {}  # the named schedules
        self.stopped = False
        self.bounds: dict[Hashable, float] = {}
        cheaper = wanted.halves is None and any(full_are_cheaper(wanted.costs, base) for base in bases)
        self.easier = easier(wanted.costs, bases[0]) if cheaper else wanted.costs

    def gather(self) -> None:
        """Orders to begin with: of named schedules, and of list scheduling in every placement."""
        for base in self.bases:
            self.names(base)
            for placement in self.wanted.placements:
                self._lists(base, placement, RULES_TRIED)

    def improve(self, effort: float) -> None:
        """Improve the best of them for so many played ops."""
        elsewhere = self.wanted.free and self.bases[0].stages > self.wanted.ranks
        parts = [0.2 * elsewhere, 0.4 * self.wanted.choose]
        self._improve(self.pool, effort * (1 - sum(parts)))
        for part, go_on in zip(parts, (self._elsewhere, self._recomputed), strict=True):
            if part and not self.optimal() and not self.stopped:
                go_on(effort * part)

    def optimal(self) -> bool:
        """Whether nothing is left to gain, wherever the stages are."""
        floors = [entry.floor for entry in self.pool]
        if self.best is not None and not floors:
            floors.append(self.floor(self.best.program))
        if self.wanted.free and self.bases[0].stages > self.wanted.ranks:
            floors.append(self._work())
        return self.best is not None and self.best.value[0] <= min(floors, default=math.inf) * (1 + 1e-9)

    def _work(self) -> float:
        """Seconds of the busiest rank, however the work is shared out."""
        cluster, ranks = self.wanted.costs.cluster, self.wanted.ranks
        speed = ranks if cluster is None else sum(cluster.speed[:ranks])
        seconds = replace(self.wanted.costs, cluster=None).seconds

        def shortest(op: Op) -> float:
            if op.kind != "B" or self.wanted.halves is False:
                return seconds(op)
            return min(seconds(op), seconds(op._replace(kind="I")) + seconds(op._replace(kind="W")))

        return min(sum(map(shortest, base.ops)) for base in self.bases) / speed

    def names(self, base: Program, *, improve: bool = True) -> None:
        """Take the named schedules, and improve them if that is wanted."""
        wanted = self.wanted
        cap = wanted.cap
        if wanted.costs.bytes is not None:  # those who count microbatches are told how many there is room for
            cap = max((room_of(entry.tasks, entry.limits) for entry in self.pool), default=0.0)
        most = wanted.microbatches or base.microbatches
        starts = named_starts(base, wanted.ranks, wanted.costs, cap, most=most, without=wanted.without)
        self.take([*wanted.starts, *starts], base, improve=improve)

    def take(
        self, starts: Iterable[tuple[str, Transform]], base: Program | None = None, *, improve: bool = True
    ) -> None:
        """Simulate named schedules, keep the best that fits, and put those into the pool that can be improved."""
        wanted, base = self.wanted, base or self.bases[0]
        recomputed = sum(op.kind == "R" for op in base.ops)
        for name, transform in starts:
            for variant in self._variants(base):
                program = made(transform, variant)
                if program is None or not self._allowed(program, recomputed):
                    continue
                self.starts[name] = transform
                fits = self.known(name, program)
                tasks = tasks_of(program, wanted.costs) if improve and fits else None
                if tasks is not None:
                    limits = limits_of(tasks, wanted.cap, wanted.costs)
                    orders = [tasks.rows]
                    if has(program, "W") and (filled := ListOrders(tasks, limits).with_weights_in_gaps(tasks.rows)):
                        orders.append(filled)
                    self.pool += entries(tasks, limits, orders, wanted.objective, self.floor(program))
                if not has(program, "B"):
                    break  # split already, and so the same again

    def known(self, name: str, program: Program) -> bool:
        """Note what a named schedule takes, and keep it if it is the best that fits; whether it fits."""
        timeline = simulate(program, self.wanted.costs)
        fits = self.consider(program, timeline)
        row = NamedRow(name, timeline.makespan, timeline.span, max(timeline.peak), fits)
        before, objective = self.named.get(name), self.wanted.objective
        if before is None or rank_of(row, objective) < rank_of(before, objective):
            self.named[name] = row
        return fits

    def rows(self) -> list[NamedRow]:
        """Rows of named schedules, the best first; without costs those that take or hold something else."""
        rows = sorted(self.named.values(), key=lambda row: rank_of(row, self.wanted.objective))
        told = [replace(row, name=row.name.replace(WITHOUT, "")) for row in rows]
        return [row for row, same in zip(rows, told, strict=True) if same == row or same != self.named.get(same.name)]

    def _variants(self, base: Program) -> list[Program]:
        """The program with full backwards and with halves, as far as that is allowed."""
        if self.wanted.halves is False or not has(base, "B"):
            return [base]
        split = split_backward()(base)
        return [split] if self.wanted.halves else [base, split]

    def _allowed(self, program: Program, recomputed: int) -> bool:
        wanted = self.wanted
        if program.ranks != wanted.ranks or sum(op.kind == "R" for op in program.ops) != recomputed:
            return False
        if (wanted.halves and has(program, "B")) or (wanted.halves is False and has(program, "I")):
            return False
        return wanted.free or program.placement in wanted.placements

    def _lists(self, base: Program, placement: Sequence[int], tried: int) -> list[Entry]:
        """Orders by rules, with halves where a full backward gains nothing."""
        wanted, found = self.wanted, list[Entry]()
        variants = self._variants(base)
        for variant in variants if full_are_cheaper(wanted.costs, base) else variants[-1:]:
            program = place(placement)(variant)
            self.least = min(self.least, max(simulate(program, wanted.costs).peak))
            tasks = tasks_of(program, wanted.costs)
            if tasks is None:
                continue
            limits = limits_of(tasks, wanted.cap, wanted.costs)
            lists = ListOrders(tasks, limits)
            ways = WAYS[:1] if wanted.choose else WAYS  # choices of what is recomputed are judged alike
            orders = [
                lists.order(rule, leaves_room, ahead)
                for leaves_room, ahead in ways
                for rule in (islice(rules(wanted.seed), tried) if ahead == math.inf else PACED_RULES)
            ]
            rows = [tasks.rows, *(order for order in orders if order is not None)]
            found += entries(tasks, limits, rows, wanted.objective, self.floor(program))
        self.pool += found
        return found

    def _improve(self, pool: Sequence[Entry], effort: float) -> None:
        if not pool:
            return
        wanted = self.wanted

        def told(played: float, best: float) -> None:
            self.told(played, best, min(entry.floor for entry in pool))

        improved, self.stopped = improve(pool, wanted.objective, effort, wanted.seed, told)
        exact = wanted.costs.bytes is None and not wanted.costs.busies
        for entry in improved[: IMPROVED if exact else len(improved)]:
            if self.best is None or entry.value < self.best.value:  # what links and senders add makes it no shorter
                self.judge(entry)
        self.pool = [*improved[:IMPROVED], *self.pool]

    def judge(self, entry: Entry) -> None:
        """Simulate an order, and keep it if it is the best; one that holds too much after all is held tighter."""
        wanted = self.wanted
        for _ in range(4):
            program = entry.tasks.ordered(entry.rows)
            timeline = simulate(program, wanted.costs)
            if self.consider(program, timeline) or wanted.costs.bytes is None:
                return
            limits = tightened(entry.tasks, entry.rows, entry.limits, timeline.peak, wanted.cap)
            lists = ListOrders(entry.tasks, limits)
            orders = (lists.order(rule) for rule in islice(rules(wanted.seed), RULES_TRIED))
            rows = [entry.tasks.rows, *(order for order in orders if order is not None)]
            pool = entries(entry.tasks, limits, rows, wanted.objective, entry.floor)
            if not pool:
                return
            entry = improve(pool, wanted.objective, 100_000, wanted.seed, lambda played, best: None)[0][0]

    def _elsewhere(self, effort: float) -> None:
        """Try placements near the best one: two stages change places, or one goes to another rank."""
        wanted, random = self.wanted, Random(self.wanted.seed)
        for _ in range(OTHER_PLACEMENTS):
            where = self.best.program.placement if self.best else ()
            listed = [rank for rank in where if isinstance(rank, int)] or list(wanted.placements[0])
            one, other = random.sample(range(len(listed)), 2)
            if random.random() < 0.6:
                listed[one], listed[other] = listed[other], listed[one]
            else:
                listed[one] = random.randrange(wanted.ranks)
            if len({*listed}) < wanted.ranks or self.stopped:
                continue
            pool = self._lists(self.bases[0], listed, 8)
            if self.best and pool and min(entry.floor for entry in pool) < self.best.value[0]:
                best = min(pool, key=lambda entry: entry.value)  # the effort is too small for more than one order
                self._improve([best], effort / OTHER_PLACEMENTS)

    def _recomputed(self, effort: float) -> None:
        """Try other choices of what is recomputed, one small change after the other, and improve the best of them.

        A change recomputes a stage more or less, in all or in every other microbatch, or one stage in place of another.
        """
        wanted, base, random = self.wanted, self.bases[0], Random(self.wanted.seed)
        before, found = again_of(base), list[Entry]()
        program = self.best.program if self.best else self.bases[-1]
        where = [rank for rank in program.placement if isinstance(rank, int)]
        placement = where if len(where) == base.stages else wanted.placements[0]
        now, value, spent = again_of(program), (math.inf, math.inf), 0.0
        tried = now
        while spent < effort / 2:
            pool = self._lists(recomputing(tried - before)(base), placement, CHOICE_RULES)
            spent += CHOICE_RULES * ORDERING * (len(pool[0].tasks.ops) if pool else len(base.ops))
            found += pool
            reached = min((entry.value for entry in pool), default=(math.inf, math.inf))
            if reached <= value:
                now, value = tried, reached
            step = random.choice((1, 1, 2))
            changed = random.sample(range(base.stages), random.choice((1, 2)) if base.stages > 1 else 1)
            which = range(random.randrange(step), base.microbatches, step)
            tried = now ^ {(stage, microbatch) for stage in changed for microbatch in which}
        self._improve(found, effort / 2)

    def floor(self, program: Program, *, stay: bool = True) -> float:
        """Seconds that no order of these ops on these ranks goes below, under the cap if residuals stay."""
        program = self.halved(program)
        stay = stay and not has(program, "OFFLOAD")
        key = kinds_of(program), stay
        if key not in self.bounds:
            cap = self.wanted.cap if stay and self.wanted.costs.bytes is None else math.inf
            try:
                found = bounds(program, self.easier, memory_cap=cap)
            except ValueError:  # the cap is below what one op holds
                return 0.0
            self.bounds[key] = getattr(found, self.wanted.objective)
        return self.bounds[key]

    def halved(self, program: Program) -> Program:
        """The program with halves, if those may be chosen: no order of it takes longer than with full backwards."""
        return split_backward()(program) if self.wanted.halves is None else program

    def consider(self, program: Program, timeline: Timeline) -> bool:
        """Keep a program if it is the best that fits; whether it fits."""
        peak = max(timeline.peak)
        self.least = min(self.least, peak)
        if peak > self.wanted.cap * (1 + 1e-9):
            return False
        value = self.wanted.value(timeline)
        if self.best is None or value < self.best.value:
            self.best = Candidate(program, timeline, value)
        return True


def rank_of(row: NamedRow, objective: str) -> tuple[bool, float, float]:
    """By what named schedules stand in order: those that fit, then the shortest."""
    return not row.fits, getattr(row, objective), row.peak
