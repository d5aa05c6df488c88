"""Ask OR-tools' CP-SAT for the best order of some tasks, and for a proof of how good any order can be.

The model: each step is an interval. The steps of a rank do not overlap, nor do its exchanges. A residual is an interval
from the start of the op that makes it to the end of the op that drops it; those open at once on a rank fit its limit.
Microbatches are alike, so the ops of a track run in their order. Residuals of exchanges are left to the caller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

from fpipe.finding.local_search import LocalSearch
from fpipe.finding.pool import Contender, contenders_of
from fpipe.finding.problem import SearchProblem, placed_ops
from fpipe.finding.tasks import Rows, Tasks, TrackStep

MAX_OPS_ASKED = 800
"""solver="auto" asks the solver up to so many ops: above, it finds and proves nothing within a minute."""
SOLVER_THREADS = 2
"""How many threads the solver uses."""


class Answer(NamedTuple):
    """The solver's result: an order, or None if it found none in time, and a lower bound."""

    rows: Rows | None
    bound: float


def is_installed() -> bool:
    """Whether OR-tools can be imported."""
    return find_spec("ortools") is not None


def solve(
    contender: Contender, problem: SearchProblem, seconds: float, report: Callable[[float, float], None]
) -> Answer:
    """Let the solver improve a contender for some seconds; `report` is called with each better value and the bound."""
    from ortools.sat.python import cp_model

    order_model = _OrderModel(cp_model.CpModel(), contender, problem.objective)
    unit = order_model.unit

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report(self.objective_value * unit, self.best_objective_bound * unit)

    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = SOLVER_THREADS
    solver.parameters.random_seed = problem.seed
    status = solver.solve(order_model.model, Listener())
    bound = max(0.0, solver.best_objective_bound) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    return Answer(order_model.rows_at([solver.value(start) for start in order_model.starts]), bound)


