"""A chain of stages as numbers, and the makespan of an order of it, which a search asks for a thousand times.

The ops of a chain of S stages are tracks: track s is the forward of stage s, track S+s its input gradient, track 2S+s
its weight gradient. Each takes the microbatches in turn, so the order of a rank is a *row* of tracks and no more:

    rank 0 | 0F0 0F1 0I0 0W0 0I1 0W1          <->          0 0 S 2S S 2S

A row may leave its W out. They fill the gaps then: a W runs where the rank would wait (or, with patience below 1,
would wait for a part of it), and where the next forward finds no room.

`play` stands apart from `orders/play.py` because of that last rule: it chooses the places of the W as it goes, which
there are given. It is held to the lanes by a law too. For 1,536 ops it takes 0.5 ms, where `list_schedule` takes 3.4
times and `simulate` 3.1 times as long, after 11 ms to build a program first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Literal

from fpipe.program import Op, Program, ProgramError, Value, is_exchange, parts_of
from fpipe.timing.costs import Costs
from fpipe.timing.waiting import way
from fpipe.transforms.cells import Key

TrackRow = list[int]
Objective = Literal["makespan", "span"]
NEVER = (math.inf, math.inf)
"""The makespan and span of an order that does not come to an end."""


@dataclass(frozen=True)
class LinearPipeline:
    """A chain of stages on ranks, its costs and its memory.

    Args:
        seconds: of each track's op, 3S numbers.
        ways: seconds that what a track's op reads takes to its rank; 2S numbers, since a W reads what is there.
        caps: the most activations each rank may hold; the forward of one stage makes 1.
        kept: the share of an activation that a W still needs after its I.
        span: seconds beyond which a span is worth nothing, however short the makespan.
        objective: what an order is to make short first; then the other.
    """

    placement: tuple[int, ...]
    microbatches: int
    seconds: tuple[float, ...]
    ways: tuple[float, ...]
    caps: tuple[float, ...]
    kept: float = 1.0
    span: float = math.inf
    objective: Objective = "makespan"

    @property
    def stages(self) -> int:
        """How many stages."""
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """How many ranks."""
        return 1 + max(self.placement)

    @cached_property
    def tracks(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[stage for stage, rank in enumerate(self.placement) if rank == own] for own in range(self.ranks)]

    @cached_property
    def path(self) -> list[int]:
        """The forwards and input gradients that a microbatch goes through, in turn."""
        stages = self.stages
        return [*range(stages), *range(2 * stages - 1, stages - 1, -1)]

    @cached_property
    def before(self) -> list[int]:
        """The track that each track reads from, -1 for the first."""
        makers = dict(pairwise(reversed(self.path)))
        return [makers.get(track, -1) for track in range(2 * self.stages)]

    @cached_property
    def after(self) -> list[int]:
        """The track that reads from each track, -1 for the last."""
        readers = dict(pairwise(self.path))
        return [readers.get(track, -1) for track in range(2 * self.stages)]

    @cached_property
    def wakes(self) -> list[int]:
        """The rank that may wait for what each track makes, -1 if it is the track's own or there is none."""
        ranks = [self.placement[track % self.stages] for track in range(2 * self.stages)]
        readers = [ranks[reader] if reader >= 0 else -1 for reader in self.after]
        return [-1 if reader == own else reader for reader, own in zip(readers, ranks, strict=True)]

    @cached_property
    def work(self) -> float:
        """Seconds that the busiest rank needs for one microbatch."""
        seconds, stages = self.seconds, self.stages
        return max(sum(seconds[kind * stages + one] for kind in range(3) for one in own) for own in self.tracks)

    def worth(self, found: tuple[float, float]) -> tuple[float, float]:
        """Worth of a makespan and span, the less the better: first the makespan, if the span is not too long, or
        first the span."""
        makespan, span = found
        if self.objective == "span":
            return span, makespan
        return found if span <= self.span * (1 + 1e-9) else (makespan + 100 * (span - self.span), span)


