"""Your own schedule as a priority: a rule that picks one of the ready ops of a free rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fpipe.limits import check_whole_number
from fpipe.model import unsuitable_signature
from fpipe.program import Op, Program, ProgramError, kind_of
from fpipe.schedules.list_scheduler import LATER, NOTHING, ListSchedule, TaskGraph, list_schedule
from fpipe.schedules.notations import placed_on
from fpipe.timing.costs import Costs, checked_costs
from fpipe.timing.waiting import waits_between_ops
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.place import RankRule
from fpipe.transforms.reorder import apply_table
from fpipe.transforms.shard import forwards_per_microbatch


class RankState(NamedTuple):
    """The state of the free rank that a key may look at: time, rank, residuals, sizes.

    Args:
        time: seconds since the start of the step.
        rank: the free rank.
        held_microbatches: microbatches that the rank holds; one microbatch of all its stages is 1.
        microbatches, stages: of the whole program.

    >>> RankState(time=2.0, rank=0, held_microbatches=1.0, microbatches=4, stages=2).held_microbatches
    1.0
    """

    time: float
    rank: int
    held_microbatches: float
    microbatches: int
    stages: int


Key = Callable[[Op, RankState], Any]
Cap = float | Sequence[float]


def from_priority(
    key: Key,
    ranks: int,
    *,
    placement: str | Sequence[int] | RankRule = "linear",
    cap: Cap | None = None,
    costs: Costs | None = None,
) -> Transform:
    """Order a program by a rule: a free rank runs its ready op with the smallest key.

    Args:
        key: `key(op, now)`, a number or anything that compares. An op whose key is `math.inf` waits; the key is
            asked again when anything has happened.
        ranks: the number of ranks.
        placement: what `fpipe.place` takes.
        cap: the most microbatches that a rank may hold, one number or one for each rank; one microbatch of all the
            rank's stages is 1, counted as `simulate` counts `peak`. A forward for which there is no room waits.
        costs: seconds of each op on the clock of the schedule; by default one for each F, I and W.

    Raises:
        ProgramError: a cap below what one microbatch needs; a dead end, in which every op waits for room or for
            another; keys that do not compare.

    1F1B is a rule too: backward first, and never more in flight than there are ranks to come.

    >>> import fpipe
    >>> rule = lambda op, now: (op.kind == "F", op.microbatch)
    >>> schedule = fpipe.schedules.from_priority(rule, 3, cap=[3, 2, 1])
    >>> print(fpipe.plot(fpipe.chain(fpipe.split(4), schedule)(fpipe.program(3))))
    rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
    rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
    rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
    """
    check_whole_number("ranks", ranks)
    if unsuitable_signature(key) is not None:
        raise TypeError(f"key is called as key(op, now); found one of {unsuitable_signature(key)}.")
    limits = checked_caps(cap, ranks)
    costs = checked_costs(costs)

    @as_transform
    def transform(program: Program) -> Program:
        program = placed_on(program, placement, ranks, "from_priority")
        ready = _ReadyOps(program, key, limits, costs)
        list_order = list_schedule(ready.graph, ready.pick)
        if sum(map(len, list_order.rows)) < len(ready.ops):
            raise ProgramError(ready.explain_dead_end(list_order))
        ops = ready.ops
        rows = [[ops[i].cell if ops[i].parts else ops[i][:4] for i in row] for row in list_order.rows]
        return apply_table(program, rows, move=False)

    return transform


def checked_caps(cap: object, ranks: int) -> list[float]:
    """Return the cap of each rank, infinite without one."""
    if cap is None:
        return [math.inf] * ranks
    caps: list[Any] = list(cap) if isinstance(cap, Sequence) and not isinstance(cap, str) else [cap] * ranks  # pyright: ignore[reportUnknownArgumentType]
    if len(caps) != ranks:
        raise ValueError(f"cap lists {len(caps)} numbers for {ranks} ranks; give one each.")
    for limit in caps:
        if math.isnan(limit):
            raise ValueError(f"cap is a number, or one a rank; found {limit!r}.")
    return caps


class _ReadyOps:
    """The scheduled ops of a program as numbers, and the residuals that each rank holds while they are picked."""

    def __init__(self, program: Program, key: Key, limits: list[float], costs: Costs) -> None:
        self.key, self.limits = key, limits
        self.sizes = (program.microbatches, program.stages)
        self.ops: list[Op] = []
        # Residuals that an op adds when it starts, and that it has freed when it ends, as `simulate` counts peaks.
        self.takes: list[int] = []
        self.drops: list[int] = []
        self.graph = self._read_program(program, costs)
        self.residuals_per_microbatch = forwards_per_microbatch(program)
        self.held = [0] * program.ranks
        # The op that runs on each rank: its drops are freed at its end, which is when the rank picks again.
        self.running_op: list[int | None] = [None] * program.ranks
        for rank, (limit, minimum) in enumerate(zip(limits, self._minimum_caps(), strict=True)):
            if limit < minimum - 1e-9:
                raise ProgramError(
                    f"cap is {limit:g} on rank {rank}, but one microbatch holds {minimum:g}; raise the cap to that."
                )

    def _read_program(self, program: Program, costs: Costs) -> TaskGraph:
        """Build the task graph of the ops that a table names; others are looked through, and an R joins its reader."""
        positions, needs = waits_between_ops(program, costs, _is_named)
        # An unnamed op -> every R that its data come from, directly or through other unnamed ops. The first named op of
        # the same rank that reads them claims them.
        unclaimed_recomputes: dict[int, list[int]] = {}
        claimed: set[int] = set()
        seconds: list[float] = []
        for position, (op, sources) in enumerate(zip(program.ops, program.sources, strict=True)):
            recomputes = [recompute for source in sources for recompute in unclaimed_recomputes.get(source, ())]
            if not _is_named(op):
                unclaimed_recomputes[position] = [*recomputes, position] if op.kind == "R" else recomputes
                continue
            unclaimed = (recompute for recompute in dict.fromkeys(recomputes) if recompute not in claimed)
            claims = [recompute for recompute in unclaimed if program.ops[recompute].rank == op.rank]
            claimed.update(claims)
            recompute_ops = [program.ops[recompute] for recompute in claims]
            parts = [*(op.parts or (op,)), *recompute_ops]
            self.takes.append(sum(part.kind in "FR" and any(v.name == "res" for v in part.writes) for part in parts))
            self.drops.append(sum(part.kind in "BW" for part in parts))
            seconds.append(costs.seconds(op) + sum(map(costs.seconds, recompute_ops)))
        self.ops += [program.ops[position] for position in positions]
        return TaskGraph.of(program.ranks, [op.rank for op in self.ops], seconds, needs)

    def _minimum_caps(self) -> list[float]:
        """Return the smallest possible cap of each rank: the peak of one microbatch that runs alone."""
        held_residuals: Counter[tuple[int, int | None]] = Counter()  # by rank and microbatch
        peaks = [0] * len(self.residuals_per_microbatch)
        for op, takes, drops in zip(self.ops, self.takes, self.drops, strict=True):
            held_residuals[op.rank, op.microbatch] += takes
            peaks[op.rank] = max(peaks[op.rank], held_residuals[op.rank, op.microbatch])
            held_residuals[op.rank, op.microbatch] -= drops
        return [peak / count for peak, count in zip(peaks, self.residuals_per_microbatch, strict=True)]

    def pick(self, rank: int, time: float, ready: list[int]) -> int:
        """Return the ready op with the smallest key that the rank has room for; the earlier op wins a tie."""
        self._free_residuals(rank)
        per_microbatch = self.residuals_per_microbatch[rank]
        # Residuals are counted as whole numbers, a cap in microbatches may be any fraction: allow for its rounding.
        room = self.limits[rank] * per_microbatch - self.held[rank] + 1e-9
        facts = RankState(time, rank, self.held[rank] / per_microbatch, *self.sizes)
        key_by_op = {index: self.key(self.ops[index], facts) for index in ready if self.takes[index] <= room}
        keys = {op_index: value for op_index, value in key_by_op.items() if not _waits(value)}
        # An infinite key may change with anything that happens, but a lack of room only with an op of this rank.
        if not keys:
            return LATER if key_by_op else NOTHING
        place_in_time = f"on rank {rank} at time {time:g}"
        try:
            # `value != value` is NaN, with which `min` would return any op without an error.
            invalid_op = next((op_index for op_index, value in keys.items() if value is None or value != value), None)
            op = min(keys, key=lambda op_index: (keys[op_index], op_index))
        except (TypeError, ValueError) as error:
            sentence = f"the keys do not compare, {place_in_time} ({error}). Give numbers, or tuples of numbers."
            raise ProgramError(sentence) from None
        if invalid_op is not None:
            raise ProgramError(
                f"key gave {keys[invalid_op]!r} for {self.ops[invalid_op].cell}, {place_in_time}; a key is a number, a "
                "tuple of numbers, or math.inf to wait."
            )
        self.held[rank] += self.takes[op]
        self.running_op[rank] = op
        return op

    def _free_residuals(self, rank: int) -> None:
        ended_op = self.running_op[rank]
        if ended_op is not None:
            self.held[rank] -= self.drops[ended_op]
            self.running_op[rank] = None

    def explain_dead_end(self, list_order: ListSchedule) -> str:
        """Return the sentences of the error: why each rank cannot go on."""
        lines: list[str] = []
        done_by_rank = [set(row) for row in list_order.rows]
        for rank, stuck in enumerate(list_order.stuck):
            self._free_residuals(rank)
            held_text = f"holds {self.held[rank] / self.residuals_per_microbatch[rank]:g} of {self.limits[rank]:g}"
            room = self.limits[rank] * self.residuals_per_microbatch[rank] - self.held[rank] + 1e-9
            blocked_cells = [self.ops[op_index].cell for op_index in stuck if self.takes[op_index] > room]
            waiting_cells = [self.ops[op_index].cell for op_index in stuck if self.takes[op_index] <= room]
            if blocked_cells:
                lines.append(f"rank {rank} {held_text} microbatches and has no room for {_first_cells(blocked_cells)}")
            if waiting_cells:
                lines.append(f"rank {rank} may go on, but the key is inf for {_first_cells(waiting_cells)}")
            rank_ops = (op_index for op_index, op in enumerate(self.ops) if op.rank == rank)
            remaining_ops = [op_index for op_index in rank_ops if op_index not in done_by_rank[rank]]
            if remaining_ops and not stuck:
                cells = _first_cells([self.ops[op_index].cell for op_index in remaining_ops])
                lines.append(f"rank {rank} waits for what {cells} reads")
        ops_run = sum(map(len, list_order.rows))
        return (
            f"a dead end: after {ops_run} of {len(self.ops)} ops nothing can go on.\n  " + ".\n  ".join(lines) + ".\n"
            "Keep room for what is further on: let the key be math.inf for the forward of an early stage while "
            "now.held_microbatches is near the cap, prefer older microbatches, or raise the cap."
        )


def _is_named(op: Op) -> bool:
    return kind_of(op.kind).position == "table"


def _waits(key: object) -> bool:
    return isinstance(key, float) and key == math.inf


def _first_cells(cells: Sequence[str]) -> str:
    return ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
