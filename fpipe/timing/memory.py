"""Memory of each rank over time: bytes of distinct storages, or microbatches whose residuals it holds.

    costs have bytes?   yes --> bytes_held           each storage from its first value written to its last value read
                        no  --> microbatches_held    residuals only, in units of one microbatch of all the rank's stages
                                  they stay on their rank --> peaks_in_program_order    its order is enough
                                  they travel             --> residual_changes          needs the times

A change is (seconds, order, rank, amount, holder). The order breaks ties between changes of one moment: that of the
program. The holder is an index into `HOLDERS`: what the amount is there for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from fpipe.program import Op, Program, Value, kind_of, lane_of, memory_of, parts_of
from fpipe.timing.lanes import OpGroups, Transfer, group_ops
from fpipe.transforms.shard import forwards_per_microbatch

MemoryChanges = list[tuple[float, float, int, float, int]]
"""Changes of what is held: (seconds, order among changes of one moment, rank, amount, holder)."""

_NAMES_BY_HOLDER = {
    "weights": ("params", "shard", "hoisted"),
    "optimizer": ("opt",),
    "gradients": ("g", "sum", "all", "cut", "squares"),
    "residuals": ("res", "wres"),
}
HOLDERS = (*_NAMES_BY_HOLDER, "in flight")
"""Purposes of memory; "in flight" are batches, outputs, cotangents and losses on their way."""
_HOLDER_BY_NAME = {name: index for index, names in enumerate(_NAMES_BY_HOLDER.values()) for name in names}
_RESIDUALS = HOLDERS.index("residuals")


class Account:
    """Current and peak bytes of each rank, where a value is held from its write to its last read.

    Several values may lie in one storage, such as views; it counts once, until none of them is left, and for the first
    of `HOLDERS` that they are. `caller_storages` do not count, nor does what is offloaded to the host.
    """

    def __init__(self, ranks: int, caller_storages: Iterable[Hashable] = ()) -> None:
        self.caller_storages = frozenset(caller_storages)
        self.holders_by_storage: list[defaultdict[Hashable, list[int]]] = [defaultdict(list) for _ in range(ranks)]
        self.current_bytes, self.peak = [0] * ranks, [0] * ranks
        self.storages: dict[Value, tuple[int, Mapping[Hashable, int]]] = {}

    def record_op(
        self, rank: int, written_values: Iterable[tuple[Value, Mapping[Hashable, int]]], dead_values: Iterable[Value]
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Account for an op, and return the changes (rank, bytes, holder) at its start and at its end.

        What it writes is there before what it reads for the last time is freed.
        """
        at_start, at_end = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for value, storages in written_values:
            memory = memory_of(value, rank)
            if memory is None:
                continue
            counted = {storage: size for storage, size in storages.items() if storage not in self.caller_storages}
            self.storages[value] = (memory, counted)
            for storage, size in counted.items():
                holders = self.holders_by_storage[memory][storage]
                # Whoever frees a storage must know for which holder it counts, so a list has all, in any order.
                holder_before = min(holders, default=None)
                holders.append(_holder_of(value))
                at_start += _transfer_bytes(memory, size, holder_before, min(holders))
        for memory, size, _ in at_start:
            self.current_bytes[memory] += size
        for memory, *_ in at_start:
            self.peak[memory] = max(self.peak[memory], self.current_bytes[memory])
        for value in dead_values:
            memory, counted = self.storages.pop(value, (0, {}))
            for storage, size in counted.items():
                holders = self.holders_by_storage[memory][storage]
                holder_before = min(holders)
                holders.remove(_holder_of(value))
                at_end += _transfer_bytes(memory, size, holder_before, min(holders, default=None))
        for memory, size, _ in at_end:
            self.current_bytes[memory] += size
        return at_start, at_end


def _holder_of(value: Value) -> int:
    return _HOLDER_BY_NAME.get(value.name, len(HOLDERS) - 1)


def _transfer_bytes(rank: int, size: int, before: int | None, after: int | None) -> list[tuple[int, int, int]]:
    """Return the changes by which a storage passes from a holder to the next; None where it is new or freed."""
    # An output that its stage's backward reads too is a residual from the start; an input becomes one when F has run.
    if before == after:
        return []
    return [(rank, change, holder) for change, holder in ((-size, before), (size, after)) if holder is not None]


