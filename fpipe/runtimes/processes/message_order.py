"""Put the messages of a program into one order, and say when each rank posts its receives.

    rank 0: SEND(y0) SEND(y1) RECV(dx0)      rank 1: RECV(y0) RECV(y1) SEND(dx0)        in the order of all SENDs

A program has one global order, so it ends wherever a value is available once it is sent. NCCL asks for more: a transfer
starts when both ranks have come to it, and transfers that share a communicator run one after the other
(`simulate(.., messages="nccl")`). With one order of messages on all ranks a program ends there too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from fpipe.program import Op, Program, Value, kind_of, parts_of
from fpipe.transforms.communicate import AHEAD, queued_transfers

# Receives of up to this many bytes from one rank are posted at once, whatever their number.
POSTED_BYTES = 2**20


class Message(NamedTuple):
    """A value that one rank sends another.

    Attributes:
        number: its index among all messages.
        cell: the op that wrote the value.
        place_in_direction: its index among the messages from its source to its target.
        acknowledged_count: how many messages from its target its source has received before it sends this one.
    """

    number: int
    value: Value
    cell: str
    source: int
    target: int
    place_in_direction: int
    acknowledged_count: int


def messages_of(program: Program) -> list[Message]:
    """Return the messages of one step of a program with transfers, in the order of its SENDs, equal on all ranks."""
    ops = parts_of(program.ops)
    cells = {value: op.cell for op in ops for value in op.writes}
    targets = {value: op.rank for op in ops if op.kind == "RECV" for value in op.reads}
    sent_by_direction = defaultdict[tuple[int, int], list[Value]](list)
    # By direction: how many messages of the other direction its sender has received.
    counts, received = defaultdict[tuple[int, int], int](int), set[Value]()
    messages_in_order: list[Message] = []
    for op in ops:
        for operand, value in zip(op.reads, op.writes, strict=True) if op.kind == "SEND" else ():
            direction = (op.rank, targets[value])
            # Count the answers that the sender has received by now. Its message acknowledges them: the receiver then
            # knows that these buffers have arrived, and frees them without waiting.
            direction_values, reverse_values = sent_by_direction[direction], sent_by_direction[targets[value], op.rank]
            while counts[direction] < len(reverse_values) and reverse_values[counts[direction]] in received:
                counts[direction] += 1
            cell = cells.get(operand, op.cell)
            number, place_in_direction = len(messages_in_order), len(direction_values)
            messages_in_order.append(Message(number, value, cell, *direction, place_in_direction, counts[direction]))
            direction_values.append(value)
        received.update(op.reads if op.kind == "RECV" else ())
    return messages_in_order


def with_results_last(program: Program) -> Program:
    """Reorder a program with transfers so that ranks wait later.

    A MERGE and its readers go to the end of their step, unless replicas add them up. A RECV goes behind the ops without
    duration that stand before its first reader.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(1), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False), fpipe.communicate())
    >>> program = step(fpipe.program(2))
    >>> for ops in (program.ops, with_results_last(program).ops):
    ...     print(*(op.cell for op in ops if op.rank == 1))
    RECV(y[0,0]@1) SPLIT(t[1,0]) 1F0 MERGE(loss) 1B0 SEND(dx[1,0]>0)
    SPLIT(t[1,0]) RECV(y[0,0]@1) 1F0 1B0 SEND(dx[1,0]>0) MERGE(loss)
    """
    reduced_values = {value for op in program.ops if op.kind in ("REDUCE", "SCATTER") for value in op.reads}
    # Three groups of ops: those in `ops` have their places, a MERGE and its readers wait in `late_ops`, and RECVs in
    # `pending_recvs`, by rank.
    late_values, ops, late_ops = set[Value](), list[Op](), list[Op]()
    pending_recvs = defaultdict[int, list[Op]](list)

    def place_recvs(rank: int, reads: Set[Value] | None = None) -> None:
        due_ops = [op for op in pending_recvs[rank] if reads is None or not reads.isdisjoint(op.writes)]
        ops.extend(due_ops)
        pending_recvs[rank] = [op for op in pending_recvs[rank] if op not in due_ops]

    def place_late_ops() -> None:
        for rank in [*pending_recvs]:
            place_recvs(rank)
        ops.extend(late_ops)
        late_values.clear()
        late_ops.clear()

    for op in program.ops:
        reads_late_value, takes_time = not late_values.isdisjoint(op.reads), kind_of(op.kind).time
        # The next training step begins on a rank with its next F, and an op with a duration needs its operands now.
        begins_step = op.kind == "F" and any(late_op.rank == op.rank for late_op in late_ops)
        if begins_step or (reads_late_value and takes_time):
            place_late_ops()
        if (reads_late_value and not takes_time) or (op.kind == "MERGE" and reduced_values.isdisjoint(op.writes)):
            late_values.update(op.writes)
            late_ops.append(op)
        elif op.kind == "RECV":
            pending_recvs[op.rank].append(op)
        else:
            # An op with a duration keeps all RECVs that stand before it; any other op only those that it reads.
            place_recvs(op.rank, None if takes_time else {*op.reads})
            ops.append(op)
    place_late_ops()
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def posted_counts(messages: Sequence[Message], bytes_by_number: Mapping[int, int]) -> dict[int, int]:
    """Count, for each message from one rank to another, how many of these are posted once it is awaited.

    Those are `AHEAD` more than the awaited one, and as many as are small together.
    """
    count_by_number, posted_count, posted_bytes = dict[int, int](), 0, 0
    # Two pointers: `posted_count` runs ahead of `message`, and `posted_bytes` are those of the messages between them.
    for message in messages:
        while posted_count < len(messages):
            next_bytes = bytes_by_number[messages[posted_count].number]
            if posted_count > message.place_in_direction + AHEAD and posted_bytes + next_bytes > POSTED_BYTES:
                break
            posted_bytes += next_bytes
            posted_count += 1
        count_by_number[message.number] = posted_count
        posted_bytes -= bytes_by_number[message.number]
    return count_by_number


def peak_bytes_in_flight(program: Program, bytes_by_number: Mapping[int, int]) -> list[int]:
    """Return for each rank the most bytes of messages that no other count includes.

    Those are receives that are posted ahead, and send buffers that no later message has acknowledged yet.
    """
    messages = messages_of(program)
    message_by_value = {message.value: message for message in messages}
    messages_by_direction = defaultdict[tuple[int, int], list[Message]](list)
    for message in messages:
        messages_by_direction[message.source, message.target].append(message)
    counts_by_direction = {
        direction: posted_counts(in_direction, bytes_by_number)
        for direction, in_direction in messages_by_direction.items()
    }
    posted_by_direction = dict.fromkeys(messages_by_direction, 0)
    freed_by_direction = dict.fromkeys(messages_by_direction, 0)
    bytes_by_rank = [0] * program.ranks

    def post(direction: tuple[int, int], count: int) -> None:
        newly_posted = messages_by_direction[direction][posted_by_direction[direction] : count]
        bytes_by_rank[direction[1]] += sum(bytes_by_number[message.number] for message in newly_posted)
        posted_by_direction[direction] = max(posted_by_direction[direction], count)

    # As `Transfers` does: post the first receives before the step, and more whenever a message is awaited.
    for direction, in_direction in messages_by_direction.items():
        post(direction, counts_by_direction[direction][in_direction[0].number])
    peak_by_rank = [*bytes_by_rank]
    for op in parts_of(program.ops):
        for message in [message_by_value[value] for value in op.reads] if op.kind == "RECV" else ():
            direction, reverse = (message.source, message.target), (message.target, message.source)
            # The received value now counts as a value of the program; its send buffer stays until it is acknowledged.
            bytes_by_rank[message.target] -= bytes_by_number[message.number]
            bytes_by_rank[message.source] += bytes_by_number[message.number]
            post(direction, counts_by_direction[direction][message.number])
            first_unfreed = freed_by_direction.get(reverse, 0)
            for acknowledged in messages_by_direction.get(reverse, ())[first_unfreed : message.acknowledged_count]:
                bytes_by_rank[message.target] -= bytes_by_number[acknowledged.number]
                freed_by_direction[reverse] += 1
            peak_by_rank = [*map(max, peak_by_rank, bytes_by_rank)]
    return peak_by_rank


def queue_of_rank(all_messages: Sequence[Message], rank: int) -> tuple[list[Message], dict[int, int]]:
    """Arrange the messages of a rank in the order of all SENDs, in which NCCL gets them.

    No two ranks then come to their common messages in different orders, so the first of all messages that wait never
    waits for another one.

    Returns:
        The rank's messages, and by number how many of them are queued once the rank comes to that message.

    >>> import fpipe
    >>> step = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(2), fpipe.communicate())
    >>> queue, count_by_number = queue_of_rank(messages_of(step(fpipe.program(2))), 1)
    >>> [(str(message.value), count_by_number[message.number]) for message in queue][:4]
    [('y[0,0]>1', 2), ('y[0,1]>1', 2), ('dx[1,0]>0', 4), ('y[0,2]>1', 4)]
    """
    rank_messages = [message for message in all_messages if rank in (message.source, message.target)]
    counts = queued_transfers([message.target == rank for message in rank_messages])
    return rank_messages, {message.number: count for message, count in zip(rank_messages, counts, strict=True)}
