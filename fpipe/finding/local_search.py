"""Local search: gather first orders, improve them, and keep the best that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from fpipe.finding.list_orders import (
    PACED_RULES,
    ROOM_FOR_ALL,
    ROOM_FOR_OLDEST,
    ROOM_FROM_ENTRY,
    ListOrders,
    limits_of,
    microbatches_that_fit,
    rules,
    tighten_limits,
)
from fpipe.finding.play import OrderValue
from fpipe.finding.pool import Contender, contenders_of, improve_pool
from fpipe.finding.problem import (
    WITHOUT_COSTS,
    SearchProblem,
    apply_if_legal,
    full_backward_is_cheaper,
    has_kind,
    named_starts,
    placed_ops,
    recompute_cells,
    recomputed_cells,
    relaxed_costs,
)
from fpipe.finding.search_result import NamedRow
from fpipe.finding.tasks import tasks_of
from fpipe.program import Op, Program
from fpipe.timing.bounds import bounds
from fpipe.timing.simulate import simulate
from fpipe.timing.timeline import Timeline
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

RULES_TRIED = 24
"""How many rules of list scheduling are tried in each placement."""
ROOM_AND_LEAD = (
    (ROOM_FOR_ALL, math.inf),
    (ROOM_FOR_OLDEST, math.inf),
    (ROOM_FOR_OLDEST, 2),
    (ROOM_FROM_ENTRY, 1),
    (ROOM_FROM_ENTRY, 2),
)
"""The room that list schedules leave, and how many microbatches may enter ahead of the pace.

