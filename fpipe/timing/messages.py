"""Messages as what carries them does it: a send that waits for its receive, and a queue for each communicator.

    eager        rank 0 |1F0|1F1|           y[1,0] leaves as soon as it is there, and waits for nobody
    rendezvous   rank 0 |1F0|SEND   |1F1|   both ranks stay until it has arrived
    nccl         rank 0 |1F0|1F1|           it leaves when both ranks have come to it, and when all that either rank has
                            queue: y[1,0]   queued before on the same communicator is over; ranks go on meanwhile

What comes to a queue does so once the work before it in its rank's row is over, a SEND and a RECV alike, as NCCL's
streams wait for the stream that computes. Orders that end where values simply arrive need not end by such rules: then
ranks wait for one another, and the program is refused under that rule. Transfers that are received in the order in
which they are sent, over all ranks, end under each: of those that wait, the first waits for nobody. So `build` receives
on NCCL, and so does a program without SEND and RECV here; one that has them says in which order ranks come to them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Literal, NamedTuple

from fpipe.program import Program, ProgramError
from fpipe.transforms.communicate import queued_until


class MessageRule(NamedTuple):
    """How messages wait.

    Attributes:
        carrier: which messages share a communicator: all, those between two ranks, or those of one direction.
        blocking: whether a rank goes on only when what it sends has arrived.
        lazily: whether communicators are made at their first use, where both ranks wait for each other.
    """

    carrier: Literal["all", "pair", "direction"]
    blocking: bool = False
    lazily: bool = False

    def communicator(self, source: int, target: int) -> Hashable:
        """The communicator of two ranks; of the messages that are queued on it a rank has one under way."""
        if self.carrier == "direction":
            return source, target
        return frozenset((source, target)) if self.carrier == "pair" else "all"


RULES: dict[str, MessageRule] = {
    "rendezvous": MessageRule("all", blocking=True),
    "nccl": MessageRule("all"),
    "nccl_pairs": MessageRule("pair", lazily=True),
    "nccl_directions": MessageRule("direction"),
}
"""By name, beside "eager", which is none."""
MESSAGES = ("eager", *RULES)
_WAY_OUT = (
    "Leave SEND and RECV out of the program (no communicate(), a table of compute alone): what is received in the "
    "order in which it is sent ends under every rule."
)


def met_order(program: Program, name: str, comes: Callable[[int], None], ahead: bool) -> Iterator[int]:
    """The ops of a program with transfers as they come to pass under a rule: each SEND, and its RECV behind it, when
    both ranks have come to it and all that either has queued before on the same communicator is over.

    Args:
        comes: is told when a rank comes to a SEND or a RECV, in the middle of what is yielded.
        ahead: whether ranks post receives ahead, as `build` does; not where a program says itself when they come.
    """
    rule, ops, sources = RULES[name], program.ops, program.sources
    receives = {own[0]: at for at, (op, own) in enumerate(zip(ops, sources, strict=True)) if op.kind == "RECV"}
    rows: list[deque[int]] = [deque() for _ in range(program.ranks)]
    for at, op in enumerate(ops):
        rows[op.rank].append(at)
    if rule.lazily:
        _refuse_circle(program, name, receives)
    follow = _posted_behind(program) if ahead and not rule.blocking else {}
    done, came = [False] * len(ops), [False] * len(ops)
    sleeping = defaultdict[int, list[int]](list)
    queues = defaultdict[tuple[int, Hashable], deque[int]](deque)

    def queues_of(one: int) -> list[deque[int]]:
        ends = ops[one].rank, ops[receives[one]].rank
        return [queues[rank, rule.communicator(*ends)] for rank in ends]

    def begun(one: int) -> Iterator[int]:
        """Whatever is first in both queues, from this transfer on."""
        heads = [one]
        while heads:
            one = heads.pop()
            both = queues_of(one)
            if all(queue and queue[0] == one for queue in both):
                yield from (one, receives[one])
                for at in (one, receives[one]):
                    done[at] = True
                    todo.extend(sleeping.pop(at, ()))
                for queue in both:
                    queue.popleft()
                heads += [queue[0] for queue in both if queue]

    def queued(at: int) -> Iterator[int]:
        """A rank has come to a transfer, and to the receives that it posts behind it."""
        for own in (at, *follow.get(at, ())):
            one = own if ops[own].kind == "SEND" else sources[own][0]
            if not came[own]:
                came[own] = True
                comes(own)
                queues[ops[own].rank, rule.communicator(ops[one].rank, ops[receives[one]].rank)].append(one)
                yield from begun(one)

    todo = [*range(len(rows))]
    while todo:
        rank = todo.pop()
        row = rows[rank]
        while row:
            at = row[0]
            if ops[at].kind in ("SEND", "RECV"):
                one = at if ops[at].kind == "SEND" else sources[at][0]
                missing = None if at != one else _missing(sources[at], done)
                if missing is None:
                    yield from queued(at)
                    missing = one if rule.blocking and not done[one] else None
            else:
                missing = _missing(sources[at], done)
            if missing is not None:
                sleeping[missing].append(rank)
                break
            row.popleft()
            if not came[at]:
                yield at
                done[at] = True
                todo.extend(sleeping.pop(at, ()))
    if any(rows) or any(queues.values()):
        heads = sorted((rank, _named(program, queue[0], receives)) for (rank, _), queue in queues.items() if queue)
        waiting = ", ".join(f"rank {rank} in that of {what}" for rank, what in heads)
        raise ProgramError(f'under messages="{name}" ranks wait for one another: {waiting}.\n{_WAY_OUT}')


def _posted_behind(program: Program) -> dict[int, list[int]]:
    """For each SEND and RECV the receives that its rank posts behind it."""
    rows = defaultdict[int, list[int]](list)
    for at, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            rows[op.rank].append(at)
    return {
        at: row[place + 1 : until]
        for row in rows.values()
        for place, (at, until) in enumerate(
            zip(row, queued_until([program.ops[own].kind == "RECV" for own in row]), strict=True)
        )
    }


def _missing(sources: tuple[int, ...], done: list[bool]) -> int | None:
    return next((at for at in sources if at >= 0 and not done[at]), None)


def _named(program: Program, one: int, receives: dict[int, int]) -> str:
    op = program.ops[one]
    return f"{op.reads[0]} {op.rank} > {program.ops[receives[one]].rank}"


def _refuse_circle(program: Program, name: str, receives: dict[int, int]) -> None:
    """Walk the first uses of communicators: a rank goes on when the other has come to the same."""
    rows = [list[tuple[Hashable, int]]() for _ in range(program.ranks)]
    for at, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            one = at if op.kind == "SEND" else program.sources[at][0]
            made = RULES[name].communicator(program.ops[one].rank, program.ops[receives[one]].rank)
            if all(made != known for known, _ in rows[op.rank]):
                rows[op.rank].append((made, one))
    waits = defaultdict[Hashable, int](int)
    todo = [*range(program.ranks)]
    at_first = [0] * program.ranks
    while todo:
        rank = todo.pop()
        if at_first[rank] < len(rows[rank]):
            made = rows[rank][at_first[rank]][0]
            if made in waits:
                other = waits.pop(made)
                at_first[rank] += 1
                at_first[other] += 1
                todo += [rank, other]
            else:
                waits[made] = rank
    if waits:
        told = sorted((rank, _named(program, rows[rank][at_first[rank]][1], receives)) for rank in waits.values())
        waiting = ", ".join(f"rank {rank} makes that of {what}" for rank, what in told)
        raise ProgramError(
            f'under messages="{name}" a communicator is made at its first use, for which both ranks wait, and here '
            f"they wait for one another: {waiting}.\n{_WAY_OUT}"
        )
