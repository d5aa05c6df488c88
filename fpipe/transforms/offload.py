"""Move what waits for its backward out of a rank's memory, and bring it back before it is read.

    0F0 1F0 1B0 0B0      --> offload() -->      0F0 OFFLOAD(res[0,0]) 1F0 .. 1B0 LOAD(res[0,0]) 0B0

OFFLOAD and LOAD run beside the main work, in a lane of their own. OFFLOAD goes as soon as its value is there, LOAD
stands just before its reader, so that it runs beside the op before that; or some ops earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, count
from math import ceil
from typing import Literal, NamedTuple

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds
from fpipe.program import Op, Program, ProgramError, Value, kind_of
from fpipe.transforms._rewrite import Transform, on_parts, rebuilt, refuse_freed, transforming
from fpipe.transforms.communicate import check_names, names_of
from fpipe.transforms.shard import shares

Policy = Literal["always", "worthwhile"] | Callable[[int, int], bool]
Where = Literal["host"] | Callable[[int], int]
_LATE = frozenset("BIWR")


def offload(
    policy: Policy = "always",
    *,
    cap: float | None = None,
    lead: int = 0,
    to: Where = "host",
    values: Sequence[str] = ("res",),
) -> Transform:
    """Keep residuals on the host, or in another rank's memory, from their forward to their backward.

    Args:
        policy: which may go: "always", "worthwhile" (what would be away during an op of its rank at least), or
            `f(stage, microbatch) -> bool`.
        cap: of these, as few as keep each rank at this many microbatches (as `Timeline.peak` counts them).
        lead: how many ops earlier than just before its reader a LOAD stands. It may run beside one op as it is.
        to: "host", or `f(rank) -> rank` whose memory takes them.
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
    if policy not in ("always", "worthwhile") and not callable(policy):
        raise ValueError(f"policy is 'always', 'worthwhile' or f(stage, microbatch) -> bool, found {policy!r}.")
    if cap is not None and not (isinstance(cap, int | float) and cap > 0):
        raise ValueError(f"cap is a number of microbatches above 0, found {cap!r}.")
    whole("lead", lead, least=0)
    if to != "host" and not callable(to):
        raise ValueError(f"to is 'host' or f(rank) -> rank, found {to!r}.")
    names = frozenset(names_of("values", values))
    if cap is not None and names != {"res"}:
        raise ValueError(f'a cap counts residuals: values=("res",) goes with it, found {values!r}.')

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        check_names("values", names, program, also=("res", "wres", "y"))
        stays_by_rank = _stays(program, names, lead, policy)
        if cap is None:
            leaving = [stay for stays in stays_by_rank.values() for stay in stays if stay.may_leave]
        else:
            leaving = _fewest_leaving(program, stays_by_rank, cap)
        if not leaving:
            return program
        ops = _with_moves(program, leaving, to)
        if lead:
            return arrange(program.inputs, ops, program.outputs, held_kinds(program) | {"LOAD"})
        return rebuilt(program, ops)

    return transform


class _Stay(NamedTuple):
    """A value that waits on its rank for a late reader, in steps of the rank's main lane.

        steps of a rank     0F0 0F1 0F2 0B0 0B1 0B2
        res[0,2]                    |---------------|        left behind 0F2, back for 0B2, and away in between

    Its OFFLOAD runs beside the step after `left`; it is `back` when the step before its LOAD starts, and held `until`
    its last reader. `load`: the position in the program before which its LOAD stands.
    """

    value: Value
    left: int
    back: int
    until: int
    load: int
    may_leave: bool


