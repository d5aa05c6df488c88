"""Search for the schedule that is best for your costs and memory, and say how good any can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from fpipe.finding.finish_search import fuse_backwards, search_with_gathers
from fpipe.finding.local_search import Candidate, LocalSearch
from fpipe.finding.long_steps import extend_to_long_step, short_program
from fpipe.finding.problem import SearchProblem, has_kind, placed_ops, recompute_cells, recomputed_cells
from fpipe.finding.search_result import SearchResult, schedule_table_of
from fpipe.finding.solver import MAX_OPS_ASKED, is_installed, solve_pool
from fpipe.limits import check_whole_number
from fpipe.model import Model
from fpipe.program import Program, ProgramError, kind_of
from fpipe.schedules.registry import about
from fpipe.timing.amounts import format_exact_amount
from fpipe.timing.costs import Costs, checked_costs
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import chain
from fpipe.transforms.checkpoint import checkpoint as recompute
from fpipe.transforms.merge import merge
from fpipe.transforms.place import stage_ranks
from fpipe.transforms.shard import checked_policies
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

Placement = Literal["any", "linear", "looped", "v"] | Sequence[int]
Objective = Literal["makespan", "span"]
Solver = Literal["auto", "local", "cp-sat"]
Policy = Literal["never", "auto", "always", "except_last"]
Progress = Callable[[float, float, float], None]

RATE = 7_500_000
"""Ops played in a second of search: one core of a usual machine plays 7 to 12 million (from 36 ops to 1,152)."""


def search(
    program: Program | Model | int,
    costs: Costs | None = None,
    *,
    ranks: int,
    microbatches: int | None = None,
    placement: Placement = "any",
    memory_cap: float | None = None,
    objective: Objective = "makespan",
    seconds: float = 10,
    solver: Solver = "auto",
    split_backward: bool | Literal["auto"] = "auto",
    checkpoint: Policy | Callable[[int, int], bool] = "never",
    without: Collection[str] = (),
    shard: Collection[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the schedule that takes the least time under these costs and this memory.

    It starts from every named schedule that accepts the sizes and from list schedules, improves them by small changes,
    and lets OR-tools' CP-SAT (the extra `schedules`) improve the best and prove how good it is. So the
    result is never worse than the best named schedule that fits, as published. Exchanges (`fpipe.exchange`) are moved
    too; each rank runs them on a lane next to its work.

    Args:
        program: a program that is split, or a `Model` or a number of stages and `microbatches`.
        costs: seconds of each stage's ops; by default one for each F, I and W. Where they differ between microbatches,
            these stay in the order that a named schedule gives them: try other orders of the batch.
        ranks: the number of ranks.
        microbatches: their number, if `program` has none yet.
        placement: "linear", "looped", "v" (waves, with more than two stages a rank), or the rank of
            each stage. "any" tries all of them, others near the best, and those of named schedules (with two
            replicas, too).
        memory_cap: the most that a rank may hold, in the unit of `Timeline.peak`: microbatches, or bytes where the
            costs have bytes.
        objective: what to minimize, the "makespan" or the "span"; then the other.
        seconds: the effort. Without the solver a second is `RATE` played ops, so the result depends on the seed alone
            and not on the machine. The solver is stopped by the clock: its result is the same if it proves its answer,
            and may differ in its last improvements otherwise.
        solver: "local" searches without it, "cp-sat" requires it, "auto" uses it if it is installed and the step has at
            most `MAX_OPS_ASKED` ops.
        split_backward: whether backwards are split: all, none, or ("auto") where it helps.
        checkpoint: a policy of `fpipe.checkpoint`, "never", or "auto": recompute any stages and microbatches for which
            the cap makes it worth the time.
        without: names of schedules not to start from. "chimera" and "dualpipe" hold the parameters twice; "bpipe" and
            "pipe_offload" move residuals, at no cost unless the costs have one.
        shard: policies of gathering to try if replicas shard the parameters, of "step", "run" and "use"
            (`fpipe.shard`), each on the result. Gathered parameters count under the cap: if they exceed it, the search
            begins again under a smaller one. Costs have the seconds of a gather (`gather`, `scatter`, or a cluster with
            replicas).
        seed: of the random choices.
        progress: called as `progress(share, best, bound)`: the share of the effort that is spent, the best seconds so
            far (infinite while nothing fits), and the bound.

    Returns:
        `SearchResult`. After Ctrl-C the best so far, if there is any.

    Raises:
        ProgramError: nothing fits the cap, with the smallest cap that does; fewer stages than ranks.
        ValueError: an unknown word, or an invalid number or cost.
        ModuleNotFoundError: solver="cp-sat" where OR-tools is not installed.

    With more than 4p microbatches a step of 2p to 3p is searched, and its steady state repeated. The times of named
    schedules are predicted from two steps of 4p to 8p, where they are in their steady state, and only those that may be
    the best are built. So 1024 microbatches take the effort of the search, and the time to build a few long programs.
    With bytes in the costs, exchanges or a policy of `checkpoint`, the whole step is searched.

    >>> import fpipe
    >>> costs = fpipe.Costs(forward=5, backward_input=6, backward_weight=4)
    >>> words = {"ranks": 2, "microbatches": 4, "placement": "v", "seconds": 0.2, "solver": "local"}
    >>> found = fpipe.search(4, costs, memory_cap=1.5, **words)
    >>> print(found)
    makespan 138, span 138, bubble 13.0%, peak per rank [1.5, 1.5]
    makespan 138: none of these ops on these ranks takes less than 131, this is 5.3% above
    the costs assume that these take no time: transfers
    """
    base = _program_to_order(program, microbatches)
    costs = checked_costs(costs, base)
    # Ask for the cost of every op now: a missing cost is an error here, not in the middle of the search.
    for op in base.ops:
        costs.seconds(op)
    seconds = _number("seconds", seconds)
    for name in without:
        about(name)
    cap = math.inf if memory_cap is None else _number("memory_cap", memory_cap)
    problem = SearchProblem(
        check_whole_number("ranks", ranks),
        costs,
        cap,
        objective,
        _placements(placement, base, ranks),
        any_placement=placement == "any",
        split_backward=None if split_backward == "auto" else bool(split_backward),
        seed=check_whole_number("seed", seed, minimum=0, maximum=math.inf),
        excluded=frozenset(without),
        choose_recompute=checkpoint == "auto" and cap < math.inf,
        microbatches=base.microbatches,
    )
    # The solver takes microbatches in their order, which is no loss where all are alike.
    if solver == "cp-sat" and costs.vary_by_microbatch:
        raise ValueError('solver="cp-sat" takes microbatches as alike, and these costs vary; say solver="local".')
    if solver == "cp-sat" and not is_installed():
        raise ModuleNotFoundError(
            'solver="cp-sat" needs OR-tools: pip install ortools networkx. solver="local" needs none, but proves less.'
        )
    policy = "never" if checkpoint == "auto" and not problem.choose_recompute else checkpoint
    policies = checked_policies(shard)

    def search_under_cap(cap: float) -> SearchResult:
        return search_for(base, replace(problem, cap=cap), seconds, solver, policy, progress)

    return search_with_gathers(search_under_cap, policies, problem) if policies else search_under_cap(problem.cap)


