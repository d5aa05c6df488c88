"""Send and receive the values of a program between processes, all known before the first step.

    rank 0: SEND(y[0,0]) SEND(y[0,1])        -- messages 0, 1 -->        rank 1: RECV(y[0,0]) .. RECV(y[0,1])

No send blocks: it is over when the step is. Receives from a rank are posted in the order in which that rank sends, a
few ahead of the one that is waited for. A rank that fails says so in what it still owes the others, in place of the
values: so all of them end, with the reason, and what is under way stays in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from fpipe.program import Op, Value
from fpipe.runtimes.late import first_told, who_is_late
from fpipe.runtimes.lowering.abstract_tree import AbstractTree
from fpipe.runtimes.lowering.lower import Instruction
from fpipe.runtimes.message import Layout, error_in
from fpipe.runtimes.rank_error import LostRank, RankError

Leaves = list[Any]
_AHEAD = 2


class _Message(NamedTuple):
    """A value that one rank sends another: its number among all, who wrote it, and which it is of those on its way."""

    number: int
    value: Value
    cell: str
    source: int
    target: int
    place: int
    layout: Layout


def messages(instructions: Iterable[Instruction], trees: Mapping[Value, AbstractTree]) -> list[_Message]:
    """All messages of a step, in the order of the program. Each rank finds the same."""
    sends = [
        (one.ops[0], *pair)
        for one in instructions
        if one.ops[0].kind == "SEND"
        for pair in zip(one.ops[0].reads, one.ops[0].writes, strict=True)
    ]
    cells = {value: op.cell for one in instructions for op in one.ops for value in op.writes}
    targets = {
        value: one.ops[0].rank for one in instructions if one.ops[0].kind == "RECV" for value in one.ops[0].reads
    }
    places: defaultdict[tuple[int, int], int] = defaultdict(int)
    found: list[_Message] = []
    for number, (op, read, value) in enumerate(sends):
        way, cell = (op.rank, targets[value]), cells.get(read, op.cell)
        found.append(_Message(number, value, cell, *way, places[way], Layout(trees[value].leaves)))
        places[way] += 1
    return found


class Transfers:
    """What one rank sends and receives in a step.

    Args:
        every: the messages of all ranks.
        rank: this rank's number in the group.
        group: whose `send` and `recv` carry them.
        timeout: seconds to wait for one; without it the group's own.
    """

    def __init__(self, every: Sequence[_Message], rank: int, group: ProcessGroup, timeout: float | None) -> None:
        self._group: Any = group
        ranks = dist.get_process_group_ranks(group)  # other groups of a mesh have losses of their own
        self._rank, self._store = rank, PrefixStore(f"fpipe/{ranks}", _get_default_store())
        self._timeout = () if timeout is None else (timedelta(seconds=timeout),)
        self._by_value = {one.value: one for one in every}
        self._outgoing = [one for one in every if one.source == rank]
        self._incoming: defaultdict[int, list[_Message]] = defaultdict(list)
        for one in every:
            if one.target == rank:
                self._incoming[one.source].append(one)
        self.begin()

    def begin(self) -> None:
        """A step starts."""
        self._posted = dict.fromkeys(self._incoming, 0)
        self._arriving: dict[Value, tuple[Tensor, Any]] = {}
        self._sent: dict[Value, tuple[Tensor, Any]] = {}

    def send(self, op: Op, made_of: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a SEND."""
        ways = [self._by_value[value] for value in op.writes]

        def send(*lists: Leaves) -> Sequence[Leaves]:
            for one, leaves in zip(ways, made_of(*lists), strict=True):
                self._send(one, one.layout.pack(leaves))
            return ()

        return send

    def receive(self, op: Op) -> Callable[..., Any]:
        """The function of a RECV."""
        ways = [self._by_value[value] for value in op.reads]
        return lambda: [self._receive(one) for one in ways]

    def end(self) -> None:
        """Wait until all that was sent has arrived."""
        for value, (_, work) in self._sent.items():
            one = self._by_value[value]
            self._wait(work, one.target, f"did not receive what {one.cell} of rank {self._rank} writes")
        self._sent.clear()

    def fail(self, said: str, broken: bool) -> None:
        """Tell all others, in what they still wait for. Unless the group is broken, nothing is left under way; if it
        is, nothing is waited for, and what was said stays until it is taken."""
        for one in self._outgoing:
            if one.value not in self._sent:
                with suppress(RankError):
                    self._send(one, one.layout.pack_error(said, broken))
        if broken:
            return
        with suppress(RuntimeError):  # a rank that is lost meanwhile hides no error; the next step meets it
            for source, row in self._incoming.items():
                self._post(source, len(row))
            for _, work in (*self._sent.values(), *self._arriving.values()):
                work.wait(*self._timeout)
        self.begin()

    def _send(self, one: _Message, message: Tensor) -> None:
        try:
            self._sent[one.value] = message, self._group.send([message], one.target, one.number)
        except RuntimeError as error:
            raise self._gone(one.target, error) from None

    def _receive(self, one: _Message) -> Leaves:
        self._post(one.source, one.place + 1 + _AHEAD)
        message, work = self._arriving.pop(one.value)
        self._wait(work, one.source, f"did not send what its {one.cell} writes")
        told = error_in(message)
        if told is not None:
            raise (LostRank if told[1] else RankError)(told[0])
        return one.layout.unpack(message)

    def _post(self, source: int, until: int) -> None:
        row = self._incoming[source]
        for one in row[self._posted[source] : until]:
            message = torch.empty(one.layout.size, dtype=torch.uint8)
            try:
                self._arriving[one.value] = message, self._group.recv([message], source, one.number)
            except RuntimeError as error:
                raise self._gone(source, error) from None
            self._posted[source] += 1

    def _wait(self, work: Any, rank: int, what: str) -> None:
        try:
            work.wait(*self._timeout)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise self._gone(rank, error) from None
            words = f"rank {rank} {what} in time"
            raise LostRank(who_is_late(self._store, self._rank, rank, words)) from None

    def _gone(self, rank: int, error: Exception) -> LostRank:
        """An error that names the first rank that was lost: others leave when they notice, and are gone too."""
        return LostRank(first_told(self._store, f"rank {rank} is gone: {_first_line(error)}"))


def _first_line(error: Exception) -> str:
    """What a library says, without where in its sources."""
    return str(error).splitlines()[0].rpartition("] ")[2]
