"""Send and receive the values of a program between processes, all known before the first step.

    rank 0: SEND(y[0,0]) SEND(y[0,1])        -- messages 0, 1 -->        rank 1: RECV(y[0,0]) .. RECV(y[0,1])

No send blocks. A send buffer is freed once a later message acknowledges it, or NCCL says that it has left, else at the
end of the step. Receives from a rank are posted in the order in which that rank sends, ahead of the one that it waits
for: a few, or as many as are small; with NCCL in the order of the SENDs of all ranks. Each message has a header that
tells its step from others: a rank that was handed another key, or arguments of other sizes, is found by it.
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
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import NOT_THE_SAME_STEP, PeerWait, Watchdog
from fpipe.runtimes.processes.message import HEADER, Layout, header, mark_of, step_of
from fpipe.runtimes.processes.message_order import Message, posted_until, queue_of
from fpipe.torch_private.processes import backend_on, default_store, gloo_beside, group_of_two, is_on_streams

# Choose what carries values between ranks: what goes one way shares nothing with what comes back.
#
# A send of gloo waits for nobody, but it locks its connection while it writes, and gloo's own thread does not sleep
# until it can read there: with few cores it takes that of whoever holds the lock. One of NCCL begins when both sides
# have come to it, and holds up all that follows on its communicator. With one for each direction it only holds up
# what goes the same way: `simulate(.., messages=)` says how much longer one for both, or for all ranks, makes a step.
#
#     gloo: 0 > 1 > 2 in one group, 0 < 1 < 2 in another         NCCL: 0 > 1, 1 > 0, 1 > 2, 2 > 1, each a group of two

Direction = tuple[int, int]


class DirectedGroup(NamedTuple):
    """A group or backend that carries messages in one direction, and the rank of the peer in it."""

    group: Any
    peer: int


class GlooConnections:
    """Connections of gloo that carry the messages of all steps of a process group, and nothing else: a receive of the
    caller's own on that group takes none of them.

    They stay as long as the group: a rank that throws its step away may have sent what is still on its way.

    Attributes:
        carriers: by name a backend of gloo.
    """

    def __init__(self) -> None:
        self._next_tag = 0
        self.carriers: dict[str, Any] = {}

    def take_tags(self, count: int) -> int:
        """Return the first of so many tags that messages of a new step have to themselves."""
        first, self._next_tag = self._next_tag, self._next_tag + count
        return first

    def connect(
        self, group: ProcessGroup, directions: Iterable[Direction], rank: int, store: Store, timeout: timedelta
    ) -> dict[Direction, DirectedGroup]:
        """Return what carries each direction that a rank takes part in: connections for messages to higher ranks, and
        others for those to lower. A backend other than gloo carries both itself."""
        backend = backend_on(group, torch.device("cpu"))
        name_by_direction = {way: "up" if way[0] < way[1] else "down" for way in sorted(directions)}
        is_gloo = backend.name() == "gloo"
        for name in sorted({*name_by_direction.values()} - {*self.carriers}) if is_gloo else ():
            self.carriers[name] = gloo_beside(backend, PrefixStore(name, store), rank, group.size(), timeout)
        return {
            (sender, receiver): DirectedGroup(self.carriers.get(name, backend), receiver if sender == rank else sender)
            for (sender, receiver), name in name_by_direction.items()
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
    """Create a two-rank process group for each (sender, receiver) that this rank takes part in.

    NCCL runs the messages of one communicator in the order in which they were queued. If two directions shared one, a
    late message would block an unrelated one behind it; a communicator a direction cannot.
    """
    backend_class = type(backend_on(group, device))
    group_by_direction: dict[Direction, DirectedGroup] = {}
    # Creating a group blocks until the peer joins. Every rank walks the directions in ascending order, so both ranks
    # of the smallest direction that is still missing are waiting for it: the creation cannot deadlock.
    for sender, receiver in sorted(directions):
        if rank not in (sender, receiver):
            continue
        is_receiver = rank == receiver
        peer = 0 if is_receiver else 1  # ranks inside the group: the sender is 0, the receiver 1
        pair_store = PrefixStore(f"direction/{sender}>{receiver}", store)
        pair_group = group_of_two(backend_class, pair_store, int(is_receiver), timeout)
        # Backends create their communicator at the first transfer. Pay for it here, not inside the first step.
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        (pair_group.recv if is_receiver else pair_group.send)([probe], peer, 0).wait()
        group_by_direction[sender, receiver] = DirectedGroup(pair_group, peer)
    return group_by_direction


Leaves = list[Any]
_LONG = 10**30
"""The least key of which the hash is compared: a header has no room for more digits."""


class Transfers:
    """Messages that one rank sends and receives in a step, of those of all ranks, for values on its device; a
    RankError if another rank does not connect in time.

    They are `carried` on the host, or with NCCL on the GPU. Nobody looks at those there before the step is over: that
    would wait for the GPU.
    """

    def __init__(
        self,
        every: Sequence[Message],
        rank: int,
        group: ProcessGroup,
        watchdog: Watchdog,
        meeting: Meeting,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.device, self._watchdog = device, watchdog
        self._on_streams = is_on_streams(group, device)
        self.carried = device if self._on_streams else torch.device("cpu")
        self._is_near = self.carried == device
        processes, connections = dist.get_process_group_ranks(group), connections_of(group)
        directions = {(message.source, message.target) for message in every}
        connecting = PeerWait(tuple(processes), "did not connect to the others", "at building the step")
        store = PrefixStore("fpipe/connections/" + "/".join(map(str, meeting.key)), default_store())
        watchdog.wait, self._first_tag = connecting, 0
        try:
            if self._on_streams:
                self._carriers = create_directed_groups(group, directions, rank, store, device, timeout)
            else:
                self._carriers = connections.connect(group, directions, rank, store, timeout)
                self._first_tag = connections.take_tags(len(every))
        except RuntimeError as error:
            raise watchdog.lost(error, connecting) from error
        watchdog.wait, meeting.carrier = None, next(iter(connections.carriers.values()), None)
        self._by_value = {message.value: message for message in every}
        self._incoming: defaultdict[int, list[Message]] = defaultdict(list)
        self._outgoing_to: defaultdict[int, list[Message]] = defaultdict(list)
        self._waits = dict[int, PeerWait]()
        for message in every:
            if message.target == rank:
                self._incoming[message.source].append(message)
                missing = f"did not send what its {message.cell} writes"
                self._waits[message.number] = PeerWait((processes[message.source],), missing)
            if message.source == rank:
                self._outgoing_to[message.target].append(message)
                missing = f"did not receive what {message.cell} of rank {rank} writes"
                self._waits[message.number] = PeerWait((processes[message.target],), missing, "at the end of")
        self._row, self._behind = queue_of(every, rank)
        self._place = {message.number: place for place, message in enumerate(self._row)}
        self._room = {message.number: HEADER for message in every}
        self._until = dict[int, int]()
        self._rank, self._signatures = rank, 0
        self.start(0, 0, None, keeps=False)

    @property
    def groups(self) -> list[Any]:
        """Groups that carry messages."""
        return list({id(group): group for group, _ in self._carriers.values()}.values())

    def know(self, layouts: Mapping[Value, Layout]) -> int:
        """Make room for the messages of a signature, and return its number. A rank that is handed other arguments than
        the rest then learns of it: a message that is too large for its memory would end the process."""
        for value, layout in layouts.items():
            number = self._by_value[value].number
            self._room[number] = max(self._room[number], layout.size)
        for row in self._incoming.values():
            self._until |= posted_until(row, self._room)
        self._signatures += 1
        return self._signatures

    def start(self, step: int, signature: int, key: int | None, keeps: bool) -> None:
        """Start a step, whose header tells it from others and from other keys; for its notes it `keeps` messages."""
        head = header(step, signature, key if key is None or abs(key) < _LONG else hash(key))
        self._mark, self._step = int(mark_of(head)), step_of(head)
        self._head, self._keeps = head.to(self.device), keeps
        self._dropped = dict.fromkeys(self._outgoing_to, 0)
        self._arrived_late: list[tuple[Message, Any]] = []
        self._posted, self._queued = dict.fromkeys(self._incoming, 0), 0
        self._arriving: dict[int, tuple[Tensor, Any]] = {}
        self._sent: dict[int, tuple[Tensor | None, Any]] = {}
        if not self._on_streams and signature:
            # Before anything comes in: gloo's thread polls in vain while a receive is posted on the same connection, as
            # long as the one that posts it waits for a core.
            for source, row in self._incoming.items():
                self._post(source, self._until[row[0].number])

    def send(self, layouts: Mapping[Value, Layout], op: Op, made_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a SEND."""
        known = [(self._by_value[value], layouts[value]) for value in op.writes]

        def send(*lists: Leaves) -> Sequence[Leaves]:
            for (message, layout), leaves in zip(known, made_of(*lists), strict=True):
                size = self._room[message.number] if self._on_streams else layout.size
                buffer = layout.pack(leaves, self._head, size)
                self._queue(self._place[message.number])
                self._put(message, buffer if self._is_near else buffer.to(self.carried))
                self._queue(self._behind[message.number])
            return ()

        return send

    def receive(self, layouts: Mapping[Value, Layout], op: Op) -> Callable[..., Any]:
        """Return the function of a RECV."""
        known = [(self._by_value[value], layouts[value]) for value in op.reads]
        return lambda: [layout.unpack(self._receive(message)) for message, layout in known]

    def sent(self, value: Value) -> Tensor | None:
        """Return the message of a value that this step has sent, if it keeps that."""
        return self._sent[self._by_value[value].number][0]

    def end(self) -> None:
        """Wait until all that was sent has arrived."""
        for number in self._sent:
            self._over_at(number)
        for message, work in self._arrived_late:  # the streams know it, the host does not
            self._watchdog.settle(work, self._waits[message.number])
        if self._on_streams and int(mark_of(self._head)) != self._mark:
            raise self._other_step(self._head, "another rank")
        self._arrived_late, self._sent = [], {}

    def _put(self, message: Message, buffer: Tensor) -> None:
        group, peer = self._carriers[message.source, message.target]
        try:
            self._sent[message.number] = buffer, group.send([buffer], peer, self._first_tag + message.number)
        except RuntimeError as error:
            raise self._watchdog.lost(error, self._waits[message.number]) from error

    def _queue(self, until: int) -> None:
        """With NCCL: post the receives among the first of this rank's messages, and free what has left meanwhile."""
        if not self._on_streams:
            return
        for message in self._row[self._queued : until]:
            if message.target == self._rank:
                self._post(message.source, message.place + 1)
        self._queued = max(self._queued, until)
        for target, row in self._outgoing_to.items() if not self._keeps else ():
            for message in row[self._dropped[target] :]:
                work = self._sent[message.number][1] if message.number in self._sent else None
                if work is None or not work.is_completed():
                    break
                self._free(message)

    def _receive(self, message: Message) -> Tensor:
        if self._on_streams:
            self._queue(self._behind[message.number])
        else:
            self._post(message.source, self._until[message.number])
        buffer, work = self._arriving.pop(message.number)
        self._watchdog.wait_for(work, self._waits[message.number], self._on_streams)
        if self._on_streams:
            self._arrived_late.append((message, work))
            # The first header that is another stays until the host looks, at the end.
            self._head = torch.where(mark_of(buffer) == self._mark, self._head, buffer[:HEADER])
        elif mark_of(buffer).item() != self._mark:
            raise self._other_step(buffer, f"rank {message.source}")
        if not self._keeps:
            self._drop(message)
        return buffer if self._is_near else buffer.to(self.device)

    def _other_step(self, buffer: Tensor, who: str) -> RankError:
        """Return the error for a message of another step."""
        (step, signature, key), (own_step, own_signature, own_key) = step_of(buffer), self._step
        if (step, signature) == (own_step, own_signature) and key != own_key:
            return self._watchdog.fail(
                f"{who} has key {key} in this step and rank {self._rank} has key {own_key}. All ranks pass the same."
            )
        return self._watchdog.fail(NOT_THE_SAME_STEP.format(who, f"rank {self._rank}"))

    def _drop(self, heard: Message) -> None:
        """Free the send buffers that this message acknowledges: the other rank had received them before it sent it."""
        row, at = self._outgoing_to.get(heard.source, ()), self._dropped.get(heard.source, 0)
        for place in range(at, heard.heard):
            self._free(row[place])

    def _free(self, message: Message) -> None:
        """Let go of a send buffer."""
        self._over_at(message.number)
        self._sent[message.number] = None, None
        self._dropped[message.target] = message.place + 1

    def _over_at(self, number: int) -> None:
        buffer, work = self._sent[number]
        if work is not None:  # waited for twice, it would never come
            self._watchdog.wait_for(work, self._waits[number], self._on_streams)
            self._sent[number] = buffer, None

    def _post(self, source: int, until: int) -> None:
        first = self._posted[source]
        if first >= until:
            return
        row, (group, peer) = self._incoming[source], self._carriers[source, self._rank]
        for message in row[first:until]:
            buffer = torch.empty(self._room[message.number], dtype=torch.uint8, device=self.carried)
            try:
                self._arriving[message.number] = buffer, group.recv([buffer], peer, self._first_tag + message.number)
            except RuntimeError as error:
                raise self._watchdog.lost(error, self._waits[message.number]) from error
            self._posted[source] += 1
