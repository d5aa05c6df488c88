"""Send and receive the values of a program between processes, all known before the first step.

    rank 0: SEND(y[0,0]) SEND(y[0,1])        -- messages 0, 1 -->        rank 1: RECV(y[0,0]) .. RECV(y[0,1])

No send blocks. A send buffer is freed once a later message acknowledges it, or NCCL says that it has left, else at the
end of the step. Receives from a rank are posted in the order in which that rank sends, ahead of the one that it waits
for: a few, or as many as are small; with NCCL in the order of the SENDs of all ranks. A rank that fails says so in what
it still owes the others, in place of the values: so all of them end, with the reason, and what is under way stays in
order.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.program import Op, Value
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.processes.communicators import GREETING, groups_of_two, ways_of
from fpipe.runtimes.processes.message import FAILED, HEADER, LOST, MARKS, MEETS, TEXT, Layout, kind_of, text_of, word
from fpipe.runtimes.processes.message_order import Message, posted_until, queue_of
from fpipe.runtimes.processes.transfer_errors import TransferErrors
from fpipe.torch_private.processes import is_on_streams

Leaves = list[Any]
_LONG = 10**40
"""A key from which on its hash is compared: a header has no room for more digits."""
_UNSENT = "did not send what its {} writes"


class Transfers:
    """Messages that one rank sends and receives in a step, of those of all ranks, for values on its device; a
    RuntimeError if another rank does not connect in time.

    They are `carried` on the host, or with NCCL on the GPU. Nobody looks at those there before the step is over: that
    would wait for the GPU. What one says in place of a value is passed on until then.
    """

    def __init__(
        self, every: Sequence[Message], rank: int, group: ProcessGroup, meeting: Meeting, device: torch.device
    ) -> None:
        self._rank, self.meeting, self.device = rank, meeting, device
        self._timeout = timedelta(seconds=meeting.seconds)
        directions, self._ways = {(one.source, one.target) for one in every}, ways_of(group)
        self._ways.boards.add(meeting.board)
        self._errors = TransferErrors(rank, meeting, self._ways.boards)
        self._apart = is_on_streams(group, device)
        self.carried = device if self._apart else torch.device("cpu")
        self._near, self._tag = self.carried == device, 0 if self._apart else self._ways.taken(len(every))
        store = meeting.board.store
        if self._apart:
            self._carriers = groups_of_two(group, directions, rank, store, device, self._timeout)
        else:
            self._carriers = self._ways.carriers(group, directions, rank, store, self._timeout)
        self._every, self._by_value = every, {one.value: one for one in every}
        self._patience = () if self._apart else (self._timeout,)
        self._incoming: defaultdict[int, list[Message]] = defaultdict(list)
        self._outgoing_to: defaultdict[int, list[Message]] = defaultdict(list)
        for one in every:
            if one.target == rank:
                self._incoming[one.source].append(one)
            if one.source == rank:
                self._outgoing_to[one.target].append(one)
        self._row, self._behind = queue_of(every, rank)
        self._place = {one.number: place for place, one in enumerate(self._row)}
        self._room = {one.number: HEADER for one in every}
        self._until = dict[int, int]()
        self._signatures, self.watchdog, self._build = 0, meeting.watchdog, f"build {meeting.built}"
        self.ctrl_c = self.watchdog.ctrl_c
        self.begin()

    def begin(self) -> None:
        """Nothing of a step is sent or received."""
        self._over, self._mark, self._own, self._keeps = False, MARKS, self._build, False
        self._dropped = dict.fromkeys(self._outgoing_to, 0)
        self._landed: list[tuple[Message, Any]] = []
        self._posted, self._queued = dict.fromkeys(self._incoming, 0), 0
        self._arriving: dict[int, tuple[Tensor, Any]] = {}
        self._sent: dict[int, tuple[Tensor | None, Any]] = {}
        self._greetings: dict[int, tuple[Tensor, Any]] = {}
        self._greeted: list[Any] = []

    @property
    def groups(self) -> list[Any]:
        """Groups of gloo that carry messages: closing one ends a wait."""
        return [] if self._apart else list({id(group): group for group, _ in self._carriers.values()}.values())

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

    def meet(self) -> None:
        """Tell all neighbours that this rank is about to agree on something, and hear it of them; a RankError if one
        runs its step instead."""
        self.watchdog.waits = "at the start"
        for one in self._row:
            if not one.place and one.source == self._rank:
                self._send(one, self._word(one, MEETS, self._build))
            elif not one.place:
                self._post(one.source, 1)
        for source, row in self._incoming.items():
            message = self._arrived(row[0])
            self._settle()
            if kind_of(message) != MEETS:
                raise self._errors.told(message, f"rank {source}", self._own)
        self._all_over()
        self.watchdog.waits = None

    def start(self, step: int, signature: int, key: int | None, keeps: bool) -> None:
        """The ranks agree, and a step starts, whose mark tells it from others and from other keys; it `keeps` what was
        sent if somebody looks at it in the end."""
        self._keeps = keeps
        self._mark = MARKS + (step + signature + self._apart * (key or 0)) % (256 - MARKS)
        self._own = f"{self._build}, key {key if key is None or abs(key) < _LONG else hash(key)}"
        self._head = word(self._mark, self._own).to(self.device)
        if not self._apart:
            # Before anything comes in: gloo's thread polls in vain while a receive is posted on the same connection, as
            # long as the one that posts it waits for a core.
            for source, row in self._incoming.items():
                self._post(source, self._until[row[0].number])

    def send(self, layouts: Mapping[Value, Layout], op: Op, made_of: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a SEND."""
        known = [(self._by_value[value], layouts[value]) for value in op.writes]

        def send(*lists: Leaves) -> Sequence[Leaves]:
            self.ctrl_c.heed()
            for (one, layout), leaves in zip(known, made_of(*lists), strict=True):
                size = self._room[one.number] if self._apart else layout.size
                message = layout.pack(leaves, self._head, size)
                self._queue(self._place[one.number])
                self._send(one, message if self._near else message.to(self.carried))
                self._queue(self._behind[one.number])
            return ()

        return send

    def receive(self, layouts: Mapping[Value, Layout], op: Op) -> Callable[..., Any]:
        """The function of a RECV."""
        known = [(self._by_value[value], layouts[value]) for value in op.reads]
        return lambda: [layout.unpack(self._receive(one)) for one, layout in known]

    def sent(self, value: Value) -> Tensor | None:
        """The message of a value that this step has sent, if it keeps that."""
        return self._sent[self._by_value[value].number][0]

    def end(self) -> None:
        """Wait until all that was sent has arrived."""
        self.watchdog.waits = "at the end"
        self._all_over()
        if self._apart:
            self._settle()
            if kind_of(self._head) != self._mark:
                raise self._errors.told(self._head, "another rank", self._own)
        self.begin()
        self._over = True

    def fail(self, said: str, broken: bool) -> None:
        """Tell all others, in what they still wait for. Unless the group is broken, nothing is left under way; if it
        is, nothing is waited for, and what was said stays until it is taken."""
        if self._over:  # all have what they wait for
            return
        self.watchdog.waits = "at the end"
        said = self.meeting.board.shortened(said, TEXT)
        for one in self._row:
            with suppress(RuntimeError):  # a rank that is lost meanwhile hides no error; the next step meets it
                if one.source == self._rank and one.number not in self._sent:
                    self._put(one, self._word(one, LOST if broken else FAILED, said))
                elif one.target == self._rank and not broken:
                    self._post(one.source, one.place + 1)
        if broken:
            return
        with suppress(RuntimeError):
            under_way = (*self._sent.values(), *self._arriving.values(), *self._greetings.values())
            for work in (*self._greeted, *(work for _, work in under_way if work is not None)):
                work.wait(self._timeout)
        self.begin()

    def _send(self, one: Message, message: Tensor) -> None:
        try:
            self._put(one, message)
        except RuntimeError as error:
            raise self._errors.gone(one.target, "") from error

    def _put(self, one: Message, message: Tensor) -> None:
        group, peer = self._carriers[one.source, one.target]
        if not one.place and self._ways.shared and not self._apart:
            self._greeted.append(group.send([message[:HEADER]], peer, GREETING))
        self._sent[one.number] = message, group.send([message], peer, self._tag + one.number)

    def _word(self, one: Message, kind: int, text: str) -> Tensor:
        """Word in the place of a value. Both sides of NCCL know how long a message is, so all have the same room."""
        said = word(kind, text)
        if not self._apart:
            return said
        message = torch.zeros(self._room[one.number], dtype=torch.uint8)
        message[: len(said)] = said
        return message.to(self.carried)

    def _queue(self, until: int) -> None:
        """With NCCL: post the receives among the first of this rank's messages, and free what has left meanwhile."""
        if not self._apart:
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
        self.ctrl_c.heed()
        if self._apart:
            self._queue(self._behind[one.number])
        else:
            self._post(one.source, self._until[one.number])
        message = self._arrived(one)
        if self._apart:
            self._head = torch.where(message[0] == self._mark, self._head, message[:HEADER])
        elif kind_of(message) != self._mark or not (one.place or text_of(message) == self._own):
            raise self._errors.told(message, f"rank {one.source}", self._own)
        if not self._keeps:
            self._drop(one)
        return message if self._near else message.to(self.device)

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

    def _arrived(self, one: Message) -> Tensor:
        if not one.place and one.source in self._greetings:
            greeting, work = self._greetings.pop(one.source)
            self._wait(work, one)
            if kind_of(greeting) in (FAILED, LOST) or text_of(greeting).partition(",")[0] != self._build:
                raise self._errors.told(greeting, f"rank {one.source}", self._own)
        message, work = self._arriving.pop(one.number)
        self._wait(work, one)
        if self._apart:
            self._landed.append((one, work))
        return message

    def _wait(self, work: Any, one: Message) -> None:
        try:
            work.wait(*self._patience)
        except RuntimeError as error:
            raise self._errors.lost(error, one.source, _UNSENT.format(one.cell)) from error

    def _settle(self) -> None:
        """Wait until the GPU has all that is to arrive before what follows: its streams know it, the host does not."""
        ends = time.monotonic() + self.meeting.seconds
        for one, work in self._landed:
            if not self.watchdog.is_over(work, ends - time.monotonic()):
                raise self._errors.late(one.source, _UNSENT.format(one.cell))
        self._landed.clear()

    def _all_over(self) -> None:
        for number in self._sent:
            self._over_at(number)
        for work in self._greeted:
            work.wait(*self._patience)
        self._greeted.clear()

    def _over_at(self, number: int) -> None:
        message, work = self._sent[number]
        if work is not None:  # waited for twice, it would never come
            try:
                work.wait(*self._patience)
            except RuntimeError as error:
                one = self._every[number]
                what = f"did not receive what {one.cell} of rank {self._rank} writes"
                raise self._errors.lost(error, one.target, what) from error
            self._sent[number] = message, None

    def _post(self, source: int, until: int) -> None:
        first = self._posted[source]
        if first >= until:
            return
        row, (group, peer) = self._incoming[source], self._carriers[source, self._rank]
        if not first and self._ways.shared and not self._apart:
            greeting = torch.empty(HEADER, dtype=torch.uint8)
            self._greetings[source] = greeting, group.recv([greeting], peer, GREETING)
        for one in row[first:until]:
            message = torch.empty(self._room[one.number], dtype=torch.uint8, device=self.carried)
            try:
                self._arriving[one.number] = message, group.recv([message], peer, self._tag + one.number)
            except RuntimeError as error:
                raise self._errors.gone(source, _UNSENT.format(one.cell)) from error
            self._posted[source] += 1
