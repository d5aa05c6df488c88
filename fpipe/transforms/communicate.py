"""Make transfers and frees explicit: a SEND and a RECV for each value read on a rank that does not have it.

    1F0 reads y[0,0] of rank 0        -->        y[0,0]>1 = SEND y[0,0] @ 0,  y[0,0]@1 = RECV y[0,0]>1 @ 1,
                                                 1F0 reads y[0,0]@1

SEND stands right behind the writer, RECV just before the first reader. A value goes to a rank once, for all readers
there, and directly from its writer. FREE drops a value after its last read, and so makes memory a part of the program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from fpipe.order import arrange, fixed_kinds
from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, as_transform, map_parts, refuse_freed

_FLOW_NAMES = ("y", "dx", "carry", "dcarry")
"""Values that flow from stage to stage, and may be rounded on their way."""
AHEAD = 2
"""Receives that a rank posts beyond the one that it comes to."""
NARROW = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def communicate(
    *, again: str | Iterable[str] | Mapping[str, Callable[[Op], object]] = (), cast: object = None
) -> Transform:
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
    dtype_by_name = _dtype_by_name(cast)
    if isinstance(again, Mapping):
        trip_by_name = dict(again)
        listed_names("again", trip_by_name)
    else:
        trip_by_name = dict.fromkeys(listed_names("again", again), _itself)

    @as_transform
    def transform(program: Program) -> Program:
        refuse_freed(program)
        check_names("again", trip_by_name, program)
        sender = _Sender(program, trip_by_name, dtype_by_name)
        ops = [map_parts(sender.read_locally, op) for op in program.ops]
        outputs = tuple(output_copy for output in program.outputs for output_copy in sender.deliver_output(output))
        if not sender.transfers:
            return program
        return arrange(program.inputs, [*ops, *sender.transfers], outputs, fixed_kinds(program))

    return transform


def with_transfers(program: Program) -> Program:
    """Make every transfer an op and drop every FREE: the form in which bytes are counted."""
    return communicate()(without_frees(program))


def with_adjacent_transfers(program: Program) -> Program:
    """Move each RECV right behind its SEND, so that all ranks meet the transfers in one order.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.communicate())(fpipe.program(2))
    >>> [row[3:6] for row in with_adjacent_transfers(program).table(comms=True)][1]
    ['RECV(y[0,1]@1)', '1B0', 'SEND(dx[1,0]>0)']
    """
    receive_by_flight = {op.reads: op for op in program.ops if op.kind == "RECV"}
    other_ops = [op for op in program.ops if op.kind != "RECV"]
    ops = [next_op for op in other_ops for next_op in (op, receive_by_flight.get(op.writes)) if next_op is not None]
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def queued_transfers(receives: Sequence[bool]) -> list[int]:
    """Count, for each transfer of a rank, the transfers that are queued once the rank comes to it.

    Up to `AHEAD` receives that follow are queued early, so that a sender need not wait for this rank to reach them. A
    send in between ends the run: its value may not exist yet.

    >>> queued_transfers([False, True, True, True, False, True])
    [3, 4, 4, 4, 6, 6]
    """
    positions = range(1, len(receives) + 1)
    return [position + sum(takewhile(bool, receives[position : position + AHEAD])) for position in positions]


def without_frees(program: Program) -> Program:
    """Drop every FREE, which takes no time and writes nothing."""
    ops = tuple(op for op in program.ops if op.kind != "FREE")
    return program if len(ops) == len(program.ops) else Program.trusted(program.inputs, ops, program.outputs)


def listed_names(argument_name: str, argument: Any) -> tuple[str, ...]:
    """Return the names in an argument that is one name or several."""
    is_single = isinstance(argument, str) or not isinstance(argument, Iterable)
    names: tuple[Any, ...] = (argument,) if is_single else tuple(argument)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{argument_name}= takes names of values, such as ('res',); found {name!r}.")
    return names


def check_names(argument_name: str, names: Iterable[str], program: Program, optional_names: Iterable[str] = ()) -> None:
    """Raise ProgramError for a name that no value of the program has and that is not in `optional_names`."""
    value_names = {end.value.name for end in program.inputs} | {value.name for op in program.ops for value in op.writes}
    for name in names:
        if name not in value_names and name not in optional_names:
            raise ProgramError(
                f"{argument_name}= names {name!r}, this program has values named {', '.join(sorted(value_names))}."
            )


def _dtype_by_name(cast: object) -> dict[str, str]:
    """Return the dtypes that values are rounded to, by value name, as text: a program contains no torch object."""
    dtypes: Mapping[Any, Any] = {}
    if cast is not None:
        dtypes = cast if isinstance(cast, Mapping) else dict.fromkeys(_FLOW_NAMES, cast)  # pyright: ignore[reportUnknownVariableType]
    dtype_names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    for name in dtype_names:
        if name not in _FLOW_NAMES:
            raise ValueError(
                f"cast= is of what flows between stages, {', '.join(map(repr, _FLOW_NAMES))}; found {name!r}."
            )
    for name, dtype_name in dtype_names.items():
        if dtype_name not in NARROW:
            raise ValueError(f"cast= is a floating dtype, torch.{', torch.'.join(NARROW)}; found {dtypes[name]!r}.")
    return dtype_names


def _itself(op: Op) -> object:
    return op


def _exact_values(program: Program) -> Iterator[tuple[Value, int]]:
    """Yield each value that must arrive exactly, with its rank: results, and parts that are joined to results."""
    # A result is joined from the parts of several ranks. Rounding those that travel, and not those that are there
    # already, would make its rows differ by the placement. dy is a cotangent and no result: a backward reads it.
    for op in program.ops:
        if op.kind == "MERGE" or (op.kind == "ADD" and op.writes[0].name != "dy"):
            yield from ((value, op.rank) for value in op.reads)
    for output in program.outputs:
        yield from ((output.value, rank) for rank in output.homes)


class _Sender:
    """Maker of transfers, with the ranks that have each value."""

    def __init__(
        self, program: Program, trip_by_name: dict[str, Callable[[Op], object]], dtype_by_name: dict[str, str]
    ) -> None:
        self.trip_by_name, self.dtype_by_name = trip_by_name, dtype_by_name
        self.exact = set(_exact_values(program)) if dtype_by_name else set[tuple[Value, int]]()
        self.transfers: list[Op] = []
        self.ranks_by_value: dict[Value, set[int]] = {value: set(homes) for value, homes in program.inputs}
        self.ranks_by_value |= {value: {op.rank} for op in program.ops for value in op.writes}
        # (value, rank, key of the trip) -> the copy. Without `again` the key is None, and all readers share one copy.
        self.copy_by_trip: dict[tuple[Value, int, object], Value] = {}
        self.trip_counts: Counter[tuple[Value, int]] = Counter()
        # Transfers that the program has already count as trips, so that no new copy takes the name of one.
        value_by_flight = {op.writes[0]: op.reads[0] for op in program.ops if op.kind == "SEND"}
        for op in program.ops:
            if op.kind == "RECV" and op.reads[0] in value_by_flight:
                value = value_by_flight[op.reads[0]]
                self.copy_by_trip[value, op.rank, None] = op.writes[0]
                self.trip_counts[value, op.rank] += 1

    def read_locally(self, op: Op) -> Op:
        if op.kind == "RECV" or all(op.rank in self.ranks_by_value[value] for value in op.reads):
            return op
        return op._replace(reads=tuple(self.copy_on(value, op.rank, op) for value in op.reads))

    def copy_on(self, value: Value, rank: int, reader: Op | None = None) -> Value:
        """Return the name of a value on a rank; add its transfer where the rank has no copy."""
        if rank in self.ranks_by_value[value]:
            return value
        trip = self.trip_by_name[value.name](reader) if reader and value.name in self.trip_by_name else None
        if (value, rank, trip) in self.copy_by_trip:
            return self.copy_by_trip[value, rank, trip]
        # The first trip makes y[0,0]@1, the next y[0,0]@1.1: each copy is a value, and is written once.
        number = self.trip_counts[value, rank]
        self.trip_counts[value, rank] += 1
        copy_name = f"{rank}.{number}" if number else f"{rank}"
        flight = value._replace(location=f"{value.location}>{copy_name}")
        copy = value._replace(location=f"{value.location}@{copy_name}")
        is_rounded = value.name in self.dtype_by_name and (value, rank) not in self.exact
        options = (("cast", self.dtype_by_name[value.name]),) if is_rounded else ()
        sender = min(self.ranks_by_value[value])
        self.transfers.append(Op("SEND", *value[1:4], sender, (value,), (flight,), (), options))
        self.transfers.append(Op("RECV", *value[1:4], rank, (flight,), (copy,)))
        self.copy_by_trip[value, rank, trip] = copy
        return copy

    def deliver_output(self, output: Output) -> list[Output]:
        """Send an output to each of its homes; return one output for each copy."""
        homes_by_value: dict[Value, list[int]] = {}
        for rank in output.homes:
            homes_by_value.setdefault(self.copy_on(output.value, rank), []).append(rank)
        return [Output(output.name, value, tuple(ranks)) for value, ranks in homes_by_value.items()]


def free() -> Transform:
    """Add a FREE behind the last reader of each value that an op writes and that is no output; apply it last.

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

    @as_transform
    def transform(program: Program) -> Program:
        refuse_freed(program)
        kept_values = {program_input.value for program_input in (*program.inputs, *program.outputs)}
        dead_by_position: defaultdict[int, list[Value]] = defaultdict(list)
        for value, position in last_uses(program).items():
            # A ">" in its name: a value in flight, which no rank holds.
            if value not in kept_values and ">" not in value.location:
                dead_by_position[position].append(value)
        ops: list[Op] = []
        for position, op in enumerate(program.ops):
            ops.append(op)
            values_by_rank: defaultdict[int, list[Value]] = defaultdict(list)
            for value in dead_by_position.get(position, ()):
                values_by_rank[program.ops[program.writer[value]].rank].append(value)
            ops.extend(Op("FREE", *op[1:4], rank, tuple(values), ()) for rank, values in sorted(values_by_rank.items()))
        return Program.trusted(program.inputs, tuple(ops), program.outputs)

    return transform


def last_uses(program: Program) -> dict[Value, int]:
    """Return the position of the last op that reads each value, or of its writer where none does."""
    return {value: position for position, op in enumerate(program.ops) for value in (*op.writes, *op.reads)}
