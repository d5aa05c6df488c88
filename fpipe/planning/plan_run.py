"""Plan a run: every schedule, number of microbatches and checkpoint policy, timed and weighed, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fpipe.finding.search import search as find
from fpipe.model import Model, the_model
from fpipe.planning.candidates import Candidates, Machine, refuse_unshared
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.planning.work import CostsOfParts, Work, at_home, work_of_costs, work_of_model
from fpipe.program import Program, ProgramError
from fpipe.timing.amounts import amount
from fpipe.timing.costs import Costs, computing
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import chain
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

Progress = Callable[[int, int, str], None]
REPLICATED = ("chimera", "dualpipe")


def plan_run(
    what: Model | CostsOfParts | Mapping[float, CostsOfParts],
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
    """Try every schedule, number of microbatches and checkpoint policy: how long a step takes, and what it holds.

    Args:
        what: a `Model`, which is profiled here, or costs of one microbatch: of a whole rank, as for `fpipe.compare`, or
            with `stages` of one stage's op. `{rows: costs}` says them for microbatches of several sizes.
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
        progress: called as `progress(done, all, what)`.

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
    for value, kind in ((machine, Machine), (candidates, Candidates)):
        if not isinstance(value, kind):
            raise TypeError(f"plan_run(what, machine, candidates) takes an fpipe.{kind.__name__}; found {value!r:.80}.")
    refuse_unshared(machine, candidates)
    report = progress or _quiet
    if not isinstance(what, Costs | Mapping) and (example is not None or hasattr(what, "state_dict")):
        what = the_model(what, "example= goes with a Model;")
    if isinstance(what, Model):
        if example is None or len(example) not in (2, 3) or rows is not None or stages is not None:
            raise ValueError("a model comes with example=(params, batch), and without rows= and stages=, which it has.")
        from fpipe.planning.model_costs import Measured  # torch, which costs that are given do without

        params, batch, *state = example
        measured = Measured(what, params, batch, state[0] if state else None, machine.flops)
        work = work_of_model(measured, machine, candidates, profiled, repeats, report)
    else:
        if any(given is not None for given in (example, profiled, machine.flops)):
            raise ValueError("example=, profiled= and flops= go with a Model; costs are given, not measured.")
        work = work_of_costs(what, machine, candidates, rows, stages)
    return _Planner(work, machine, candidates, report).plan()


def _quiet(done: int, total: int, what: str) -> None:
    """Report nothing."""