def linear_pipeline_of(
    program: Program,
    placement: Sequence[int],
    costs: Costs,
    cap: float,
    kept: float,
    name: str,
    objective: Objective = "makespan",
    fused: bool = False,
) -> LinearPipeline:
    """The chain of a program's stages as numbers, on the ranks of a placement, for a schedule of this name.

    A cap is in microbatches; one below the minimum is a ProgramError. Where backwards are full (`fused`), an I takes
    all the time of a B, and a W none.
    """
    stages, microbatches = len(placement), program.microbatches
    words = {op.stage: op.how for op in parts_of(program.ops) if is_exchange(op)}
    redone = {op.stage for op in program.ops if op.kind == "R" or (op.how and op.kind in "BI")} - {*words}

    def cost(kind: str, stage: int) -> float:
        return costs.seconds(Op(kind, stage, 0, None, placement[stage], (), (), (), words.get(stage, ())))

    seconds = [cost(kind, stage) for kind in ("FB" if fused else "FIW") for stage in range(stages)]
    seconds += [0.0] * (3 * stages - len(seconds))
    for stage in redone:
        if stage is not None:
            seconds[stages + stage] += cost("R", stage)
    bare = LinearPipeline(tuple(placement), microbatches, tuple(seconds), (), (), kept, objective=objective)
    ways = [0.0] * (2 * stages)
    for track, source in enumerate(bare.before):
        if source >= 0:
            value = Value("y" if source < stages - 1 else "dx", source % stages, 0)
            ways[track] = way(costs, value, placement[source % stages], placement[track % stages])
    if isinstance(cap, bool) or not isinstance(cap, int | float) or math.isnan(cap):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"memory_cap is a number of microbatches, found {cap!r}.")
    if cap < 1:
        raise ProgramError(
            f"{name}: memory_cap is {cap:g}, below the minimum: one microbatch by itself holds 1 on each rank. Say a "
            "cap of at least 1."
        )
    caps = tuple(min(cap, microbatches) * len(own) + 1e-6 for own in bare.tracks)
    ticks = _in_ticks([*seconds, *ways])
    return replace(bare, seconds=tuple(ticks[: 3 * stages]), ways=tuple(ticks[3 * stages :]), caps=caps)


def unit_pipeline(placement: Sequence[int], microbatches: int, *, fused: bool) -> LinearPipeline:
    """A chain where F = I = W, without transfers or caps."""
    stages = len(placement)
    seconds = [second for second in ((1.0, 2.0, 0.0) if fused else (1.0, 1.0, 1.0)) for _ in range(stages)]
    caps = (math.inf,) * (1 + max(placement))
    return LinearPipeline(tuple(placement), microbatches, tuple(seconds), (0.0,) * (2 * stages), caps)


def _in_ticks(seconds: Sequence[float]) -> list[float]:
    """Costs as whole numbers of their common unit, if they have one; else in a fine grid.

    Sums of whole numbers are exact, so an order does not depend on the unit that costs are told in: in seconds two ways
    of the same length differ in their last bits, by which a search would choose among them.

    >>> _in_ticks([1e-5, 1.2e-5, 0.8e-5]), _in_ticks([1.0, 1.2, 0.8])
    ([5.0, 6.0, 4.0], [5.0, 6.0, 4.0])
    """
    most = max(seconds, default=0.0)
    shares = [Fraction(one / most).limit_denominator(_FINEST) if most else Fraction(0) for one in seconds]
    unit = math.lcm(*(share.denominator for share in shares))
    return [float(round(share * min(unit, _GRID))) for share in shares]


_FINEST = 10**6
_GRID = 2**30