class _OrderModel:
    """The model of all orders of a contender's tasks on its ranks, with times in ticks of `unit` seconds.

    `starts` and `ends` are the variables of each op, `value` is what the solver minimizes.
    """

    def __init__(self, model: Any, contender: Contender, objective: str) -> None:
        self.model, self.tasks, self.rows = model, contender.tasks, contender.rows
        self.on_exchange_lane = self.tasks.on_exchange_lane or [False for _ in self.tasks.ops]
        is_exact, self.unit = _ticks(self.tasks)
        # If durations have no common unit, they are rounded down, so that the bound stays a bound.
        self.durations = [
            round(seconds / self.unit) if is_exact else self._whole_ticks(seconds) for seconds in self.tasks.seconds
        ]
        played = self.tasks.play([self.tasks.ops_of_row(row) for row in self.rows])
        self.horizon = self._latest_end(played.makespan, objective)
        self.starts = [self._new_time(f"s{op}") for op in range(len(self.durations))]
        self.ends = [start + duration for start, duration in zip(self.starts, self.durations, strict=True)]
        self._wait_for_data()
        for row in self.rows:
            self._forbid_overlap(row)
        for rank, residuals in enumerate(self.tasks.residuals):
            self._limit_residuals(residuals, contender.limits[rank])
        self.value = self._new_time("value")
        for row in self.rows:
            self._add_rank_value(row, objective)
        model.minimize(self.value)
        for op, end in enumerate(played.ends[:-1]):
            model.add_hint(self.starts[op], round((end - self.tasks.seconds[op]) / self.unit))

    def rows_at(self, start_ticks: list[int]) -> Rows:
        """Return the rows in which the ops start at these times."""
        rows: Rows = []
        for row in self.rows:
            timed_steps = [
                (start_ticks[step[0]], start_ticks[step[-1]] + self.durations[step[-1]], step, track)
                for track in set(row)
                for step in self.tasks.tracks[track]
            ]
            rows.append([track for *_, track in sorted(timed_steps)])
        return rows

    def _whole_ticks(self, seconds: float) -> int:
        return math.floor(seconds / self.unit + 1e-9)

    def _new_time(self, name: str, earliest: int = 0) -> Any:
        return self.model.new_int_var(earliest, self.horizon, name)

    def _latest_end(self, makespan: float, objective: str) -> int:
        """Return a time at which everything has ended in some best order.

        That is the start order's makespan, with a tick an op for rounding; for the span, by how much a start may be put
        off; and all exchanges.
        """
        tasks, unit = self.tasks, self.unit
        latest_end = math.ceil(makespan / unit) + len(tasks.ops)
        if objective == "span":
            latest_end += math.ceil(max(map(len, self.rows)) * max(tasks.seconds) / unit)
        lanes = zip(tasks.seconds, self.on_exchange_lane, strict=True)
        return latest_end + math.ceil(sum(seconds for seconds, is_exchange in lanes if is_exchange) / unit)

    def _wait_for_data(self) -> None:
        self.arrivals = [[(source, self._whole_ticks(delay)) for source, delay in needs] for needs in self.tasks.needs]
        for op, arrivals in enumerate(self.arrivals):
            for source, delay in arrivals:
                self.model.add(self.starts[op] >= (self.ends[source] if source >= 0 else 0) + delay)

    def _forbid_overlap(self, row: Sequence[int]) -> None:
        """Forbid that steps of a rank overlap, or exchanges on their lane.

        The steps of a track keep their order, which removes symmetric solutions.
        """
        steps: list[Any] = []
        exchanges: list[Any] = []
        for track in dict.fromkeys(row):
            last_op_before = None
            for step in self.tasks.tracks[track]:
                is_exchange = len(step) == 1 and self.on_exchange_lane[step[0]]
                if self.durations[step[0]] or not is_exchange:
                    (exchanges if is_exchange else steps).append(self._interval_of(step))
                if last_op_before is not None:
                    self.model.add(self.starts[step[0]] >= self.ends[last_op_before])
                last_op_before = step[-1]
        self.model.add_no_overlap(steps)
        self.model.add_no_overlap(exchanges)

    def _interval_of(self, step: TrackStep) -> Any:
        """Return the interval of a step: of several ops, an R and its reader, it has a variable length."""
        first_op, last_op = step[0], step[-1]
        if len(step) == 1:
            return self.model.new_fixed_size_interval_var(
                self.starts[first_op], self.durations[first_op], f"i{first_op}"
            )
        length = self._new_time(f"l{first_op}")
        interval = self.model.new_interval_var(self.starts[first_op], length, self.ends[last_op], f"i{first_op}")
        for op, next_op in pairwise(step):
            self.model.add(self.starts[next_op] >= self.ends[op])
        return interval

    def _limit_residuals(self, residuals: Sequence[tuple[int, int, float]], limit: float) -> None:
        """Keep the residuals that a rank holds at once below its limit; exchanges do not count."""
        residuals = [
            (maker, dropper, size)
            for maker, dropper, size in residuals
            if not (self.on_exchange_lane[maker] or self.on_exchange_lane[dropper])
        ]
        sizes = [size for *_, size in residuals]
        if sum(sizes) <= limit:
            return
        intervals: list[Any] = []
        for maker, dropper, _ in residuals:
            length = self._new_time(f"h{maker}", earliest=self.durations[maker])
            intervals.append(self.model.new_interval_var(self.starts[maker], length, self.ends[dropper], f"r{maker}"))
        # CP-SAT counts integers, so bytes are rounded in thousandths of the largest residual.
        size_unit = 1.0 if all(map(float.is_integer, sizes)) else max(sizes) / 1000
        sizes_in_units = [math.ceil(size / size_unit - 1e-9) for size in sizes]
        self.model.add_cumulative(intervals, sizes_in_units, math.floor(limit / size_unit + 1e-9))

    def _add_rank_value(self, row: Sequence[int], objective: str) -> None:
        """Let the value be no less than the last end of a rank, or than its span."""
        tracks = [self.tasks.tracks[track] for track in dict.fromkeys(row)]
        tracks = [steps for steps in tracks if not self.on_exchange_lane[steps[0][0]]]
        first_ops = [steps[0][0] for steps in tracks]
        last_end = self._new_time("last")
        self.model.add_max_equality(last_end, [self.ends[steps[-1][-1]] for steps in tracks])
        if objective == "makespan":
            self.model.add(self.value >= last_end)
            return
        first_start = self._new_time("begun")
        self.model.add_min_equality(first_start, [self.starts[op] for op in first_ops])
        self.model.add(self.value >= last_end - first_start)
        # A schedule runs ops as early as it can, so a rank cannot shorten its span by starting late. If every track of
        # the rank needs the first op, that op starts as soon as it can; say so if its start is one known end.
        first_op = first_ops[0]
        if all(op == first_op or self.tasks.follows(op, first_op) for op in first_ops):
            arrivals = self.arrivals[first_op]
            if len(arrivals) == 1 and arrivals[0][0] >= 0:
                ((source, delay),) = arrivals
                self.model.add(self.starts[first_op] == self.ends[source] + delay)
            elif not arrivals:
                self.model.add(self.starts[first_op] == 0)


