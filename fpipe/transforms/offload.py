"""Move what waits for its backward out of a rank's memory, and bring it back before it is read.

    0F0 1F0 1B0 0B0      --> offload() -->      0F0 OFFLOAD(res[0,0]) 1F0 .. 1B0 LOAD(res[0,0]) 0B0

OFFLOAD and LOAD run beside the main work, in a lane of their own. OFFLOAD goes as soon as its value is there, LOAD
stands just before its reader, so that it runs beside the op before that; or some ops earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from fpipe.limits import whole
from fpipe.order import arrange, held_kinds
from fpipe.program import Op, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, on_parts, rebuilt, refuse_freed, transforming
from fpipe.transforms._waiting import LATE, Policy, Stay, enough, waiting
from fpipe.transforms.communicate import check_names, names_of

Where = Literal["host"] | Callable[[int], int]


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
        rows = waiting(program, names, lead, policy)
        if cap is None:
            stays = [stay for row in rows.values() for stay in row if stay.may]
        else:
            stays = enough(program, rows, cap)
        if not stays:
            return program
        ops = _moved(program, stays, to)
        if lead:
            return arrange(program.inputs, ops, program.outputs, held_kinds(program) | {"LOAD"})
        return rebuilt(program, ops)

    return transform


def _moved(program: Program, stays: list[Stay], to: Where) -> list[Op]:
    """The ops, with an OFFLOAD behind each writer, a LOAD where it is to stand, and late readers that read the copy."""
    loads: defaultdict[int, list[Op]] = defaultdict(list)
    copies: dict[Value, Value] = {}
    offloads: dict[Value, Op] = {}
    for value, stay in {stay.value: stay for stay in stays}.items():
        rank = program.ops[program.writer[value]].rank
        away = value._replace(at=f"{value.at}@{'host' if to == 'host' else _partner(to, rank, program.ranks)}")
        copies[value] = away._replace(at=f"{away.at}@{rank}")
        offloads[value] = Op("OFFLOAD", *value[1:4], rank, (value,), (away,))
        loads[stay.load].append(Op("LOAD", *value[1:4], rank, (away,), (copies[value],)))

    def reading(op: Op) -> Op:
        if op.kind not in LATE or copies.keys().isdisjoint(op.reads):
            return op
        return op._replace(reads=tuple(copies.get(value, value) for value in op.reads))

    ops: list[Op] = []
    for position, op in enumerate(program.ops):
        ops += loads.get(position, ())
        ops.append(on_parts(reading, op))
        ops += [offloads[value] for value in op.writes if value in offloads]
    return ops


def _partner(to: Callable[[int], int], rank: int, ranks: int) -> int:
    found = to(rank)
    if type(found) is not int or not 0 <= found < ranks or found == rank:
        raise ProgramError(f"to({rank}) is another rank that takes what rank {rank} offloads, found {found!r}.")
    return found
