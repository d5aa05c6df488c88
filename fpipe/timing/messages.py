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
from fpipe.transforms.communicate import queued_transfers


class MessageRule(NamedTuple):
    """A rule by which messages wait.

    Attributes:
        sharing: which messages share a communicator: all, those between two ranks, or those of one direction.
        is_blocking: whether a rank goes on only when what it sends has arrived.
        is_lazy: whether communicators are created at their first use, where both ranks wait for each other.
    """

    sharing: Literal["all", "pair", "direction"]
    is_blocking: bool = False
    is_lazy: bool = False

    def communicator(self, source: int, target: int) -> Hashable:
        """Return the communicator of two ranks, which carries one message of a rank at a time."""
        if self.sharing == "direction":
            return source, target
        return frozenset((source, target)) if self.sharing == "pair" else "all"


MESSAGE_RULES: dict[str, MessageRule] = {
    "rendezvous": MessageRule("all", is_blocking=True),
    "nccl": MessageRule("all"),
    "nccl_pairs": MessageRule("pair", is_lazy=True),
    "nccl_directions": MessageRule("direction"),
}
"""The rules by name. "eager" has no rule: messages wait for nobody."""
MESSAGES = ("eager", *MESSAGE_RULES)
_REMEDY = (
    "Leave SEND and RECV out of the program (no communicate(), a table of compute alone): what is received in the "
    "order in which it is sent ends under every rule."
)


def order_messages(
    program: Program, name: str, note_arrival: Callable[[int], None], receives_are_posted_ahead: bool
) -> Iterator[int]:
    """Yield the positions of a program's ops in the order in which they happen under a rule of messages.

    A SEND, and its RECV right after it, happens when both ranks have reached it and all that either has queued before
    on the same communicator is over.

    Args:
        note_arrival: called when a rank reaches a SEND or a RECV, between the positions that are yielded.
        receives_are_posted_ahead: whether ranks post receives ahead, as `build` does if a program has no RECVs.

    Raises:
        ProgramError: ranks wait for one another.
    """
    # Each rank runs its ops until one must wait, and is woken by the op that it waits for. `queues` holds, for a rank
    # and a communicator, the SENDs (a RECV stands as its SEND) in the order in which the rank has queued them.
    rule, ops, sources = MESSAGE_RULES[name], program.ops, program.sources
    # 1. Rows of ranks, and receives that are posted with other messages.
    receives = {sources[position][0]: position for position, op in enumerate(ops) if op.kind == "RECV"}  # by SEND
    rank_ops: list[deque[int]] = [deque() for _ in range(program.ranks)]
    for position, op in enumerate(ops):
        rank_ops[op.rank].append(position)
    if rule.is_lazy:
        _refuse_communicator_deadlock(program, name, receives)
    # A rank that blocks in each message cannot post others ahead.
    posted_behind = _receives_posted_behind(program) if receives_are_posted_ahead and not rule.is_blocking else {}
    # 2. What has happened, who waits, and what is queued.
    is_done, is_queued = [False] * len(ops), [False] * len(ops)
    ranks_waiting_for = defaultdict[int, list[int]](list)
    queues = defaultdict[tuple[int, Hashable], deque[int]](deque)

    def mark_done(position: int) -> None:
        is_done[position] = True
        runnable_ranks.extend(ranks_waiting_for.pop(position, ()))

    def deliver(send: int) -> Iterator[int]:
        """Yield transfers that are first in the queues of both ranks, from this one on."""
        heads = [send]
        while heads:
            send = heads.pop()
            ranks = ops[send].rank, ops[receives[send]].rank
            rank_queues = [queues[rank, rule.communicator(*ranks)] for rank in ranks]
            if all(queue and queue[0] == send for queue in rank_queues):
                yield from (send, receives[send])
                mark_done(send)
                mark_done(receives[send])
                for queue in rank_queues:
                    queue.popleft()
                # Whatever stood behind it may be first in both queues now.
                heads += [queue[0] for queue in rank_queues if queue]

    def queue_transfer(position: int) -> Iterator[int]:
        """Queue a transfer that a rank has reached, and the receives that it posts with it."""
        for end in (position, *posted_behind.get(position, ())):
            send = end if ops[end].kind == "SEND" else sources[end][0]
            if not is_queued[end]:
                is_queued[end] = True
                note_arrival(end)
                queues[ops[end].rank, rule.communicator(ops[send].rank, ops[receives[send]].rank)].append(send)
                yield from deliver(send)

    # 3. Run each rank until it must wait. The op that it waits for makes it runnable again, in `mark_done`.
    runnable_ranks = [*range(len(rank_ops))]
    while runnable_ranks:
        rank = runnable_ranks.pop()
        ops_left = rank_ops[rank]
        while ops_left:
            position = ops_left[0]
            kind = ops[position].kind
            # A RECV may be queued before its value is sent, so it waits for nothing that it reads.
            missing = None
            if kind != "RECV":
                missing = next((source for source in sources[position] if source >= 0 and not is_done[source]), None)
            if missing is None and kind in ("SEND", "RECV"):
                yield from queue_transfer(position)
                send = position if kind == "SEND" else sources[position][0]
                missing = send if rule.is_blocking and not is_done[send] else None
            if missing is not None:
                ranks_waiting_for[missing].append(rank)
                break
            ops_left.popleft()
            if not is_queued[position]:  # `deliver` yields what is queued
                yield position
                mark_done(position)
    # 4. No rank can run. If some have ops or messages left, they wait for one another.
    if any(rank_ops) or any(queues.values()):
        first_in_queues = [(rank, queue[0]) for (rank, _), queue in queues.items() if queue]
        heads = sorted((rank, _describe_transfer(program, send, receives)) for rank, send in first_in_queues)
        waiting = ", ".join(f"rank {rank} in that of {transfer}" for rank, transfer in heads)
        raise ProgramError(f'under messages="{name}" ranks wait for one another: {waiting}.\n{_REMEDY}')


