"""How short can it be: lower bounds on the time of any order of a program's ops on their ranks.

Each looks through the window of one rank: when the first of its ops can start at the earliest, what it has to work,
and what is left to do, at the least, when it is done with that.

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

from fpipe.program import Op, Program, building, parts_of, the_program
from fpipe.timing.costs import Costs, the_costs
from fpipe.timing.lanes import is_work, op_groups, walk
from fpipe.timing.memory import known_shares, residuals_stay, units_held
from fpipe.timing.timeline import Timeline
from fpipe.timing.waiting import DataGraph

# Bounds from memory: how long a rank waits, and a microbatch is held, where only so many residuals fit.
#
# rank r | forwards that fit | nothing to do | first backward ... at most k microbatches of life L: L m/k


def makes_residuals(op: Op) -> bool:
    """Whether an op makes residuals."""
    return op.kind in "FR" and any(value.name == "res" for value in op.writes)


def bounds_of_memory(graph: DataGraph, most: Sequence[int]) -> tuple[list[float], list[float]] | None:
    """For each rank what holding at most so many residuals asks for: of its span, and of the makespan. None where that
    takes too long."""
    positions: defaultdict[int | None, list[int]] = defaultdict(list)
    for position, op in enumerate(graph.ops):
        positions[op.microbatch].append(position)
    first_backward = [float("inf")] * len(most)
    lives: list[list[tuple[float, float, float]]] = [[] for _ in most]
    shapes = [_shape(graph, group) for group in positions.values()]
    if sum(len(shape) ** 2 for shape in {*shapes}) > _MOST_PAIRS:
        return None
    times = {shape: _times(shape) for shape in {*shapes}}
    for group, shape in zip(positions.values(), shapes, strict=True):
        earliest_backwards, life_of_residuals = times[shape]
        for place, seconds in earliest_backwards.items():
            rank = shape[place].rank
            first_backward[rank] = min(first_backward[rank], seconds)
        for place, seconds in life_of_residuals.items():
            tail = min(graph.tails[group[user]] for user in shape[place].users)
            lives[shape[place].rank].append((seconds, graph.starts[group[place]], tail))
    spans = [_span(graph, rank, most[rank], first) for rank, first in enumerate(first_backward)]
    return spans, [_lifespan(row, most[rank]) for rank, row in enumerate(lives)]


_MOST_PAIRS = 20_000_000  # of ops of a microbatch; a million take .2 s


class _ShapeOp(NamedTuple):
    """An op of a microbatch, whose others it names by their place among them."""

    rank: int
    seconds: float
    is_backward: bool
    is_work: bool
    needs: tuple[tuple[int, float], ...]
    users: tuple[int, ...]


_Shape = tuple[_ShapeOp, ...]


def _shape(graph: DataGraph, group: Sequence[int]) -> _Shape:
    """The ops of a microbatch, equal for microbatches that are alike."""
    places = {position: place for place, position in enumerate(group)}
    users = _users(graph, group)
    shape: list[_ShapeOp] = []
    for position in group:
        op, seconds = graph.ops[position], graph.seconds[position]
        is_backward = any(part.kind in "BI" for part in op.parts or (op,))
        needs = tuple((places[source], way) for source, way in graph.needs[position] if source in places)
        users_of_op = tuple(places[user] for user in users.get(position, ()))
        shape.append(_ShapeOp(op.rank, seconds, is_backward, seconds > 0 and is_work(op, seconds), needs, users_of_op))
    return tuple(shape)


def _times(shape: _Shape) -> tuple[dict[int, float], dict[int, float]]:
    """For each backward how long after the first op of its rank that it needs it can start, and for each op that makes
    residuals how long they live."""
    earliest = {place: 0.0 for place, op in enumerate(shape) if op.is_backward}
    lives: dict[int, float] = {}
    for place, op in enumerate(shape):
        if op.is_work:
            delays = _delays(shape, place)
            for backward in earliest:
                if shape[backward].rank == op.rank and backward in delays:
                    earliest[backward] = max(earliest[backward], delays[backward])
            ends = [delays[user] + shape[user].seconds for user in op.users if user in delays]
            if ends:
                lives[place] = max(ends)
    return earliest, lives


def _delays(shape: _Shape, start: int) -> dict[int, float]:
    """How long after the start of one op each op of its microbatch that needs it can start."""
    delays = {start: 0.0}
    for place in range(start + 1, len(shape)):
        ways = [delays[source] + shape[source].seconds + way for source, way in shape[place].needs if source in delays]
        if ways:
            delays[place] = max(ways)
    return delays


def _users(graph: DataGraph, group: Sequence[int]) -> dict[int, list[int]]:
    """For each op that makes residuals, the ops that hold them to their end: B, or the W of an I."""
    parts = _parts(graph, group)
    weights = {part[1:4]: position for part, position in parts if part.kind == "W"}
    makers = {value: position for part, position in parts if makes_residuals(part) for value in part.writes}
    users: defaultdict[int, list[int]] = defaultdict(list)
    for part, position in parts:
        if part.kind in "BI":
            user = weights.get(part[1:4], position) if part.kind == "I" else position
            for value in part.reads:
                if value.name == "res" and value in makers:
                    users[makers[value]].append(user)
    return users


def _parts(graph: DataGraph, positions: Sequence[int]) -> list[tuple[Op, int]]:
    """The ops at some positions, a PAIR as its parts, each with its position."""
    return [(part, position) for position in positions for part in graph.ops[position].parts or (graph.ops[position],)]


def _span(graph: DataGraph, rank: int, most: int, first_backward: float) -> float:
    """The work of a rank, and how long it has nothing to do before its first backward can start."""
    ops, seconds, row = graph.ops, graph.seconds, graph.rows[rank]
    work = sum(seconds[position] for position in row)
    if first_backward == float("inf"):
        return work
    parts = _parts(graph, row)
    halved = {part[1:4] for part, _ in parts if part.kind == "I"}
    behind = {at for part, at in parts if part.kind in "BI" or (part.kind == "W" and part[1:4] in halved)}
    holding = sorted((seconds[position] for position in row if makes_residuals(ops[position])), reverse=True)
    rest = (position for position in row if position not in behind and not makes_residuals(ops[position]))
    return work + max(0.0, first_backward - sum(holding[:most]) - sum(seconds[position] for position in rest))


def _lifespan(lives: list[tuple[float, float, float]], most: int) -> float:
    """How long it takes to hold so many residuals for so long, if only `most` fit at once.

    Of any n that live L seconds or more, ceil(n/most) follow each other; and all together fill `most` places.
    """
    if not lives:
        return 0.0
    head, tail = min(start for _, start, _ in lives), min(tail for _, _, tail in lives)
    longest = sorted((life for life, _, _ in lives), reverse=True)
    last = [n for n, (life, shorter) in enumerate(pairwise([*longest, -1.0]), 1) if life > shorter]
    rows = max(longest[n - 1] * -(-n // most) for n in last)
    return head + max(rows, sum(longest) / most) + tail


@dataclass(frozen=True)
class Bound:
    """One lower bound, by rank.

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
        """Seconds that the makespan has at least."""
        return max(self.ranks, default=0.0)

    @property
    def rank(self) -> int:
        """The rank whose window asks for most."""
        return max(range(len(self.ranks)), key=self.ranks.__getitem__, default=0)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on any order of a program's ops, and which of them binds.

    Attributes:
        head, fused, drain, warm_up, lifespan: the five.
        note: why the last two ask for nothing of memory, where they do not; else "".

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(8), fpipe.schedules.one_f_one_b(4))(fpipe.program(4))
    >>> found = fpipe.bounds(program)
    >>> print(found)
    bound     makespan  rank
    head            27     3
    fused           33     3  binds
    drain           33     3
    warm-up         33     3
    lifespan        33     3
    >>> found.gap(fpipe.simulate(program))
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
    def all(self) -> tuple[Bound, ...]:
        """The five, in the order in which they are printed."""
        return self.head, self.fused, self.drain, self.warm_up, self.lifespan

    @property
    def binding(self) -> Bound:
        """The one that asks for most; of equal ones the first."""
        return max(self.all, key=lambda bound: bound.makespan)

    @property
    def makespan(self) -> float:
        """No makespan is below this, in seconds."""
        return self.binding.makespan

    @property
    def span(self) -> float:
        """No span is below this, in seconds."""
        return max((span for bound in self.all for span in bound.spans), default=0.0)

    def gap(self, timeline: Timeline, of: Literal["makespan", "span"] = "makespan") -> float:
        """How far above the bound a timeline is, as a share of the bound: 0 is optimal, 0.1 takes a tenth longer."""
        if of not in ("makespan", "span"):
            raise ValueError(f'a gap is of the "makespan" or the "span", found {of!r}.')
        least, found = getattr(self, of), getattr(timeline, of)
        return found / least - 1 if least else 0.0

    def __str__(self) -> str:
        rows = [f"{'bound':9} {'makespan':>8} {'rank':>5}"]
        for bound in self.all:
            mark = "  binds" if bound is self.binding else ""
            rows.append(f"{bound.name:9} {bound.makespan:>8g} {bound.rank:>5}{mark}")
        return "\n".join([*rows, *([self.note] if self.note else [])])


