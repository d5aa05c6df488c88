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
    receives = {sources[at][0]: at for at, op in enumerate(ops) if op.kind == "RECV"}
    rows: list[deque[int]] = [deque() for _ in range(program.ranks)]
    for position, op in enumerate(ops):
        rows[op.rank].append(position)
    if rule.lazily:
        _refuse_circle(program, name, receives)
    posted = _posted_behind(program) if ahead and not rule.blocking else {}
    done, queued = [False] * len(ops), [False] * len(ops)
    sleeping = defaultdict[int, list[int]](list)  # ranks, by the op that they wait for
    queues = defaultdict[tuple[int, Hashable], deque[int]](deque)

    def finish(position: int) -> None:
        done[position] = True
        todo.extend(sleeping.pop(position, ()))

    def carry(send: int) -> Iterator[int]:
        """Carry whatever is first in both queues, from this transfer on."""
        heads = [send]
        while heads:
            send = heads.pop()
            ranks = ops[send].rank, ops[receives[send]].rank
            both = [queues[rank, rule.communicator(*ranks)] for rank in ranks]
            if all(queue and queue[0] == send for queue in both):
                yield from (send, receives[send])
                finish(send)
                finish(receives[send])
                for queue in both:
                    queue.popleft()
                heads += [queue[0] for queue in both if queue]

    def enqueue(position: int) -> Iterator[int]:
        """Let a rank come to a transfer, and to the receives that it posts behind it."""
        for end in (position, *posted.get(position, ())):
            send = end if ops[end].kind == "SEND" else sources[end][0]
            if not queued[end]:
                queued[end] = True
                comes(end)
                queues[ops[end].rank, rule.communicator(ops[send].rank, ops[receives[send]].rank)].append(send)
                yield from carry(send)

    todo = [*range(len(rows))]
    while todo:
        rank = todo.pop()
        row = rows[rank]
        while row:
            position = row[0]
            kind = ops[position].kind
            missing = None
            if kind != "RECV":
                missing = next((source for source in sources[position] if source >= 0 and not done[source]), None)
            if missing is None and kind in ("SEND", "RECV"):
                yield from enqueue(position)
                send = position if kind == "SEND" else sources[position][0]
                missing = send if rule.blocking and not done[send] else None
            if missing is not None:
                sleeping[missing].append(rank)
                break
            row.popleft()
            if not queued[position]:
                yield position
                finish(position)
    if any(rows) or any(queues.values()):
        heads = sorted((rank, _in_words(program, queue[0], receives)) for (rank, _), queue in queues.items() if queue)
        waiting = ", ".join(f"rank {rank} in that of {transfer}" for rank, transfer in heads)
        raise ProgramError(f'under messages="{name}" ranks wait for one another: {waiting}.\n{_WAY_OUT}')


def _posted_behind(program: Program) -> dict[int, list[int]]:
    """For each SEND and RECV the receives that its rank posts behind it."""
    rows = defaultdict[int, list[int]](list)
    for position, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            rows[op.rank].append(position)
    posted: dict[int, list[int]] = {}
    for row in rows.values():
        ends = queued_until([program.ops[position].kind == "RECV" for position in row])
        posted |= {position: row[place + 1 : ends[place]] for place, position in enumerate(row)}
    return posted


def _in_words(program: Program, send: int, receives: dict[int, int]) -> str:
    op = program.ops[send]
    return f"{op.reads[0]} {op.rank} > {program.ops[receives[send]].rank}"


def _refuse_circle(program: Program, name: str, receives: dict[int, int]) -> None:
    """Walk the first uses of communicators: a rank goes on when the other has come to the same."""
    first_uses = [dict[Hashable, int]() for _ in range(program.ranks)]  # in the order of the rank
    for position, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            send = position if op.kind == "SEND" else program.sources[position][0]
            communicator = RULES[name].communicator(program.ops[send].rank, program.ops[receives[send]].rank)
            first_uses[op.rank].setdefault(communicator, send)
    rows = [deque(uses.items()) for uses in first_uses]
    waits: dict[Hashable, int] = {}
    todo = [*range(program.ranks)]
    while todo:
        rank = todo.pop()
        if rows[rank]:
            communicator, _ = rows[rank][0]
            if communicator in waits:
                partner = waits.pop(communicator)
                rows[rank].popleft()
                rows[partner].popleft()
                todo += [rank, partner]
            else:
                waits[communicator] = rank
    if waits:
        transfers = sorted((rank, _in_words(program, rows[rank][0][1], receives)) for rank in waits.values())
        waiting = ", ".join(f"rank {rank} makes that of {transfer}" for rank, transfer in transfers)
        raise ProgramError(
            f'under messages="{name}" a communicator is made at its first use, for which both ranks wait, and here '
            f"they wait for one another: {waiting}.\n{_WAY_OUT}"
        )