def _receives_posted_behind(program: Program) -> dict[int, list[int]]:
    """Map each SEND and RECV to the receives that its rank posts with it, ahead of their readers."""
    messages_by_rank = defaultdict[int, list[int]](list)
    for position, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            messages_by_rank[op.rank].append(position)
    receives_by_message: dict[int, list[int]] = {}
    for messages in messages_by_rank.values():
        stops = queued_transfers([program.ops[position].kind == "RECV" for position in messages])
        receives_by_message |= {position: messages[index + 1 : stops[index]] for index, position in enumerate(messages)}
    return receives_by_message


def _describe_transfer(program: Program, send: int, receives: dict[int, int]) -> str:
    op = program.ops[send]
    return f"{op.reads[0]} {op.rank} > {program.ops[receives[send]].rank}"


def _refuse_communicator_deadlock(program: Program, name: str, receives: dict[int, int]) -> None:
    """Raise a ProgramError if ranks wait in a circle to create communicators.

    Each rank creates its communicators in the order of their first use, and blocks in each until the peer does too.
    """
    first_uses = [dict[Hashable, int]() for _ in range(program.ranks)]  # communicator to SEND, in the rank's order
    for position, op in enumerate(program.ops):
        if op.kind in ("SEND", "RECV"):
            send = position if op.kind == "SEND" else program.sources[position][0]
            communicator = MESSAGE_RULES[name].communicator(program.ops[send].rank, program.ops[receives[send]].rank)
            first_uses[op.rank].setdefault(communicator, send)
    uses_left = [deque(uses.items()) for uses in first_uses]
    # Meet ranks two by two: a rank that finds its peer in the same creation goes on, and so does the peer.
    waiting_rank: dict[Hashable, int] = {}
    runnable_ranks = [*range(program.ranks)]
    while runnable_ranks:
        rank = runnable_ranks.pop()
        if uses_left[rank]:
            communicator, _ = uses_left[rank][0]
            if communicator in waiting_rank:
                peer = waiting_rank.pop(communicator)
                uses_left[rank].popleft()
                uses_left[peer].popleft()
                runnable_ranks += [rank, peer]
            else:
                waiting_rank[communicator] = rank
    if waiting_rank:
        sends = [(rank, uses_left[rank][0][1]) for rank in waiting_rank.values()]
        transfers = sorted((rank, _describe_transfer(program, send, receives)) for rank, send in sends)
        waiting = ", ".join(f"rank {rank} makes that of {transfer}" for rank, transfer in transfers)
        raise ProgramError(
            f'under messages="{name}" ranks wait for one another to make communicators: {waiting}.\n{_REMEDY}'
        )