def bounds(
    program: Program, costs: Costs | None = None, *, memory_cap: float | Sequence[float] | None = None
) -> Bounds:
    """Lower bounds on makespan and span over all orders of a program's ops, where each stays on its rank.

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
    >>> found = fpipe.bounds(fpipe.chain(fpipe.split(8), fpipe.schedules.zb_h1(4))(fpipe.program(4)))
    >>> found.makespan, found.span
    (27.0, 27.0)
    """
    program = the_program(program)
    costs = the_costs(costs, program)
    with building():
        graph = DataGraph(program, costs)
        ranks = range(program.ranks)
        windows = [graph.window(rank) for rank in ranks]
        without_weights = [graph.window(rank, without_weights=True) for rank in ranks]
        most = _caps(program, costs, memory_cap)
        memory = bounds_of_memory(graph, most) if most else None
        spans, lives = memory or ([window[1] for window in windows], [0.0 for _ in ranks])
        why = "a microbatch has too many ops" if most else "residuals leave their rank"
        return Bounds(
            Bound("head", tuple(first + work for first, work, _ in windows)),
            Bound("fused", tuple(map(sum, windows))),
            Bound("drain", tuple(map(sum, without_weights))),
            Bound("warm-up", tuple(span + graph.around(rank) for rank, span in enumerate(spans)), tuple(spans)),
            Bound("lifespan", tuple(lives)),
            "" if memory else f"warm-up and lifespan leave memory out: {why}.",
        )


