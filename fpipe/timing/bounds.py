"""Lower bounds on the time of any order of a program's ops on their ranks.

Each looks through the window of one rank: the earliest start of its first op, its work, and the shortest tail, which is
what others still have to do once it is done.

    rank r   | earliest first start |   work of the rank, in any order   | shortest tail |
                                                                         |<- elsewhere ->|
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, NamedTuple

from fpipe.program import Op, Program, building, parts_of
from fpipe.timing.costs import Costs, checked_costs
from fpipe.timing.lanes import group_ops, is_work, simulate_iterations
from fpipe.timing.memory import microbatches_held, residuals_stay_on_rank, shares_of_groups
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import DataGraph

# Bounds from memory: a rank of which only k residuals fit waits for its first backward, and holds m microbatches of
# life L in at least L m/k seconds.
#
# rank r | k forwards | nothing to do | first backward ..
#
# Both follow from the ops of one microbatch. Most microbatches of a program look alike, so times are computed once for
# each shape of a microbatch: its ops, with indices among themselves in place of positions in the program.


def makes_residuals(op: Op) -> bool:
    """Whether an op writes residuals: an F, or the R that repeats it."""
    return op.kind in "FR" and any(value.name == "res" for value in op.writes)


def memory_bounds(graph: DataGraph, caps: Sequence[int]) -> tuple[list[float], list[float]] | None:
    """Return bounds on each rank's span, and on the makespan, if each rank holds at most its cap of residuals.

    None if microbatches have too many ops to compare all pairs of them.
    """
    # 1. Group ops by microbatch, and microbatches by shape.
    positions_by_microbatch: defaultdict[int | None, list[int]] = defaultdict(list)
    for position, op in enumerate(graph.ops):
        positions_by_microbatch[op.microbatch].append(position)
    shapes = [_microbatch_shape(graph, group) for group in positions_by_microbatch.values()]
    if sum(len(shape) ** 2 for shape in {*shapes}) > _MAX_OP_PAIRS:
        return None
    times_by_shape = {shape: _backward_times(shape) for shape in {*shapes}}
    # 2. Collect, by rank, the earliest first backward, and (life, earliest start, shortest tail) of all residuals.
    first_backward = [float("inf")] * len(caps)
    lives_by_rank: list[list[tuple[float, float, float]]] = [[] for _ in caps]
    for group, shape in zip(positions_by_microbatch.values(), shapes, strict=True):
        earliest_backwards, life_of_residuals = times_by_shape[shape]
        for index, seconds in earliest_backwards.items():
            rank = shape[index].rank
            first_backward[rank] = min(first_backward[rank], seconds)
        for index, life in life_of_residuals.items():
            tail = min(graph.tails[group[holder]] for holder in shape[index].holders)
            lives_by_rank[shape[index].rank].append((life, graph.starts[group[index]], tail))
    # 3. One bound of each sort for each rank.
    spans = [_span_bound(graph, rank, caps[rank], seconds) for rank, seconds in enumerate(first_backward)]
    return spans, [_lifespan_bound(lives, caps[rank]) for rank, lives in enumerate(lives_by_rank)]


_MAX_OP_PAIRS = 20_000_000
"""Pairs of ops of a microbatch that are compared at most; a million take 0.2 s."""


class _ShapeOp(NamedTuple):
    """An op of a microbatch, which refers to the others by their index among them."""

    rank: int
    seconds: float
    is_backward: bool
    is_work: bool
    waits: tuple[tuple[int, float], ...]  # what it reads from, with the seconds on the way
    holders: tuple[int, ...]  # the ops that hold its residuals to their end


_Shape = tuple[_ShapeOp, ...]


def _microbatch_shape(graph: DataGraph, positions: Sequence[int]) -> _Shape:
    """Return the ops of a microbatch as a shape, which is equal for microbatches that are alike."""
    index_by_position = {position: index for index, position in enumerate(positions)}
    holders_by_position = _residual_holders(graph, positions)
    shape: list[_ShapeOp] = []
    for position in positions:
        op, seconds = graph.ops[position], graph.seconds[position]
        is_backward = any(part.kind in "BI" for part in op.parts or (op,))
        inside = [(source, travel) for source, travel in graph.waits[position] if source in index_by_position]
        waits = tuple((index_by_position[source], travel) for source, travel in inside)
        holders = tuple(index_by_position[holder] for holder in holders_by_position.get(position, ()))
        shape.append(_ShapeOp(op.rank, seconds, is_backward, seconds > 0 and is_work(op, seconds), waits, holders))
    return tuple(shape)


def _backward_times(shape: _Shape) -> tuple[dict[int, float], dict[int, float]]:
    """Return the earliest start of each backward, and the life of each op's residuals, by index.

    A backward's start counts from the first op of its own rank that it depends on.
    """
    # Of all work of the rank that a backward depends on, the one with the longest delay counts: that is the first.
    earliest = {index: 0.0 for index, op in enumerate(shape) if op.is_backward}
    lives: dict[int, float] = {}
    for index, op in enumerate(shape):
        if op.is_work:
            delays = _delays_after(shape, index)
            for backward in earliest:
                if shape[backward].rank == op.rank and backward in delays:
                    earliest[backward] = max(earliest[backward], delays[backward])
            ends = [delays[holder] + shape[holder].seconds for holder in op.holders if holder in delays]
            if ends:
                lives[index] = max(ends)
    return earliest, lives


def _delays_after(shape: _Shape, start: int) -> dict[int, float]:
    """Return how long after the start of one op each op that depends on it can start, in its microbatch."""
    delays = {start: 0.0}
    for index in range(start + 1, len(shape)):
        waits = [(source, travel) for source, travel in shape[index].waits if source in delays]
        if waits:
            delays[index] = max(delays[source] + shape[source].seconds + travel for source, travel in waits)
    return delays


def _residual_holders(graph: DataGraph, positions: Sequence[int]) -> dict[int, list[int]]:
    """Map each op that makes residuals to the ops that hold them to their end: B, or the W of an I."""
    # Indices 1 to 3 of an op are stage, microbatch and slice, which an I shares with its W.
    parts = _parts_at(graph, positions)
    weights = {part[1:4]: position for part, position in parts if part.kind == "W"}
    makers = {value: position for part, position in parts if makes_residuals(part) for value in part.writes}
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for part, position in parts:
        if part.kind in "BI":
            holder = weights.get(part[1:4], position) if part.kind == "I" else position
            for value in part.reads:
                if value.name == "res" and value in makers:
                    holders[makers[value]].append(holder)
    return holders


def _parts_at(graph: DataGraph, positions: Sequence[int]) -> list[tuple[Op, int]]:
    """Return (op, position) for each op at these positions, and for each part of a PAIR."""
    return [(part, position) for position in positions for part in graph.ops[position].parts or (graph.ops[position],)]


def _span_bound(graph: DataGraph, rank: int, cap: int, first_backward: float) -> float:
    """Return the work of a rank plus the time that it idles at least before its first backward can start.

    Until then it can only run `cap` of the ops that make residuals, at best the longest, and ops that are no backwards.
    """
    row = graph.rank_ops[rank]
    work = sum(graph.seconds[position] for position in row)
    if first_backward == float("inf"):
        return work
    backward_positions = _backward_positions(graph, row)
    # Ops that are neither a forward nor a backward, such as sums, may all run before the first backward.
    forward_seconds: list[float] = []
    neutral_seconds: list[float] = []
    for position in row:
        if makes_residuals(graph.ops[position]):
            forward_seconds.append(graph.seconds[position])
        elif position not in backward_positions:
            neutral_seconds.append(graph.seconds[position])
    forward_seconds.sort(reverse=True)
    return work + max(0.0, first_backward - sum(forward_seconds[:cap]) - sum(neutral_seconds))


def _backward_positions(graph: DataGraph, positions: Sequence[int]) -> set[int]:
    """Return which ops at some positions are backwards: B, I, and the W of such an I."""
    parts = _parts_at(graph, positions)
    split_backwards = {part[1:4] for part, _ in parts if part.kind == "I"}
    return {
        position for part, position in parts if part.kind in "BI" or (part.kind == "W" and part[1:4] in split_backwards)
    }


def _lifespan_bound(lives: list[tuple[float, float, float]], cap: int) -> float:
    """Return the makespan that holding all residuals of a rank asks for, if only `cap` fit at once.

    Of any n that live L seconds or more, ceil(n/cap) follow one another; and all together fill `cap` places in time.
    """
    if not lives:
        return 0.0
    head, tail = min(start for _, start, _ in lives), min(tail for _, _, tail in lives)
    sorted_lives = sorted((life for life, _, _ in lives), reverse=True)
    # n runs over the counts of lives that are at least L, for each L that occurs.
    counts = [n for n, (life, shorter) in enumerate(pairwise([*sorted_lives, -1.0]), 1) if life > shorter]
    sequential = max(sorted_lives[n - 1] * -(-n // cap) for n in counts)
    return head + max(sequential, sum(sorted_lives) / cap) + tail


@dataclass(frozen=True)
class Bound:
    """A lower bound of one sort, for each rank.

    Attributes:
        name: "head", "fused", "drain", "warm-up" or "lifespan".
        ranks: seconds of makespan that the window of each rank asks for; the largest counts.
        spans: the same for the span of each rank, where the bound is about that.
    """

    name: str
    ranks: tuple[float, ...]
    spans: tuple[float, ...] = ()

    @property
    def makespan(self) -> float:
        """The bound on the makespan, in seconds: the largest over all ranks."""
        return max(self.ranks, default=0.0)

    @property
    def rank(self) -> int:
        """The rank whose window asks for most."""
        return max(range(len(self.ranks)), key=self.ranks.__getitem__, default=0)


@dataclass(frozen=True)
class Bounds:
    """Five lower bounds on the time of any order of a program's ops; the largest one binds.

    Attributes:
        head, fused, drain, warm_up, lifespan: the five.
        note: why the last two ask for nothing of memory, where they do not; else "".

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(8), fpipe.schedules.one_f_one_b(4))(fpipe.program(4))
    >>> lower_bounds = fpipe.bounds(program)
    >>> print(lower_bounds)
    bound     makespan  rank
    head            27     3
    fused           33     3  binds
    drain           33     3
    warm-up         33     3
    lifespan        33     3
    >>> lower_bounds.gap(fpipe.simulate(program))
    0.0
    """

    head: Bound
    fused: Bound
    drain: Bound
    warm_up: Bound
    lifespan: Bound
    note: str = ""

    def __repr__(self) -> str:
        return f"<Bounds: makespan >= {self.makespan:g} ({self.binding.name}), span >= {self.span:g}>"

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The five bounds, in the order in which they are printed."""
        return self.head, self.fused, self.drain, self.warm_up, self.lifespan

    @property
    def binding(self) -> Bound:
        """The bound that asks for most; of equal ones the first."""
        return max(self.bounds, key=lambda bound: bound.makespan)

    @property
    def makespan(self) -> float:
        """No makespan is below this, in seconds."""
        return self.binding.makespan

    @property
    def span(self) -> float:
        """Lower bound of the span, in seconds."""
        return max((span for bound in self.bounds for span in bound.spans), default=0.0)

    def gap(self, timeline: Timeline, objective: Literal["makespan", "span"] = "makespan") -> float:
        """How far above the bound a timeline is, as a share of the bound: 0 is optimal, 0.1 takes a tenth longer."""
        if objective not in ("makespan", "span"):
            raise ValueError(f'a gap is of "makespan" or "span", found {objective!r}.')
        bound, seconds = getattr(self, objective), getattr(timeline, objective)
        # A bound that is met, and is added up in another order, may differ in the last digit.
        return max(0.0, seconds / bound - 1) if bound else 0.0

    def __str__(self) -> str:
        rows = [f"{'bound':9} {'makespan':>8} {'rank':>5}"]
        for bound in self.bounds:
            mark = "  binds" if bound is self.binding else ""
            rows.append(f"{bound.name:9} {bound.makespan:>8g} {bound.rank:>5}{mark}")
        return "\n".join([*rows, *([self.note] if self.note else [])])


