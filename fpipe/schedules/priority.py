"""A schedule of your own, as a priority: of the ops that could run on a free rank, which one does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fpipe.limits import whole
from fpipe.program import Op, Program, ProgramError, kind_of
from fpipe.schedules.list_scheduler import LATER, NOTHING, Scheduled, TaskGraph, list_schedule
from fpipe.schedules.tables import placed_on
from fpipe.timing.costs import Costs, the_costs
from fpipe.timing.waiting import named_waits
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.place import Rule
from fpipe.transforms.reorder import by_table
from fpipe.transforms.shard import shares


class Now(NamedTuple):
    """Facts that a key may look at besides the op: the moment, the free rank and what it holds, and the sizes.

    Args:
        time: seconds from the start.
        rank: the free rank.
        held: microbatches whose activations it holds; one microbatch of all its stages is 1.
        microbatches, stages: of the whole program.

    >>> Now(time=2.0, rank=0, held=1.0, microbatches=4, stages=2).held
    1.0
    """

    time: float
    rank: int
    held: float
    microbatches: int
    stages: int


Key = Callable[[Op, Now], Any]
Cap = float | Sequence[float]


def from_priority(
    key: Key,
    ranks: int,
    *,
    placement: str | Sequence[int] | Rule = "linear",
    cap: Cap | None = None,
    costs: Costs | None = None,
) -> Transform:
    """Order a program by a rule: of the ops that are ready on a free rank, the one with the smallest key runs.

    Args:
        key: `key(op, now)`, a number or anything that compares. An op whose key is `math.inf` waits; it is asked for
            again when anything has happened.
        ranks: how many.
        placement: what `fpipe.place` takes.
        cap: the most microbatches that a rank may hold, one number or one for each rank; one microbatch of all the
            rank's stages is 1, counted as `simulate` counts `peak`. A forward for which there is no room waits.
        costs: seconds per op, by which the clock runs that tells what is ready; by default one for each F, I and W.

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
    if not callable(key):
        raise TypeError(f"a key is a function of an op and of now, `key(op, now)`; found {key!r}.")
    whole("ranks", ranks)
    limits = _limits(cap, ranks)
    costs = the_costs(costs)

    @transforming
    def transform(program: Program) -> Program:
        program = placed_on(program, placement, ranks, "from_priority")
        ready = _ReadyOps(program, key, limits, costs)
        found = list_schedule(ready.work, ready.pick)
        if sum(map(len, found.rows)) < len(ready.ops):
            raise ProgramError(ready.dead_end(found))
        rows = [[ready.ops[at].cell if ready.ops[at].parts else ready.ops[at][:4] for at in row] for row in found.rows]
        return by_table(program, rows, move=False)

    return transform


def _limits(cap: object, ranks: int) -> list[float]:
    """The cap of each rank."""
    if cap is None:
        return [math.inf] * ranks
    found: list[Any] = list(cap) if isinstance(cap, Sequence) and not isinstance(cap, str) else [cap] * ranks  # pyright: ignore[reportUnknownArgumentType]
    if len(found) != ranks:
        raise ValueError(f"cap lists {len(found)} numbers for {ranks} ranks; give one number, or one for each rank.")
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int | float) or math.isnan(one):
            raise ValueError(f"cap is a number of microbatches, or one for each rank; found {one!r}.")
    return found