def _caps(program: Program, costs: Costs, memory_cap: Any) -> list[int]:
    """The bundles of residuals that each rank may hold; nothing if they do not stay where they are made."""
    groups = op_groups(program.ops)
    share = known_shares(program, groups)
    if not residuals_stay(program, groups):
        return []
    held: Sequence[Any]
    if memory_cap is None:
        starts, ends, *_ = next(walk(program, costs))
        held, _ = units_held(program, starts, ends, list, groups)
    elif isinstance(memory_cap, Sequence) and not isinstance(memory_cap, str):
        if len(memory_cap) != program.ranks:
            raise ValueError(f"memory_cap lists {len(memory_cap)} caps for {program.ranks} ranks; give one a rank.")
        held = memory_cap
    else:
        held = [memory_cap] * program.ranks
    for most in held:
        if not (isinstance(most, Real) and float(most) >= 0):
            raise ValueError(f"memory_cap is in microbatches, at least what one op holds; found {most!r}.")
    caps = [int(min(most * count + 1e-9, len(program.ops))) for most, count in zip(held, share, strict=True)]
    for rank in {op.rank for op in parts_of(program.ops) if makes_residuals(op)}:
        if caps[rank] < 1:
            least = f"where one op alone holds {1 / share[rank]:g}; give it at least that"
            raise ValueError(f"memory_cap is {held[rank]!r} microbatches on rank {rank}, {least}.")
    return caps
