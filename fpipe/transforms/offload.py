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

from fpipe.memory import shares
from fpipe.order import arrange, held_kinds
from fpipe.program import Op, Program, ProgramError, Value, building, kind_of
from fpipe.transforms._rewrite import Transform, rebuilt, refuse_freed, transforming

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
        ProgramError: a rank that cannot keep to `cap`, with the least it can keep to.

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
    if type(lead) is not int or lead < 0:
        raise ValueError(f"lead is a whole number of ops, at least 0; found {lead!r}.")
    if to != "host" and not callable(to):
        raise ValueError(f"to is 'host' or f(rank) -> rank, found {to!r}.")
    names = frozenset((values,) if isinstance(values, str) else values)
    if cap is not None and names != {"res"}:
        raise ValueError(f'a cap counts residuals: values=("res",) goes with it, found {values!r}.')

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        with building():
            rows = _stays(program, names, lead, policy)
            if cap is not None:
                stays = _enough(program, rows, cap)
            else:
                stays = [stay for row in rows.values() for stay in row if stay.may]
            if not stays:
                return program
            ops = _moved(program, stays, to)
            if lead:
                return arrange(program.inputs, ops, program.outputs, held_kinds(program) | {"LOAD"})
            return rebuilt(program, ops)

    return transform


class _Stay(NamedTuple):
    """A value on its rank, in steps of the rank's main lane: `left` by its forward, held `until` its last reader.

    If it is moved, its OFFLOAD runs beside the step after `left`, and it is `back` when the step before its LOAD
    starts, since the LOAD may run beside that.
    """

    value: Value
    left: int
    back: int
    until: int
    load: int  # the position in the program before which its LOAD stands
    may: bool  # leave

    @property
    def away(self) -> int:
        """Steps for which it would be away."""
        return self.back - self.left - 1


