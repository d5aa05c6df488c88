"""Ask OR-tools' CP-SAT for the best order of some tasks, and for a proof of how good any order can be.

The model: each step is an interval. The steps of a rank do not overlap, nor do its exchanges. A residual is an interval
from the start of the op that makes it to the end of the op that drops it; those open at once on a rank fit its limit.
Microbatches are alike, so the ops of a track run in their order. Residuals of exchanges are left to the caller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

from fpipe.finding.local_search import LocalSearch
from fpipe.finding.op_facts import placed_ops
from fpipe.finding.pool import Contender, contenders_of
from fpipe.finding.problem import SearchProblem
from fpipe.finding.tasks import Rows, Tasks

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

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            report(self.objective_value * unit, self.best_objective_bound * unit)

    tasks, caps, objective, start_rows = contender.tasks, contender.limits, problem.objective, contender.rows

    # 1) Time in integers. If durations have no common unit, they are rounded down, so that the bound stays a bound.
    #    `horizon` is the latest end of anything: the start order's makespan, with a tick an op for rounding; for the
    #    span, by how much a start may be put off; and all exchanges.
    is_exact, unit = _ticks(tasks)
    times = tasks.play([tasks.ops_of_row(row) for row in start_rows])
    horizon = math.ceil(times.makespan / unit) + len(tasks.ops)
    if objective == "span":
        horizon += math.ceil(max(map(len, start_rows)) * max(tasks.seconds) / unit)
    on_exchange_lane = tasks.on_exchange_lane or [False for _ in tasks.ops]
    horizon += math.ceil(
        sum(seconds for seconds, is_exchange in zip(tasks.seconds, on_exchange_lane, strict=True) if is_exchange) / unit
    )
    model: Any = cp_model.CpModel()
    durations = [
        math.floor(seconds / unit + 1e-9) if not is_exact else round(seconds / unit) for seconds in tasks.seconds
    ]
    # 2) Data: an op starts when what it reads has arrived.
    starts = [model.new_int_var(0, horizon, f"s{index}") for index in range(len(durations))]
    ends = [begin + length for begin, length in zip(starts, durations, strict=True)]
    arrivals: list[list[tuple[int, int]]] = []
    for index, needs in enumerate(tasks.needs):
        arrivals.append([(source, math.floor(delay / unit + 1e-9)) for source, delay in needs])
        for source, delay in arrivals[-1]:
            model.add(starts[index] >= (ends[source] if source >= 0 else 0) + delay)
    # 3) Ranks: steps do not overlap, nor do exchanges on their lane. A step of several ops, an R and its reader, is one
    #    interval of variable length. The steps of a track keep their order, which removes symmetric solutions.
    for row in start_rows:
        steps: list[Any] = []
        exchanges: list[Any] = []
        for track in dict.fromkeys(row):
            for microbatch, step in enumerate(tasks.tracks[track]):
                first_op, last_op = step[0], step[-1]
                if len(step) == 1:
                    if durations[first_op] or not on_exchange_lane[first_op]:
                        interval = model.new_fixed_size_interval_var(
                            starts[first_op], durations[first_op], f"i{first_op}"
                        )
                        (exchanges if on_exchange_lane[first_op] else steps).append(interval)
                else:
                    length = model.new_int_var(0, horizon, f"l{first_op}")
                    steps.append(model.new_interval_var(starts[first_op], length, ends[last_op], f"i{first_op}"))
                    for op, next_op in pairwise(step):
                        model.add(starts[next_op] >= ends[op])
                if microbatch:
                    model.add(starts[first_op] >= ends[tasks.tracks[track][microbatch - 1][-1]])
        model.add_no_overlap(steps)
        model.add_no_overlap(exchanges)
    # 4) Memory: CP-SAT counts integers, so bytes are rounded in thousandths of the largest residual.
    for rank, rank_residuals in enumerate(tasks.residuals):
        residuals = [
            (maker, dropper, size)
            for maker, dropper, size in rank_residuals
            if not (on_exchange_lane[maker] or on_exchange_lane[dropper])
        ]
        sizes = [size for *_, size in residuals]
        if sum(sizes) > caps[rank]:
            residual_intervals: list[Any] = []
            for maker, dropper, _ in residuals:
                length = model.new_int_var(durations[maker], horizon, f"h{maker}")
                residual_intervals.append(model.new_interval_var(starts[maker], length, ends[dropper], f"r{maker}"))
            residual_unit = 1.0 if all(map(float.is_integer, sizes)) else max(sizes) / 1000
            sizes_in_units = [math.ceil(size / residual_unit - 1e-9) for size in sizes]
            model.add_cumulative(residual_intervals, sizes_in_units, math.floor(caps[rank] / residual_unit + 1e-9))
    # 5) The objective: the last end of any rank, or the longest span.
    value = model.new_int_var(0, horizon, "value")
    for row in start_rows:
        last_end = model.new_int_var(0, horizon, "last")
        work = [track for track in dict.fromkeys(row) if not on_exchange_lane[tasks.tracks[track][0][0]]]
        final_ops = [tasks.tracks[track][-1][-1] for track in work]
        model.add_max_equality(last_end, [ends[index] for index in final_ops])
        if objective == "makespan":
            model.add(value >= last_end)
            continue
        first_start = model.new_int_var(0, horizon, "begun")
        model.add_min_equality(first_start, [starts[tasks.tracks[track][0][0]] for track in work])
        model.add(value >= last_end - first_start)
        # A schedule runs ops as early as it can, so a rank cannot shorten its span by starting late. If every track of
        # the rank needs the first op, that op starts as soon as it can; say so if its start is one known end.
        first_op = tasks.tracks[work[0]][0][0]
        if all(
            tasks.tracks[track][0][0] == first_op or tasks.follows(tasks.tracks[track][0][0], first_op)
            for track in work
        ):
            needs = arrivals[first_op]
            if len(needs) == 1 and needs[0][0] >= 0:
                model.add(starts[first_op] == ends[needs[0][0]] + needs[0][1])
            elif not needs:
                model.add(starts[first_op] == 0)
    model.minimize(value)

    # 6) Solve from the contender's order as a hint, and read the rows off the start times.
    for index, end in enumerate(times.ends[:-1]):
        model.add_hint(starts[index], round((end - tasks.seconds[index]) / unit))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = SOLVER_THREADS
    solver.parameters.random_seed = problem.seed
    status = solver.solve(model, Listener())
    bound = max(0.0, solver.best_objective_bound) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound)
    start_ticks = [solver.value(start) for start in starts]
    rows: Rows = []
    for row in start_rows:
        timed_steps = [
            (start_ticks[step[0]], start_ticks[step[-1]] + durations[step[-1]], step, track)
            for track in set(row)
            for step in tasks.tracks[track]
        ]
        rows.append([track for *_, track in sorted(timed_steps)])
    return Answer(rows, bound)


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