def bounds(
    program: Program, costs: Costs | None = None, *, memory_cap: float | Sequence[float] | None = None
) -> Bounds:
    """Compute lower bounds on makespan and span over all orders of a program's ops, where each stays on its rank.

    With p ranks, m microbatches, T = F+B+W and equal stages in a row (B is the input gradient here), they are:

    - head: (p-1)(F+c) + mT. The last rank cannot start before the first microbatch is there.
    - fused: (m+p-1)T + 2(p-1)c. With full backwards the last one still goes all the way back.
    - drain: (m+p-1)(F+B) + W + 2(p-1)c. So do input gradients, whenever weight gradients are made.
    - warm-up: the span of rank r is mT + max(0, (p-1-r)(B+2c) + (p-r-k)F), if it holds at most k microbatches: until
      its first backward can start it has no more than k forwards to do.
    - lifespan: L ceil(m/k) with L = pF + pB + W + 2(p-1)c. A microbatch is held so long on rank 0.

    For stages that are not alike, in any graph and placement, the longest paths through the data take the place of the
    formulas. Takes time in proportion to ops and, for each kind of microbatch, to the square of stages.

    Args:
        program: any; its order only says how much is held.
        costs: as for `simulate`.
        memory_cap: microbatches that a rank (or each rank) may hold; by default what this program holds.

    Returns:
        `Bounds`. Where residuals leave their rank (offload), or there are thousands of stages, the last two ask for
        nothing of memory, and its note says so.

    Raises:
        ValueError: a cap below what one op needs; costs that are missing.

    Source: each follows from one rank's window; head and drain for linear placement are in Qi et al. 2024, section 2.

    >>> import fpipe
    >>> lower_bounds = fpipe.bounds(fpipe.chain(fpipe.split(8), fpipe.schedules.zb_h1(4))(fpipe.program(4)))
    >>> lower_bounds.makespan, lower_bounds.span
    (27.0, 27.0)
    """
    costs = checked_costs(costs, program)
    with building():
        # 1. From data alone: the window of each rank's ops, and of its ops without W, which can be put off.
        graph = DataGraph(program, costs)
        ranks = range(program.ranks)
        windows = [graph.window(rank) for rank in ranks]
        without_weights = [graph.window(rank, without_weights=True) for rank in ranks]
        # 2. From memory. Without it warm-up is the work of a rank, and lifespan 0.
        caps = _residual_caps(program, costs, memory_cap)
        memory = memory_bounds(graph, caps) if caps else None
        spans, lives = memory or ([window[1] for window in windows], [0.0 for _ in ranks])
        reason = "a microbatch has too many ops" if caps else "residuals leave their rank"
        return Bounds(
            Bound("head", tuple(first_start + work for first_start, work, _ in windows)),
            Bound("fused", tuple(map(sum, windows))),
            Bound("drain", tuple(map(sum, without_weights))),
            Bound("warm-up", tuple(span + graph.idle_around(rank) for rank, span in enumerate(spans)), tuple(spans)),
            Bound("lifespan", tuple(lives)),
            "" if memory else f"warm-up and lifespan leave memory out: {reason}.",
        )


