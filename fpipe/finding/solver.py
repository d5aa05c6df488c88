"""Ask OR-tools' CP-SAT for the best order of some tasks, and for a proof of how good any order can be.

Each step of a row is an interval; those of a rank do not overlap, nor do its exchanges. A residual is an interval too,
from the start of the op that makes it to the end of the one that drops it, and no more of a rank's are open at once
than fit (those of exchanges, which count where the order has them, are left to the caller). Microbatches are alike, so
the ops of a track keep their turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

from fpipe.finding.hunt import Hunt
from fpipe.finding.op_facts import kinds_of
from fpipe.finding.pool import Entry, entries
from fpipe.finding.tasks import Rows, Tasks
from fpipe.finding.wanted import Wanted

SMALL = 800
"""Ops of an order beyond which the solver is asked only by name: within a minute it finds and proves nothing there."""
WORKERS = 2
"""Threads of the solver."""


class Answer(NamedTuple):
    """The solver's result: an order, if it found one better than what it was given, and a lower bound."""

    rows: Rows | None
    bound: float


def installed() -> bool:
    """Whether the solver is there."""
    return find_spec("ortools") is not None


def solve(entry: Entry, wanted: Wanted, seconds: float, found: Callable[[float, float], None]) -> Answer:
    """The best order within some time, from an entry's on; `found` hears each better time and the bound so far."""
    from ortools.sat.python import cp_model

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found(self.objective_value * unit, self.best_objective_bound * unit)

    tasks, caps, objective, start = entry.tasks, entry.limits, wanted.objective, entry.rows
    ticks, unit = _ticks(tasks)
    before = tasks.play([tasks.flat(row) for row in start])
    most = math.ceil(before.makespan / unit) + len(tasks.ops)
    if objective == "span":
        most += math.ceil(max(map(len, start)) * max(tasks.seconds) / unit)
    beside = tasks.beside or [False for _ in tasks.ops]
    most += math.ceil(sum(one for one, away in zip(tasks.seconds, beside, strict=True) if away) / unit)
    model: Any = cp_model.CpModel()
    took = [math.floor(one / unit + 1e-9) if not ticks else round(one / unit) for one in tasks.seconds]
    starts = [model.new_int_var(0, most, f"s{at}") for at in range(len(took))]
    ends = [begin + long for begin, long in zip(starts, took, strict=True)]
    arrivals: list[list[tuple[int, int]]] = []
    for at, needs in enumerate(tasks.needs):
        arrivals.append([(source, math.floor(way / unit + 1e-9)) for source, way in needs])
        for source, way in arrivals[-1]:
            model.add(starts[at] >= (ends[source] if source >= 0 else 0) + way)
    for row in start:
        steps: list[Any] = []
        exchanges: list[Any] = []
        for track in dict.fromkeys(row):
            for turn, step in enumerate(tasks.tracks[track]):
                first, last = step[0], step[-1]
                if len(step) == 1:
                    if took[first] or not beside[first]:
                        one = model.new_fixed_size_interval_var(starts[first], took[first], f"i{first}")
                        (exchanges if beside[first] else steps).append(one)
                else:
                    long = model.new_int_var(0, most, f"l{first}")
                    steps.append(model.new_interval_var(starts[first], long, ends[last], f"i{first}"))
                    for one, other in pairwise(step):
                        model.add(starts[other] >= ends[one])
                if turn:
                    model.add(starts[first] >= ends[tasks.tracks[track][turn - 1][-1]])
        model.add_no_overlap(steps)
        model.add_no_overlap(exchanges)
    for rank, every in enumerate(tasks.residuals):
        residuals = [(maker, dropper, size) for maker, dropper, size in every if not (beside[maker] or beside[dropper])]
        sizes = [size for *_, size in residuals]
        if sum(sizes) > caps[rank]:
            held: list[Any] = []
            for maker, dropper, _ in residuals:
                long = model.new_int_var(took[maker], most, f"h{maker}")
                held.append(model.new_interval_var(starts[maker], long, ends[dropper], f"r{maker}"))
            count = 1.0 if all(map(float.is_integer, sizes)) else max(sizes) / 1000
            demands = [math.ceil(size / count - 1e-9) for size in sizes]
            model.add_cumulative(held, demands, math.floor(caps[rank] / count + 1e-9))
    value = model.new_int_var(0, most, "value")
    for row in start:
        last = model.new_int_var(0, most, "last")
        work = [track for track in dict.fromkeys(row) if not beside[tasks.tracks[track][0][0]]]
        own = [tasks.tracks[track][-1][-1] for track in work]
        model.add_max_equality(last, [ends[at] for at in own])
        if objective == "makespan":
            model.add(value >= last)
            continue
        begun = model.new_int_var(0, most, "begun")
        model.add_min_equality(begun, [starts[tasks.tracks[track][0][0]] for track in work])
        model.add(value >= last - begun)
        first = tasks.tracks[work[0]][0][0]  # a rank cannot put off what it does first
        if all(tasks.tracks[track][0][0] == first or tasks.follows(tasks.tracks[track][0][0], first) for track in work):
            needs = arrivals[first]
            if len(needs) == 1 and needs[0][0] >= 0:
                model.add(starts[first] == ends[needs[0][0]] + needs[0][1])
            elif not needs:
                model.add(starts[first] == 0)
    model.minimize(value)
    for at, end in enumerate(before.ends[:-1]):
        model.add_hint(starts[at], round((end - tasks.seconds[at]) / unit))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = wanted.seed
    status = solver.solve(model, Listener())
    bound = max(0.0, solver.best_objective_bound) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    when = [solver.value(one) for one in starts]
    rows: Rows = []
    for row in start:
        each = [
            (when[step[0]], when[step[-1]] + took[step[-1]], step, track)
            for track in set(row)
            for step in tasks.tracks[track]
        ]
        rows.append([track for *_, track in sorted(each)])
    return Answer(rows, bound)


