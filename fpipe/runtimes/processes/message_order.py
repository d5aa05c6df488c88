"""Put the messages of a program into one order, and say when each rank posts its receives.

    rank 0: SEND(y0) SEND(y1) RECV(dx0)      rank 1: RECV(y0) RECV(y1) SEND(dx0)        in the order of all SENDs

A program has one global order, so it ends where a value is simply there once it is sent. What carries values may ask
for more: NCCL starts a transfer only when both sides have come to it, and those that share a communicator one after
the other (`simulate(.., messages="nccl")`). In one order on all ranks that ends too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.transforms.communicate import AHEAD, queued_until

SMALL = 2**20
"""Bytes of what is posted from one rank, whatever their number."""


class Message(NamedTuple):
    """A value that one rank sends another.

    Attributes:
        number: its index among all messages.
        cell: the op that wrote the value.
        place: its index among the messages from its source to its target.
        heard: how many messages from its target its source has received before it sends this one.
    """

    number: int
    value: Value
    cell: str
    source: int
    target: int
    place: int
    heard: int


def messages(program: Program) -> list[Message]:
    """Return all messages of a step of a program with transfers, in its order: the same on each rank."""
    ops = parts_of(program.ops)
    cells = {value: op.cell for op in ops for value in op.writes}
    targets = {value: op.rank for op in ops if op.kind == "RECV" for value in op.reads}
    sent_by_direction = defaultdict[tuple[int, int], list[Value]](list)
    heard, received = defaultdict[tuple[int, int], int](int), set[Value]()
    ordered: list[Message] = []
    for op in ops:
        for read, value in zip(op.reads, op.writes, strict=True) if op.kind == "SEND" else ():
            direction = (op.rank, targets[value])
            sent, answers = sent_by_direction[direction], sent_by_direction[targets[value], op.rank]
            while heard[direction] < len(answers) and answers[heard[direction]] in received:
                heard[direction] += 1
            cell = cells.get(read, op.cell)
            ordered.append(Message(len(ordered), value, cell, *direction, len(sent), heard[direction]))
            sent.append(value)
        received.update(op.reads if op.kind == "RECV" else ())
    return ordered


def results_last(program: Program) -> Program:
    """Reorder a program with transfers so that ranks wait later. A MERGE and its readers go to the end of their step,
    unless replicas add them up. A RECV goes behind ops that take no time before its first reader.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(1), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False), fpipe.communicate())
    >>> program = step(fpipe.program(2))
    >>> for ops in (program.ops, results_last(program).ops):
    ...     print(*(op.cell for op in ops if op.rank == 1))
    RECV(y[0,0]@1) SPLIT(t[1,0]) 1F0 MERGE(loss) 1B0 SEND(dx[1,0]>0)
    SPLIT(t[1,0]) RECV(y[0,0]@1) 1F0 1B0 SEND(dx[1,0]>0) MERGE(loss)
    """
    reduced = {value for op in program.ops if op.kind in ("REDUCE", "SCATTER") for value in op.reads}
    late, ops, last = set[Value](), list[Op](), list[Op]()
    received = defaultdict[int, list[Op]](list)

    def receive(rank: int, reads: Set[Value] | None = None) -> None:
        due = [op for op in received[rank] if reads is None or not reads.isdisjoint(op.writes)]
        ops.extend(due)
        received[rank] = [op for op in received[rank] if op not in due]

    def finish() -> None:
        for rank in [*received]:
            receive(rank)
        ops.extend(last)
        late.clear()
        last.clear()

    for op in program.ops:
        waits, timed = not late.isdisjoint(op.reads), kind_of(op.kind).time
        if (waits and timed) or (op.kind == "F" and any(message.rank == op.rank for message in last)):
            finish()
        if (waits and not timed) or (op.kind == "MERGE" and reduced.isdisjoint(op.writes)):
            late.update(op.writes)
            last.append(op)
        elif op.kind == "RECV":
            received[op.rank].append(op)
        else:
            receive(op.rank, None if timed else {*op.reads})
            ops.append(op)
    finish()
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def posted_until(row: Sequence[Message], room: Mapping[int, int]) -> dict[int, int]:
    """Return for each message from a rank how many of its messages are received or posted when it is awaited: `AHEAD`
    more, and as many as are small together."""
    posted, until, held = dict[int, int](), 0, 0
    for message in row:
        while until < len(row) and (until <= message.place + AHEAD or held + room[row[until].number] <= SMALL):
            held += room[row[until].number]
            until += 1
        posted[message.number] = until
        held -= room[message.number]
    return posted


def most_in_flight(program: Program, room: Mapping[int, int]) -> list[int]:
    """Return for each rank the most bytes of messages that no other count has: receives that are posted ahead, and send
    buffers whose receipt the sender has not heard of. `room` has the bytes of each message by its number."""
    every = messages(program)
    known, ways = {message.value: message for message in every}, defaultdict[tuple[int, int], list[Message]](list)
    for message in every:
        ways[message.source, message.target].append(message)
    until = {way: posted_until(row, room) for way, row in ways.items()}
    posted, freed, now = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0), [0] * program.ranks

    def post(way: tuple[int, int], until: int) -> None:
        now[way[1]] += sum(room[message.number] for message in ways[way][posted[way] : until])
        posted[way] = max(posted[way], until)

    for way, row in ways.items():
        post(way, until[way][row[0].number])
    most = [*now]
    for op in parts_of(program.ops):
        for message in [known[value] for value in op.reads] if op.kind == "RECV" else ():
            way, back = (message.source, message.target), (message.target, message.source)
            now[message.target] -= room[message.number]
            now[message.source] += room[message.number]
            post(way, until[way][message.number])
            for heard in ways[back][freed[back] : message.heard] if back in ways else ():
                now[message.target] -= room[heard.number]
                freed[back] += 1
            most = [*map(max, most, now)]
    return most


def queue_of(every: Sequence[Message], rank: int) -> tuple[list[Message], dict[int, int]]:
    """Arrange the messages of a rank as NCCL gets them, in the order of all SENDs: no two ranks come to those between
    them in different orders, so that of all that wait the first waits for nobody.

    Returns:
        The rank's own messages, and for the number of each how many are `queued_until` it.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(2), fpipe.communicate())
    >>> row, behind = queue_of(messages(step(fpipe.program(2))), 1)
    >>> [(str(one.value), behind[one.number]) for one in row][:4]
    [('y[0,0]>1', 2), ('y[0,1]>1', 2), ('dx[1,0]>0', 4), ('y[0,2]>1', 4)]
    """
    row = [message for message in every if rank in (message.source, message.target)]
    queued = queued_until([message.target == rank for message in row])
    return row, {message.number: until for message, until in zip(row, queued, strict=True)}