def cells_of(pipeline: LinearPipeline, track_rows: Sequence[Sequence[int]], kinds: str = "FIW") -> list[list[Key]]:
    """The rows of a table: the microbatch of a track's op is how often the track came before. `kinds` are "FB" of rows
    without W whose backwards are full."""
    stages = pipeline.stages
    rows: list[list[Key]] = []
    for track_row in track_rows:
        turn = [0] * (3 * stages)
        row: list[Key] = []
        for track in track_row:
            row.append((kinds[track // stages], track % stages, turn[track], None))
            turn[track] += 1
        rows.append(row)
    return rows


def tracks_of(pipeline: LinearPipeline, rows: Sequence[Sequence[Key]]) -> list[TrackRow]:
    """The rows of a table as tracks; a B is the I of a pipeline whose backwards are full."""
    return [[_TRACKS[kind] * pipeline.stages + (stage or 0) for kind, stage, _, _ in row] for row in rows]


_TRACKS = {"F": 0, "B": 1, "I": 1, "W": 2}


def shortest(pipeline: LinearPipeline, tables: Iterable[list[list[Key]]]) -> list[list[Key]]:
    """The rows that are worth most, of several ways to draw a schedule; of equal ones the first."""
    as_written = [math.inf] * pipeline.ranks  # no W runs before the row names it
    return min(tables, key=lambda rows: pipeline.worth(play(pipeline, tracks_of(pipeline, rows), as_written)))


def play(
    pipeline: LinearPipeline,
    rows: Sequence[TrackRow],
    patience: Sequence[float],
    full: list[TrackRow] | None = None,
    times: list[list[float]] | None = None,
) -> tuple[float, float]:
    """Makespan and span of rows; `NEVER` if they wait for each other or for room that never comes.

    A W that a row names, by the track of any W, is the next one that waits, if one does.

    Args:
        patience: for each rank the share of a W that has to fit into a gap for it to run there: with 1 it never delays
            what comes next, with 0 it runs in any gap.
        full: a row for each rank, to which the rows with their W are written.
        times: a list for each F and I track, to which the ends of its ops are written.

    >>> pipeline = LinearPipeline((0, 1), 2, (1.0,) * 6, (0.0,) * 4, (2.0, 2.0))
    >>> full = [[], []]
    >>> play(pipeline, [[0, 0, 2, 2], [1, 3, 1, 3]], [1, 1], full), full
    ((7.0, 7.0), [[0, 0, 2, 4, 2, 4], [1, 3, 1, 3, 5, 5]])
    """
    stages, ranks, weights = pipeline.stages, pipeline.ranks, 2 * pipeline.stages
    seconds, after, wakes, ways, caps, kept = (
        pipeline.seconds,
        pipeline.after,
        pipeline.wakes,
        pipeline.ways,
        pipeline.caps,
        pipeline.kept,
    )
    ends: list[list[float]] = [[] for _ in range(2 * stages)] if times is None else times
    read = [[0.0] * pipeline.microbatches, *[ends[source] for source in pipeline.before[1:]]]  # 0 reads what is there
    place, free, held, first = [0] * ranks, [0.0] * ranks, [0.0] * ranks, [-1.0] * ranks
    waiting: list[list[int]] = [[] for _ in range(ranks)]  # the W that could run, as tracks
    done = [0] * ranks  # and how many of them have
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        row, time, holds = rows[rank], free[rank], held[rank]
        queue, head, share = waiting[rank], done[rank], patience[rank]
        at = len(row)
        for turn in range(place[rank], len(row)):
            track = row[turn]
            if track >= weights:  # 1. a W that the row names is the next one that waits
                if head < len(queue):
                    if full is not None:
                        full[rank].append(queue[head])
                    time += seconds[queue[head]]
                    head += 1
                    holds -= kept
                continue
            own, there = ends[track], read[track]
            if len(own) >= len(there):  # 2. what the op reads is not there: its writer wakes this rank
                at = turn
                break
            ready = there[len(own)] + ways[track]
            room = caps[rank] - 1 if track < stages else math.inf
            while head < len(queue) and (holds > room or time < ready):  # 3. W make room, and fill the gap
                longer = seconds[queue[head]]
                if holds <= room and not time + longer * share <= ready + 1e-9 * ready:  # 0 * inf is no number
                    break
                if full is not None:
                    full[rank].append(queue[head])
                time += longer
                head += 1
                holds -= kept
            if holds > room:
                return NEVER
            if ready > time:
                time = ready
            if first[rank] < 0:
                first[rank] = time
            if full is not None:
                full[rank].append(track)
            time += seconds[track]  # 4. the op itself
            own.append(time)
            if track < stages:
                holds += 1
            else:
                queue.append(track + stages)
                holds -= 1 - kept
            other = wakes[track]  # 5. a rank that stands before the op that reads this goes on
            if other >= 0 and place[other] < len(rows[other]) and rows[other][place[other]] == after[track]:
                todo.append(other)
        place[rank], free[rank], held[rank], done[rank] = at, time, holds, head
    if any(at < len(row) for at, row in zip(place, rows, strict=True)):
        return NEVER
    makespan = span = 0.0
    for rank, end in enumerate(free):  # 6. the rest of the W
        rest = waiting[rank][done[rank] :]
        if full is not None:
            full[rank] += rest
        end += sum([seconds[track] for track in rest])
        makespan, span = max(makespan, end), max(span, end - first[rank])
    return makespan, span
