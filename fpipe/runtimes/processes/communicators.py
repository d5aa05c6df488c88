"""Choose what carries values between ranks: what goes one way shares nothing with what comes back.

    gloo: 0 > 1 > 2 in one group, 0 < 1 < 2 in another         NCCL: 0 > 1, 1 > 0, 1 > 2, 2 > 1, each a group of two

A send of gloo waits for nobody, but it locks its connection while it writes, and gloo's own thread does not sleep until
it can read there: with few cores it takes that of whoever holds the lock. One of NCCL begins when both sides have come
to it, and holds up all that follows on its communicator. With one for each direction it only holds up what goes the
same way: `simulate(.., messages=)` says how much longer one for both, or for all ranks, makes a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.torch_private.processes import backend_on, gloo_beside, group_of_two

Direction = tuple[int, int]


class Ways:
    """Connections of gloo that carry the messages of all steps of a process group, and nothing else: a receive of the
    caller's own on that group takes none of them. They stay as long as the group: a rank that throws its step away may
    have sent what is still on its way.

    Each step that is built has its own numbers of messages, and a board. Where several are `shared`, the header of the
    first message between two ranks goes ahead as a `GREETING`, by which ranks hear that they are not in the same one.
    """

    def __init__(self) -> None:
        self._first, self.shared = GREETING + 1, False
        self._carriers: dict[str, Any] = {}
        self.boards: WeakSet[Any] = WeakSet()

    def taken(self, count: int) -> int:
        """The first of so many numbers that a new step has for its messages."""
        first, self._first, self.shared = self._first, self._first + count, self._first > GREETING + 1
        return first

    def carriers(
        self, group: ProcessGroup, directions: Iterable[Direction], rank: int, store: Store, timeout: timedelta
    ) -> dict[Direction, tuple[Any, int]]:
        """For each direction what carries it on the host, and who the other is in it: one carries what goes to higher
        ranks, and one what goes to lower. A backend other than gloo carries both itself."""
        own = backend_on(group, torch.device("cpu"))
        ways = {way: "up" if way[0] < way[1] else "down" for way in sorted(directions)}
        for name in sorted({*ways.values()} - {*self._carriers}) if own.name() == "gloo" else ():
            self._carriers[name] = gloo_beside(own, PrefixStore(name, store), rank, group.size(), timeout)
        return {
            (a, b): (self._carriers.get(name, own), b if a == rank else a)
            for (a, b), name in ways.items()
            if rank in (a, b)
        }


GREETING = 0


def ways_of(group: ProcessGroup) -> Ways:
    """Those of a group, one for all of its steps."""
    return _WAYS.setdefault(group, Ways())


_WAYS: WeakKeyDictionary[ProcessGroup, Ways] = WeakKeyDictionary()


def groups_of_two(
    group: ProcessGroup,
    directions: Iterable[Direction],
    rank: int,
    store: Store,
    device: torch.device,
    timeout: timedelta,
) -> dict[Direction, tuple[Any, int]]:
    """A group of two for each direction that a rank has part in, on the backend of the group, and who the other is.

    All ranks go through them in one order: two that make a group wait for each other, and the least one that is not
    made yet is never waited for in vain.
    """
    kind, found = type(backend_on(group, device)), dict[Direction, tuple[Any, int]]()
    for direction in sorted(directions):
        if rank in direction:
            me = direction.index(rank)
            two = group_of_two(kind, PrefixStore(f"direction/{direction[0]}>{direction[1]}", store), me, timeout)
            word = torch.zeros(1, dtype=torch.uint8, device=device)  # the first transfer makes the communicator
            (two.recv if me else two.send)([word], 1 - me, 0).wait()
            found[direction] = two, 1 - me
    return found
