"""Send values: a SEND and a RECV for each value that is read on a rank where it is not. And free them.

    1F0 reads y[0,0] of rank 0        -->        y[0,0]>1 = SEND y[0,0] @ 0,  y[0,0]@1 = RECV y[0,0]>1 @ 1,
                                                 1F0 reads y[0,0]@1

SEND goes as soon as the value is there, RECV stands just before the first reader. A value goes to a rank once, whoever
reads it there, and through nobody between. FREE drops a value after its last read, and makes memory a part of the
program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from fpipe.order import arrange, held_kinds
from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, on_parts, refuse_freed, transforming

_FLOW = ("y", "dx", "carry", "dcarry")
"""Values that flow from stage to stage, and may be rounded on their way."""
AHEAD = 2
"""Receives that a rank posts beyond the one that it comes to."""
NARROW = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def communicate(*, again: Iterable[str] | Mapping[str, Callable[[Op], object]] = (), cast: object = None) -> Transform:
    """Make every transfer an op.

    Args:
        again: names of values (such as "params") that travel once for each reader instead of once for each rank, so
            that no copy stays there in between; or `{name: f(op)}`, and readers for which f gives the same share a
            trip: `{"params": lambda op: op.kind == "F"}` brings weights once for all forwards of a stage on a rank, and
            once more for its backwards.
        cast: a dtype that activations and their gradients are rounded to while they travel, such as `torch.bfloat16`;
            or `{name: dtype}` for some of "y", "dx", "carry" and "dcarry". They arrive in the dtype they had. What is
            no wider, integers, weights and sums travel as they are; so do results, what goes to an output's home, to
            MERGE or to the sum of input gradients, and a copy that a stage reads beside them. A number x arrives as
            x (1 + e) with e at most 2**-8 for bfloat16, 2**-11 for float16, if it is neither too large nor too small
            for the dtype.

    Returns:
        A transform; what travels already is left as it is.

    Raises:
        ValueError: names or shares of `again` that are none, or another `cast`.
        ProgramError: a name in `again` that no value of the program has.

    >>> import fpipe
    >>> program = fpipe.place("linear")(fpipe.program(2))
    >>> program.table(comms=True)
    [['0F0', '0B0'], ['1F0', '1B0']]
    >>> program = fpipe.communicate()(program)
    >>> program.table(comms=True)
    [['0F0', 'SEND(y[0,0]>1)', 'RECV(dx[1,0]@0)', '0B0'], ['RECV(y[0,0]@1)', '1F0', '1B0', 'SEND(dx[1,0]>0)']]
    >>> print(*(op for op in program.ops if op.kind in ("SEND", "RECV")), sep="\\n")
    y[0,0]>1 = SEND[0,0] y[0,0] @ 0
    y[0,0]@1 = RECV[0,0] y[0,0]>1 @ 1
    dx[1,0]>0 = SEND[1,0] dx[1,0] @ 1
    dx[1,0]@0 = RECV[1,0] dx[1,0]>0 @ 0
    >>> program = fpipe.chain(fpipe.place("linear"), fpipe.communicate(cast={"y": "bfloat16"}))(fpipe.program(2))
    >>> print(*(op for op in program.ops if op.kind == "SEND"), sep="\\n")
    y[0,0]>1 = SEND[0,0] y[0,0] {cast='bfloat16'} @ 0
    dx[1,0]>0 = SEND[1,0] dx[1,0] @ 1
    """
    casts = _casts(cast)
    if isinstance(again, Mapping):
        trips = dict(again)
        names_of("again", trips)
        for name, share in trips.items():
            if not callable(share):
                example = "such as lambda op: op.kind"
                raise ValueError(f"again= says f(op) for each name, {example}; found {{{name!r}: {share!r}}}.")
    else:
        trips = dict.fromkeys(names_of("again", again), _itself)

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        check_names("again", trips, program)
        sender = _Sender(program, trips, casts)
        ops = [on_parts(sender.read_locally, op) for op in program.ops]
        outputs = tuple(delivered for end in program.outputs for delivered in sender.deliver(end))
        if not sender.transfers:
            return program
        return arrange(program.inputs, [*ops, *sender.transfers], outputs, held_kinds(program))

    return transform


def with_transfers(program: Program) -> Program:
    """Make every transfer an op and drop FREE: the form in which bytes are counted."""
    return communicate()(without_frees(program))


def received_as_sent(program: Program) -> Program:
    """A program with transfers whose RECVs stand right behind their SENDs: all ranks come to them in one order.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.communicate())(fpipe.program(2))
    >>> [row[3:6] for row in received_as_sent(program).table(comms=True)][1]
    ['RECV(y[0,1]@1)', '1B0', 'SEND(dx[1,0]>0)']
    """
    received = {op.reads: op for op in program.ops if op.kind == "RECV"}
    rest = [op for op in program.ops if op.kind != "RECV"]
    ops = [next_op for op in rest for next_op in (op, received.get(op.writes)) if next_op is not None]
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def queued_until(receives: Sequence[bool]) -> list[int]:
    """How many of a rank's transfers are queued once it has come to each: the next receives, `AHEAD` at most, are too.

    >>> queued_until([False, True, True, True, False, True])
    [3, 4, 4, 4, 6, 6]
    """
    behind = range(1, len(receives) + 1)
    return [place + sum(takewhile(bool, receives[place : place + AHEAD])) for place in behind]


def without_frees(program: Program) -> Program:
    """Drop FREE, which takes no time and writes nothing."""
    ops = tuple(op for op in program.ops if op.kind != "FREE")
    return program if len(ops) == len(program.ops) else Program.trusted(program.inputs, ops, program.outputs)


def names_of(word: str, argument: Any) -> tuple[str, ...]:
    """The names in an argument: one, or several."""
    is_single = isinstance(argument, str) or not isinstance(argument, Iterable)
    names: tuple[Any, ...] = (argument,) if is_single else tuple(argument)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{word}= takes names of values, such as ('res',); found {name!r}.")
    return names


def check_names(word: str, names: Iterable[str], program: Program, also: Iterable[str] = ()) -> None:
    """Refuse a name that no value of the program has; those in `also` some programs have, and need not."""
    known = {end.value.name for end in program.inputs} | {value.name for op in program.ops for value in op.writes}
    for name in names:
        if name not in known and name not in also:
            raise ProgramError(f"{word}= names {name!r}, this program has values named {', '.join(sorted(known))}.")


def _casts(cast: object) -> dict[str, str]:
    """The dtypes of rounded values, by name; a program is data, so dtypes are words in it."""
    dtypes: Mapping[Any, Any] = {}
    if cast is not None:
        dtypes = cast if isinstance(cast, Mapping) else dict.fromkeys(_FLOW, cast)  # pyright: ignore[reportUnknownVariableType]
    casts = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    for name in casts:
        if name not in _FLOW:
            raise ValueError(f"cast= is of what flows between stages, {', '.join(map(repr, _FLOW))}; found {name!r}.")
    for name, word in casts.items():
        if word not in NARROW:
            raise ValueError(f"cast= is a floating dtype, torch.{', torch.'.join(NARROW)}; found {dtypes[name]!r}.")
    return casts


def _itself(op: Op) -> object:
    return op


def _results(program: Program) -> Iterator[tuple[Value, int]]:
    """Results, and the rank where each is handed out or joined: rounded on the way, some rows would be, others not."""
    for op in program.ops:
        if op.kind == "MERGE" or (op.kind == "ADD" and op.writes[0].name != "dy"):  # dy is what a backward takes
            yield from ((value, op.rank) for value in op.reads)
    for end in program.outputs:
        yield from ((end.value, rank) for rank in end.homes)


class _Sender:
    """The ranks where each value is, and the transfers to those where it is not."""

    def __init__(self, program: Program, again: dict[str, Callable[[Op], object]], casts: dict[str, str]) -> None:
        self.again, self.casts = again, casts
        self.exact = set(_results(program)) if casts else set[tuple[Value, int]]()
        self.transfers: list[Op] = []
        self.ranks: dict[Value, set[int]] = {end.value: set(end.homes) for end in program.inputs}
        self.ranks |= {value: {op.rank} for op in program.ops for value in op.writes}
        self.copies: dict[tuple[Value, int, object], Value] = {}  # a value on a rank, for a trip
        self.trips: Counter[tuple[Value, int]] = Counter()
        sent = {op.writes[0]: op.reads[0] for op in program.ops if op.kind == "SEND"}
        for op in program.ops:
            if op.kind == "RECV" and op.reads[0] in sent:
                value = sent[op.reads[0]]
                self.copies[value, op.rank, None] = op.writes[0]
                self.trips[value, op.rank] += 1

    def read_locally(self, op: Op) -> Op:
        if op.kind == "RECV" or all(op.rank in self.ranks[value] for value in op.reads):
            return op
        return op._replace(reads=tuple(self.copy(value, op.rank, op) for value in op.reads))

    def copy(self, value: Value, rank: int, reader: Op | None = None) -> Value:
        """Return the value as it is read on a rank; send it there if it is not."""
        if rank in self.ranks[value]:
            return value
        purpose = self.again[value.name](reader) if reader and value.name in self.again else None
        if (value, rank, purpose) in self.copies:
            return self.copies[value, rank, purpose]
        trip = self.trips[value, rank]
        self.trips[value, rank] += 1
        tail = f"{rank}.{trip}" if trip else f"{rank}"
        flight, copy = value._replace(at=f"{value.at}>{tail}"), value._replace(at=f"{value.at}@{tail}")
        is_rounded = value.name in self.casts and (value, rank) not in self.exact
        how = (("cast", self.casts[value.name]),) if is_rounded else ()
        self.transfers.append(Op("SEND", *value[1:4], min(self.ranks[value]), (value,), (flight,), (), how))
        self.transfers.append(Op("RECV", *value[1:4], rank, (flight,), (copy,)))
        self.copies[value, rank, purpose] = copy
        return copy

    def deliver(self, end: Output) -> list[Output]:
        """Send an output to the homes where it is not; it is an output there too."""
        homes: dict[Value, list[int]] = {}
        for rank in end.homes:
            homes.setdefault(self.copy(end.value, rank), []).append(rank)
        return [Output(end.name, value, tuple(ranks)) for value, ranks in homes.items()]


def free() -> Transform:
    """Add a FREE behind the last reader of each value that an op wrote and that is no output, as the last transform.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> program.table(comms=True)
    [['0F0', '1F0', '1B0', '0B0']]
    >>> program = fpipe.free()(program)
    >>> program.table(comms=True)
    [['0F0', '1F0', 'FREE(y[0,0])', '1B0', 'FREE(res[1,0])', '0B0', 'FREE(res[0,0])']]
    >>> print(*(op for op in program.ops if op.kind == "FREE"), sep="\\n")
    _ = FREE[1,0] y[0,0] @ 0
    _ = FREE[1,0] res[1,0] @ 0
    _ = FREE[0,0] res[0,0] dx[1,0] @ 0
    """

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        ends = {end.value for end in (*program.inputs, *program.outputs)}
        dead: defaultdict[int, list[Value]] = defaultdict(list)
        for value, position in last_uses(program).items():
            if value not in ends and ">" not in value.at:
                dead[position].append(value)
        ops: list[Op] = []
        for position, op in enumerate(program.ops):
            ops.append(op)
            values_by_rank: defaultdict[int, list[Value]] = defaultdict(list)
            for value in dead.get(position, ()):
                values_by_rank[program.ops[program.writer[value]].rank].append(value)
            ops.extend(Op("FREE", *op[1:4], rank, tuple(values), ()) for rank, values in sorted(values_by_rank.items()))
        return Program.trusted(program.inputs, tuple(ops), program.outputs)

    return transform


def last_uses(program: Program) -> dict[Value, int]:
    """The position of the last op that reads each value, or of its writer where nobody does."""
    return {value: position for position, op in enumerate(program.ops) for value in (*op.writes, *op.reads)}
