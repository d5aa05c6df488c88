"""Search a short step and repeat its steady state: a step of 1024 microbatches has the order of one of 32."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import NamedTuple

from fpipe.finding.local_search import LocalSearch
from fpipe.finding.play import Needs, order_value
from fpipe.finding.pool import Contender
from fpipe.finding.problem import SearchProblem, apply_if_legal, picks_order_by_costs, schedule_of
from fpipe.finding.tasks import Rows, SteadyState, Tasks, extrapolate, steady_states, stretch
from fpipe.model import Source
from fpipe.program import Program, ProgramError, is_exchange
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import chain, identity
from fpipe.transforms.cells import Key
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.reorder import apply_table
from fpipe.transforms.split import split
from fpipe.transforms.split_backward import split_backward
from fpipe.transforms.training import program as base_program

LONG_STEP = 4
"""A step with more microbatches for each rank is searched as a shorter one."""
ORDERS_EXTENDED = 8
"""How many orders of the short step are extended, the most promising first."""
STATES_EXTENDED = 2
"""How many steady states of each order are extended, the fastest first."""
PROBE_EXTENSIONS = 4, 8
"""Microbatches a rank by which an order is extended to predict its time in the long step."""
PROBE_STEPS = 4, 6
"""Microbatches a rank, besides the remainder, of the two steps that predict a named schedule."""


def short_program(program: Program, problem: SearchProblem) -> Program | None:
    """Return a step of the same stages with 2p to 3p microbatches; None if the program is short or not uniform.

    Both numbers of microbatches have the same remainder modulo p, since a schedule may repeat groups of p.
    """
    ranks, count = problem.ranks, program.microbatches
    kinds = {op.kind for op in program.ops}
    if count <= LONG_STEP * ranks or program.slices > 1 or problem.costs.bytes is not None or kinds & {"R", "PAIR"}:
        return None
    if problem.costs.vary_by_microbatch or {"B", "I"} <= kinds or any(map(is_exchange, program.ops)):
        return None
    try:
        return program_with_microbatches(program, 2 * ranks + count % ranks)
    except ValueError:
        return None


def program_with_microbatches(program: Program, count: int) -> Program:
    """Return a step of the same stages with this number of microbatches."""
    sources_by_stage: dict[int, list[Source | tuple[int, int]]] = defaultdict(list)
    for op in program.ops:
        if op.kind == "F" and op.microbatch == 0 and op.stage is not None:
            for value in op.reads:
                if value.name == "y" and value.stage is not None:
                    sources_by_stage[op.stage].append((value.stage, value.port) if value.port else value.stage)
                elif value.name in ("x", "inputs"):
                    sources_by_stage[op.stage].append("batch")
    inputs = [
        tuple(sources_by_stage[stage]) if len(sources_by_stage[stage]) != 1 else sources_by_stage[stage][0]
        for stage in range(program.stages)
    ]
    split_halves = split_backward() if any(op.kind == "I" for op in program.ops) else identity()
    steps = chain(split(count), split_halves, merge())
    return steps(base_program(program.stages, inputs=inputs))  # pyright: ignore[reportArgumentType]


def extend_to_long_step(short_search: LocalSearch, long_search: LocalSearch) -> None:
    """Extend the most promising orders of the short step to the long one, and so the named schedules.

    Building a long program is the slow part. So the time of each in the long step is predicted first, from orders that
    are a few microbatches longer, which costs the same for every length of the step.
    """
    problem = long_search.problem
    extra_microbatches = long_search.bases[0].microbatches - short_search.bases[0].microbatches
    promising = sorted(
        short_search.pool,
        key=lambda contender: contender.value[0] + extra_microbatches * pace(contender.tasks, contender.rows),
    )[:ORDERS_EXTENDED]
    orders = [order for contender in promising for order in long_orders(contender, problem, extra_microbatches)]
    for order in sorted(orders, key=lambda order: order.value):
        if long_search.best is not None and long_search.best.value[0] <= order.value * (1 + 1e-9):
            break
        program = apply_rows(long_search.bases[0], order.contender.tasks, order.rows(extra_microbatches))
        if program is not None:
            long_search.consider(program, simulate(program, problem.costs))
    extend_named_schedules(short_search, long_search)


def extend_named_schedules(short_search: LocalSearch, long_search: LocalSearch) -> None:
    """Build each named schedule that may be the best of the long step, by a prediction from two shorter steps.

    In both a schedule is in its steady state, with the same remainder of microbatches as in the long step. A schedule
    that may take another order there is predicted by a lower bound.
    """
    problem, base, count = long_search.problem, short_search.bases[0], long_search.bases[0].microbatches
    # 1) A step no longer than the two shorter ones together: build everything.
    if count <= 2 * LONG_STEP * problem.ranks:
        long_search.add_named_schedules(long_search.bases[0], improve=False)
        return
    # 2) Measure every named schedule in the two shorter steps.
    sizes = [count % (2 * problem.ranks) + multiple * problem.ranks for multiple in PROBE_STEPS]
    probes = [LocalSearch([program_with_microbatches(base, size)], problem, short_search.report) for size in sizes]
    for probe in probes:
        probe.add_named_schedules(probe.bases[0], improve=False)
    first_rows, second_rows = (probe.named for probe in probes)
    # How far the long step is beyond the second one, in distances between the two.
    steps = (count - sizes[1]) / (sizes[1] - sizes[0])

    def predict(name: str, attribute: str) -> float:
        """Extrapolate a field of `NamedRow`: each microbatch adds as much as between the two steps."""
        return extrapolate(getattr(first_rows[name], attribute), getattr(second_rows[name], attribute), steps)

    # 3) Schedules with one order: build them by predicted time, until none can beat the best.
    names_in_both = first_rows.keys() & second_rows.keys()
    predicted = {
        name: predict(name, problem.objective) for name in names_in_both if not may_reorder(name, problem.ranks)
    }
    for name in sorted(predicted, key=lambda name: (predicted[name], name)):
        best = long_search.best
        if long_search.named and best is not None and best.value[0] <= predicted[name] * (1 + 1e-9):
            break
        if predict(name, "peak") <= problem.cap * (1 + 1e-9) or second_rows[name].fits:
            long_search.add_starts([(name, probes[1].starts[name])], improve=False)
    # 4) Schedules that may take another order: build them by lower bound, until a named schedule is as good.
    fitting_names = {schedule_of(name) for probe in probes for name, row in probe.named.items() if row.fits}
    open_names = [name for name in names_in_both - predicted.keys() if schedule_of(name) in fitting_names]
    lower_bounds = {name: lower_bound_of_named(name, probes, steps) for name in open_names}
    for name in sorted(lower_bounds, key=lambda name: (lower_bounds[name], name)):
        named_values = [getattr(row, problem.objective) for row in long_search.named.values() if row.fits]
        if min(named_values, default=math.inf) <= lower_bounds[name] * (1 + 1e-9):
            break
        long_search.add_starts([(name, probes[1].starts[name])], improve=False)


def may_reorder(name: str, ranks: int) -> bool:
    """Whether a schedule may take another order for another number of microbatches with the same remainder."""
    group = re.search(r"group=(\d+)", name)
    return picks_order_by_costs(name) or (group is not None and 2 * ranks % int(group[1]) > 0)


def lower_bound_of_named(name: str, probes: Sequence[LocalSearch], steps: float) -> float:
    """Return a lower bound of a schedule in the long step: the bound of its ops, plus the idle time that it must keep.

    Several orders that all grow by the same seconds with each microbatch: the shortest idles no less in a longer step.
    That needs whole rounds; a remainder may fit in differently with every microbatch, so its idle time is not added.
    """
    problem, count = probes[0].problem, probes[0].bases[0].microbatches
    first_floor, second_floor = (floor_of_named(name, probe) for probe in probes)
    predicted = extrapolate(first_floor, second_floor, steps)
    # Such schedules choose by the makespan, so their idle time says nothing about the span.
    if count % problem.ranks or problem.objective == "span" or not picks_order_by_costs(name):
        return predicted
    return predicted + min(probes[0].named[name].makespan - first_floor, probes[1].named[name].makespan - second_floor)


def floor_of_named(name: str, probe: LocalSearch) -> float:
    """Return seconds that no order of a named schedule's ops goes below, without a cap."""
    base, problem = probe.bases[0], probe.problem
    program = apply_if_legal(probe.starts[name], base if problem.split_backward is False else split_backward()(base))
    return 0.0 if program is None else probe.floor_of(program, residuals_stay=False)


