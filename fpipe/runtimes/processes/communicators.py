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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from fpipe.torch_private.processes import backend_on, gloo_beside, group_of_two

Direction = tuple[int, int]


class DirectedGroup(NamedTuple):
    """A group or backend that carries messages in one direction, and the rank of the other side in it."""

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
        own = backend_on(group, torch.device("cpu"))
        name_by_direction = {way: "up" if way[0] < way[1] else "down" for way in sorted(directions)}
        is_gloo = own.name() == "gloo"
        for name in sorted({*name_by_direction.values()} - {*self.carriers}) if is_gloo else ():
            self.carriers[name] = gloo_beside(own, PrefixStore(name, store), rank, group.size(), timeout)
        return {
            (sender, receiver): DirectedGroup(self.carriers.get(name, own), receiver if sender == rank else sender)
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