def bytes_held(
    program: Program,
    storages: Callable[[Value], Mapping[Hashable, int]],
    hoisted_values: Callable[[Op], Sequence[Value]],
    starts: list[float],
    ends: list[float],
) -> tuple[tuple[float, ...], MemoryChanges]:
    """Return the peak bytes of each rank, and their changes over time, of a program whose transfers are ops.

    A copy is there from just before its first reader on its rank until after the last. The peak is that of a walk down
    the list, which a rank's ops follow one by one. `hoisted_values` are those that an op reads: the first op of a rank
    that reads such a value computes it.
    """
    parts = [(part, position) for position, op in enumerate(program.ops) for part in op.parts or (op,)]
    output_values = {end.value for end in program.outputs}
    hoisted = [[value._replace(location=f"@{op.rank}") for value in hoisted_values(op)] for op, _ in parts]
    last_index_by_value = {
        value: index for index, (op, _) in enumerate(parts) for value in (*op.writes, *op.reads, *hoisted[index])
    }
    dead_by_index: defaultdict[int, list[Value]] = defaultdict(list)
    for value, index in last_index_by_value.items():
        if value not in output_values:
            dead_by_index[index].append(value)
    # What is freed at the end of an op comes after what the op adds, and before the next op: hence the half.
    account, changes = Account(program.ranks), MemoryChanges()
    for index, (op, position) in enumerate(parts):
        written_values = (*op.writes, *(value for value in hoisted[index] if value not in account.storages))
        writes = [(value, storages(value)) for value in written_values]
        at_start, at_end = account.record_op(op.rank, writes, dead_by_index.get(index, ()))
        changes += [(starts[position], index, *change) for change in at_start]
        changes += [(ends[position], index + 0.5, *change) for change in at_end]
    return tuple(map(float, account.peak)), changes


def shares_of_groups(program: Program, groups: OpGroups) -> list[int]:
    """Return `forwards_per_microbatch` of a program, read off its groups of ops if every microbatch has all forwards.

    A share is how many forwards of one microbatch a rank runs: what is held is counted in units of it.
    """
    if not any(op.parts or op.kind == "R" for op in groups.samples):
        sizes = Counter(groups.numbers)
        forwards = [(op.rank, sizes[number]) for number, op in enumerate(groups.samples) if op.kind == "F"]
        if {size for _, size in forwards} == {program.microbatches * program.slices}:
            stages = Counter(rank for rank, _ in forwards)
            return [max(1, stages[rank] * program.slices) for rank in range(program.ranks)]
    return forwards_per_microbatch(program)


