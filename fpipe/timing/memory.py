"""Memory of each rank: bytes of distinct storages, or microbatches whose residuals are there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from fpipe.program import Program, Value, kind_of, lane_of, memory_of, parts_of
from fpipe.timing.lanes import OpGroups, Transfer, op_groups
from fpipe.transforms.shard import shares

HeldChanges = list[tuple[float, float, int, float]]
"""Changes of what is held: when, in which order where that is one moment, on which rank, and by how much."""


class Account:
    """Bytes held now and at most, on each rank: from where a value is written to where it is read last.

    Storages of the caller (`given`) do not count, nor does what is offloaded to the host.
    """

    def __init__(self, ranks: int, given: Iterable[Hashable] = ()) -> None:
        self.given = frozenset(given)
        self.held: list[Counter[Hashable]] = [Counter() for _ in range(ranks)]
        self.now, self.peak = [0] * ranks, [0] * ranks
        self.storages: dict[Value, tuple[int, Mapping[Hashable, int]]] = {}

    def note(
        self, rank: int, written: Iterable[tuple[Value, Mapping[Hashable, int]]], dead: Iterable[Value]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Account for an op, whose writes are there before what it reads last is gone; return (rank, bytes) of what it
        adds and of what goes."""
        added, gone = list[tuple[int, int]](), list[tuple[int, int]]()
        for value, storages in written:
            memory = memory_of(value, rank)
            if memory is None:
                continue
            counted = {storage: size for storage, size in storages.items() if storage not in self.given}
            self.storages[value] = (memory, counted)
            for storage, size in counted.items():
                self.held[memory][storage] += 1
                if self.held[memory][storage] == 1:
                    self.now[memory] += size
                    added.append((memory, size))
        for memory, _ in added:
            self.peak[memory] = max(self.peak[memory], self.now[memory])
        for value in dead:
            memory, counted = self.storages.pop(value, (0, {}))
            for storage, size in counted.items():
                self.held[memory][storage] -= 1
                if not self.held[memory][storage]:
                    self.now[memory] -= size
                    gone.append((memory, size))
        return added, gone


def bytes_held(
    program: Program, storages: Callable[[Value], Mapping[Hashable, int]], starts: list[float], ends: list[float]
) -> tuple[tuple[float, ...], HeldChanges]:
    """Return the most bytes on each rank, and how they change in time, in a walk down a program `with_transfers`.

    A copy is there from just before its first reader on its rank until after the last.
    """
    rows = [(part, at) for at, op in enumerate(program.ops) for part in op.parts or (op,)]
    kept = {end.value for end in program.outputs}
    last = {value: row for row, (op, _) in enumerate(rows) for value in (*op.writes, *op.reads)}
    dead: defaultdict[int, list[Value]] = defaultdict(list)
    for value, row in last.items():
        if value not in kept:
            dead[row].append(value)
    account, steps = Account(program.ranks), HeldChanges()
    for row, (op, at) in enumerate(rows):
        added, gone = account.note(op.rank, [(value, storages(value)) for value in op.writes], dead.get(row, ()))
        steps += [(starts[at], row, rank, size) for rank, size in added]
        steps += [(ends[at], row + 0.5, rank, -size) for rank, size in gone]
    return tuple(map(float, account.peak)), steps


def known_shares(program: Program, groups: OpGroups) -> list[int]:
    """Return `shares` of a program, without a look at each op where every microbatch has all forwards."""
    if not any(op.parts or op.kind == "R" for op in groups.samples):
        sizes = Counter(groups.numbers)
        forwards = [(op.rank, sizes[number]) for number, op in enumerate(groups.samples) if op.kind == "F"]
        if {size for _, size in forwards} == {program.microbatches * program.slices}:
            stages = Counter(rank for rank, _ in forwards)
            return [max(1, stages[rank] * program.slices) for rank in range(program.ranks)]
    return shares(program)