def _stays(program: Program, names: frozenset[str], lead: int, policy: Policy) -> dict[int, list[_Stay]]:
    """For each rank the values of these names that wait there for a backward or a recompute."""
    timed: defaultdict[int, list[int]] = defaultdict(list)  # the positions of a rank's timed ops
    steps: list[int] = []
    step_of_w: dict[tuple[int | None, ...], int] = {}
    readers_of: defaultdict[Value, list[tuple[int, Op]]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        steps.append(len(timed[op.rank]))
        if kind_of(op.kind).time:
            timed[op.rank].append(position)
        for part in op.parts or (op,):
            if part.kind == "W":
                step_of_w[part[1:4]] = steps[-1]
            for value in part.reads:
                if value.name in names:
                    readers_of[value].append((position, part))
    stays: defaultdict[int, list[_Stay]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        for value in op.writes if op.kind not in ("OFFLOAD", "LOAD") else ():
            late = [(place, reader) for place, reader in readers_of.get(value, ()) if reader.kind in _LATE]
            early = [(place, reader) for place, reader in readers_of.get(value, ()) if reader.kind not in _LATE]
            if not late or any(reader.rank != op.rank for _, reader in late):
                continue
            place, reader = late[0]
            left = max([steps[position], *(steps[place] for place, reader in early if reader.rank == op.rank)])
            load = max(left + 1, steps[place] - lead)
            back = max(left, load - 1)
            until = step_of_w.get(reader[1:4], steps[place]) if reader.kind == "I" else steps[late[-1][0]]
            is_fixed = op.kind == "R" or any(reader.kind == "OFFLOAD" for _, reader in early)
            may_leave = not is_fixed and _is_chosen(value, back - left - 1, policy)
            stays[op.rank].append(_Stay(value, left, back, until, timed[op.rank][load], may_leave))
    return stays


def _is_chosen(value: Value, steps_away: int, policy: Policy) -> bool:
    if callable(policy):
        return policy(value.stage or 0, value.microbatch or 0)
    return policy == "always" or steps_away > 0


def _fewest_leaving(program: Program, stays_by_rank: Mapping[int, list[_Stay]], cap: float) -> list[_Stay]:
    """Choose as few values as keep every rank at `cap`."""
    units = shares(program)
    leaving = {rank: _leaving_for(stays, int(cap * units[rank] + 1e-9)) for rank, stays in stays_by_rank.items()}
    if None in leaving.values():
        least = {
            rank: next(room for room in count(1) if _leaving_for(stays, room) is not None) / units[rank]
            for rank, stays in stays_by_rank.items()
        }
        worst = max(least, key=least.__getitem__)
        raise ProgramError(
            f"cap={cap:g} is less than rank {worst} can keep to in this order: the least is "
            f"{ceil(least[worst] * 1000) / 1000:g} microbatches."
        )
    return [stay for stays in leaving.values() for stay in stays or ()]


def _leaving_for(stays: list[_Stay], room: int) -> list[_Stay] | None:
    """Choose what leaves for `room`: the value that is back last, or two that pass each other; None if none do."""
    leaving: set[_Stay] = set()
    present: list[_Stay] = []
    coming = sorted(stays, key=lambda stay: stay.left, reverse=True)
    for step in sorted({step for stay in stays for step in (stay.left, stay.left + 1, stay.back)}):
        while coming and coming[-1].left <= step:
            present.append(coming.pop())
        present = [stay for stay in present if stay.until >= step]
        free = sorted((stay for stay in present if stay.may_leave and stay not in leaving), key=lambda stay: -stay.back)
        held = _held(present, leaving, step)
        for more in (*((stay,) for stay in free), *combinations(free, 2)) if held > room else ():
            if held > room and leaving.isdisjoint(more) and (less := _held(present, leaving.union(more), step)) < held:
                leaving.update(more)
                held = less
        if held > room:
            return None
    return [stay for stay in stays if stay in leaving]


def _held(present: Iterable[_Stay], leaving: set[_Stay], step: int) -> int:
    """Count the values that a rank holds in a step; the lane moves one at a time, so that none leaves as one comes."""
    held = out = back = 0
    for stay in present:
        if stay not in leaving or stay.left == step or step > stay.back:
            held += 1
        elif step == stay.left + 1:
            out += 1
        elif step == stay.back:
            back += 1
    return held + max(out, back)


def _with_moves(program: Program, leaving: list[_Stay], to: Where) -> list[Op]:
    """The ops, with an OFFLOAD behind each writer, a LOAD where it is to stand, and late readers that read the copy."""
    loads: defaultdict[int, list[Op]] = defaultdict(list)
    copies: dict[Value, Value] = {}
    offloads: dict[Value, Op] = {}
    for value, stay in {stay.value: stay for stay in leaving}.items():
        rank = program.ops[program.writer[value]].rank
        away = value._replace(at=f"{value.at}@{'host' if to == 'host' else _partner(to, rank, program.ranks)}")
        copies[value] = away._replace(at=f"{away.at}@{rank}")
        offloads[value] = Op("OFFLOAD", *value[1:4], rank, (value,), (away,))
        loads[stay.load].append(Op("LOAD", *value[1:4], rank, (away,), (copies[value],)))

    def read_copies(op: Op) -> Op:
        if op.kind not in _LATE or copies.keys().isdisjoint(op.reads):
            return op
        return op._replace(reads=tuple(copies.get(value, value) for value in op.reads))

    ops: list[Op] = []
    for position, op in enumerate(program.ops):
        ops += loads.get(position, ())
        ops.append(on_parts(read_copies, op))
        ops += [offloads[value] for value in op.writes if value in offloads]
    return ops


def _partner(to: Callable[[int], int], rank: int, ranks: int) -> int:
    partner = to(rank)
    if type(partner) is not int or not 0 <= partner < ranks or partner == rank:
        raise ProgramError(f"to({rank}) is another rank that takes what rank {rank} offloads, found {partner!r}.")
    return partner