def microbatches_held(
    program: Program,
    starts: list[float],
    ends: list[float],
    transfers: Callable[[], Iterable[Transfer]],
    groups: OpGroups,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the peak microbatches of each rank, held until the end of W, and until the end of I."""
    share = shares_of_groups(program, groups)
    if residuals_stay_on_rank(program, groups):
        peaks_by_release = peaks_in_program_order(program, groups)
    else:
        moved = list(transfers())
        changes = [residual_changes(program, starts, ends, moved, released) for released in (0, 1)]
        peaks_by_release = peaks_of(changes[0], program.ranks), peaks_of(changes[1], program.ranks)
    to_w, to_i = ([units / count for units, count in zip(peak, share, strict=True)] for peak in peaks_by_release)
    return tuple(to_w), tuple(to_i)


MemoryStates = list[tuple[float, tuple[float, ...]]]
"""Memory of a rank from each change on: (seconds, amount for each of `HOLDERS`)."""


def memory_states(changes: MemoryChanges, share_by_rank: Sequence[float]) -> list[MemoryStates]:
    """Return what each rank holds, in units of its share."""
    changes_by_rank: list[MemoryChanges] = [[] for _ in share_by_rank]
    for change in changes:
        changes_by_rank[change[2]].append(change)
    pairs = zip(changes_by_rank, share_by_rank, strict=True)
    return [_states_of_rank(sorted(rank_changes), unit) for rank_changes, unit in pairs]


def _states_of_rank(changes: MemoryChanges, unit: float) -> MemoryStates:
    amounts = [0.0] * len(HOLDERS)
    states: MemoryStates = [(0.0, tuple(amounts))]
    for seconds, group in groupby(changes, key=itemgetter(0)):
        amounts_of_moment: list[tuple[float, ...]] = []
        for *_, change, holder in group:
            amounts[holder] += change
            amounts_of_moment.append(tuple(amount / unit for amount in amounts))
        # A moment has a state for the most held within it, and one for what is left, so that the top is the peak.
        for held in (max(amounts_of_moment, key=sum), amounts_of_moment[-1]):
            if held != states[-1][1]:
                states.append((seconds, held))
    return states[1:]


def peaks_of(changes: MemoryChanges, ranks: int) -> list[float]:
    """Return the most that each rank holds at once."""
    changes = sorted(changes)
    return _running_peaks([change[2] for change in changes], [change[3] for change in changes], ranks)


def residuals_stay_on_rank(program: Program, groups: OpGroups) -> bool:
    """Whether residuals are only read on the rank that makes them, and never offloaded."""
    # Placement alone often tells: each stage on one rank, and no copy lanes. Else look at all reads; an op has its kind
    # at index 0, its rank at 4 and its reads at 5, which is faster than attributes over a million ops.
    stage_ranks = {(op.stage, op.rank) for op in groups.samples if kind_of(op.kind).time}
    is_stage_on_one_rank = len({stage for stage, _ in stage_ranks}) == len(stage_ranks)
    if is_stage_on_one_rank and all(lane_of(op) == "main" for op in groups.samples):
        return True
    ops = program.ops
    return not any(
        value[0] == "res" and (op[0] == "OFFLOAD" or op[0] == "SEND" or ops[source][4] != op[4])
        for op, sources in zip(ops, program.sources, strict=True)
        for value, source in zip(op[5], sources, strict=True)
    )


def peaks_in_program_order(program: Program, groups: OpGroups) -> tuple[list[float], list[float]]:
    """Return the peaks to the end of W and of I where residuals stay on their rank.

    A rank runs one op at a time, so the order of its ops is enough: F adds a microbatch, B or W takes one.
    """
    ops = parts_of(program.ops)
    if ops is not program.ops:
        groups = group_ops(ops)
    kinds = [op.kind for op in groups.samples]
    change_by_kind = {"F": 1, "R": 1, "B": -1, "W": -1}
    ranks = groups.spread(op.rank for op in groups.samples)
    changes = groups.spread(change_by_kind.get(kind, 0) for kind in kinds)
    # If each F has its backward, the changes cancel. If not, some F are recomputed, and leave no residuals.
    if sum(changes):
        pairs = zip(changes, ops, strict=True)
        changes = [int(any(value[0] == "res" for value in op[6])) if change > 0 else change for change, op in pairs]
    peaks = _running_peaks(ranks, changes, program.ranks)
    if "I" not in kinds:
        return peaks, peaks
    change_at_i = {"I": -1, "W": 0}
    changes = list(map(change_at_i.get, groups.spread(kinds), changes))
    return peaks, _running_peaks(ranks, changes, program.ranks)


def _running_peaks(rank_by_change: Sequence[int], changes: Sequence[float], ranks: int) -> list[float]:
    # Starting from the integer 0 keeps whole microbatches integers, which are added faster.
    current, peak = list[float]([0] * ranks), list[float]([0] * ranks)
    for rank, change in zip(rank_by_change, changes, strict=True):
        current[rank] = units = current[rank] + change
        if units > peak[rank]:
            peak[rank] = units
    return list(map(float, peak))


def residual_changes(
    program: Program, starts: Sequence[float], ends: Sequence[float], transfers: Iterable[Transfer], released: int = 0
) -> MemoryChanges:
    """Return how the residuals on each rank change over time, wherever they travel.

    A copy is held from the start of the op that makes it (F, R, LOAD), or from its arrival, to the end of the last op
    that reads it there (a full backward, OFFLOAD, a transfer), and where that is an I, of its W; of I with `released`.
    """
    # A copy is (value, rank). The order of changes in one moment is the position of the op; a quarter more at the end
    # of a read, half more at the end of a transfer, and half less than the first reader's at an arrival.
    parts = [(part, position) for position, op in enumerate(program.ops) for part in op.parts or (op,)]
    # Indices 1 to 3 of an op are stage, microbatch and slice, which an I shares with its W.
    weight_position = {op[1:4]: position for op, position in parts if op.kind == "W"}
    pairs = zip(program.ops, program.sources, strict=True)
    receives = ((op, program.ops[sources[0]]) for op, sources in pairs if op.kind == "RECV")
    sent_copy_by_received = {op.writes[0]: (send.reads[0], op.rank) for op, send in receives}
    # 1. Where the program says so: copies begin at their writer, and are used until the end of each reader. A RECV
    # gives the copy a new name, which is mapped back to that of the sent value on this rank.
    begin_by_copy: dict[tuple[Value, int], tuple[float, float]] = {}
    uses_by_copy: defaultdict[tuple[Value, int], list[tuple[float, float]]] = defaultdict(list)
    writer: dict[Value, int] = {}
    first_reader: dict[tuple[Value, int], int] = {}
    for op, position in parts:
        for value in _residuals(op.writes):
            writer[value] = position
            memory = memory_of(value, op.rank)
            if op.kind not in ("RECV", "SEND") and memory is not None:
                begin_by_copy[value, memory] = (starts[position], position)
        for value in _residuals(op.reads):
            copy = sent_copy_by_received.get(value, (value, memory_of(value, op.rank) or 0))
            first_reader.setdefault(copy, position)
            if op.kind in ("SEND", "RECV", "FREE"):
                continue
            last_position = weight_position.get(op[1:4], position) if op.kind == "I" and not released else position
            uses_by_copy[copy].append((ends[last_position], last_position + 0.25))
    # 2. Transfers use the copy on their source, and begin that on their target.
    for value, source, target, _, end in transfers:
        if value.name == "res":
            sent_copy = sent_copy_by_received.get(value, (value, source))
            uses_by_copy[sent_copy].append((end, writer[value] + 0.5))
            begin_by_copy[value, target] = (end, first_reader.get((value, target), len(program.ops)) - 0.5)
    # 3. A copy adds one where it begins, and takes it back at the end of its last use; unused copies stay.
    changes = MemoryChanges()
    for copy, (seconds, order) in begin_by_copy.items():
        changes.append((seconds, order, copy[1], 1, _RESIDUALS))
        if copy in uses_by_copy:
            changes.append((*max(uses_by_copy[copy]), copy[1], -1, _RESIDUALS))
    return changes


def _residuals(values: Iterable[Value]) -> Iterator[Value]:
    return (value for value in values if value[0] == "res" and ">" not in value[5])
