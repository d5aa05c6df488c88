"""Reach the backends and stores of torch.distributed's process groups."""

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
    """The default process group (2.13: `dist.group.WORLD` is a property that type checkers take for None)."""
    world = dist.group.WORLD
    assert world is not None
    return world


def group_named(name: str) -> ProcessGroup:
    """The process group of a name, as ops have it (2.13: `_resolve_process_group`)."""
    return _RESOLVE(name)


def axis_of(group: Any) -> str:
    """The dimension of a mesh that a group is along, as `DeviceMesh` calls its group (2.13: `mesh_` and the name)."""
    return group.group_desc.removeprefix("mesh_")


def default_store() -> Store:
    """The store of the default process group (2.13: `_get_default_store`)."""
    return _get_default_store()


def own_client(store: Any) -> Store:
    """Return another client of a store: one answers a call at a time (2.13: type checkers know no `clone`)."""
    return store.clone()


def is_kept_by_process(store: Any) -> bool:
    """Whether a process keeps a store for others, as TCP's, and no file or memory does (2.13: `TCPStore` of
    `torch._C`, and `underlying_store` of a prefix)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def all_gather(whole: Tensor, own: Tensor, group: ProcessGroup) -> Any:
    """Start gathering a tensor of each process, one behind the other, and return what to wait for (2.13:
    `all_gather_single`; `all_gather_into_tensor` before)."""
    return _ALL_GATHER(whole, own, group=group, async_op=True)


def reduce_scatter(own: Tensor, whole: Tensor, group: ProcessGroup) -> Any:
    """Start adding up a tensor over processes, of which each gets its part, and return what to wait for (2.13:
    `reduce_scatter_single`; `reduce_scatter_tensor` before)."""
    return _REDUCE_SCATTER(own, whole, group=group, async_op=True)


@contextmanager
def coalesced(group: ProcessGroup, devices: Sequence[torch.device]) -> Generator[list[Any]]:
    """Start collectives on tensors of these devices as one, and return what to wait for instead of them; of a backend
    that can, NCCL, and else as they are (2.13: `supports_coalescing` of a backend, `_start_coalescing` and
    `_end_coalescing` of a group)."""
    joint = list[Any]()
    if len(devices) < 2 or len({*devices}) > 1 or not backend_on(group, devices[0]).supports_coalescing:
        yield joint
        return
    group._start_coalescing(devices[0])  # pyright: ignore[reportPrivateUsage]
    end = partial(group._end_coalescing, devices[0])  # pyright: ignore[reportPrivateUsage]
    try:
        yield joint
    except BaseException:
        with suppress(RuntimeError):  # it would hide the first error
            joint.append(end())
        raise
    joint.append(end())


_NAMES: Any = vars(dist)
_RESOLVE: Any = vars(distributed_c10d)["_resolve_process_group"]
_ALL_GATHER: Any = _NAMES.get("all_gather_single") or _NAMES["all_gather_into_tensor"]
_REDUCE_SCATTER: Any = _NAMES.get("reduce_scatter_single") or _NAMES["reduce_scatter_tensor"]


def strided_shard(parts: int) -> Any:
    """The placement of rows that are cut behind a cut into so many parts, as `fully_shard` places them (2.13:
    `_StridedShard`)."""
    from torch.distributed.tensor import placement_types  # its import takes long

    return placement_types._StridedShard(0, split_factor=parts)  # pyright: ignore[reportPrivateUsage]


def backend_on(group: ProcessGroup, device: torch.device) -> Any:
    """The backend that carries a group's tensors on a device; a RuntimeError if none does (2.13:
    `_get_backend`)."""
    return group._get_backend(device)  # pyright: ignore[reportPrivateUsage]


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long a group waits (2.13: `_device_types`, and `_timeout` of a backend's options)."""
    return backend_on(group, group._device_types[0]).options._timeout  # pyright: ignore[reportPrivateUsage]


def gloo_beside(gloo: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Connections of gloo more, on the devices of a backend that is there (2.13: `_Options` with `_devices`,
    `_threads`, `_timeout`)."""
    made: Any = dist.ProcessGroupGloo
    options = made._Options()
    options._devices, options._threads, options._timeout = gloo.options._devices, 1, timeout
    return made(store, rank, size, options)


def close_connections(group: Any) -> None:
    """Close the connections of a group on gloo, which wakes those who wait there (2.13: gloo closes a connection when
    a receive on it times out). Other backends are left alone: their works are asked whether they are over."""
    for peer in range(group.size()):
        with suppress(RuntimeError, ValueError):  # of NCCL, which takes no tensors of the host
            group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(_BRIEFLY)


def disconnected_peers(group: Any) -> list[int]:
    """Return the ranks whose connection is closed, found by a receive that fails at once (2.13); none on a backend that
    takes no such receive. It is for a group that nobody uses any longer: what is never sent stays asked for."""
    time.sleep(_CLOSES)
    closed = list[int]()
    for peer in {*range(group.size())} - {group.rank()}:
        try:
            group.recv([torch.empty(1)], peer, _NEVER_SENT)
        except RuntimeError:
            closed.append(peer)
    return closed if len(closed) < group.size() - 1 else []


def timed_out(error: RuntimeError) -> bool:
    """Whether a wait took too long; else a process is gone (2.13: the words of gloo and of stores)."""
    return "imed out" in str(error) or "imeout" in str(error)


_BRIEFLY, _NEVER_SENT = timedelta(milliseconds=1), 2**31 - 1
_CLOSES = 0.02
"""Seconds after which gloo knows what is closed."""


def is_on_streams(group: ProcessGroup, device: torch.device) -> bool:
    """Whether what carries a group's tensors on a device is ordered by its streams, as NCCL is: it carries no others.
    Gloo carries what is on a GPU through the host (2.13: `_device_types`, and `Backend.backend_capability`)."""
    if all(one.type != device.type for one in group._device_types):  # pyright: ignore[reportPrivateUsage]
        return False
    return "cpu" not in dist.Backend.backend_capability.get(backend_on(group, device).name(), ("cpu",))


def group_of_two(kind: Any, store: Store, rank: int, timeout: timedelta) -> Any:
    """A group of two on a backend of some class, such as NCCL's (2.13: `_timeout` of its options, which ends the
    process: so it comes later than who waits says for whom)."""
    options = kind.Options()
    options._timeout = timeout + _LONGER
    return kind(store, rank, 2, options)


_LONGER = timedelta(seconds=30)
