"""Move residuals out of a rank's memory between forward and backward, and load them before they are read.

    0F0 1F0 1B0 0B0      --> offload() -->      0F0 OFFLOAD(res[0,0]) 1F0 .. 1B0 LOAD(res[0,0]) 0B0

OFFLOAD and LOAD run on a copy lane, next to the rank's main work. OFFLOAD stands right behind its writer. LOAD stands
just before its reader, so that it overlaps with the op before that, or `lead` ops earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, count
from math import ceil
from typing import Literal, NamedTuple

from fpipe.limits import check_whole_number
from fpipe.order import arrange, fixed_kinds
from fpipe.program import Op, Program, ProgramError, Value, kind_of
from fpipe.transforms._rewrite import Transform, as_transform, map_parts, rebuild, refuse_freed
from fpipe.transforms.communicate import check_names, listed_names
from fpipe.transforms.shard import forwards_per_microbatch

Policy = Literal["always", "worthwhile"] | Callable[[int, int], bool]
Destination = Literal["host"] | Callable[[int], int]
_LATE_KINDS = frozenset("BIWR")


def offload(
    policy: Policy = "always",
    *,
    cap: float | None = None,
    lead: int = 0,
    destination: Destination = "host",
    values: str | Sequence[str] = ("res",),
) -> Transform:
    """Keep residuals on the host, or in another rank's memory, from their forward to their backward.

    Args:
        policy: which may go: "always", "worthwhile" (what would be away during an op of its rank at least), or
            `f(stage, microbatch) -> bool`.
        cap: of these, as few as keep each rank at this many microbatches (as `Timeline.peak` counts them).
        lead: how many ops earlier than just before its reader a LOAD stands. It may run beside one op as it is.
        destination: "host", or `f(rank) -> rank` whose memory takes them.
        values: names of the values: "res", or also "y" and "wres", as far as a backward or a recompute reads them.

    Returns:
        A transform. With `cap`, `lead` or "worthwhile" it looks at the order of ops: put it after the schedule. What is
        read on another rank than it lies on, or recomputed, stays.

    Raises:
        ValueError: another policy, or a `cap` or `lead` that is no such number.
        ProgramError: a name that no value has; a rank that cannot keep to `cap`, with the least it can keep to.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> print(*(row for row in program.table(comms=True)))
    ['0F0', '1F0', '1B0', '0B0']
    >>> program = fpipe.offload(lambda stage, microbatch: stage == 0)(program)
    >>> print(*(row for row in program.table(comms=True)))
    ['0F0', 'OFFLOAD(res[0,0]@host)', '1F0', '1B0', 'LOAD(res[0,0]@host@0)', '0B0']
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"cap is a number of microbatches above 0, found {cap!r}.")
    check_whole_number("lead", lead, minimum=0)
    names = frozenset(listed_names("values", values))
    if cap is not None and names != {"res"}:
        raise ValueError(f'a cap counts residuals: values=("res",) goes with it, found {values!r}.')

    @as_transform
    def transform(program: Program) -> Program:
        refuse_freed(program)
        check_names("values", names, program, optional_names=("res", "wres", "y"))
        residences_by_rank = _residences_by_rank(program, names, lead, policy)
        if cap is None:
            leaving = [stay for residences in residences_by_rank.values() for stay in residences if stay.may_leave]
        else:
            leaving = _choose_fewest_leaving(program, residences_by_rank, cap)
        if not leaving:
            return program
        ops = _add_moves(program, leaving, destination)
        if lead:
            return arrange(program.inputs, ops, program.outputs, fixed_kinds(program) | {"LOAD"})
        return rebuild(program, ops)

    return transform


class _Residence(NamedTuple):
    """The time that a value spends on its rank waiting for a late reader, in steps of the rank's main lane.

        steps of a rank     0F0 0F1 0F2 0B0 0B1 0B2
        res[0,2]                    |---------------|        last used by 0F2, back for 0B2, and away in between

    Its OFFLOAD runs next to the step after `last_use`. It is `back` when the step before its LOAD starts, and leaves
    memory at the step `release` of its last reader. `load_position`: the position in the program of the LOAD.
    """

    value: Value
    last_use: int
    back: int
    release: int
    load_position: int
    may_leave: bool


