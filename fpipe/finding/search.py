"""Search for the schedule that is best for your costs and memory, and say how good any can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from fpipe.finding.found import Found
from fpipe.finding.fuse import fused
from fpipe.finding.gathering import gathered
from fpipe.finding.hunt import Candidate, Hunt
from fpipe.finding.kept import kept_of
from fpipe.finding.long_steps import short_of, stretched
from fpipe.finding.op_facts import again_of, has, kinds_of, recomputing
from fpipe.finding.solver import SMALL, ask, installed
from fpipe.finding.wanted import Wanted
from fpipe.limits import whole
from fpipe.model import Model
from fpipe.program import Program, ProgramError, kind_of
from fpipe.schedules.registry import about
from fpipe.timing.amounts import exact_amount
from fpipe.timing.costs import Costs, the_costs
from fpipe.timing.simulate import simulate
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import chain
from fpipe.transforms.checkpoint import checkpoint as recompute
from fpipe.transforms.merge import merge
from fpipe.transforms.place import stage_ranks
from fpipe.transforms.shard import checked_gathers
from fpipe.transforms.split import split

Placement = Literal["any", "linear", "looped", "v"] | Sequence[int]
Objective = Literal["makespan", "span"]
Solver = Literal["auto", "local", "cp-sat"]
Policy = Literal["never", "auto", "always", "except_last"]
Progress = Callable[[float, float, float], None]

RATE = 7_500_000
"""Ops that a second of searching plays: what one core of a usual machine does, where most changes play a part of them
(7 to 12 million, from 36 ops to 1,152)."""


def search(
    what: Program | Model | int,
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
) -> Found:
    """Search for the schedule that takes least time for some costs and memory.

    It starts from every named schedule that serves the sizes and from orders by rules, improves them by small changes,
    and lets OR-tools' CP-SAT (`pip install 'fpipe[schedules]'`) improve the best and prove how good it is. So it is
    never worse than the best named schedule that fits, as published. Exchanges (`fpipe.exchange`) are moved too, each
    rank's on a lane of their own beside its work.

    Args:
        what: a program that is split, or a `Model` or a number of stages and `microbatches`.
        costs: seconds of each stage's ops; by default one for each F, I and W.
        ranks: how many.
        microbatches: how many, where `what` is no program.
        placement: where stages are: "linear", "looped", "v" (waves, with more than two stages a rank), or the rank of
            each stage. "any" tries all of them, others near the best, and those of named schedules (two replicas,
            too).
        memory_cap: the most that a rank may hold, in the unit of `Timeline.peak`: microbatches, or bytes where the
            costs have bytes.
        objective: what to make short, the "makespan" or the "span"; then the other.
        seconds: how long to search. Without the solver they count played ops, `RATE` to a second, so that the result
            depends on the seed alone and not on the machine. The solver is stopped by the clock; within it the result
            is the same where it proves its answer, and may differ in its last improvements where it does not.
        solver: "local" does without, "cp-sat" insists on it, "auto" uses it where it is installed and the step has at
            most `SMALL` ops.
        split_backward: whether backwards are cut in two: all, none, or ("auto") where it helps.
        checkpoint: what is recomputed: "never", a policy of `fpipe.checkpoint`, or ("auto") any stages and microbatches
            for which a cap makes it worth the time.
        without: names of schedules that it does not start from: "chimera" and "dualpipe" hold the parameters twice,
            "bpipe" and "pipe_offload" move residuals, for nothing unless the costs say what that takes.
        shard: which policies of gathering are tried where replicas share parameters out, of "step", "run" and "use"
            (`fpipe.shard`), each on what is found. What is gathered counts under the cap: where it is too much, the
            search begins again under a smaller one. Costs say what a gather takes (`gather`, `scatter`, or a cluster
            with replicas).
        seed: of the random choices.
        progress: called now and then as `progress(share, best, bound)`: what share of the effort is spent, the best
            seconds so far (infinite while nothing fits), and the bound.

    Returns:
        `Found`. After Ctrl-C the best so far, if there is any.

    Raises:
        ProgramError: nothing fits the cap, with the smallest cap that does; fewer stages than ranks.
        ValueError: a word, number or cost that is none.
        ModuleNotFoundError: solver="cp-sat" where OR-tools is not installed.

    With more than 4p microbatches a step of 2p to 3p is searched, and its steady state repeated. What a named schedule
    takes for all microbatches is told from two steps of 4p to 8p, where it is in its steady state, and those that may
    be the best are made: beside the effort of the search 1024 microbatches take what these few programs take to make.
    With bytes in the costs, exchanges or a policy of `checkpoint`, the whole step is searched.

    >>> import fpipe
    >>> costs = fpipe.Costs(forward=5, backward_input=6, backward_weight=4)
    >>> words = {"ranks": 2, "microbatches": 4, "placement": "v", "seconds": 0.2, "solver": "local"}
    >>> found = fpipe.search(4, costs, memory_cap=1.5, **words)
    >>> print(found)
    makespan 138, span 138, bubble 13.0%, peak per rank [1.5, 1.5]
    makespan 138: none of these ops on these ranks takes less than 131, this is 5.3% above
    """
    base = _base(what, microbatches)
    costs = the_costs(costs, base)
    for op in base.ops:  # none is missing
        costs.seconds(op)
    seconds = _number("seconds", seconds)
    if split_backward not in (True, False, "auto"):
        raise ValueError(f'split_backward is True, False or "auto", found {split_backward!r}.')
    if isinstance(without, str):
        raise ValueError(f"without lists names of schedules, such as ('chimera',); found {without!r}.")
    for name in without:
        about(name)
    cap = math.inf if memory_cap is None else _number("memory_cap", memory_cap)
    wanted = Wanted(
        whole("ranks", ranks),
        costs,
        cap,
        _one_of("objective", objective, Objective),
        _placements(placement, base, ranks),
        free=placement == "any",
        halves=None if split_backward == "auto" else bool(split_backward),
        seed=whole("seed", seed, least=0, most=math.inf),
        without=frozenset(without),
        choose=checkpoint == "auto" and cap < math.inf,
        microbatches=base.microbatches,
    )
    if _one_of("solver", solver, Solver) == "cp-sat" and not installed():
        raise ModuleNotFoundError(
            'solver="cp-sat" needs OR-tools: pip install \'fpipe[schedules]\'. Without it (solver="local") the search '
            "finds the same order nearly always, but proves less: the bound is that of fpipe.bounds."
        )
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a function progress(share, best, bound), found {progress!r}.")
    policy = "never" if checkpoint == "auto" and not wanted.choose else checkpoint
    policies = checked_gathers(shard)

    def found(cap: float) -> Found:
        return search_for(base, replace(wanted, cap=cap), seconds, solver, policy, progress)

    return gathered(found, policies, wanted) if policies else found(wanted.cap)


def search_for(
    base: Program,
    wanted: Wanted,
    seconds: float,
    solver: str = "local",
    policy: Policy | Callable[[int, int], bool] = "never",
    progress: Progress | None = None,
) -> Found:
    """Search for what is wanted, whose words are checked."""
    bases = _recomputing(base, policy)
    short = short_of(base, wanted) if policy in ("never", "auto") else None
    searched = _recomputing(short, policy) if short is not None else bases
    named_ops = sum(bool(kind_of(op.kind).time) for op in searched[0].ops)
    by_solver = solver == "cp-sat" or (solver == "auto" and installed() and named_ops * 1.5 <= SMALL)
    return _Search(base, searched, bases, wanted, seconds, by_solver, progress).found()


def _base(what: Program | Model | int, microbatches: int | None) -> Program:
    """The program to order, in microbatches."""
    if not isinstance(what, Program):
        return chain(split(whole("microbatches", microbatches)), merge())(base_program(what))
    if microbatches is not None:
        raise ValueError("microbatches= goes with a Model or a number of stages; a program is split already.")
    if what.slices > 1:
        raise ProgramError("search orders whole microbatches; for slices of a sequence use fpipe.schedules.seq1f1b.")
    return what


def _number(word: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ValueError(f"{word} is a number above 0, found {given!r}.")
    return float(given)


def _one_of(word: str, given: str, kind: Any) -> str:
    *others, last = [f'"{one}"' for one in get_args(kind)]
    if given not in get_args(kind):
        raise ValueError(f"{word} is {', '.join(others)} or {last}, found {given!r}.")
    return given


def _placements(placement: Any, base: Program, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of stages that are tried."""
    words = ("linear", "looped", "v") if placement == "any" else (placement,)
    if isinstance(placement, str) and placement not in ("any", "linear", "looped", "v"):
        raise ValueError(f'placement is "any", "linear", "looped", "v" or the rank of each stage, found {placement!r}.')
    listed = [tuple(stage_ranks(word, base.stages, ranks)) for word in words]
    odd = next((where for where in listed if {*where} != {*range(ranks)}), None)
    if odd is not None:
        raise ValueError(f"a placement has a stage for each of the ranks 0..{ranks - 1}, and no others; found {odd}.")
    return tuple(dict.fromkeys(listed))


