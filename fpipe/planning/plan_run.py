"""Plan a run: time every schedule, number of microbatches and checkpoint policy, and sort them, the best first.

    Candidates --Work.scheduled_program--> Program --simulate--> seconds, memory of each rank --> PlanRow --> RunPlan
                                          and one search for each number of microbatches, if asked

Schedules that do not serve the sizes are listed with their reason, and Ctrl-C returns what has been tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fpipe.finding.search import search as find
from fpipe.model import Model, require_model
from fpipe.planning.candidates import Candidates, Machine, check_shard_policies
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.planning.work import CostsOfParts, Work, home_bytes, work_of_costs, work_of_model
from fpipe.program import Program, ProgramError
from fpipe.timing.amounts import format_amount
from fpipe.timing.costs import Costs, compute_ranks
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import chain
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

Progress = Callable[[int, int, str], None]
REPLICATED = ("chimera", "dualpipe")


def plan_run(
    workload: Model | CostsOfParts | Mapping[float, CostsOfParts],
    machine: Machine,
    candidates: Candidates,
    *,
    example: tuple[Any, ...] | None = None,
    rows: int | None = None,
    stages: int | None = None,
    profiled: Collection[int] | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> RunPlan:
    """Try every schedule, number of microbatches and checkpoint policy, for the time and memory of a step.

    Args:
        workload: a `Model`, which is profiled here, or costs of one microbatch: of a whole rank, as for
            `fpipe.compare`, or with `stages` of one stage's op. `{rows: costs}` says them for microbatches of several
            sizes.
        machine: the ranks, their memory and links, and how many replicas there are.
        candidates: numbers of microbatches, schedules and policies that are tried.
        example: of a model, `(params, batch)` or `(params, batch, state)`, as its step takes them. Its programs give
            loss and gradients, and no outputs.
        rows: of the batch, where costs are given; by default each microbatch has one row, and so a batch with more of
            them more rows.
        stages: how many there are, where costs are of one stage's op; a model has its own.
        profiled: the numbers of microbatches at which a model is measured, by default all; costs of others are
            interpolated between the nearest two.
        repeats: how often each op is timed.
        progress: called as `progress(done, total, subject)`.

    Returns:
        A `RunPlan`; after Ctrl-C with the rows so far, if one of them fits.

    Raises:
        ValueError: a size, word or cost that is none; nothing fits the memory, with the way that is closest to it.

    >>> import fpipe
    >>> costs = fpipe.Costs.per_rank(F=10, B=12, W=8, c=0.5)
    >>> tried = fpipe.Candidates([4, 8], schedules=["one_f_one_b", "zb_h1"], checkpoint=["never"])
    >>> print(plan_run(costs, fpipe.Machine(ranks=2), tried))
    schedule     m  rows  recompute  seconds  bubble  rows held    rows/s  costs
    zb_h1        8     1  never          256    6.2%          2   0.03125  given  *
    zb_h1        4     1  never          136   11.8%          2  0.029412  given
    one_f_one_b  8     1  never          274   12.4%          2  0.029197  given
    one_f_one_b  4     1  never          152   21.1%          2  0.026316  given
    """
    check_shard_policies(machine, candidates)
    # With example=, or if it looks like a net, `workload` must be a Model: say so, rather than that it is no costs.
    report = progress or _report_nothing
    if not isinstance(workload, Costs | Mapping) and (example is not None or hasattr(workload, "state_dict")):
        workload = require_model(workload)
    if isinstance(workload, Model):
        if example is None or len(example) not in (2, 3) or rows is not None or stages is not None:
            raise ValueError("a model needs example=(params, batch), without rows= or stages=.")
        # Imported here since it needs torch, which a plan from given costs does without.
        from fpipe.measuring.profile import MeasuredModel

        params, batch, *state = example
        measured = MeasuredModel(workload, params, batch, state[0] if state else None, machine.flops)
        work = work_of_model(measured, machine, candidates, profiled, repeats, report)
    else:
        if any(option is not None for option in (example, profiled, machine.flops)):
            raise ValueError("example=, profiled= and flops= go with a Model; costs are given, not measured.")
        work = work_of_costs(workload, machine, candidates, rows, stages)
    return _Planner(work, machine, candidates, report).plan()


def _report_nothing(done: int, total: int, subject: str) -> None:
    """Report nothing."""


@dataclass
class _Planner:
    """Planner that tries ways to run one by one, so that the rows so far are a plan if it is interrupted."""

    work: Work
    machine: Machine
    candidates: Candidates
    progress: Progress
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    in_bytes: bool = False

    def plan(self) -> RunPlan:
        is_complete = True
        try:
            self._try_all()
        except KeyboardInterrupt:
            if not any(row.fits for row in self.rows):
                raise
            is_complete = False
        if not self.rows:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise ValueError(f"no schedule serves {self.machine.ranks} ranks and these microbatches. {reasons}")
        if not any(row.fits for row in self.rows):
            fullest_ranks = map(self._fullest_rank, self.rows)
            rank, amount, closest = min(fullest_ranks, key=lambda fullest: fullest[1] / self._limit(fullest[0]))
            needed, limit = self._format_amount(amount), self._format_amount(self._limit(rank))
            raise ValueError(
                f"nothing fits: rank {rank} must hold {needed} at least, by {closest.name}, and may hold {limit}."
            )
        # Ways are compared by seconds a row, since numbers of microbatches may make batches of different size.
        rows = sorted(self.rows, key=lambda row: (not row.fits, row.seconds_per_row, row.peak_memory))
        served = {row.schedule for row in rows}
        refused = tuple((name, reason) for name, reason in self.refused.items() if name not in served)
        return RunPlan(tuple(rows), refused, "bytes" if self.in_bytes else "rows", self.machine.limits, is_complete)

    def _limit(self, rank: int) -> float:
        return self.machine.limits[min(rank, self.machine.ranks - 1)]

    def _fullest_rank(self, row: PlanRow) -> tuple[int, float, PlanRow]:
        """Return the rank that is closest to its limit, and how much it holds."""
        by_rank = zip(sorted(compute_ranks(row.program)), row.memory, strict=True)
        return *max(by_rank, key=lambda pair: pair[1] / self._limit(pair[0])), row

    def _format_amount(self, amount: float) -> str:
        return format_amount(amount, self.in_bytes) + " rows" * (not self.in_bytes)

    def _try_all(self) -> None:
        combinations = self.candidates.combinations
        searched_counts = [*dict.fromkeys(self.candidates.microbatches)] if self.candidates.search else []
        # A search counts as one step of progress, like a way that is only simulated.
        total = len(combinations) + len(searched_counts)
        for tried, (count, policy, name, gather) in enumerate(combinations):
            self.progress(tried, total, self._describe_best())
            try:
                program = self.work.scheduled_program(self.candidates.named[name], self.machine.ranks, count, policy)
                program = self.work.with_replicas(program, gather)
                costs, source = self.work.costs_of(program)
            except ValueError as error:  # the schedule does not serve these sizes
                self.refused.setdefault(name, str(error).removeprefix(f"{name.partition(':')[0]}: "))
                continue
            self._add_row(name, policy, gather, program, costs, source)
        for tried, count in enumerate(searched_counts, len(combinations)):
            self.progress(tried, total, f"searching m={count}")
            self._search(count)
        self.progress(total, total, self._describe_best())

    def _describe_best(self) -> str:
        best = min((row for row in self.rows if row.fits), key=lambda row: row.seconds_per_row, default=None)
        return "nothing fits yet" if best is None else f"best {best.name}: {best.makespan:.4g} s"

    def _add_row(self, name: str, policy: str, gather: str, program: Program, costs: Costs, source: str) -> None:
        # With replicas a step ends when the last gradient is summed over them, on whichever lane that runs.
        timeline = simulate(program, costs)
        self.in_bytes = costs.bytes is not None
        seconds = max(timeline.makespan, timeline.delivered) if gather else timeline.makespan
        rows = self.work.rows_of(program.microbatches)
        ranks = sorted(compute_ranks(program))
        if self.in_bytes:
            memory = [timeline.peak[rank] + home_bytes(program, costs, rank) for rank in ranks]
        else:
            memory = [timeline.peak[rank] * rows for rank in ranks]
        limits = [self._limit(rank) for rank in ranks]
        throughput = rows * program.microbatches / seconds if seconds else math.inf
        fits = all(peak <= limit * (1 + 1e-9) for peak, limit in zip(memory, limits, strict=True))
        choices = name, program.microbatches, rows, policy, source
        figures = seconds, throughput, timeline.bubble, tuple(memory), fits
        self.rows.append(PlanRow(*choices, *figures, gather=gather, program=program, timeline=timeline))

    def _search(self, count: int) -> None:
        """Search a schedule for a number of microbatches, and add it as a row.

        The search gets the memory that is left after parameters; the row is then timed and weighed like any other.
        """
        work, ranks, policies = self.work, self.machine.ranks, {*self.candidates.checkpoint}
        base = work.unscheduled_program(2 * ranks, count)
        try:
            # Split and placed, so that bytes are asked for halves of backwards too, which a search may use.
            placed = chain(split_backward(), place("linear", ranks=ranks))(base)
        except ProgramError as error:
            self.refused.setdefault("found", str(error))
            return
        costs, _ = work.costs_of(placed)
        smallest_limit = min(self.machine.limits)
        params = 0.0 if costs.bytes is None else max(home_bytes(placed, costs, rank) for rank in range(ranks))
        if params >= smallest_limit:
            needed, limit = format_amount(params, True), format_amount(smallest_limit, True)
            reason = f"parameters alone are {needed} on a rank, and it may hold {limit}."
            self.refused.setdefault("found", reason)
            return
        cap = smallest_limit / work.rows_of(count) if costs.bytes is None else smallest_limit - params
        # With several policies of recomputing the search chooses what to recompute; with one it keeps to that.
        policy: Any = policies.pop() if len(policies) == 1 else "auto"
        try:
            result = find(
                base,
                costs,
                ranks=ranks,
                memory_cap=None if cap == math.inf else cap,
                seconds=self.candidates.search,
                checkpoint=policy,
                without=() if cap == math.inf else REPLICATED,
                seed=self.candidates.seed,
            )
        # Nothing found is a ProgramError; a mistake in costs is another ValueError, which the caller must see.
        except ProgramError as error:
            self.refused.setdefault("found", str(error))
            return
        for gather in self.candidates.gathers:
            program = work.with_replicas(result.program, gather)
            self._add_row("found", policy, gather, program, *work.costs_of(program))
        # The search takes Ctrl-C for itself and returns its best: hand the interruption on.
        if not result.complete:
            raise KeyboardInterrupt
