"""Plan a run: every schedule, number of microbatches and checkpoint policy, timed and weighed, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fpipe.finding.search import search as find
from fpipe.model import Model, the_model
from fpipe.planning.asked import Asked, Said, asked_for, work_of_costs, work_of_model
from fpipe.planning.run_plan import PlanRow, RunPlan
from fpipe.planning.work import Work, at_home
from fpipe.program import Program, ProgramError
from fpipe.timing.amounts import amount
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs, computing
from fpipe.timing.simulate import simulate
from fpipe.transforms.chain import chain
from fpipe.transforms.place import place
from fpipe.transforms.split_backward import split_backward

Progress = Callable[[int, int, str], None]
REPLICATED = ("chimera", "dualpipe")


def plan_run(
    what: Model | Said | Mapping[float, Said],
    params: Sequence[Any] | None = None,
    batch: tuple[Any, Any] | None = None,
    *,
    state: Sequence[Any] | None = None,
    ranks: int,
    microbatches: Collection[int],
    rows: int | None = None,
    stages: int | None = None,
    schedules: Collection[str] | None = None,
    checkpoint: Collection[str] = ("never", "except_last", "always"),
    cluster: Cluster | str | None = None,
    memory: float | None = None,
    replicas: int | None = None,
    shard: Collection[str] | None = None,
    search: float = 0,
    profiled: Collection[int] | None = None,
    repeats: int = 3,
    flops: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> RunPlan:
    """Try every schedule, number of microbatches and checkpoint policy: how long a step takes, and what it holds.

    Args:
        what: a `Model`, which is profiled here, or costs of one microbatch: of a whole rank, as for `fpipe.compare`, or
            with `stages` of one stage's op. `{rows: costs}` says them for microbatches of several sizes.
        params, batch, state: of a model, as its step takes them. Its programs give loss and gradients, and no outputs.
        ranks: how many.
        microbatches: numbers of them that are tried.
        rows: of the batch, where costs are given; by default each microbatch has one row, and so a batch with more of
            them more rows.
        stages: how many there are, where costs are of one stage's op; a model has its own.
        schedules: names, with options behind a colon; by default all.
        checkpoint: which of "never", "except_last" and "always" are tried.
        cluster: what it runs on, a `Cluster` or its text: links, speeds, and memory of ranks.
        memory: the most that a rank may hold: bytes where they are known, else rows. Bytes are those of parameters
            (`params` in the bytes of costs), gradients and values; what an optimizer keeps is not among them.
        replicas: of all ranks, each with a batch like this; by default those of the cluster.
        shard: which policies of gathering the parameters that replicas share out are tried, of "step", "run" and "use"
            (`fpipe.shard`), and "never", whole ones on each (`fpipe.data_parallel`); by default there is one replica.
            A rank holds its part of parameters and added gradients, and what it has gathered, and a step takes until
            the last gradient is added up. A search is for whole parameters, and what it finds is then sharded.
        search: seconds for `fpipe.search` to find a schedule for each number of microbatches; its row is `found`. Where
            the number of stages is open, it is two a rank.
        profiled: the numbers of microbatches at which a model is measured, by default all; costs of others are
            interpolated between the nearest two.
        repeats: how often each op is timed.
        flops: of a model, operations a second of a rank: costs are those of `fpipe.estimate`, and nothing runs, so that
            params and batch may be on the meta device.
        seed: of the random choices of a search.
        progress: called as `progress(done, all, what)`.

    Returns:
        A `RunPlan`; after Ctrl-C with the rows so far, if one of them fits.

    Raises:
        ValueError: a size, word or cost that is none; nothing fits the memory, with the way that is closest to it.

    >>> import fpipe
    >>> costs = fpipe.Costs.per_rank(F=10, B=12, W=8, c=0.5)
    >>> words = {"schedules": ["one_f_one_b", "zb_h1"], "checkpoint": ["never"]}
    >>> print(plan_run(costs, ranks=2, microbatches=[4, 8], **words))
    schedule     m  rows  recompute  seconds  bubble  rows held    rows/s  costs
    zb_h1        8     1  never          256    6.2%          2   0.03125  given  *
    zb_h1        4     1  never          136   11.8%          2  0.029412  given
    one_f_one_b  8     1  never          274   12.4%          2  0.029197  given
    one_f_one_b  4     1  never          152   21.1%          2  0.026316  given
    """
    on = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    asked = asked_for(ranks, microbatches, checkpoint, schedules, memory, on, search, replicas, shard)
    told = progress or _quiet
    if not isinstance(what, Costs | Mapping) and (params is not None or hasattr(what, "state_dict")):
        what = the_model(what, "params and a batch go with a Model;")
    if isinstance(what, Model):
        if params is None or batch is None or rows is not None or stages is not None:
            raise ValueError("a model comes with its params and a batch, and without rows= and stages=, which it has.")
        work = work_of_model(what, params, batch, state, asked, profiled, repeats, flops, told)
    else:
        if any(one is not None for one in (params, batch, profiled, flops)):
            raise ValueError("params, batch, profiled= and flops= go with a Model; costs are given, not measured.")
        work = work_of_costs(what, asked, rows, stages)
    return _Planner(work, asked, seed, told).plan()


def _quiet(done: int, every: int, what: str) -> None:
    """No progress is asked for."""


@dataclass
class _Planner:
    """Ways to run, one after the other; what there is when it is stopped is the plan."""

    work: Work
    asked: Asked
    seed: int
    progress: Progress
    rows: list[PlanRow] = field(default_factory=list[PlanRow])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    in_bytes: bool = False

    def plan(self) -> RunPlan:
        """Try all, and put the best first."""
        complete = True
        try:
            self._try_all()
        except KeyboardInterrupt:
            if not any(row.fits for row in self.rows):
                raise
            complete = False
        asked = self.asked
        if not self.rows:
            said = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ValueError(f"no schedule serves {asked.ranks} ranks and these microbatches. {said}")
        if not any(row.fits for row in self.rows):
            rank, held, closest = min(map(self._tightest, self.rows), key=lambda one: one[1] / self._limit(one[0]))
            raise ValueError(
                f"nothing fits: rank {rank} must hold {self._held(held)} at least, by {closest.name}, and may hold "
                f"{self._held(self._limit(rank))}."
            )
        rows = sorted(self.rows, key=lambda row: (not row.fits, row.seconds_per_row, row.most))
        served = {row.schedule for row in rows}
        refused = tuple((name, why) for name, why in self.refused.items() if name not in served)
        return RunPlan(tuple(rows), refused, "bytes" if self.in_bytes else "rows", asked.limits, complete)

    def _limit(self, rank: int) -> float:
        return self.asked.limits[min(rank, len(self.asked.limits) - 1)]

    def _tightest(self, row: PlanRow) -> tuple[int, float, PlanRow]:
        """The rank of a way that holds the most of what it may, and what it holds."""
        rank, held = max(
            zip(sorted(computing(row.program)), row.memory, strict=True), key=lambda one: one[1] / self._limit(one[0])
        )
        return rank, held, row

    def _held(self, most: float) -> str:
        return amount(most, self.in_bytes) + " rows" * (not self.in_bytes)

    def _try_all(self) -> None:
        asked = self.asked
        ways = [
            (count, policy, shown, gather)
            for count in asked.microbatches
            for policy in asked.checkpoint
            for shown in asked.schedules
            for gather in asked.shard
        ]
        searched = list(asked.microbatches) if asked.search else []
        every = len(ways) + len(searched)
        for done, (count, policy, shown, gather) in enumerate(ways):
            self.progress(done, every, self._said())
            try:
                program = self.work.program(asked.schedules[shown], asked.ranks, count, policy)
                program = self.work.sharded(program, gather)
                costs, word = self.work.costs_of(program)
            except ValueError as error:
                self.refused.setdefault(shown, str(error).removeprefix(f"{shown.partition(':')[0]}: "))
                continue
            self._add(shown, policy, gather, program, costs, word)
        for done, count in enumerate(searched, len(ways)):
            self.progress(done, every, f"searching m={count}")
            self._search(count)
        self.progress(every, every, self._said())

    def _said(self) -> str:
        best = min((row for row in self.rows if row.fits), key=lambda row: row.seconds_per_row, default=None)
        return "nothing fits yet" if best is None else f"best {best.name}: {best.makespan:.4g} s"

    def _add(self, shown: str, policy: str, gather: str, program: Program, costs: Costs, word: str) -> None:
        """A way: its time, and what each rank holds."""
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
                all(each <= limit * (1 + 1e-9) for each, limit in zip(held, limits, strict=True)),
                gather=gather,
                program=program,
                timeline=timeline,
            )
        )

    def _search(self, count: int) -> None:
        """The schedule that a search finds; what it holds is weighed as for the others."""
        work, asked = self.work, self.asked
        base = work.base(2 * asked.ranks, count)
        try:
            placed = chain(split_backward(), place("linear", ranks=asked.ranks))(base)  # bytes of halves and wholes
        except ProgramError as error:
            self.refused.setdefault("found", str(error))
            return
        costs, _ = work.costs_of(placed)
        least = min(asked.limits)
        kept = 0.0 if costs.bytes is None else max(at_home(placed, costs, rank) for rank in range(asked.ranks))
        if kept >= least:
            said = f"parameters alone are {amount(kept, True)} on a rank, and it may hold {amount(least, True)}."
            self.refused.setdefault("found", said)
            return
        cap = least / work.rows_of(count) if costs.bytes is None else least - kept
        policy: Any = asked.checkpoint[0] if len(asked.checkpoint) == 1 else "auto"
        try:
            found = find(
                base,
                costs,
                ranks=asked.ranks,
                memory_cap=None if cap == math.inf else cap,
                seconds=asked.search,
                checkpoint=policy,
                without=() if cap == math.inf else REPLICATED,
                seed=self.seed,
            )
        except ProgramError as error:  # a mistake in costs is a ValueError, and none of the search
            self.refused.setdefault("found", str(error))
            return
        for gather in asked.shard:
            program = work.sharded(found.program, gather)
            self._add("found", policy, gather, program, *work.costs_of(program))
        if not found.complete:
            raise KeyboardInterrupt