def _recomputing(base: Program, policy: Any) -> list[Program]:
    """The program for each choice of what is recomputed."""
    if policy == "never":
        return [base]
    if policy != "auto":
        return [recompute(policy)(base)]
    first = [recompute(lambda stage, microbatch, most=most: stage < most)(base) for most in range(1, base.stages + 1)]
    return [base, *first]


class _Search:
    """The parts of a search, one after the other; what there is when it is stopped is what is found."""

    def __init__(
        self,
        plain: Program,
        searched: list[Program],
        bases: list[Program],
        wanted: Wanted,
        seconds: float,
        by_solver: bool,
        progress: Progress | None,
    ) -> None:
        self.plain, self.bases, self.wanted = plain, bases, wanted
        self.seconds, self.by_solver = seconds, by_solver
        self.progress: Progress = progress or (lambda share, best, bound: None)
        self.local = min(2.0, seconds / 4) if by_solver else seconds
        self.hunt = Hunt(searched, wanted, self._told)
        self.long = None if searched[0] is bases[0] else Hunt(bases, wanted, self._told)
        self.proven: dict[Any, float] = {}
        self.complete = True

    def found(self) -> Found:
        """Search, and say what was found."""
        try:
            self.hunt.gather()
            self.hunt.improve(self.local * RATE)
            self.complete = not self.hunt.stopped
            if self.by_solver and self.complete and not self.hunt.optimal():
                self.proven = ask(self.hunt, self.seconds - self.local, self._asked)
        except KeyboardInterrupt:
            self.complete = False
            if self.hunt.best is None:
                raise
        best = self._best()
        if self.long is None:
            best = self._whole(best)
        self.progress(1.0, best.value[0], self.bound)
        hunt = self.long or self.hunt
        schedule, program, timeline = kept_of(best.program), best.program, best.timeline
        if has(program, "OFFLOAD"):  # an OFFLOAD and a LOAD of one moment may change places
            program = schedule(self.plain)
            timeline = timeline if program == best.program else simulate(program, self.wanted.costs)
        return Found(schedule, program, timeline, self.wanted.objective, self.bound, tuple(hunt.rows()), self.complete)

    def _told(self, played: float, best: float, bound: float) -> None:
        whole = self.seconds / self.local if self.by_solver else 1.0
        self.progress(min(1.0, played / (self.local * RATE)) / whole, best, bound)

    def _asked(self, share: float, best: float, bound: float) -> None:
        self.progress((self.local + share * (self.seconds - self.local)) / self.seconds, best, bound)

    def _best(self) -> Candidate:
        """The best that fits; of a short step, made long. Notes the bound."""
        hunt = self.hunt
        if self.long is not None and hunt.best is not None:
            try:
                stretched(hunt, self.long)
            except KeyboardInterrupt:
                self.complete = False
                if self.long.best is None:
                    raise
            hunt = self.long
        if hunt.best is None:
            in_bytes = self.wanted.costs.bytes is not None
            cap, least = (exact_amount(one, in_bytes) for one in (self.wanted.cap, hunt.least))
            raise ProgramError(f"nothing fits memory_cap={cap}: the smallest cap that does is {least}.")
        program = hunt.best.program
        self.bound = hunt.floor(program)
        halved = kinds_of(hunt.halved(program))
        stay = not has(program, "OFFLOAD")  # which the solver takes for granted
        if self.long is None and stay and halved in self.proven and hunt.easier is self.wanted.costs:
            self.bound = max(self.bound, self.proven[halved])
        self.bound = min(self.bound, hunt.best.value[0])  # they differ in the last bit of a sum
        return hunt.best

    def _whole(self, best: Candidate) -> Candidate:
        """The best, with full backwards wherever halves gain nothing."""
        wanted = self.wanted
        if wanted.halves is not None or has(best.program, "OFFLOAD"):
            return best

        def judged(program: Program) -> Candidate | None:
            timeline = simulate(program, wanted.costs)
            value = wanted.value(timeline)
            fits = max(timeline.peak) <= wanted.cap * (1 + 1e-9)
            good = fits and all(one <= other * (1 + 1e-12) for one, other in zip(value, best.value, strict=True))
            return Candidate(program, timeline, value) if good else None

        more = again_of(best.program) - again_of(self.plain)
        try:
            return fused(recomputing(more)(self.plain) if more else self.plain, best, judged)
        except KeyboardInterrupt:
            self.complete = False
            return best