class LongOrder(NamedTuple):
    """The n-th fastest steady state of an order, with the predicted value of the long step that repeats it."""

    value: float
    contender: Contender
    number: int

    def rows(self, extra_microbatches: int) -> Rows:
        """Return the order extended by this many microbatches."""
        orders = longer_orders(self.contender.tasks, self.contender.rows, extra_microbatches)
        return next(islice(orders, self.number, None))


def long_orders(contender: Contender, problem: SearchProblem, extra_microbatches: int) -> list[LongOrder]:
    """Return the fastest steady states of an order, with the predicted value of the long step."""
    # Play each at two lengths and extrapolate. Both leave the remainder of the long step.
    ranks = problem.ranks
    sizes = [min(extra_microbatches, extra_microbatches % ranks + times * ranks) for times in PROBE_EXTENSIONS]
    probes = [(lengthen_tasks(contender.tasks, size), size) for size in sizes]
    values: list[list[float]] = [[], []]
    for state_values, (tasks, size) in zip(values, probes, strict=True):
        if tasks is None:
            return []
        for rows in islice(longer_orders(contender.tasks, contender.rows, size), STATES_EXTENDED):
            state_values.append(order_value(tasks.play([tasks.ops_of_row(row) for row in rows]), problem.objective)[0])
    steps = (extra_microbatches - sizes[1]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    pairs = enumerate(zip(*values, strict=True))
    return [LongOrder(extrapolate(near, far, steps), contender, number) for number, (near, far) in pairs]


def apply_rows(base: Program, tasks: Tasks, rows: Rows) -> Program | None:
    """Return the long program in the order of these tracks, or None if it deadlocks or tracks are not uniform."""
    recomputed_stages = {op.stage for op in tasks.ops if op.kind == "R"}
    base = checkpoint(lambda stage, microbatch: stage in recomputed_stages)(base) if recomputed_stages else base
    last_ops = [tasks.ops[steps[0][-1]] for steps in tasks.tracks]
    if any(op.parts for op in last_ops) or any(len(steps) != tasks.program.microbatches for steps in tasks.tracks):
        return None
    cells: list[list[Key]] = []
    for row in rows:
        counters = [count() for _ in last_ops]
        cells.append([(last_ops[track].kind, last_ops[track].stage, next(counters[track]), None) for track in row])
    try:
        return apply_table(base, cells, move=True)
    except ProgramError:
        return None


def longer_orders(tasks: Tasks, rows: Rows, extra_microbatches: int) -> Iterator[Rows]:
    """Yield an order extended by this many microbatches, once for each steady state, the fastest first."""
    return (stretch(rows, steady, extra_microbatches) for steady in steady_states_of(tasks, rows))


def pace(tasks: Tasks, rows: Rows) -> float:
    """Return the seconds that a further microbatch adds: by the fastest steady state, else by the busiest rank."""
    states = steady_states_of(tasks, rows)
    return states[0].pace if states else max(tasks.work_by_rank) / max(1, tasks.program.microbatches)


def steady_states_of(tasks: Tasks, rows: Rows) -> list[SteadyState]:
    """Return the steady states of an order of tasks, the fastest first."""
    ends = tasks.play([tasks.ops_of_row(row) for row in rows]).ends
    first_ops = [[step[0] for step in tasks.steps_of_row(row)] for row in rows]
    return steady_states(rows, [[ends[op] - tasks.seconds[op] for op in rank_ops] for rank_ops in first_ops])


def lengthen_tasks(tasks: Tasks, extra_microbatches: int) -> Tasks | None:
    """Return the tasks with further microbatches like the first; None if the microbatches are not all alike."""
    # 1) Every track has one step of the same length for each microbatch, and no pairs.
    count = tasks.program.microbatches
    if any(len(steps) != count or len({*map(len, steps)}) > 1 for steps in tasks.tracks):
        return None
    if any(op.parts for op in tasks.ops):
        return None
    # 2) Number the ops of each microbatch by `offset`, the same for all, and compare everything about them.
    ops = sorted((op, track, offset) for track, steps in enumerate(tasks.tracks) for offset, op in enumerate(steps[0]))
    ops_by_microbatch = [[tasks.tracks[track][m][offset] for _, track, offset in ops] for m in range(count)]
    first_ops, op_count, microbatches = ops_by_microbatch[0], len(ops), count + extra_microbatches
    offset_by_op = {op: offset for row in ops_by_microbatch for offset, op in enumerate(row)} | {-1: -1}

    def facts(index: int) -> tuple[object, ...]:
        op, needs = tasks.ops[index], [(offset_by_op[source], delay) for source, delay in tasks.needs[index]]
        return op.kind, op.stage, op.rank, tasks.seconds[index], needs

    facts_by_microbatch = [list(map(facts, row)) for row in ops_by_microbatch]
    if any(row != facts_by_microbatch[0] for row in facts_by_microbatch[1:]):
        return None
    # 3) Op `offset` of microbatch m becomes number m * op_count + offset.
    steps = [[offset_by_op[op] for op in steps[0]] for steps in tasks.tracks]

    def needs_of(op: int, microbatch: int) -> Needs:
        start = microbatch * op_count
        return tuple((start + offset_by_op[source] if source >= 0 else -1, lag) for source, lag in tasks.needs[op])

    return replace(
        tasks,
        ops=[tasks.ops[op]._replace(microbatch=microbatch) for microbatch in range(microbatches) for op in first_ops],
        seconds=[tasks.seconds[op] for op in first_ops] * microbatches,
        needs=[needs_of(op, microbatch) for microbatch in range(microbatches) for op in first_ops],
        takes=[tasks.takes[op] for op in first_ops] * microbatches,
        drops=[tasks.drops[op] for op in first_ops] * microbatches,
        tracks=[[tuple(m * op_count + offset for offset in track) for m in range(microbatches)] for track in steps],
        rows=[[] for _ in tasks.rows],
    )
