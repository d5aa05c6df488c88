"""Timelines: starts and ends of all ops, and what follows from them: idle times, memory, the critical path.

A timeline stores what simulating has found, and computes all else when asked: most callers want a few numbers of many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter

from fpipe.program import HtmlRepr, Op, Program, Value, building
from fpipe.timing.amounts import format_amount
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import (
    Transfer,
    is_work,
    posts_receives_ahead,
    run_lanes,
    simulate_iterations,
    updates_by_input,
    with_timed_transfers,
)
from fpipe.timing.memory import HOLDERS, MemoryChanges, MemoryStates, memory_states, residual_changes
from fpipe.timing.waiting import CauseFinder, Event, PathStep, Wait, sorted_transfers
from fpipe.transforms.shard import forwards_per_microbatch
from fpipe.transforms.update import is_post_validated, with_waiting_updates

_new = tuple.__new__


@dataclass(frozen=True)
class Timeline(HtmlRepr):
    """A step in time: when each op runs, in seconds from the first.

    `makespan` is the last end of work; `span` the longest any rank takes from its first start to its last end (what the
    zero-bubble papers report). `bubble` and `bubble_span` are the idle share of each. `peak` is, per rank, the most
    microbatches' activations held at once (one microbatch of all the rank's stages is 1), from the start of F (or R) to
    the end of W or of a full backward; `peak_released` lets go of them at the end of I. With `Costs(bytes=...)`, and in
    a measured timeline (`build(record=True)`), peaks are bytes: of distinct storages alive, as a walk down the program
    holds them, copies on the ranks of their readers too, whether their transfers are ops or not. `delivered`: when the
    last result reached its last home; sums that ranks exchange for it take no rank's time.

    Attributes:
        ops, starts, ends: every op and when it runs, in the order of the program, one iteration after the other.
        rounds: how many iterations these are.
        ranks: how many there are.
        program, costs: what was simulated; a measured timeline has none.
        simulated_transfers, memory_changes, result_arrivals: by-products of the simulation, from which `transfers`,
            `memory_curve` and `delivered` are read; None where these are computed when asked for.

    >>> import fpipe
    >>> print(fpipe.simulate(fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2))(fpipe.program(2))))
    makespan 15, span 15, bubble 20.0%, peak per rank [4, 4]
    """

    ops: tuple[Op, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    ranks: int
    peak: tuple[float, ...]
    peak_released: tuple[float, ...]
    rounds: int = 1
    program: Program | None = field(default=None, repr=False, compare=False)
    costs: Costs | None = field(default=None, repr=False, compare=False)
    simulated_transfers: tuple[tuple[Transfer, ...], ...] | None = field(default=None, repr=False, compare=False)
    memory_changes: MemoryChanges | None = field(default=None, repr=False, compare=False)
    result_arrivals: Mapping[tuple[Value, int], float] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        text = str(self)
        return f"<Timeline: {text if len(text) <= 400 else f'{text[:200]} ... {text[-200:]}'}>"

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """(op, start, end) of every op.

        >>> import fpipe
        >>> fpipe.simulate(fpipe.program(1)).events[1][1:]
        (1.0, 3.0)
        """
        with building():
            return tuple(map(_new, repeat(Event), zip(self.ops, self.starts, self.ends, strict=True)))

    @cached_property
    def delivered(self) -> float:
        """When the last result is at its last home, in seconds; 0 where nothing is known of homes."""
        if self.result_arrivals is not None:
            return max(self.result_arrivals.values(), default=0.0)
        if self.program is None or self.costs is None:
            return 0.0
        # Without results this was simulated on main lanes alone, where all links have one latency.
        latency = self.costs.latency(0, 0)
        arrivals: list[float] = []
        for output in self.program.outputs:
            writer = self.program.writer[output.value]
            if writer >= 0:
                is_remote = any(rank != self.ops[writer].rank for rank in output.homes)
                arrivals.append(self.ends[writer] + latency * is_remote)
        return max(arrivals, default=0.0)

    @cached_property
    def _work_and_span(self) -> list[tuple[float, float, float]]:
        return _work_by_rank(self.ops, self.starts, self.ends, self.ranks)

    @cached_property
    def makespan(self) -> float:
        """Last end of work over all ranks, in seconds."""
        return max((last_end for _, _, last_end in self._work_and_span), default=0.0)

    @cached_property
    def span(self) -> float:
        """Longest time of a rank from its first start to its last end, in seconds."""
        return max((last_end - first_start for _, first_start, last_end in self._work_and_span), default=0.0)

    @cached_property
    def idle(self) -> float:
        """Makespan less the mean work of a rank, in seconds."""
        return self.makespan - self._mean_work

    @cached_property
    def bubble(self) -> float:
        """Idle share of the makespan."""
        return self.idle / self.makespan if self.makespan else 0.0

    @cached_property
    def bubble_span(self) -> float:
        """Idle share of the span."""
        return 1 - self._mean_work / self.span if self.span else 0.0

    @cached_property
    def _mean_work(self) -> float:
        """Mean work of the ranks that work at all, which a host that only keeps copies does not."""
        work = [seconds for seconds, _, _ in self._work_and_span if seconds]
        return sum(work) / len(work) if work else 0.0

    @cached_property
    def iterations(self) -> tuple[float, ...]:
        """When the work of each iteration ends, in seconds."""
        size = len(self.ops) // self.rounds
        rows = (slice(size * n, size * (n + 1)) for n in range(self.rounds))
        return tuple(makespan_of(self.ops[row], self.starts[row], self.ends[row], self.ranks) for row in rows)

    @cached_property
    def steady(self) -> float:
        """Seconds that an iteration takes in a long row: from the last but one end to the last end.

        Of one iteration alone, its makespan.

        >>> import fpipe
        >>> rows = ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2".split(), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2".split()]
        >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.from_table(rows), fpipe.merge())(fpipe.program(2))
        >>> fpipe.simulate(program).steady, fpipe.simulate(program, iterations=3).steady  # the span
        (10.0, 9.0)
        """
        return self.makespan if self.rounds == 1 else self.iterations[-1] - self.iterations[-2]

    @cached_property
    def rerun_makespan(self) -> float | None:
        """Makespan of all steps of a call, in seconds, if they run again; None if no norm is checked.

        With `update(validate="after")`, a norm that turns out to clip costs this in addition: all steps of the call run
        again, with updates that wait for their norms.

        >>> import fpipe
        >>> step = fpipe.chain(fpipe.split(8), fpipe.schedules.zb_h2(4), fpipe.merge(outputs=False))(fpipe.program(4))
        >>> program = fpipe.chain(fpipe.update("AdamW", clip=1.0, validate="after"), fpipe.steps(4))(step)
        >>> timeline = fpipe.simulate(program, fpipe.Costs(update=0.5))
        >>> timeline.makespan, timeline.rerun_makespan, round(timeline.break_even_share, 3)
        (101.0, 110.0, 0.082)
        """
        if self.program is None or self.costs is None or not is_post_validated(self.program):
            return None
        program = with_waiting_updates(self.program)
        iterations = [*simulate_iterations(program, self.costs, self.rounds)]
        return max(makespan_of(program.ops, iteration.starts, iteration.ends, self.ranks) for iteration in iterations)

    @property
    def break_even_share(self) -> float | None:
        """The share of calls that may run again before it is cheaper to wait for each norm."""
        return None if not self.rerun_makespan else 1 - self.makespan / self.rerun_makespan

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers: (value, from, to, start, end), by time, whether SENDs are ops or not.

        >>> import fpipe
        >>> fpipe.simulate(fpipe.place("linear")(fpipe.program(2)), fpipe.Costs(transfer=0.5)).transfers[0]
        Transfer(value=y[0,0], source=0, target=1, start=1.0, end=1.5)
        """
        return sorted_transfers(chain.from_iterable(self._transfers_by_iteration))

    @cached_property
    def _transfers_by_iteration(self) -> tuple[tuple[Transfer, ...], ...]:
        if self.simulated_transfers is not None or self.program is None or self.costs is None:
            return self.simulated_transfers or ()
        iterations = simulate_iterations(self.program, self.costs, self.rounds)
        return tuple(tuple(iteration.transfers) for iteration in iterations)

    @cached_property
    def _cause_finder(self) -> CauseFinder:
        if self.costs is None or self.program is None:
            return CauseFinder(self.events, self._transfers_by_iteration, {}, Costs())
        events, transfers, program = self.events, self._transfers_by_iteration, self.program
        # SENDs and RECVs that take time are work of their ranks, on which others wait. This timeline has no events for
        # those that the program does not name, so it is simulated again with all of them.
        if self.costs.send or self.costs.receive:
            are_ahead, program = posts_receives_ahead(program), with_timed_transfers(program, self.costs)
            iterations = [*run_lanes(program, self.costs, self.rounds, are_ahead)]
            rows = chain.from_iterable(zip(program.ops, run.starts, run.ends, strict=True) for run in iterations)
            events = [Event(*row) for row in rows]
            transfers = [iteration.transfers for iteration in iterations]
        return CauseFinder(events, transfers, updates_by_input(program), self.costs)

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """The chain of ops and transfers, each held back by the one before it, that ends with the makespan.

        >>> import fpipe
        >>> timeline = fpipe.simulate(fpipe.place("linear")(fpipe.program(2)), fpipe.Costs(transfer=0.5))
        >>> print(*timeline.critical_path, sep="\\n")
                 0          1  0F0
                 1        1.5  y[0,0] 0 > 1             needs it
               1.5        2.5  1F0                      needs it
               2.5        4.5  1B0                      same rank
               4.5          5  dx[1,0] 1 > 0            needs it
                 5          7  0B0                      needs it
        """
        return self._cause_finder.path()

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Idle times, rank by rank, and for each the op of another rank that it waits for.

        >>> import fpipe
        >>> timeline = fpipe.simulate(fpipe.place("linear")(fpipe.program(2)))
        >>> [(wait.rank, wait.start, wait.end, wait.op.cell, wait.writer.cell) for wait in timeline.waits if wait.op]
        [(0, 1.0, 4.0, '0B0', '1B0'), (1, 0.0, 1.0, '1F0', '0F0')]
        """
        return self._cause_finder.waits(self.ranks, self.makespan)

    @property
    def in_bytes(self) -> bool:
        """Whether memory is counted in bytes, rather than microbatches."""
        return self.memory_changes is not None

    def memory_curve(self, rank: int) -> list[tuple[float, float]]:
        """Return the memory of a rank in the first iteration: (seconds, amount) from each change on, as `peak` counts.

        >>> import fpipe
        >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1))(fpipe.program(1))
        >>> fpipe.simulate(program).memory_curve(0)
        [(0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0)]
        """
        totals = [(seconds, sum(amounts.values(), 0.0)) for seconds, amounts in self.memory_by_holder(rank)]
        pairs = zip(totals, [(0.0, 0.0), *totals], strict=False)
        return [total for total, previous in pairs if total[1] != previous[1]]

    def memory_by_holder(self, rank: int) -> list[tuple[float, dict[str, float]]]:
        """Return the memory of a rank by what holds it: (seconds, amounts by holder) from each change on.

        In bytes holders are "weights", "optimizer", "gradients", "residuals" and, for all else, "in flight". Arguments
        of the step, such as parameters, do not count: weights are gathered, received or updated ones.

        >>> import fpipe
        >>> costs = fpipe.Costs(bytes={"y": 0, "res": 8, "loss": 1, "g": 4})
        >>> fpipe.simulate(fpipe.program(1), costs).memory_by_holder(0)[-1]
        (3.0, {'gradients': 4.0, 'in flight': 1.0})
        """
        if rank not in range(self.ranks):
            raise ValueError(f"ranks are 0..{self.ranks - 1}, found {rank!r}.")
        return [
            (seconds, {name: amount for name, amount in zip(HOLDERS, amounts, strict=True) if amount})
            for seconds, amounts in self._memory_states[rank]
        ]

    @property
    def excess_bytes(self) -> dict[int, float]:
        """Bytes by which each rank that holds too many exceeds its memory on the cluster, without parameters.

        >>> import fpipe
        >>> costs = fpipe.Costs(bytes={name: 8e9 * (name == "res") for name in "x t w y dx g loss res".split()})
        >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(1))(fpipe.program(1))
        >>> fpipe.simulate(program, costs, cluster="1 rank; rank 0 memory 20GB").excess_bytes
        {0: 12000000000.0}
        """
        if self.costs is None or self.costs.cluster is None or self.costs.bytes is None:
            raise ValueError("excess memory needs a cluster and bytes: simulate(cluster=), Costs(bytes=).")
        pairs = enumerate(zip(self.peak, self.costs.cluster.memory, strict=False))
        return {rank: peak - memory for rank, (peak, memory) in pairs if peak > memory}

    @cached_property
    def _memory_states(self) -> list[MemoryStates]:
        # One walk over the ops finds the changes of all ranks; a walk for each made 3/4 of the time of a large picture.
        if self.memory_changes is not None:
            return memory_states(self.memory_changes, [1] * self.ranks)
        if self.program is None:
            return [[] for _ in range(self.ranks)]
        changes = residual_changes(self.program, self.starts, self.ends, self._transfers_by_iteration[0])
        return memory_states(changes, forwards_per_microbatch(self.program))

    def __str__(self) -> str:
        peaks = ", ".join(format_amount(peak, self.in_bytes) for peak in self.peak)
        rounds_text = f"{self.rounds} iterations, each {self.steady:g}, " if self.rounds > 1 else ""
        rerun, break_even = self.rerun_makespan, self.break_even_share
        redo_text = "" if rerun is None else f" ({rerun:g} to do it again: pays below {break_even:.1%} of calls)"
        times = f"makespan {self.makespan:g}{redo_text}, span {self.span:g}, bubble {self.bubble:.1%}"
        return f"{rounds_text}{times}, peak per rank [{peaks}]"


def makespan_of(ops: Sequence[Op], starts: Sequence[float], ends: Sequence[float], ranks: int) -> float:
    """Return the last end of work over all ranks, in seconds."""
    return max((last_end for _, _, last_end in _work_by_rank(ops, starts, ends, ranks)), default=0.0)


def _work_by_rank(
    ops: Sequence[Op], starts: Sequence[float], ends: Sequence[float], ranks: int
) -> list[tuple[float, float, float]]:
    """Return the work, first start and last end of each rank."""
    totals_by_rank = [[0.0, float("inf"), 0.0] for _ in range(ranks)]
    kind_and_options = itemgetter(0, 8)
    # Whether an op is work follows from its kind, its `options` and whether it takes time. So it is asked once for each
    # kind and `options`, without time and with some, and not for each of a million ops.
    samples = {kind_and_options(op): op for op in ops}
    is_work_by_kind = {kind: (is_work(op, 0), is_work(op, 1)) for kind, op in samples.items()}
    for op, start, end in zip(ops, starts, ends, strict=True):
        if is_work_by_kind[kind_and_options(op)][end > start]:
            totals = totals_by_rank[op[4]]  # index 4 of an op is its rank
            totals[0] += end - start
            if start < totals[1]:
                totals[1] = start
            if end > totals[2]:
                totals[2] = end
    return [(work, min(first_start, last_end), last_end) for work, first_start, last_end in totals_by_rank]