class _ReadyOps:
    """Where ops wait to be picked: the scheduled ops of a program as numbers, and what each rank holds."""

    def __init__(self, program: Program, key: Key, limits: list[float], costs: Costs) -> None:
        self.key, self.limits = key, limits
        self.sizes = (program.microbatches, program.stages)
        self.ops: list[Op] = []
        self.takes: list[int] = []  # activations that an op starts to hold
        self.drops: list[int] = []  # and those that it has let go when it ends
        self.work = self._read(program, costs)
        self.share = shares(program)
        self.held = [0] * program.ranks
        self.last: list[int | None] = [None] * program.ranks  # the op whose end frees what it drops
        for rank, (limit, least) in enumerate(zip(limits, self._least(), strict=True)):
            if limit < least - 1e-9:
                raise ProgramError(
                    f"cap is {limit:g} on rank {rank}, below the minimum: one microbatch by itself holds {least:g} "
                    f"there. Say a cap of at least {least:g}."
                )

    def _read(self, program: Program, costs: Costs) -> TaskGraph:
        """The scheduled ops as numbers; what no table names is looked through, and an R is part of its reader."""
        places, needs = named_waits(program, costs, _is_named)
        before: dict[int, list[int]] = {}  # op that no table names -> the R that stand before it and no reader has yet
        claimed: set[int] = set()
        seconds: list[float] = []
        for at, (op, sources) in enumerate(zip(program.ops, program.sources, strict=True)):
            found = [one for source in sources for one in before.get(source, ())]
            if not _is_named(op):
                before[at] = [*found, at] if op.kind == "R" else found
                continue
            own = [one for one in dict.fromkeys(found) if one not in claimed and program.ops[one].rank == op.rank]
            claimed.update(own)
            parts = [*(op.parts or (op,)), *(program.ops[one] for one in own)]
            self.takes.append(sum(part.kind in "FR" and any(v.name == "res" for v in part.writes) for part in parts))
            self.drops.append(sum(part.kind in "BW" for part in parts))
            seconds.append(costs.seconds(op) + sum(costs.seconds(program.ops[one]) for one in own))
        self.ops += [program.ops[at] for at in places]
        return TaskGraph.of(program.ranks, [op.rank for op in self.ops], seconds, needs)

    def _least(self) -> list[float]:
        """Residuals that one microbatch by itself holds on each rank."""
        held: Counter[tuple[int, int | None]] = Counter()
        most: Counter[tuple[int, int | None]] = Counter()
        for op, takes, drops in zip(self.ops, self.takes, self.drops, strict=True):
            place = (op.rank, op.microbatch)
            held[place] += takes
            most[place] = max(most[place], held[place])
            held[place] -= drops
        counts = ([count for (own, _), count in most.items() if own == rank] for rank in range(len(self.share)))
        return [max(each, default=0) / share for each, share in zip(counts, self.share, strict=True)]

    def pick(self, rank: int, time: float, ready: list[int]) -> int:
        """The ready op with the smallest key that there is room for."""
        self._settle(rank)
        share = self.share[rank]
        room = self.limits[rank] * share - self.held[rank] + 1e-9
        now = Now(time, rank, self.held[rank] / share, *self.sizes)
        given = {at: self.key(self.ops[at], now) for at in ready if self.takes[at] <= room}
        keys = {at: found for at, found in given.items() if not _waits(found)}
        if not keys:
            return LATER if given else NOTHING
        where = f"on rank {rank} at time {time:g}"
        try:
            odd = next((at for at, found in keys.items() if found is None or found != found), None)
            op = min(keys, key=lambda at: (keys[at], at))
        except (TypeError, ValueError) as error:
            sentence = f"the keys do not compare, {where} ({error}). Give numbers, or tuples of numbers."
            raise ProgramError(sentence) from None
        if odd is not None:
            raise ProgramError(
                f"key gave {keys[odd]!r} for {self.ops[odd].cell}, {where}; a key is a number or a tuple of numbers, "
                "and math.inf for an op that waits."
            )
        self.held[rank] += self.takes[op]
        self.last[rank] = op
        return op

    def _settle(self, rank: int) -> None:
        """Let go of what the op before has dropped, by the time the next one is picked."""
        before = self.last[rank]
        if before is not None:
            self.held[rank] -= self.drops[before]
            self.last[rank] = None

    def dead_end(self, found: Scheduled) -> str:
        """Why nothing can go on, rank by rank."""
        lines: list[str] = []
        done = [set(row) for row in found.rows]
        for rank, stuck in enumerate(found.stuck):
            self._settle(rank)
            holding = f"holds {self.held[rank] / self.share[rank]:g} of {self.limits[rank]:g}"
            room = self.limits[rank] * self.share[rank] - self.held[rank] + 1e-9
            full = [self.ops[at].cell for at in stuck if self.takes[at] > room]
            late = [self.ops[at].cell for at in stuck if self.takes[at] <= room]
            if full:
                lines.append(f"rank {rank} {holding} microbatches and has no room for {_few(full)}")
            if late:
                lines.append(f"rank {rank} may go on, but the key is inf for {_few(late)}")
            left = [at for at, op in enumerate(self.ops) if op.rank == rank and at not in done[rank]]
            if left and not stuck:
                lines.append(f"rank {rank} waits for what {_few([self.ops[at].cell for at in left])} reads")
        ran = sum(map(len, found.rows))
        return (
            f"a dead end: after {ran} of {len(self.ops)} ops nothing can go on.\n  " + ".\n  ".join(lines) + ".\n"
            "Keep room for what is further on: let the key be math.inf for the forward of an early stage while "
            "now.held is near the cap, prefer older microbatches, or raise the cap."
        )


def _is_named(op: Op) -> bool:
    return kind_of(op.kind).place == "table"


def _waits(key: object) -> bool:
    return isinstance(key, float) and key == math.inf


def _few(cells: Sequence[str]) -> str:
    return ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