def units_held(
    program: Program,
    starts: list[float],
    ends: list[float],
    transfers: Callable[[], Iterable[Transfer]],
    groups: OpGroups,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The most microbatches held at once on each rank: to the end of W, and to the end of I."""
    share = known_shares(program, groups)
    if residuals_stay(program, groups):
        both = peaks_in_order(program, groups)
    else:
        moved = list(transfers())
        both = tuple(peaks_of(unit_steps(program, starts, ends, moved, released), program.ranks) for released in (0, 1))
    held, released = ([most / count for most, count in zip(peak, share, strict=True)] for peak in both)
    return tuple(held), tuple(released)


def curves(steps: HeldChanges, share: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Memory of each rank from each change on: (seconds, amount), in units of the rank's share."""
    changes_by_rank: list[list[tuple[float, float, float]]] = [[] for _ in share]
    for when, order, rank, change in steps:
        if change:
            changes_by_rank[rank].append((when, order, change))
    return [_curve(sorted(changes), unit) for changes, unit in zip(changes_by_rank, share, strict=True)]


def _curve(changes: Sequence[tuple[float, float, float]], unit: float) -> list[tuple[float, float]]:
    amounts = (held / unit for held in accumulate(change for _, _, change in changes))
    moments = groupby(zip((when for when, _, _ in changes), amounts, strict=True), key=itemgetter(0))
    # Within one moment the most that is held is shown too, so that the curve's maximum is the peak.
    points: list[tuple[float, float]] = []
    for when, group in moments:
        values = [amount for _, amount in group]
        points += [(when, amount) for amount in dict.fromkeys((max(values), values[-1]))]
    return [point for point, before in zip(points, [(0.0, 0.0), *points], strict=False) if point[1] != before[1]]


def peaks_of(steps: HeldChanges, ranks: int) -> list[float]:
    """The most that each rank holds."""
    steps = sorted(steps)
    return _peaks([rank for _, _, rank, _ in steps], [change for *_, change in steps], ranks)


def residuals_stay(program: Program, groups: OpGroups) -> bool:
    """Whether residuals are only read where they are made, by backwards."""
    places = {(op.stage, op.rank) for op in groups.samples if kind_of(op.kind).time}
    alone = len({stage for stage, _ in places}) == len(places)
    if alone and all(lane_of(op) == "main" for op in groups.samples):
        return True
    ops = program.ops
    return not any(
        value[0] == "res" and (op[0] == "OFFLOAD" or op[0] == "SEND" or ops[source][4] != op[4])
        for op, sources in zip(ops, program.sources, strict=True)
        for value, source in zip(op[5], sources, strict=True)
    )


def peaks_in_order(program: Program, groups: OpGroups) -> tuple[list[float], list[float]]:
    """Peaks where residuals stay on their rank, which does one op at a time: its order is enough."""
    ops = parts_of(program.ops)
    if ops is not program.ops:
        groups = op_groups(ops)
    kinds = [op.kind for op in groups.samples]
    change_by_kind = {"F": 1, "R": 1, "B": -1, "W": -1}
    ranks = groups.spread(op.rank for op in groups.samples)
    changes = groups.spread(change_by_kind.get(kind, 0) for kind in kinds)
    if sum(changes):  # some F, being recomputed, leave no residuals
        pairs = zip(changes, ops, strict=True)
        changes = [int(any(value[0] == "res" for value in op[6])) if change > 0 else change for change, op in pairs]
    held = _peaks(ranks, changes, program.ranks)
    if "I" not in kinds:
        return held, held
    sooner = {"I": -1, "W": 0}
    return held, _peaks(ranks, list(map(sooner.get, groups.spread(kinds), changes)), program.ranks)


def _peaks(at: Sequence[int], changes: Sequence[float], ranks: int) -> list[float]:
    held, peak = list[float]([0] * ranks), list[float]([0] * ranks)  # whole microbatches are added faster
    for rank, change in zip(at, changes, strict=True):
        held[rank] = now = held[rank] + change
        if now > peak[rank]:
            peak[rank] = now
    return list(map(float, peak))


def unit_steps(
    program: Program, starts: Sequence[float], ends: Sequence[float], transfers: Iterable[Transfer], released: int = 0
) -> HeldChanges:
    """How the number of residuals on each rank changes in time, wherever they go.

    A copy is held from the start of the op that makes it (F, R, LOAD), or from its arrival, to the end of the last op
    that reads it there (a full backward, OFFLOAD, a transfer), and where that is an I, of its W; of I with `released`.
    """
    rows = [(part, at) for at, op in enumerate(program.ops) for part in op.parts or (op,)]
    weights = {op[1:4]: at for op, at in rows if op.kind == "W"}
    landed = {
        op.writes[0]: (program.ops[sources[0]].reads[0], op.rank)
        for op, sources in zip(program.ops, program.sources, strict=True)
        if op.kind == "RECV"
    }
    begins: dict[tuple[Value, int], tuple[float, float]] = {}
    uses: defaultdict[tuple[Value, int], list[tuple[float, float]]] = defaultdict(list)
    made: dict[Value, int] = {}
    first: dict[tuple[Value, int], int] = {}
    for op, at in rows:
        for value in _residuals(op.writes):
            made[value] = at
            there = memory_of(value, op.rank)
            if op.kind not in ("RECV", "SEND") and there is not None:
                begins[value, there] = (starts[at], at)
        for value in _residuals(op.reads):
            key = landed.get(value, (value, memory_of(value, op.rank) or 0))
            first.setdefault(key, at)
            if op.kind in ("SEND", "RECV", "FREE"):
                continue
            until = weights.get(op[1:4], at) if op.kind == "I" and not released else at
            uses[key].append((ends[until], until + 0.25))
    for value, source, target, _, end in transfers:
        if value.name == "res":
            from_key = landed.get(value, (value, source))
            uses[from_key].append((end, made[value] + 0.5))
            begins[value, target] = (end, first.get((value, target), len(program.ops)) - 0.5)
    steps = HeldChanges()
    for key, (when, order) in begins.items():
        steps.append((when, order, key[1], 1))
        if key in uses:
            steps.append((*max(uses[key]), key[1], -1))
    return steps


def _residuals(values: Iterable[Value]) -> Iterator[Value]:
    return (value for value in values if value[0] == "res" and ">" not in value[5])