def _residences_by_rank(
    program: Program, names: frozenset[str], lead: int, policy: Policy
) -> dict[int, list[_Residence]]:
    """Return, for each rank, the residences of values of these names that wait for a backward or a recompute."""
    main_lanes = _number_steps(program, names)
    residences_by_rank: defaultdict[int, list[_Residence]] = defaultdict(list)
    for op, step in zip(program.ops, main_lanes.step_by_position, strict=True):
        for value in op.writes if op.kind not in ("OFFLOAD", "LOAD") else ():
            residence = _residence_of(value, op, step, main_lanes, lead, policy)
            if residence:
                residences_by_rank[op.rank].append(residence)
    return residences_by_rank


class _Reader(NamedTuple):
    """An op or a part of a PAIR that reads a value, and its step."""

    step: int
    op: Op


class _MainLanes(NamedTuple):
    """Where ops stand in the main lane of their rank.

    The steps of a rank are its timed ops, numbered from 0. An instant op has the number of the step that follows it.
    """

    step_by_position: list[int]
    positions_by_rank: defaultdict[int, list[int]]  # of each step
    readers_by_value: defaultdict[Value, list[_Reader]]
    weight_step_by_index: dict[tuple[int | None, ...], int]  # of each W, by its stage, microbatch and slice


def _number_steps(program: Program, names: frozenset[str]) -> _MainLanes:
    """Number the steps of each rank, and find the readers of values of these names."""
    main_lanes = _MainLanes([], defaultdict(list), defaultdict(list), {})
    for position, op in enumerate(program.ops):
        step = len(main_lanes.positions_by_rank[op.rank])
        main_lanes.step_by_position.append(step)
        if kind_of(op.kind).time:
            main_lanes.positions_by_rank[op.rank].append(position)
        for part in op.parts or (op,):
            if part.kind == "W":
                main_lanes.weight_step_by_index[part[1:4]] = step
            for value in part.reads:
                if value.name in names:
                    main_lanes.readers_by_value[value].append(_Reader(step, part))
    return main_lanes


def _residence_of(
    value: Value, writer: Op, writer_step: int, main_lanes: _MainLanes, lead: int, policy: Policy
) -> _Residence | None:
    """Return the residence of a value; None if no backward or recompute waits for it, or one on another rank does."""
    readers = main_lanes.readers_by_value.get(value, ())
    late_readers = [reader for reader in readers if reader.op.kind in _LATE_KINDS]
    early_readers = [reader for reader in readers if reader.op.kind not in _LATE_KINDS]
    # A reader on another rank has its copy from a SEND, which an offloaded value could not serve.
    if not late_readers or any(reader.op.rank != writer.rank for reader in late_readers):
        return None
    first_reader, last_reader = late_readers[0], late_readers[-1]
    last_use = max([writer_step, *(reader.step for reader in early_readers if reader.op.rank == writer.rank)])
    load_step = max(last_use + 1, first_reader.step - lead)
    back = max(last_use, load_step - 1)
    # What I reads counts until its W has run, as `Timeline.peak` counts it: I keeps it, in parts, as wres.
    release = last_reader.step
    if first_reader.op.kind == "I":
        release = main_lanes.weight_step_by_index.get(first_reader.op[1:4], first_reader.step)
    # A recomputed value is written just before its reader, and an offloaded one leaves already.
    is_fixed = writer.kind == "R" or any(reader.op.kind == "OFFLOAD" for reader in early_readers)
    may_leave = not is_fixed and _is_chosen(value, back - last_use - 1, policy)
    load_position = main_lanes.positions_by_rank[writer.rank][load_step]
    return _Residence(value, last_use, back, release, load_position, may_leave)


def _is_chosen(value: Value, steps_away: int, policy: Policy) -> bool:
    if callable(policy):
        return policy(value.stage or 0, value.microbatch or 0)
    return policy == "always" or steps_away > 0


def _choose_fewest_leaving(
    program: Program, residences_by_rank: Mapping[int, list[_Residence]], cap: float
) -> list[_Residence]:
    """Choose the fewest values whose offload keeps every rank within `cap`."""
    values_per_microbatch = forwards_per_microbatch(program)
    # 1e-9: a cap such as 7/3 of 3 values is 7 values, whatever the last bit of the product.
    limits = {rank: int(cap * values_per_microbatch[rank] + 1e-9) for rank in residences_by_rank}
    leaving = {rank: _choose_leaving(residences, limits[rank]) for rank, residences in residences_by_rank.items()}
    if None in leaving.values():

        def least_cap(rank: int) -> float:
            residences = residences_by_rank[rank]
            fitting = next(limit for limit in count(1) if _choose_leaving(residences, limit) is not None)
            return fitting / values_per_microbatch[rank]

        fullest_rank = max(residences_by_rank, key=least_cap)
        smallest_cap = ceil(least_cap(fullest_rank) * 1000) / 1000  # rounded up, so that the quoted cap does fit
        raise ProgramError(
            f"cap={cap:g} is less than rank {fullest_rank} can keep to in this order: the least is {smallest_cap:g} "
            "microbatches."
        )
    return [residence for residences in leaving.values() for residence in residences or ()]