A lead of 0 is left out: with it a search of 0.1 seconds on a V under a cap of 2 ended at 335, without it at 330."""
PLACEMENTS_TRIED = 12
"""How many random placements near the best one are tried."""
RULES_PER_CHOICE = 3
"""How many rules of list scheduling judge a choice of what is recomputed."""
COST_OF_LISTING = 50
"""The cost of list scheduling an op, in ops played."""
KEPT_CONTENDERS = 4
"""How many improved orders are simulated and kept, the best first."""


@dataclass(frozen=True)
class Candidate:
    """A program that fits the cap, with its timeline and value."""

    program: Program
    timeline: Timeline
    value: OrderValue


class LocalSearch:
    """The state of a search: the best candidate, the pool of orders, and the named schedules.

    Args:
        bases: the programs to place and order: one, or one for each choice of what is recomputed.
        problem: what the search is asked for.
        report: called with the ops played so far, the best value and the bound of the best.
    """

    def __init__(
        self, bases: Sequence[Program], problem: SearchProblem, report: Callable[[float, float, float], None]
    ) -> None:
        self.bases, self.problem, self.report = bases, problem, report
        self.best: Candidate | None = None
        self.named: dict[str, NamedRow] = {}
        self.smallest_peak = math.inf
        self.pool: list[Contender] = []
        self.starts: dict[str, Transform] = {}
        self.stopped = False
        self.bounds: dict[Hashable, float] = {}
        needs_relaxing = problem.split_backward is None and any(
            full_backward_is_cheaper(problem.costs, base) for base in bases
        )
        self.relaxed_costs = relaxed_costs(problem.costs, bases[0]) if needs_relaxing else problem.costs

    def gather_orders(self) -> None:
        """Fill the pool with named schedules and with list schedules in every placement."""
        for base in self.bases:
            self.add_named_schedules(base)
            for placement in self.problem.placements:
                self._add_list_orders(base, placement, RULES_TRIED)

    def improve_orders(self, effort: float) -> None:
        """Improve the pool, other placements and other choices of recompute, until `effort` ops are played."""
        may_move = self.problem.any_placement and self.bases[0].stages > self.problem.ranks
        shares = [0.2 * may_move, 0.4 * self.problem.choose_recompute]
        self._improve_contenders(self.pool, effort * (1 - sum(shares)))
        for share, continue_search in zip(shares, (self._try_placements, self._try_recompute_choices), strict=True):
            if share and not self.is_optimal() and not self.stopped:
                continue_search(effort * share)

    def is_optimal(self) -> bool:
        """Whether the best candidate reaches the lower bound of every placement."""
        floors = [contender.floor for contender in self.pool]
        if self.best is not None and not floors:
            floors.append(self.floor_of(self.best.program))
        if self.problem.any_placement and self.bases[0].stages > self.problem.ranks:
            floors.append(self._busiest_rank_seconds())
        return self.best is not None and self.best.value[0] <= min(floors, default=math.inf) * (1 + 1e-9)

    def _busiest_rank_seconds(self) -> float:
        """Return a lower bound for every placement: all work, spread evenly over the ranks by their speed."""
        cluster, ranks = self.problem.costs.cluster, self.problem.ranks
        speed = ranks if cluster is None else sum(cluster.speed[:ranks])
        seconds = replace(self.problem.costs, cluster=None).seconds

        def shortest(op: Op) -> float:
            if op.kind != "B" or self.problem.split_backward is False:
                return seconds(op)
            return min(seconds(op), seconds(op._replace(kind="I")) + seconds(op._replace(kind="W")))

        return min(sum(map(shortest, base.ops)) for base in self.bases) / speed

    def add_named_schedules(self, base: Program, *, improve: bool = True) -> None:
        """Simulate the named schedules, and add them to the pool if `improve`."""
        problem, cap = self.problem, self.problem.cap
        # Schedules count a cap in microbatches. For a cap in bytes they get the microbatches that it has room for.
        if problem.costs.bytes is not None:
            counts = (microbatches_that_fit(contender.tasks, contender.limits) for contender in self.pool)
            cap = max(counts, default=0.0)
        microbatches = problem.microbatches or base.microbatches
        starts = named_starts(
            base, problem.ranks, problem.costs, cap, step_microbatches=microbatches, excluded=problem.excluded
        )
        self.add_starts([*problem.starts, *starts], base, improve=improve)

    def add_starts(
        self, starts: Iterable[tuple[str, Transform]], base: Program | None = None, *, improve: bool = True
    ) -> None:
        """Simulate schedules, keep the best that fits, and add those to the pool that the search can improve."""
        problem, base = self.problem, base or self.bases[0]
        recompute_count = sum(op.kind == "R" for op in base.ops)
        for name, transform in starts:
            for variant in self._backward_variants(base):
                program = apply_if_legal(transform, variant)
                if program is None or not self._is_allowed(program, recompute_count):
                    continue
                self.starts[name] = transform
                fits = self.record_named(name, program)
                tasks = tasks_of(program, problem.costs) if improve and fits else None
                if tasks is not None:
                    limits = limits_of(tasks, problem.cap, problem.costs)
                    orders = [tasks.rows]
                    if has_kind(program, "W") and (rows := ListOrders(tasks, limits).with_weights_in_gaps(tasks.rows)):
                        orders.append(rows)
                    self.pool += contenders_of(tasks, limits, orders, problem.objective, self.floor_of(program))
                # The schedule splits backwards itself: the split variant would give the same program again.
                if not has_kind(program, "B"):
                    break

    def record_named(self, name: str, program: Program) -> bool:
        """Record the times of a named schedule, keep it if it is the best so far, and return whether it fits."""
        timeline = simulate(program, self.problem.costs)
        fits = self.consider(program, timeline)
        row = NamedRow(name, timeline.makespan, timeline.span, max(timeline.peak), fits)
        known_row, objective = self.named.get(name), self.problem.objective
        if known_row is None or named_row_key(row, objective) < named_row_key(known_row, objective):
            self.named[name] = row
        return fits

    def named_rows(self) -> list[NamedRow]:
        """Return the rows of the named schedules, the best first.

        A schedule tried with and without costs has two rows, unless both are equal.
        """
        rows = sorted(self.named.values(), key=lambda row: named_row_key(row, self.problem.objective))
        renamed_rows = [replace(row, name=row.name.replace(WITHOUT_COSTS, "")) for row in rows]
        pairs = zip(rows, renamed_rows, strict=True)
        return [row for row, renamed in pairs if renamed == row or renamed != self.named.get(renamed.name)]

    def _backward_variants(self, base: Program) -> list[Program]:
        """Return the program with full and with split backwards, as far as the problem allows."""
        if self.problem.split_backward is False or not has_kind(base, "B"):
            return [base]
        split = split_backward()(base)
        return [split] if self.problem.split_backward else [base, split]

    def _is_allowed(self, program: Program, recomputed: int) -> bool:
        problem, split = self.problem, self.problem.split_backward
        if program.ranks != problem.ranks or sum(op.kind == "R" for op in program.ops) != recomputed:
            return False
        if (split and has_kind(program, "B")) or (split is False and has_kind(program, "I")):
            return False
        return problem.any_placement or program.placement in problem.placements

    def _add_list_orders(self, base: Program, placement: Sequence[int], rule_count: int) -> list[Contender]:
        """Add list schedules of a placement to the pool and return them.

        Full backwards are tried only if they are cheaper than their halves; fusing restores them otherwise.
        """
        problem, contenders = self.problem, list[Contender]()
        variants = self._backward_variants(base)
        for variant in variants if full_backward_is_cheaper(problem.costs, base) else variants[-1:]:
            program = place(placement)(variant)
            self.smallest_peak = min(self.smallest_peak, max(simulate(program, problem.costs).peak))
            tasks = tasks_of(program, problem.costs)
            if tasks is None:
                continue
            limits = limits_of(tasks, problem.cap, problem.costs)
            lists = ListOrders(tasks, limits)
            # Choices of what is recomputed are compared by few orders of the same kind.
            rooms_and_leads = ROOM_AND_LEAD[:1] if problem.choose_recompute else ROOM_AND_LEAD
            orders = [
                lists.order(rule, leaves_room, ahead)
                for leaves_room, ahead in rooms_and_leads
                for rule in (islice(rules(problem.seed), rule_count) if ahead == math.inf else PACED_RULES)
            ]
            rows = [tasks.rows, *(order for order in orders if order is not None)]
            contenders += contenders_of(tasks, limits, rows, problem.objective, self.floor_of(program))
        self.pool += contenders
        return contenders

    def _improve_contenders(self, pool: Sequence[Contender], effort: float) -> None:
        if not pool:
            return
        problem = self.problem

        def report_progress(played: float, best: float) -> None:
            self.report(played, best, min(contender.floor for contender in pool))

        improved, self.stopped = improve_pool(pool, problem.objective, effort, problem.seed, report_progress)
        # Without bytes and busy links the played value is the simulated one, so the first few are the best. Otherwise
        # the simulation only adds to the value: an order that is played no better than the best is never simulated.
        is_exact = problem.costs.bytes is None and not problem.costs.occupies_ranks
        for contender in improved[: KEPT_CONTENDERS if is_exact else len(improved)]:
            if self.best is None or contender.value < self.best.value:
                self.judge_contender(contender)
        self.pool = [*improved[:KEPT_CONTENDERS], *self.pool]

    def judge_contender(self, contender: Contender) -> None:
        """Simulate an order and keep it if it is the best; redo it under lower limits if it exceeds a cap in bytes."""
        problem = self.problem
        for _ in range(4):
            program = contender.tasks.apply(contender.rows)
            timeline = simulate(program, problem.costs)
            if self.consider(program, timeline) or problem.costs.bytes is None:
                return
            limits = tighten_limits(contender.tasks, contender.rows, contender.limits, timeline.peak, problem.cap)
            lists = ListOrders(contender.tasks, limits)
            orders = (lists.order(rule) for rule in islice(rules(problem.seed), RULES_TRIED))
            rows = [contender.tasks.rows, *(order for order in orders if order is not None)]
            pool = contenders_of(contender.tasks, limits, rows, problem.objective, contender.floor)
            if not pool:
                return
            contender = improve_pool(pool, problem.objective, 100_000, problem.seed, lambda played, best: None)[0][0]

    def _try_placements(self, effort: float) -> None:
        """Try placements near the best one: swap two stages, or move one to another rank."""
        problem, random = self.problem, Random(self.problem.seed)
        for _ in range(PLACEMENTS_TRIED):
            best_placement = self.best.program.placement if self.best else ()
            stage_ranks = [rank for rank in best_placement if isinstance(rank, int)] or list(problem.placements[0])
            stage, other_stage = random.sample(range(len(stage_ranks)), 2)
            if random.random() < 0.6:
                stage_ranks[stage], stage_ranks[other_stage] = stage_ranks[other_stage], stage_ranks[stage]
            else:
                stage_ranks[stage] = random.randrange(problem.ranks)
            if len({*stage_ranks}) < problem.ranks or self.stopped:
                continue
            pool = self._add_list_orders(self.bases[0], stage_ranks, 8)
            if self.best and pool and min(contender.floor for contender in pool) < self.best.value[0]:
                # The share of a placement is too small to improve more than one order.
                best = min(pool, key=lambda contender: contender.value)
                self._improve_contenders([best], effort / PLACEMENTS_TRIED)

    def _try_recompute_choices(self, effort: float) -> None:
        """Climb over choices of recomputed stages and microbatches, and improve the orders of all.

        A change flips one or two stages, in all microbatches or in every other one.
        """
        problem, base, random = self.problem, self.bases[0], Random(self.problem.seed)
        base_cells, contenders = recomputed_cells(base), list[Contender]()
        program = self.best.program if self.best else self.bases[-1]
        best_placement = [rank for rank in program.placement if isinstance(rank, int)]
        placement = best_placement if len(best_placement) == base.stages else problem.placements[0]
        chosen, value, spent_effort = recomputed_cells(program), (math.inf, math.inf), 0.0
        proposed = chosen
        while spent_effort < effort / 2:
            pool = self._add_list_orders(recompute_cells(proposed - base_cells)(base), placement, RULES_PER_CHOICE)
            spent_effort += RULES_PER_CHOICE * COST_OF_LISTING * (len(pool[0].tasks.ops) if pool else len(base.ops))
            contenders += pool
            reached_value = min((contender.value for contender in pool), default=(math.inf, math.inf))
            if reached_value <= value:
                chosen, value = proposed, reached_value
            step = random.choice((1, 1, 2))
            stages = random.sample(range(base.stages), random.choice((1, 2)) if base.stages > 1 else 1)
            microbatches = range(random.randrange(step), base.microbatches, step)
            proposed = chosen ^ {(stage, microbatch) for stage in stages for microbatch in microbatches}
        self._improve_contenders(contenders, effort / 2)

    def floor_of(self, program: Program, *, residuals_stay: bool = True) -> float:
        """Return seconds that no order of these ops on these ranks goes below, under the cap if residuals stay."""
        program = self.with_split_backward(program)
        residuals_stay = residuals_stay and not has_kind(program, "OFFLOAD")
        key = placed_ops(program), residuals_stay
        if key not in self.bounds:
            cap = self.problem.cap if residuals_stay and self.problem.costs.bytes is None else math.inf
            try:
                op_bounds = bounds(program, self.relaxed_costs, memory_cap=cap)
            except ValueError:
                # The cap is below what one op holds.
                return 0.0
            self.bounds[key] = getattr(op_bounds, self.problem.objective)
        return self.bounds[key]

    def with_split_backward(self, program: Program) -> Program:
        """Return the program with split backwards if the search may split: its bound holds for full backwards too."""
        return split_backward()(program) if self.problem.split_backward is None else program

    def consider(self, program: Program, timeline: Timeline) -> bool:
        """Keep a program if it is the best that fits, and return whether it fits."""
        peak = max(timeline.peak)
        self.smallest_peak = min(self.smallest_peak, peak)
        if peak > self.problem.cap * (1 + 1e-9):
            return False
        value = self.problem.value(timeline)
        if self.best is None or value < self.best.value:
            self.best = Candidate(program, timeline, value)
        return True


def named_row_key(row: NamedRow, objective: str) -> tuple[bool, float, float]:
    """Return the sort key of named schedules: fitting ones first, then the shortest, then the smallest peak."""
    return not row.fits, getattr(row, objective), row.peak