def _ticks(tasks: Tasks) -> tuple[bool, float]:
    """Return whether all times are multiples of a unit, and the unit: else a hundred-thousandth of the longest."""
    times = [*tasks.seconds, *(delay for needs in tasks.needs for _, delay in needs)]
    longest = max(times, default=0.0) or 1.0
    shares = {Fraction(seconds / longest).limit_denominator(10**4) for seconds in times}
    ticks_in_longest = math.lcm(*(share.denominator for share in shares))
    is_exact = ticks_in_longest <= 10**6 and all(
        abs(seconds / longest * ticks_in_longest - round(seconds / longest * ticks_in_longest))
        < 1e-9 * ticks_in_longest
        for seconds in times
    )
    return (True, longest / ticks_in_longest) if is_exact else (False, longest / 10**5)


def solve_pool(
    search: LocalSearch, seconds: float, report: Callable[[float, float, float], None]
) -> dict[Hashable, float]:
    """Let the solver improve the best order of each placement, most of the seconds in the best one.

    Its orders join the search. `report` is called with the share of the seconds, the best value and the bound. Returns
    for each key of `placed_ops` that was solved the value that no order of these ops goes below.
    """
    problem, start_time, proven = search.problem, time.monotonic(), dict[Hashable, float]()
    best_by_ops: dict[Hashable, Contender] = {}
    for contender in sorted(search.pool, key=lambda contender: contender.value):
        best_by_ops.setdefault(placed_ops(contender.tasks.program), contender)
    for number, (kinds, contender) in enumerate(best_by_ops.items(), 1):
        best = search.best.value[0] if search.best else math.inf
        remaining_seconds = seconds - (time.monotonic() - start_time)
        if remaining_seconds < 0.02 or contender.floor >= best * (1 - 1e-9):
            continue

        def report_solution(value: float, bound: float, best: float = best, floor: float = contender.floor) -> None:
            report(min(1.0, (time.monotonic() - start_time) / seconds), min(best, value), max(floor, bound))

        solver_seconds = remaining_seconds if number == len(best_by_ops) else remaining_seconds * 0.7
        answer = solve(contender, problem, solver_seconds, report_solution)
        # The limits of residuals under a cap in bytes are measured on two orders: a bound under them proves nothing.
        if problem.costs.bytes is None or problem.cap == math.inf:
            proven[kinds] = max(contender.floor, answer.bound)
        if answer.rows is not None:
            floor = proven.get(kinds, contender.floor)
            contenders = contenders_of(contender.tasks, contender.limits, [answer.rows], problem.objective, floor)
            search.pool += contenders
            for improved in contenders:
                search.judge_contender(improved)
    return proven
