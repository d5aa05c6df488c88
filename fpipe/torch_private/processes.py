"""Reach the backends and stores behind torch.distributed's process groups."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)


def world_group() -> ProcessGroup:
    """Return the default process group (2.13: `dist.group.WORLD` is a property that type checkers take for None)."""
    world = dist.group.WORLD
    assert world is not None
    return world


def group_named(name: str) -> ProcessGroup:
    """Return the process group with a name, which ops have as argument (2.13: `_resolve_process_group`)."""
    return _RESOLVE(name)


def axis_of(group: Any) -> str:
    """Return the dimension of a mesh that a group is along, from its description (2.13: `mesh_` and the name)."""
    return group.group_desc.removeprefix("mesh_")


def default_store() -> Store:
    """Return the store of the default process group (2.13: `_get_default_store`)."""
    return _get_default_store()


def clone_client(store: Any) -> Store:
    """Return another client of a store, since a client answers one call at a time (2.13: `clone`)."""
    return store.clone()


def is_served_by_process(store: Any) -> bool:
    """Whether a process serves a store, so that the store ends with it: a TCPStore, not a file or memory (2.13)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def all_gather(whole: Tensor, shard: Tensor, group: ProcessGroup) -> Any:
    """Start gathering the shards of all processes into `whole`, in order, and return the work.

    2.13: `all_gather_single`; `all_gather_into_tensor` before.
    """
    return _ALL_GATHER(whole, shard, group=group, async_op=True)


def reduce_scatter(shard: Tensor, whole: Tensor, group: ProcessGroup) -> Any:
    """Start adding up `whole` over all processes, hand each its shard, and return the work.

    2.13: `reduce_scatter_single`; `reduce_scatter_tensor` before.
    """
    return _REDUCE_SCATTER(shard, whole, group=group, async_op=True)


@contextmanager
def coalesce(group: ProcessGroup, devices: Sequence[torch.device]) -> Generator[list[Any]]:
    """Start the collectives in this context as one, if the backend can; the list then has the work to wait for.

    NCCL can, gloo cannot. `devices` are those of the tensors (2.13: `_start_coalescing`, `_end_coalescing`).
    """
    works = list[Any]()
    if len(devices) < 2 or len({*devices}) > 1 or not backend_on(group, devices[0]).supports_coalescing:
        yield works
        return
    group._start_coalescing(devices[0])  # pyright: ignore[reportPrivateUsage]
    end_coalescing = partial(group._end_coalescing, devices[0])  # pyright: ignore[reportPrivateUsage]
    try:
        yield works
    except BaseException:
        # A second error would hide the first one.
        with suppress(RuntimeError):
            works.append(end_coalescing())
        raise
    works.append(end_coalescing())


_DIST_NAMES: Any = vars(dist)
_RESOLVE: Any = vars(distributed_c10d)["_resolve_process_group"]
_ALL_GATHER: Any = _DIST_NAMES.get("all_gather_single") or _DIST_NAMES["all_gather_into_tensor"]
_REDUCE_SCATTER: Any = _DIST_NAMES.get("reduce_scatter_single") or _DIST_NAMES["reduce_scatter_tensor"]


def strided_shard(parts: int) -> Any:
    """Return the placement of rows that are cut again inside a cut into `parts`, as by `fully_shard` (2.13)."""
    from torch.distributed.tensor import placement_types  # its import takes long

    return placement_types._StridedShard(0, split_factor=parts)  # pyright: ignore[reportPrivateUsage]


def backend_on(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend that carries a group's tensors on a device; RuntimeError if none does (2.13)."""
    return group._get_backend(device)  # pyright: ignore[reportPrivateUsage]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group (2.13: `_device_types`, and `_timeout` of a backend's options)."""
    return backend_on(group, group._device_types[0]).options._timeout  # pyright: ignore[reportPrivateUsage]


def create_gloo(gloo: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create another gloo backend on the network devices of one that exists (2.13: `_Options`)."""
    gloo_class: Any = dist.ProcessGroupGloo
    options = gloo_class._Options()
    options._devices, options._threads, options._timeout = gloo.options._devices, 1, timeout
    return gloo_class(store, rank, size, options)


def close_connections(group: Any) -> None:
    """Close the connections of a group on gloo, which wakes peers that wait there (2.13).

    Works of other backends are polled, so nobody there needs to be woken.
    """
    # Gloo closes a connection when a receive on it times out. NCCL takes no tensors of the host, and raises.
    for peer in range(group.size()):
        with suppress(RuntimeError, ValueError):
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_RECV_TIMEOUT)


def disconnected_peers(group: Any) -> list[int]:
    """Return the ranks whose connection is closed, found by a receive that fails at once (2.13); none on NCCL.

    Only for a group that nobody uses any longer: the receives from living peers stay posted.
    """
    time.sleep(_CLOSE_DETECTION_SECONDS)
    closed_peers = list[int]()
    for peer in {*range(group.size())} - {group.rank()}:
        try:
            group.recv([torch.empty(1)], peer, _UNUSED_TAG)
        except RuntimeError:
            closed_peers.append(peer)
    # If all fail, the backend takes no such receive.
    return closed_peers if len(closed_peers) < group.size() - 1 else []


def is_timeout(error: RuntimeError) -> bool:
    """Whether an error is a timeout, rather than a lost process (2.13: the words of gloo and of stores)."""
    return "imed out" in str(error) or "imeout" in str(error)


_RECV_TIMEOUT, _UNUSED_TAG = timedelta(milliseconds=1), 2**31 - 1
_CLOSE_DETECTION_SECONDS = 0.02
"""Seconds after which gloo knows which connections are closed."""


def is_on_streams(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of a group on a device is ordered by streams, as NCCL's (2.13)."""
    # Such a backend carries no tensors of the host. Gloo does, and carries those of a GPU through the host.
    if all(device_type.type != device.type for device_type in group._device_types):  # pyright: ignore[reportPrivateUsage]
        return False
    return "cpu" not in dist.Backend.backend_capability.get(backend_on(group, device).name(), ("cpu",))


def create_pair_group(backend_class: Any, store: Store, rank: int, timeout: timedelta) -> Any:
    """Create a backend of two ranks, such as NCCL's (2.13: `_timeout` of its options)."""
    # NCCL ends the process at its timeout. Ours comes first, so that the error can name the rank that was waited for.
    options = backend_class.Options()
    options._timeout = timeout + _EXTRA_TIMEOUT
    return backend_class(store, rank, 2, options)


_EXTRA_TIMEOUT = timedelta(seconds=30)