def _ticks(tasks: Tasks) -> tuple[bool, float]:
    """Whether all times are whole numbers of a unit, and the unit; else one so small that they almost are."""
    times = [*tasks.seconds, *(way for needs in tasks.needs for _, way in needs)]
    most = max(times, default=0.0) or 1.0
    shares = {Fraction(one / most).limit_denominator(10**4) for one in times}
    fine = math.lcm(*(share.denominator for share in shares))
    exact = fine <= 10**6 and all(abs(one / most * fine - round(one / most * fine)) < 1e-9 * fine for one in times)
    return (True, most / fine) if exact else (False, most / 10**5)


def ask(hunt: Hunt, seconds: float, told: Callable[[float, float, float], None]) -> dict[Hashable, float]:
    """Let the solver search for some seconds, most of them in the best placement; its best order joins the hunt.

    `told` hears the share of the seconds, the best value and the bound. Returns which ops on which ranks were asked
    about, and what no order of them goes below.
    """
    wanted, began, proven = hunt.wanted, time.monotonic(), dict[Hashable, float]()
    best_of: dict[Hashable, Entry] = {}
    for entry in sorted(hunt.pool, key=lambda entry: entry.value):
        best_of.setdefault(kinds_of(entry.tasks.program), entry)
    for number, (kinds, entry) in enumerate(best_of.items(), 1):
        best = hunt.best.value[0] if hunt.best else math.inf
        left = seconds - (time.monotonic() - began)
        if left < 0.02 or entry.floor >= best * (1 - 1e-9):
            continue

        def heard(value: float, bound: float, best: float = best, floor: float = entry.floor) -> None:
            told(min(1.0, (time.monotonic() - began) / seconds), min(best, value), max(floor, bound))

        answer = solve(entry, wanted, left if number == len(best_of) else left * 0.7, heard)
        if wanted.costs.bytes is None or wanted.cap == math.inf:  # how much of a cap in bytes is left for residuals is
            proven[kinds] = max(entry.floor, answer.bound)  # measured, and proves nothing
        if answer.rows is not None:
            floor = proven.get(kinds, entry.floor)
            better = entries(entry.tasks, entry.limits, [answer.rows], wanted.objective, floor)
            hunt.pool += better
            for one in better:
                hunt.judge(one)
    return proven