def _residual_caps(program: Program, costs: Costs, memory_cap: Any) -> list[int]:
    """Return how many ops' residuals each rank may hold; an empty list if residuals leave their rank."""
    groups = group_ops(program.ops)
    shares = shares_of_groups(program, groups)
    if not residuals_stay_on_rank(program, groups):
        return []
    caps_in_microbatches: Sequence[Any]
    if memory_cap is None:
        starts, ends, *_ = next(simulate_iterations(program, costs))
        caps_in_microbatches, _ = microbatches_held(program, starts, ends, list, groups)
    elif isinstance(memory_cap, Sequence) and not isinstance(memory_cap, str):
        if len(memory_cap) != program.ranks:
            raise ValueError(f"memory_cap lists {len(memory_cap)} caps for {program.ranks} ranks.")
        caps_in_microbatches = memory_cap
    else:
        caps_in_microbatches = [memory_cap] * program.ranks
    for cap in caps_in_microbatches:
        if not (isinstance(cap, Real) and float(cap) >= 0):
            raise ValueError(f"memory_cap is in microbatches, at least 0; found {cap!r}.")
    # A cap may be a peak, which was divided by the share: 1e-9 keeps the product from rounding below an integer.
    pairs = zip(caps_in_microbatches, shares, strict=True)
    caps = [int(min(cap * share + 1e-9, len(program.ops))) for cap, share in pairs]
    for rank in {op.rank for op in parts_of(program.ops) if makes_residuals(op)}:
        if caps[rank] < 1:
            remedy = f"where one op alone holds {1 / shares[rank]:g}; give it at least that"
            raise ValueError(f"memory_cap is {caps_in_microbatches[rank]!r} microbatches on rank {rank}, {remedy}.")
    return caps