def _stays(program: Program, names: frozenset[str], lead: int, policy: Policy) -> dict[int, list[_Stay]]:
    """For each rank the values of these names that wait there for a backward or a recompute."""
    rows: defaultdict[int, list[int]] = defaultdict(list)  # the positions of timed ops
    steps: list[int] = []
    weights: dict[tuple[int | None, ...], int] = {}
    readers: defaultdict[Value, list[tuple[int, Op]]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        steps.append(len(rows[op.rank]))
        if kind_of(op.kind).time:
            rows[op.rank].append(position)
        for part in op.parts or (op,):
            if part.kind == "W":
                weights[part[1:4]] = steps[-1]
            for value in part.reads:
                if value.name in names:
                    readers[value].append((position, part))
    found: defaultdict[int, list[_Stay]] = defaultdict(list)
    for position, op in enumerate(program.ops):
        for value in op.writes if op.kind not in ("OFFLOAD", "LOAD") else ():
            late = [(at, reader) for at, reader in readers.get(value, ()) if reader.kind in _LATE]
            early = [(at, reader) for at, reader in readers.get(value, ()) if reader.kind not in _LATE]
            if not late or any(reader.rank != op.rank for _, reader in late):
                continue
            at, reader = late[0]
            left = max([steps[position], *(steps[at] for at, other in early if other.rank == op.rank)])
            step = max(left + 1, steps[at] - lead)
            until = weights.get(reader[1:4], steps[at]) if reader.kind == "I" else steps[late[-1][0]]
            out = op.kind == "R" or any(other.kind == "OFFLOAD" for _, other in early)
            stay = _Stay(value, left, max(left, step - 1), until, rows[op.rank][step], not out)
            found[op.rank].append(stay if stay.may and _chosen(stay, policy) else stay._replace(may=False))
    return found


def _chosen(stay: _Stay, policy: Policy) -> bool:
    if callable(policy):
        return policy(stay.value.stage or 0, stay.value.microbatch or 0)
    return policy == "always" or stay.away > 0


def _enough(program: Program, rows: Mapping[int, list[_Stay]], cap: float) -> list[_Stay]:
    """As few values as keep every rank at `cap`."""
    units = shares(program)
    chosen = {rank: _leaving(row, int(cap * units[rank] + 1e-9)) for rank, row in rows.items()}
    if None in chosen.values():
        least = {
            rank: next(room for room in count(1) if _leaving(row, room) is not None) / units[rank]
            for rank, row in rows.items()
        }
        worst = max(least, key=least.__getitem__)
        raise ProgramError(
            f"cap={cap:g} is less than rank {worst} can keep to in this order: the least is "
            f"{ceil(least[worst] * 1000) / 1000:g} microbatches."
        )
    return [stay for row in chosen.values() for stay in row or ()]


def _leaving(row: list[_Stay], room: int) -> list[_Stay] | None:
    """Which values leave so that there are never more than `room`: where there are, the one that is back last, or two
    that pass each other; None if that is not enough."""
    out: set[_Stay] = set()
    there: list[_Stay] = []
    coming = sorted(row, key=lambda stay: stay.left, reverse=True)
    for step in sorted({step for stay in row for step in (stay.left, stay.left + 1, stay.back)}):
        while coming and coming[-1].left <= step:
            there.append(coming.pop())
        there = [stay for stay in there if stay.until >= step]
        free = sorted((stay for stay in there if stay.may and stay not in out), key=lambda stay: -stay.back)
        held = _held(there, out, step)
        for leaving in (*((stay,) for stay in free), *combinations(free, 2)) if held > room else ():
            if held > room and out.isdisjoint(leaving) and (now := _held(there, out.union(leaving), step)) < held:
                out.update(leaving)
                held = now
        if held > room:
            return None
    return [stay for stay in row if stay in out]


def _held(there: Iterable[_Stay], out: set[_Stay], step: int) -> int:
    """How many values a rank holds in a step, while those that are `out` leave in the step after their forward.

    What leaves and what comes back in one step are never there together: the lane does one after the other.
    """
    held = leaving = coming = 0
    for stay in there:
        if stay not in out or stay.left == step or step > stay.back:
            held += 1
        elif step == stay.left + 1:
            leaving += 1
        elif step == stay.back:
            coming += 1
    return held + max(leaving, coming)


def _moved(program: Program, stays: list[_Stay], to: Where) -> list[Op]:
    """The ops, with an OFFLOAD behind each writer, a LOAD where it is to stand, and late readers that read the copy."""
    out = {stay.value: stay for stay in stays}
    loads: defaultdict[int, list[Op]] = defaultdict(list)
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    offloads: dict[Value, Op] = {}
    for op in program.ops:
        for value in op.writes:
            if value in out:
                place = "host" if to == "host" else _partner(to, op.rank, program.ranks)
                away = value._replace(at=f"{value.at}@{place}")
                copies[value] = away._replace(at=f"{away.at}@{op.rank}")
                offloads[value] = Op("OFFLOAD", *value[1:4], op.rank, (value,), (away,))
                loads[out[value].load].append(Op("LOAD", *value[1:4], op.rank, (away,), (copies[value],)))
    for position, op in enumerate(program.ops):
        ops += loads.get(position, ())
        ops.append(_reading(op, copies))
        ops += [offloads[value] for value in op.writes if value in offloads]
    return ops


def _partner(to: Callable[[int], int], rank: int, ranks: int) -> int:
    found = to(rank)
    if type(found) is not int or not 0 <= found < ranks or found == rank:
        raise ProgramError(f"to({rank}) is another rank that takes what rank {rank} offloads, found {found!r}.")
    return found


def _reading(op: Op, copies: Mapping[Value, Value]) -> Op:
    """A backward or recompute that reads the copies that were loaded."""
    if op.parts:
        parts = tuple(_reading(part, copies) for part in op.parts)
        return op._replace(parts=parts, reads=tuple(dict.fromkeys(value for part in parts for value in part.reads)))
    if op.kind not in _LATE or not any(value in copies for value in op.reads):
        return op
    return op._replace(reads=tuple(copies.get(value, value) for value in op.reads))