def _choose_leaving(residences: list[_Residence], limit: int) -> list[_Residence] | None:
    """Choose the values of a rank that leave so that it never holds more than `limit`; None if no choice does."""
    # Belady's rule, step by step: where too many are held, the value leaves that is needed again last. Only the steps
    # count at which a value arrives, has left or is back; in between the number that is held stays.
    leaving: set[_Residence] = set()
    present: list[_Residence] = []
    arriving = sorted(residences, key=lambda residence: residence.last_use, reverse=True)
    steps = {step for stay in residences for step in (stay.last_use, stay.last_use + 1, stay.back)}
    for step in sorted(steps):
        while arriving and arriving[-1].last_use <= step:
            present.append(arriving.pop())
        present = [residence for residence in present if residence.release >= step]
        candidates = [residence for residence in present if residence.may_leave and residence not in leaving]
        candidates.sort(key=lambda residence: -residence.back)
        # One value at a time; where none alone helps, since it leaves in the very step in which another comes back,
        # two that pass each other in the copy lane.
        held_count = _held_count(present, leaving, step)
        single, pairs = ((residence,) for residence in candidates), combinations(candidates, 2)
        for additions in (*single, *pairs) if held_count > limit else ():
            if held_count <= limit:
                break
            if leaving.isdisjoint(additions):
                smaller_count = _held_count(present, leaving.union(additions), step)
                if smaller_count < held_count:
                    leaving.update(additions)
                    held_count = smaller_count
        if held_count > limit:
            return None
    return [residence for residence in residences if residence in leaving]


def _held_count(present: Iterable[_Residence], leaving: set[_Residence], step: int) -> int:
    # One that leaves and one that comes back in a step share one place: the copy lane moves one value at a time, and
    # frees the first before it brings the second. So the larger of the two numbers counts.
    held_count = outgoing = returning = 0
    for residence in present:
        if residence not in leaving or residence.last_use == step or step > residence.back:
            held_count += 1
        elif step == residence.last_use + 1:
            outgoing += 1
        elif step == residence.back:
            returning += 1
    return held_count + max(outgoing, returning)


def _add_moves(program: Program, leaving: list[_Residence], destination: Destination) -> list[Op]:
    """Return the ops with an OFFLOAD behind each writer, a LOAD before each late reader, which reads the copy."""
    loads_by_position: defaultdict[int, list[Op]] = defaultdict(list)
    copy_by_value: dict[Value, Value] = {}
    offload_by_value: dict[Value, Op] = {}
    for value, residence in {residence.value: residence for residence in leaving}.items():
        rank = program.ops[program.writer[value]].rank
        memory_name = "host" if destination == "host" else _destination_rank(destination, rank, program.ranks)
        moved_value = value._replace(location=f"{value.location}@{memory_name}")
        copy_by_value[value] = moved_value._replace(location=f"{moved_value.location}@{rank}")
        offload_by_value[value] = Op("OFFLOAD", *value[1:4], rank, (value,), (moved_value,))
        load = Op("LOAD", *value[1:4], rank, (moved_value,), (copy_by_value[value],))
        loads_by_position[residence.load_position].append(load)

    def read_copies(op: Op) -> Op:
        if op.kind not in _LATE_KINDS or copy_by_value.keys().isdisjoint(op.reads):
            return op
        return op._replace(reads=tuple(copy_by_value.get(value, value) for value in op.reads))

    ops: list[Op] = []
    for position, op in enumerate(program.ops):
        ops += loads_by_position.get(position, ())
        ops.append(map_parts(read_copies, op))
        ops += [offload_by_value[value] for value in op.writes if value in offload_by_value]
    return ops


def _destination_rank(destination: Callable[[int], int], rank: int, ranks: int) -> int:
    partner = destination(rank)
    if type(partner) is not int or not 0 <= partner < ranks or partner == rank:
        raise ProgramError(
            f"destination({rank}) is another rank that takes what rank {rank} offloads, found {partner!r}."
        )
    return partner
