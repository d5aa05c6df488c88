"""Send and receive the values of a program between processes, all known before the first step.

    rank 0: SEND(y[0,0]) SEND(y[0,1])        -- messages 0, 1 -->        rank 1: RECV(y[0,0]) .. RECV(y[0,1])

No send blocks. A send buffer is freed once a later message acknowledges it, or NCCL says that it has left, else at the
end of the step. Receives from a rank are posted in the order in which that rank sends, a few ahead of the awaited one,
or as many as are small; with NCCL in the order of the SENDs of all ranks. Each message has a header that names its
step, which reveals a rank that was handed another key, or arguments of other sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.program import Op, Value
from fpipe.runtimes.capture.device_graph import is_capturing
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import NOT_SAME_STEP, PeerWait, Watchdog
from fpipe.runtimes.processes.message_layout import HEADER, Layout, header_of_step, mark_of, step_of
from fpipe.runtimes.processes.message_order import Message, posted_counts, queue_of_rank
from fpipe.torch_private.processes import backend_on, create_gloo, create_pair_group, default_store, is_on_streams

# Each direction between two ranks has a connection of its own.
#
# A send of gloo waits for nobody, but it locks its connection while it writes, and gloo's own thread spins until it can
# read there: with few cores it takes the core of the thread that holds the lock. A send of NCCL begins when both sides
# have come to it, and blocks all that follows on its communicator. With a communicator for each direction it blocks
# only messages of that direction: `simulate(.., messages=)` tells how much longer a step takes with one for both
# directions, or for all ranks.
#
#     gloo: 0 > 1 > 2 in one group, 0 < 1 < 2 in another         NCCL: 0 > 1, 1 > 0, 1 > 2, 2 > 1, each a group of two

Direction = tuple[int, int]


class DirectedGroup(NamedTuple):
    """A group or backend that carries messages in one direction, and the rank of the peer in it."""

    group: Any
    peer: int


class GlooConnections:
    """Connections of gloo that carry the messages of all steps of a process group, and nothing else.

    A receive of the caller's own on that group takes none of these messages. The connections live as long as the group:
    a rank that throws its step away may have sent messages that are still in flight.

    Attributes:
        backend_by_name: a backend of gloo for messages "up" to higher ranks, and one for "down".
    """

    def __init__(self) -> None:
        self._next_tag = 0
        self.backend_by_name: dict[str, Any] = {}

    def take_tags(self, count: int) -> range:
        """Reserve tags for the messages of a step."""
        tags = range(self._next_tag, self._next_tag + count)
        self._next_tag += count
        return tags

    def connect(
        self, group: ProcessGroup, directions: Iterable[Direction], rank: int, store: Store, timeout: timedelta
    ) -> dict[Direction, DirectedGroup]:
        """Return the group that carries each direction that this rank takes part in.

        Messages to higher and to lower ranks have separate connections. A backend other than gloo carries both itself.
        """
        backend = backend_on(group, torch.device("cpu"))
        name_by_direction = {pair: "up" if pair[0] < pair[1] else "down" for pair in sorted(directions)}
        is_gloo = backend.name() == "gloo"
        for group_name in sorted({*name_by_direction.values()} - {*self.backend_by_name}) if is_gloo else ():
            self.backend_by_name[group_name] = create_gloo(
                backend, PrefixStore(group_name, store), rank, group.size(), timeout
            )
        return {
            (sender, receiver): DirectedGroup(
                self.backend_by_name.get(group_name, backend), receiver if sender == rank else sender
            )
            for (sender, receiver), group_name in name_by_direction.items()
            if rank in (sender, receiver)
        }


def connections_of(group: ProcessGroup) -> GlooConnections:
    """Return the connections of a process group, shared by all steps that are built on it."""
    return _CONNECTIONS.setdefault(group, GlooConnections())


_CONNECTIONS: WeakKeyDictionary[ProcessGroup, GlooConnections] = WeakKeyDictionary()


def create_directed_groups(
    group: ProcessGroup,
    directions: Iterable[Direction],
    rank: int,
    store: Store,
    device: torch.device,
    timeout: timedelta,
) -> dict[Direction, DirectedGroup]:
    """Connect this rank with its peers: a process group of two for every direction in which they exchange messages.

    A communicator of NCCL is a queue, so a message that waits holds up everything that was queued after it. With a
    queue for each direction it holds up only messages of one sender to one receiver, which come in order anyway.
    """
    backend_class = type(backend_on(group, device))
    group_by_direction: dict[Direction, DirectedGroup] = {}
    # Both ranks of a direction meet in its creation, which blocks. All ranks take the directions in one order, sorted,
    # so the first direction that is not there yet always has both of its ranks, and no circle of waiting ranks forms.
    for sender, receiver in sorted(directions):
        if rank not in (sender, receiver):
            continue
        is_receiver = rank == receiver
        peer = 0 if is_receiver else 1  # in its group the sender has rank 0 and the receiver rank 1
        pair_store = PrefixStore(f"direction/{sender}>{receiver}", store)
        pair_group = create_pair_group(backend_class, pair_store, int(is_receiver), timeout)
        # The first transfer makes the backend set its communicator up, which takes time that no step should pay.
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        (pair_group.recv if is_receiver else pair_group.send)([probe], peer, 0).wait()
        group_by_direction[sender, receiver] = DirectedGroup(pair_group, peer)
    return group_by_direction


Leaves = list[Any]
# Of keys from here on the hash is compared: a header has no room for more digits.
_LARGE_KEY = 10**30


class MessagePlaces:
    """The tag and the room of the k-th message of each direction, shared by all programs of a step.

    A rank that runs the program of another number of microbatches is then named by its first message.
    """

    def __init__(self) -> None:
        self.tags, self.signature_count = list[int](), 0
        # The largest message of all programs and signatures, by source, target and place.
        self._most_bytes = dict[tuple[int, int, int], int]()

    def bytes_of(self, message: Message) -> int:
        """Return the bytes of the room for a message: at first a header."""
        return self._most_bytes.get((message.source, message.target, message.place_in_direction), HEADER)

    def make_room(self, message: Message, size: int) -> None:
        """Make room for a message of `size` bytes."""
        place = message.source, message.target, message.place_in_direction
        self._most_bytes[place] = max(self.bytes_of(message), size)


class Transfers:
    """The messages that one rank sends and receives in a step, for values on its device.

    They are carried on the host, or with NCCL on the GPU. The host does not read headers on a GPU before the step is
    over, since that would wait for the GPU.

    With `connected`, the transfers of another program of the step, both share their places, and new connections are
    made only where that one has none.

    Raises:
        RankError: another rank does not connect in time.

    Attributes:
        carrier_device: where messages are when they are sent.
        is_captured: whether a graph captures the messages of the step, which are sent by its replays.
        received_header: the header of a message of another step, if one has come in.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        rank: int,
        group: ProcessGroup,
        watchdog: Watchdog,
        meeting: Meeting,
        device: torch.device,
        timeout: timedelta,
        connected: Transfers | None = None,
    ) -> None:
        # 1. Connect to the other ranks.
        self.device, self._watchdog = device, watchdog
        self._on_streams = is_on_streams(group, device)
        self.carrier_device = device if self._on_streams else torch.device("cpu")
        self._is_carried_on_device = self.carrier_device == device
        processes, connections = dist.get_process_group_ranks(group), connections_of(group)
        directions = {(message.source, message.target) for message in messages}
        connecting = PeerWait(tuple(processes), "did not connect to the others", "at building the step")
        store = PrefixStore("fpipe/connections/" + "/".join(map(str, meeting.key)), default_store())
        # Connecting blocks until the peers connect: the watchdog ends that wait if one is dead.
        watchdog.wait = connecting
        self._places = MessagePlaces() if connected is None else connected._places
        try:
            if self._on_streams:
                groups = {} if connected is None else connected._group_by_direction
                new_directions = directions - groups.keys()
                new_groups = create_directed_groups(group, new_directions, rank, store, device, timeout)
                self._group_by_direction = {**groups, **new_groups}
            else:
                self._group_by_direction = connections.connect(group, directions, rank, store, timeout)
                place_count = 1 + max((message.place_in_direction for message in messages), default=-1)
                self._places.tags += connections.take_tags(max(0, place_count - len(self._places.tags)))
        except RuntimeError as error:
            raise watchdog.as_rank_error(error, connecting) from error
        watchdog.wait, meeting.gloo_backend = None, next(iter(connections.backend_by_name.values()), None)
        # 2. Sort this rank's messages by peer, each with the wait that names the peer if it fails.
        self._message_by_value = {message.value: message for message in messages}
        self._incoming_by_source: defaultdict[int, list[Message]] = defaultdict(list)
        self._outgoing_by_target: defaultdict[int, list[Message]] = defaultdict(list)
        self._wait_by_number = dict[int, PeerWait]()
        for message in messages:
            if message.target == rank:
                self._incoming_by_source[message.source].append(message)
                omission = f"did not send what its {message.cell} writes"
                self._wait_by_number[message.number] = PeerWait((processes[message.source],), omission)
            if message.source == rank:
                self._outgoing_by_target[message.target].append(message)
                omission = f"did not receive what {message.cell} of rank {rank} writes"
                self._wait_by_number[message.number] = PeerWait((processes[message.target],), omission, "at the end of")
        # 3. Order the receives.
        self._queue_order, self._queued_counts = queue_of_rank(messages, rank)
        self._place_by_number = {message.number: queue_index for queue_index, message in enumerate(self._queue_order)}
        self._posted_until = dict[int, int]()
        self._rank = rank
        # The header that graphs send: a replay reads this memory, which the host fills before it.
        self._graph_header = torch.empty(HEADER, dtype=torch.uint8, device=device)
        self.begin_step(0, 0, None, keeps=False)

    @property
    def groups(self) -> list[Any]:
        """The groups that carry messages."""
        return list({id(group): group for group, _ in self._group_by_direction.values()}.values())

    def add_signature(self, layouts: Mapping[Value, Layout]) -> int:
        """Make room for the messages of a signature, and return its number."""
        # A receive has room for the largest message of all signatures. Gloo ends the process when a message is larger
        # than its memory, so a rank that is handed other arguments could not be named.
        for value, layout in layouts.items():
            self._places.make_room(self._message_by_value[value], layout.size)
        for incoming in self._incoming_by_source.values():
            bytes_by_number = {message.number: self._places.bytes_of(message) for message in incoming}
            self._posted_until |= posted_counts(incoming, bytes_by_number)
        self._places.signature_count += 1
        return self._places.signature_count

    def begin_step(self, step: int, signature: int, key: int | None, keeps: bool) -> None:
        """Begin a step.

        Args:
            step, signature, key: what the header of its messages names.
            keeps: whether buffers are kept until the end of the step, for its notes.
        """
        self.is_captured, self._keeps_messages = is_capturing(self.device), keeps
        self._sent_header = self._graph_header if self.is_captured else self._write_header(step, signature, key)
        # The first header of another step that came in, or else the one that is sent.
        self.received_header = self._sent_header
        self._freed_counts = dict.fromkeys(self._outgoing_by_target, 0)
        self._unsettled_receives: list[tuple[Message, Any]] = []
        self._posted_counts, self._queued_count = dict.fromkeys(self._incoming_by_source, 0), 0
        self._receives_in_flight: dict[int, tuple[Tensor, Any]] = {}
        self._sends: dict[int, tuple[Tensor | None, Any]] = {}
        if not self._on_streams and signature:
            # Post before any message comes in: gloo's thread polls in vain while another thread posts a receive on the
            # same connection and waits for a core.
            for source, incoming in self._incoming_by_source.items():
                self._post_receives(source, self._posted_until[incoming[0].number])

    def begin_replay(self, step: int, signature: int, key: int | None) -> None:
        """Begin a step whose messages a graph sends and receives: queue the copy of its header."""
        self._graph_header.copy_(self._write_header(step, signature, key))

    def _write_header(self, step: int, signature: int, key: int | None) -> Tensor:
        """Return the header of a step on the device, and keep its mark."""
        header = header_of_step(step, signature, key if key is None or abs(key) < _LARGE_KEY else hash(key))
        self._step_mark, self._step = int(mark_of(header)), step_of(header)
        # From pinned memory, so that the host does not wait for the device.
        return header.pin_memory().to(self.device, non_blocking=True) if self._on_streams else header.to(self.device)

    def send(self, layouts: Mapping[Value, Layout], op: Op, compute_leaves: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a SEND, whose `compute_leaves` makes the leaves that are sent."""
        sent_messages = [(self._message_by_value[value], layouts[value]) for value in op.writes]

        def send(*operands: Leaves) -> Sequence[Leaves]:
            for (message, layout), leaves in zip(sent_messages, compute_leaves(*operands), strict=True):
                # Both sides of an NCCL transfer must name the same size; a receive of gloo takes shorter messages.
                size = self._places.bytes_of(message) if self._on_streams else layout.size
                buffer = layout.pack(leaves, self._sent_header, size)
                self._advance_queue(self._place_by_number[message.number])
                self._start_send(message, buffer if self._is_carried_on_device else buffer.to(self.carrier_device))
                self._advance_queue(self._queued_counts[message.number])
            return ()

        return send

    def receive(self, layouts: Mapping[Value, Layout], op: Op) -> Callable[..., Any]:
        """Return the function that runs a RECV."""
        received_messages = [(self._message_by_value[value], layouts[value]) for value in op.reads]
        return lambda: [layout.unpack(self._receive(message)) for message, layout in received_messages]

    def sent_message(self, value: Value) -> Tensor | None:
        """Return the message of a value that this step has sent; None if its buffer is freed."""
        return self._sends[self._message_by_value[value].number][0]

    def wait_for_sends(self) -> None:
        """Wait until all messages of the step have arrived."""
        for number in self._sends:
            self._wait_for_send(number)
        # The streams waited for these receives. The host must too: only a wait of the host notices a dead peer.
        for message, work in self._unsettled_receives if not self.is_captured else ():
            self._watchdog.wait_on_host(work, self._wait_by_number[message.number])
        if self._on_streams and not self.is_captured:
            self.check_header(self.received_header)
        self._unsettled_receives, self._sends = [], {}

    def check_header(self, received_header: Tensor) -> None:
        """Raise RankError if a message of another step has come in; this waits for the device."""
        if int(mark_of(received_header)) != self._step_mark:
            raise self._end_run_for_step(received_header, "another rank")

    def _start_send(self, message: Message, buffer: Tensor) -> None:
        group, peer = self._group_by_direction[message.source, message.target]
        try:
            self._sends[message.number] = buffer, group.send([buffer], peer, self._tag_of(message))
        except RuntimeError as error:
            raise self._watchdog.as_rank_error(error, self._wait_by_number[message.number]) from error

    def _tag_of(self, message: Message) -> int:
        # NCCL has no tags: each direction has a communicator of its own, and its messages come in order.
        return 0 if self._on_streams else self._places.tags[message.place_in_direction]

    def _advance_queue(self, count: int) -> None:
        """With NCCL, post the receives among this rank's first `count` messages, and free buffers that have left."""
        if not self._on_streams:
            return
        for message in self._queue_order[self._queued_count : count]:
            if message.target == self._rank:
                self._post_receives(message.source, message.place_in_direction + 1)
        self._queued_count = max(self._queued_count, count)
        # Nothing of a capture is ever completed: its buffers are freed by what acknowledges them.
        polls = not (self._keeps_messages or self.is_captured)
        for target, outgoing in self._outgoing_by_target.items() if polls else ():
            for message in outgoing[self._freed_counts[target] :]:
                send_work = self._sends[message.number][1] if message.number in self._sends else None
                if send_work is None or not send_work.is_completed():
                    break
                self._free(message)

    def _receive(self, message: Message) -> Tensor:
        if self._on_streams:
            self._advance_queue(self._queued_counts[message.number])
        else:
            self._post_receives(message.source, self._posted_until[message.number])
        buffer, work = self._receives_in_flight.pop(message.number)
        self._watchdog.wait_for(work, self._wait_by_number[message.number], self._on_streams)
        if self._on_streams:
            self._unsettled_receives.append((message, work))
            # On the GPU: keep the first header that differs, for the host to read at the end of the step. The mark is
            # compared with memory, since a number would stay that of the capture in all replays.
            is_of_step = mark_of(buffer) == mark_of(self._sent_header)
            self.received_header = torch.where(is_of_step, self.received_header, buffer[:HEADER])
        elif mark_of(buffer).item() != self._step_mark:
            raise self._end_run_for_step(buffer, f"rank {message.source}")
        if not self._keeps_messages:
            self._free_acknowledged(message)
        return buffer if self._is_carried_on_device else buffer.to(self.device)

    def _end_run_for_step(self, buffer: Tensor, sender: str) -> RankError:
        """End the run for a message of another step, and return the error to raise."""
        (step, signature, key), (own_step, own_signature, own_key) = step_of(buffer), self._step
        if (step, signature) == (own_step, own_signature) and key != own_key:
            return self._watchdog.end_run_because(
                f"{sender} has key {key} in this step and rank {self._rank} has key {own_key}. All ranks pass the same."
            )
        return self._watchdog.end_run_because(NOT_SAME_STEP.format(sender, f"rank {self._rank}"))

    def _free_acknowledged(self, received: Message) -> None:
        """Free the send buffers that a received message acknowledges."""
        # Its sender had received these messages before it sent this one, so waiting for their sends takes no time.
        outgoing = self._outgoing_by_target.get(received.source, ())
        for index in range(self._freed_counts.get(received.source, 0), received.acknowledged_count):
            self._free(outgoing[index])

    def _free(self, message: Message) -> None:
        self._wait_for_send(message.number)
        self._sends[message.number] = None, None
        self._freed_counts[message.target] = message.place_in_direction + 1

    def _wait_for_send(self, number: int) -> None:
        buffer, work = self._sends[number]
        # A second wait for the same work of gloo would never return.
        if work is not None:
            self._watchdog.wait_for(work, self._wait_by_number[number], self._on_streams)
            self._sends[number] = buffer, None

    def _post_receives(self, source: int, count: int) -> None:
        posted_count = self._posted_counts[source]
        if posted_count >= count:
            return
        incoming, (group, peer) = self._incoming_by_source[source], self._group_by_direction[source, self._rank]
        for message in incoming[posted_count:count]:
            buffer = torch.empty(self._places.bytes_of(message), dtype=torch.uint8, device=self.carrier_device)
            try:
                work = group.recv([buffer], peer, self._tag_of(message))
                self._receives_in_flight[message.number] = buffer, work
            except RuntimeError as error:
                raise self._watchdog.as_rank_error(error, self._wait_by_number[message.number]) from error
            self._posted_counts[source] += 1