@dataclass
class _Planner:
    """Tries ways to run, one after the other; what there is when it is stopped is the plan."""

    work: Work
    machine: Machine
    candidates: Candidates
    progress: Progress
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    in_bytes: bool = False

    def plan(self) -> RunPlan:
        """Try all ways, and return them with the best first."""
        complete = True
        try:
            self._try_all()
        except KeyboardInterrupt:
            if not any(row.fits for row in self.rows):
                raise
            complete = False
        if not self.rows:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ValueError(f"no schedule serves {self.machine.ranks} ranks and these microbatches. {reasons}")
        if not any(row.fits for row in self.rows):
            rank, held, closest = min(map(self._fullest, self.rows), key=lambda full: full[1] / self._limit(full[0]))
            raise ValueError(
                f"nothing fits: rank {rank} must hold {self._amount(held)} at least, by {closest.name}, and may hold "
                f"{self._amount(self._limit(rank))}."
            )
        rows = sorted(self.rows, key=lambda row: (not row.fits, row.seconds_per_row, row.most))
        served = {row.schedule for row in rows}
        refused = tuple((name, why) for name, why in self.refused.items() if name not in served)
        return RunPlan(tuple(rows), refused, "bytes" if self.in_bytes else "rows", self.machine.limits, complete)

    def _limit(self, rank: int) -> float:
        return self.machine.limits[min(rank, self.machine.ranks - 1)]

    def _fullest(self, row: PlanRow) -> tuple[int, float, PlanRow]:
        """Return the rank that holds the most of what it may, and what it holds."""
        by_rank = zip(sorted(computing(row.program)), row.memory, strict=True)
        return *max(by_rank, key=lambda pair: pair[1] / self._limit(pair[0])), row

    def _amount(self, held: float) -> str:
        return amount(held, self.in_bytes) + " rows" * (not self.in_bytes)

    def _try_all(self) -> None:
        ways = self.candidates.ways
        searched = [*dict.fromkeys(self.candidates.microbatches)] if self.candidates.search else []
        total = len(ways) + len(searched)
        for done, (count, policy, name, gather) in enumerate(ways):
            self.progress(done, total, self._best_so_far())
            try:
                program = self.work.program(self.candidates.named[name], self.machine.ranks, count, policy)
                program = self.work.sharded(program, gather)
                costs, word = self.work.costs_of(program)
            except ValueError as error:
                self.refused.setdefault(name, str(error).removeprefix(f"{name.partition(':')[0]}: "))
                continue
            self._add(name, policy, gather, program, costs, word)
        for done, count in enumerate(searched, len(ways)):
            self.progress(done, total, f"searching m={count}")
            self._search(count)
        self.progress(total, total, self._best_so_far())

    def _best_so_far(self) -> str:
        best = min((row for row in self.rows if row.fits), key=lambda row: row.seconds_per_row, default=None)
        return "nothing fits yet" if best is None else f"best {best.name}: {best.makespan:.4g} s"

    def _add(self, shown: str, policy: str, gather: str, program: Program, costs: Costs, word: str) -> None:
        """Add a way: its time, and what each rank holds."""
        timeline = simulate(program, costs)
        self.in_bytes = costs.bytes is not None
        seconds = max(timeline.makespan, timeline.delivered) if gather else timeline.makespan
        rows = self.work.rows_of(program.microbatches)
        ranks = sorted(computing(program))
        if self.in_bytes:
            held = [timeline.peak[rank] + at_home(program, costs, rank) for rank in ranks]
        else:
            held = [timeline.peak[rank] * rows for rank in ranks]
        limits = [self._limit(rank) for rank in ranks]
        self.rows.append(
            PlanRow(
                shown,
                program.microbatches,
                rows,
                policy,
                word,
                seconds,
                rows * program.microbatches / seconds if seconds else math.inf,
                timeline.bubble,
                tuple(held),
                all(most <= limit * (1 + 1e-9) for most, limit in zip(held, limits, strict=True)),
                gather=gather,
                program=program,
                timeline=timeline,
            )
        )

    def _search(self, count: int) -> None:
        """Add the schedule that a search finds; what it holds is weighed as for the others."""
        work, ranks, policies = self.work, self.machine.ranks, {*self.candidates.checkpoint}
        base = work.base(2 * ranks, count)
        try:
            placed = chain(split_backward(), place("linear", ranks=ranks))(base)  # bytes of halves and wholes
        except ProgramError as error:
            self.refused.setdefault("found", str(error))
            return
        costs, _ = work.costs_of(placed)
        least = min(self.machine.limits)
        params = 0.0 if costs.bytes is None else max(at_home(placed, costs, rank) for rank in range(ranks))
        if params >= least:
            reason = f"parameters alone are {amount(params, True)} on a rank, and it may hold {amount(least, True)}."
            self.refused.setdefault("found", reason)
            return
        cap = least / work.rows_of(count) if costs.bytes is None else least - params
        policy: Any = policies.pop() if len(policies) == 1 else "auto"
        try:
            found = find(
                base,
                costs,
                ranks=ranks,
                memory_cap=None if cap == math.inf else cap,
                seconds=self.candidates.search,
                checkpoint=policy,
                without=() if cap == math.inf else REPLICATED,
                seed=self.candidates.seed,
            )
        except ProgramError as error:  # a mistake in costs is a ValueError, and none of the search
            self.refused.setdefault("found", str(error))
            return
        for gather in self.candidates.gathers:
            program = work.sharded(found.program, gather)
            self._add("found", policy, gather, program, *work.costs_of(program))
        if not found.complete:
            raise KeyboardInterrupt
