"""Choose what carries values between ranks: the sends of the group, or on GPUs a communicator for each direction.

    gloo: 0 <-> 1 <-> 2 in one group               NCCL: 0 > 1, 1 > 0, 1 > 2, 2 > 1, each a group of two

A send of gloo waits for nobody. One of NCCL begins when both sides have come to it, and holds up all that follows on
its communicator: were there one for both directions, almost every schedule would stand still (`check_transfers`). With
one for each it only holds up what goes the same way, which is received in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

Direction = tuple[int, int]
_LONGER = timedelta(seconds=30)


def by_nccl(group: ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries tensors on a device for this group. Gloo carries those on a GPU through the host."""
    if device.type != "cuda":
        return False
    backend: Any = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
    return backend.name() == "nccl"


def groups_of_two(
    directions: Iterable[Direction], rank: int, store: Store, device: torch.device, timeout: timedelta
) -> dict[Direction, tuple[Any, int]]:
    """A group of two for each direction that a rank has part in, and who the other is in it.

    All ranks go through them in one order: two that make a group wait for each other, and the least one that is not
    made yet is never waited for in vain.
    """
    found: dict[Direction, tuple[Any, int]] = {}
    for direction in sorted(directions):
        if rank in direction:
            me = direction.index(rank)
            two = _two(PrefixStore(f"direction/{direction[0]}>{direction[1]}", store), me, timeout)
            word = torch.zeros(1, dtype=torch.uint8, device=device)  # the first transfer makes the communicator
            (two.recv if me else two.send)([word], 1 - me, 0).wait()
            found[direction] = two, 1 - me
    return found


def _two(store: Store, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout + _LONGER  # it ends the process; who waits here says before whom it waits for
    return dist.ProcessGroupNCCL(store, rank, 2, options)
