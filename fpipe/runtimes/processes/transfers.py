"""Send and receive the values of a program between processes, all known before the first step.

    rank 0: SEND(y[0,0]) SEND(y[0,1])        -- messages 0, 1 -->        rank 1: RECV(y[0,0]) .. RECV(y[0,1])

No send blocks. A send buffer is freed once a later message acknowledges it, or NCCL says that it has left, else at the
end of the step. Receives from a rank are posted in the order in which that rank sends, ahead of the one that it waits
for: a few, or as many as are small; with NCCL in the order of the SENDs of all ranks. Each message has a header that
tells its step from others: a rank that was handed another key, or arguments of other sizes, is found by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.program import Op, Value
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import NOT_THE_SAME_STEP, PeerWait, Watchdog
from fpipe.runtimes.processes.communicators import connections_of, create_directed_groups
from fpipe.runtimes.processes.message import HEADER, Layout, header, mark_of, step_of
from fpipe.runtimes.processes.message_order import Message, posted_until, queue_of
from fpipe.torch_private.processes import default_store, is_on_streams

Leaves = list[Any]
_LONG = 10**30
"""A key from which on its hash is compared: a header has no room for more digits."""


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
        directions = {(one.source, one.target) for one in every}
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
        self._every, self._by_value = every, {one.value: one for one in every}
        self._incoming: defaultdict[int, list[Message]] = defaultdict(list)
        self._outgoing_to: defaultdict[int, list[Message]] = defaultdict(list)
        self._waits = dict[int, PeerWait]()
        for one in every:
            if one.target == rank:
                self._incoming[one.source].append(one)
                missing = f"did not send what its {one.cell} writes"
                self._waits[one.number] = PeerWait((processes[one.source],), missing)
            if one.source == rank:
                self._outgoing_to[one.target].append(one)
                missing = f"did not receive what {one.cell} of rank {rank} writes"
                self._waits[one.number] = PeerWait((processes[one.target],), missing, "at the end of")
        self._row, self._behind = queue_of(every, rank)
        self._place = {one.number: place for place, one in enumerate(self._row)}
        self._room = {one.number: HEADER for one in every}
        self._until = dict[int, int]()
        self._rank, self._signatures = rank, 0
        self.start(0, 0, None, keeps=False)

    @property
    def groups(self) -> list[Any]:
        """Groups that carry messages."""
        return list({id(group): group for group, _ in self._carriers.values()}.values())

    def know(self, layouts: Mapping[Value, Layout]) -> int:
        """Make room for what another signature sends, and number it. A rank that is handed other arguments than the
        rest then hears of it: a message that is too large for its memory would end the process."""
        for value, layout in layouts.items():
            number = self._by_value[value].number
            self._room[number] = max(self._room[number], layout.size)
        for row in self._incoming.values():
            self._until |= posted_until(row, self._room)
        self._signatures += 1
        return self._signatures

    def start(self, step: int, signature: int, key: int | None, keeps: bool) -> None:
        """Start a step, whose header tells it from others and from other keys; it `keeps` what was sent if somebody
        looks at it in the end."""
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
            for (one, layout), leaves in zip(known, made_of(*lists), strict=True):
                size = self._room[one.number] if self._on_streams else layout.size
                message = layout.pack(leaves, self._head, size)
                self._queue(self._place[one.number])
                self._put(one, message if self._is_near else message.to(self.carried))
                self._queue(self._behind[one.number])
            return ()

        return send

    def receive(self, layouts: Mapping[Value, Layout], op: Op) -> Callable[..., Any]:
        """Return the function of a RECV."""
        known = [(self._by_value[value], layouts[value]) for value in op.reads]
        return lambda: [layout.unpack(self._receive(one)) for one, layout in known]

    def sent(self, value: Value) -> Tensor | None:
        """Return the message of a value that this step has sent, if it keeps that."""
        return self._sent[self._by_value[value].number][0]

    def end(self) -> None:
        """Wait until all that was sent has arrived."""
        for number in self._sent:
            self._over_at(number)
        for one, work in self._arrived_late:  # the streams know it, the host does not
            self._watchdog.settle(work, self._waits[one.number])
        if self._on_streams and int(mark_of(self._head)) != self._mark:
            raise self._other_step(self._head, "another rank")
        self._arrived_late, self._sent = [], {}

    def _put(self, one: Message, message: Tensor) -> None:
        group, peer = self._carriers[one.source, one.target]
        try:
            self._sent[one.number] = message, group.send([message], peer, self._first_tag + one.number)
        except RuntimeError as error:
            raise self._watchdog.lost(error, self._waits[one.number]) from error

    def _queue(self, until: int) -> None:
        """With NCCL: post the receives among the first of this rank's messages, and free what has left meanwhile."""
        if not self._on_streams:
            return
        for one in self._row[self._queued : until]:
            if one.target == self._rank:
                self._post(one.source, one.place + 1)
        self._queued = max(self._queued, until)
        for target, row in self._outgoing_to.items() if not self._keeps else ():
            for one in row[self._dropped[target] :]:
                work = self._sent[one.number][1] if one.number in self._sent else None
                if work is None or not work.is_completed():
                    break
                self._free(one)

    def _receive(self, one: Message) -> Tensor:
        if self._on_streams:
            self._queue(self._behind[one.number])
        else:
            self._post(one.source, self._until[one.number])
        message, work = self._arriving.pop(one.number)
        self._watchdog.wait_for(work, self._waits[one.number], self._on_streams)
        if self._on_streams:
            self._arrived_late.append((one, work))
            # The first header that is another stays until the host looks, at the end.
            self._head = torch.where(mark_of(message) == self._mark, self._head, message[:HEADER])
        elif mark_of(message).item() != self._mark:
            raise self._other_step(message, f"rank {one.source}")
        if not self._keeps:
            self._drop(one)
        return message if self._is_near else message.to(self.device)

    def _other_step(self, message: Tensor, who: str) -> RankError:
        """Return the error for a message of another step."""
        (step, signature, key), (own_step, own_signature, own_key) = step_of(message), self._step
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

    def _free(self, one: Message) -> None:
        """Let go of a send buffer."""
        self._over_at(one.number)
        self._sent[one.number] = None, None
        self._dropped[one.target] = one.place + 1

    def _over_at(self, number: int) -> None:
        message, work = self._sent[number]
        if work is not None:  # waited for twice, it would never come
            self._watchdog.wait_for(work, self._waits[number], self._on_streams)
            self._sent[number] = message, None

    def _post(self, source: int, until: int) -> None:
        first = self._posted[source]
        if first >= until:
            return
        row, (group, peer) = self._incoming[source], self._carriers[source, self._rank]
        for one in row[first:until]:
            message = torch.empty(self._room[one.number], dtype=torch.uint8, device=self.carried)
            try:
                self._arriving[one.number] = message, group.recv([message], peer, self._first_tag + one.number)
            except RuntimeError as error:
                raise self._watchdog.lost(error, self._waits[one.number]) from error
            self._posted[source] += 1