def search_for(
    base: Program,
    problem: SearchProblem,
    seconds: float,
    solver: str = "local",
    policy: Policy | Callable[[int, int], bool] = "never",
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the schedule that a checked problem asks for."""
    bases = _recomputing(base, policy)
    short_base = short_program(base, problem) if policy in ("never", "auto") else None
    searched = _recomputing(short_base, policy) if short_base is not None else bases
    named_ops = sum(bool(kind_of(op.kind).time) for op in searched[0].ops)
    is_solvable = is_installed() and not problem.costs.vary_by_microbatch and named_ops * 1.5 <= MAX_OPS_ASKED
    by_solver = solver == "cp-sat" or (solver == "auto" and is_solvable)
    return _Search(base, searched, bases, problem, seconds, by_solver, progress).run()


def _program_to_order(program: Program | Model | int, microbatches: int | None) -> Program:
    if not isinstance(program, Program):
        if microbatches is None:
            raise ValueError("microbatches is missing, the number to split into.")
        return chain(split(microbatches), merge())(base_program(program))
    if microbatches is not None:
        raise ValueError("a program is split already; leave microbatches= out.")
    if program.slices > 1:
        raise ProgramError("search orders whole microbatches; for sequence slices use fpipe.schedules.seq1f1b.")
    return program


def _number(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is a number above 0, found {value!r}.")
    return float(value)


def _placements(placement: Any, base: Program, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the placements to try, each as the rank of every stage."""
    policies = ("linear", "looped", "v") if placement == "any" else (placement,)
    if isinstance(placement, str) and placement not in ("any", "linear", "looped", "v"):
        raise ValueError(f'placement is "any", "linear", "looped", "v" or the rank of each stage, found {placement!r}.')
    listed = [tuple(stage_ranks(policy, base.stages, ranks)) for policy in policies]
    unsupported = next((ranks_listed for ranks_listed in listed if {*ranks_listed} != {*range(ranks)}), None)
    if unsupported is not None:
        raise ValueError(f"a placement uses each of the ranks 0..{ranks - 1}, found {unsupported}.")
    return tuple(dict.fromkeys(listed))


def _recomputing(base: Program, policy: Any) -> list[Program]:
    """Return the program with each choice of recomputed stages that the policy allows."""
    if policy == "never":
        return [base]
    if policy != "auto":
        return [recompute(policy)(base)]
    counts = range(1, base.stages + 1)
    return [base, *(recompute(lambda stage, microbatch, count=count: stage < count)(base) for count in counts)]


class _Search:
    """A search that runs in phases: local search, solver, long step, full backwards. Ctrl-C ends the running one."""

    def __init__(
        self,
        plain: Program,
        searched: list[Program],
        bases: list[Program],
        problem: SearchProblem,
        seconds: float,
        by_solver: bool,
        progress: Progress | None,
    ) -> None:
        self.base, self.bases, self.problem = plain, bases, problem
        self.seconds, self.by_solver = seconds, by_solver
        self.progress: Progress = progress or (lambda share, best, bound: None)
        self.local_seconds = min(2.0, seconds / 4) if by_solver else seconds
        self.solver_seconds = seconds - self.local_seconds
        self.local_search = LocalSearch(searched, problem, self._report_local)
        self.long_search = None if searched[0] is bases[0] else LocalSearch(bases, problem, self._report_local)
        self.proven_floors: dict[Any, float] = {}
        self.complete = True

    def run(self) -> SearchResult:
        try:
            self.local_search.gather_orders()
            self.local_search.improve_orders(self.local_seconds * RATE)
            self.complete = not self.local_search.stopped
            if self.by_solver and self.complete and not self.local_search.is_optimal():
                self.proven_floors = solve_pool(self.local_search, self.solver_seconds, self._report_solver)
        except KeyboardInterrupt:
            self.complete = False
            if self.local_search.best is None:
                raise
        best = self._best_candidate()
        if self.long_search is None:
            best = self._with_full_backwards(best)
        self.progress(1.0, best.value[0], self.bound)
        last_search = self.long_search or self.local_search
        schedule, program, timeline = schedule_table_of(best.program), best.program, best.timeline
        # The result promises program == schedule(base). An OFFLOAD and a LOAD of the same moment may be swapped by the
        # way through the table, so such a program is made from the table and simulated again.
        if has_kind(program, "OFFLOAD"):
            program = schedule(self.base)
            timeline = timeline if program == best.program else simulate(program, self.problem.costs)
        objective, named_rows = self.problem.objective, tuple(last_search.named_rows())
        return SearchResult(schedule, program, timeline, objective, self.bound, named_rows, self.complete)

    def _report_local(self, played: float, best: float, bound: float) -> None:
        time_share = self.seconds / self.local_seconds if self.by_solver else 1.0
        self.progress(min(1.0, played / (self.local_seconds * RATE)) / time_share, best, bound)

    def _report_solver(self, share: float, best: float, bound: float) -> None:
        self.progress((self.local_seconds + share * self.solver_seconds) / self.seconds, best, bound)

    def _best_candidate(self) -> Candidate:
        """Return the best candidate that fits, extended to the long step, and set `self.bound`."""
        search = self.local_search
        if self.long_search is not None and search.best is not None:
            try:
                extend_to_long_step(search, self.long_search)
            except KeyboardInterrupt:
                self.complete = False
                if self.long_search.best is None:
                    raise
            search = self.long_search
        if search.best is None:
            in_bytes = self.problem.costs.bytes is not None
            cap, peak = (format_exact_amount(amount, in_bytes) for amount in (self.problem.cap, search.smallest_peak))
            raise ProgramError(f"nothing fits memory_cap={cap}: the smallest cap that does is {peak}.")
        program = search.best.program
        self.bound = search.floor_of(program)
        ops_solved = placed_ops(search.with_split_backward(program))
        # The solver proved its bound for these ops with the true costs, for one step length, and with residuals that
        # stay on their rank. Only where all of that holds for the best program is the proof about it.
        is_as_proven = search.relaxed_costs is self.problem.costs and not has_kind(program, "OFFLOAD")
        if self.long_search is None and is_as_proven and ops_solved in self.proven_floors:
            self.bound = max(self.bound, self.proven_floors[ops_solved])
        # Bound and makespan may differ in the last bit of a sum: an optimal schedule must not be below its bound.
        self.bound = min(self.bound, search.best.value[0])
        return search.best

    def _with_full_backwards(self, best: Candidate) -> Candidate:
        problem = self.problem
        if problem.split_backward is not None or has_kind(best.program, "OFFLOAD"):
            return best

        def judge(program: Program) -> Candidate | None:
            timeline = simulate(program, problem.costs)
            value = problem.value(timeline)
            fits = max(timeline.peak) <= problem.cap * (1 + 1e-9)
            is_as_good = fits and all(new <= old * (1 + 1e-12) for new, old in zip(value, best.value, strict=True))
            return Candidate(program, timeline, value) if is_as_good else None

        recomputed = recomputed_cells(best.program) - recomputed_cells(self.base)
        try:
            return fuse_backwards(recompute_cells(recomputed)(self.base) if recomputed else self.base, best, judge)
        except KeyboardInterrupt:
            self.complete = False
            return best
