"""Prove that the transfers of a program end, where each waits for the other side and for those before it.

    rank 0: SEND(y) RECV(dx)      rank 1: RECV(y) SEND(dx)        -->        y arrives, then dx: nobody waits for ever

A program has one global order, so it ends where a value is simply there once it is sent. What carries values may ask
for more: NCCL starts a transfer only when both sides have come to it, and those that share a communicator one after
the other. So each rank walks through its SENDs and RECVs here, against queues of transfers that do the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from fpipe.program import Program, ProgramError, Value, parts_of

Communicator = Callable[[int, int], Hashable]
AHEAD = 2


class Message(NamedTuple):
    """A value that one rank sends another: its number among all, who wrote it, which it is of those on its way, and how
    many of those on the way back its source has received by then."""

    number: int
    value: Value
    cell: str
    source: int
    target: int
    place: int
    heard: int


def messages(program: Program) -> list[Message]:
    """All messages of a step of a program with transfers, in its order. Each rank finds the same."""
    ops = parts_of(program.ops)
    cells = {value: op.cell for op in ops for value in op.writes}
    targets = {value: op.rank for op in ops if op.kind == "RECV" for value in op.reads}
    ways = defaultdict[tuple[int, int], list[Value]](list)
    heard, came = defaultdict[tuple[int, int], int](int), set[Value]()
    found: list[Message] = []
    for op in ops:
        for read, value in zip(op.reads, op.writes, strict=True) if op.kind == "SEND" else ():
            way, back = (op.rank, targets[value]), ways[targets[value], op.rank]
            while heard[way] < len(back) and back[heard[way]] in came:
                heard[way] += 1
            found.append(Message(len(found), value, cells.get(read, op.cell), *way, len(ways[way]), heard[way]))
            ways[way].append(value)
        came.update(op.reads if op.kind == "RECV" else ())
    return found


def posted_until(row: Sequence[Message], room: Mapping[int, int], small: int) -> dict[int, int]:
    """For each message of those from one rank how many of them are received or posted when it is waited for: `AHEAD`
    more, and as many as are small together."""
    found, until, held = dict[int, int](), 0, 0
    for one in row:
        while until < len(row) and (until <= one.place + AHEAD or held + room[row[until].number] <= small):
            held += room[row[until].number]
            until += 1
        found[one.number] = until
        held -= room[one.number]
    return found


def each_way(source: int, target: int) -> Hashable:
    """Communicator of each direction: a transfer waits only for those that go the same way."""
    return source, target


def check_transfers(
    program: Program, ahead: int, *, communicator: Communicator = each_way, blocking: bool = False
) -> None:
    """Whether all transfers of a program end.

    Args:
        program: one in which every transfer is an op.
        ahead: how many more receives a rank posts than the one that it waits for, in the order of the sender.
        communicator: `f(source, target)`; of transfers on the same one a rank begins one only when that before is over.
        blocking: whether a SEND is over only when its value has arrived. By default it waits for nothing.

    Raises:
        ProgramError: ranks wait for one another, and for what.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), fpipe.merge(), fpipe.communicate())
    >>> program = step(fpipe.program(2))
    >>> check_transfers(program, ahead=2)
    >>> check_transfers(program, ahead=0, blocking=True)
    Traceback (most recent call last):
    fpipe.program.ProgramError: ranks wait for one another: rank 0 in SEND(y[0,1]>1), rank 1 in SEND(dx[1,0]>0).
    Leave SEND and RECV to fpipe.communicate().
    """
    every = messages(program)
    known, incoming = {one.value: one for one in every}, defaultdict[tuple[int, int], list[Message]](list)
    rows = defaultdict[int, list[tuple[str, Message]]](list)
    for one in every:
        incoming[one.source, one.target].append(one)
    for op in parts_of(program.ops):
        if op.kind in ("SEND", "RECV"):
            rows[op.rank] += [(op.cell, known[value]) for value in (op.writes if op.kind == "SEND" else op.reads)]
    at, posted, over = dict.fromkeys(rows, 0), dict.fromkeys(incoming, 0), set[int]()
    queues = defaultdict[tuple[int, Hashable], deque[Message]](deque)
    ready, sent = [*rows], set[int]()

    def begin(rank: int, one: Message) -> None:
        queues[rank, communicator(one.source, one.target)].append(one)
        heads = [one]
        while heads:
            one = heads.pop()
            sides = [queues[side, communicator(one.source, one.target)] for side in (one.source, one.target)]
            if all(side and side[0] is one for side in sides):
                over.add(one.number)
                ready.extend((one.source, one.target))
                for side in sides:
                    side.popleft()
                heads += [side[0] for side in sides if side]

    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            _, one = rows[rank][at[rank]]
            way = one.source, one.target
            if rank == one.target:
                until = min(one.place + 1 + ahead, len(incoming[way]))
                first, posted[way] = posted[way], max(until, posted[way])
                for other in incoming[way][first:until]:
                    begin(rank, other)
            elif one.number not in sent:
                sent.add(one.number)
                begin(rank, one)
            if one.number not in over and (rank == one.target or blocking):
                break
            at[rank] += 1
    stuck = [f"rank {rank} in {rows[rank][at[rank]][0]}" for rank in sorted(rows) if at[rank] < len(rows[rank])]
    if stuck or any(queues.values()):
        where = ", ".join(stuck) or "at the end of the step"
        raise ProgramError(f"ranks wait for one another: {where}.\nLeave SEND and RECV to fpipe.communicate().")
