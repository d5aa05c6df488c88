"""A process group on the fake accelerator whose work its streams order, as NCCL's: nobody waits on the host for it.

    send(y0) send(y1) all_reduce(g)        -->        a stream of the communicator: y0, then y1;  of another: g

What is queued on a communicator starts when the stream that was current knows of all it reads, and when all before it
is over; `wait` makes the current stream wait, and with a timeout the host too. Sends and receives are matched by their
order, whatever their tags. The group neither keeps what it is handed nor tells the allocator: until somebody has waited
that is the caller's work.

Bytes travel by gloo. As ops on the fake device compute at once, `wait` first brings what is to be there by then, which
is no wait of the host's as the checker sees it.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

NAME = "ordered"


def moved(place: int, host: Tensor) -> None:
    """Bytes of the host go somewhere, which is no access that is checked."""
    ctypes.memmove(place, host.data_ptr(), host.nbytes)


class Communicator:
    """A stream, and what is queued on it and has not arrived."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.queue = torch.Stream(device), deque[Queued]()


class Queued:
    """Work of a group: `wait` and `is_completed` are those of torch's.

    Attributes:
        held_up: how often a wait has held the host up.
    """

    held_up = 0

    def __init__(
        self, on: Communicator, carried: Any, there: Callable[[], bool], written: Sequence[Tensor], made: list[Tensor]
    ) -> None:
        self.on, self.carried, self.there, self.made = on, carried, there, made
        self.places = [(StorageWeakRef(one.untyped_storage()), one.data_ptr()) for one in written]
        self.end, self.arrived = on.stream.record_event(), False
        on.queue.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.arrive()
        torch.accelerator.current_stream(self.on.stream.device).wait_event(self.end)
        if timeout is not None:
            Queued.held_up += 1
            self.end.synchronize()
        return True

    def arrive(self) -> None:
        """What was queued first comes first."""
        while not self.arrived:
            first = self.on.queue.popleft()
            first.carried.wait()
            for (storage, place), host in zip(first.places, first.made, strict=True):
                if not storage.expired():
                    moved(place, host)
            first.arrived = True

    def is_completed(self) -> bool:
        before = list(takewhile(lambda one: one is not self, self.on.queue))
        if not self.arrived and all(one.there() for one in (*before, self)):
            self.arrive()
        return self.arrived and self.end.query()


class OrderedGroup(dist.ProcessGroup):
    """The group, and its own backend on the fake device; on the CPU it is gloo's."""

    class Options:
        _timeout = timedelta(seconds=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        super().__init__(rank, size)
        self.options, self._store = options or self.Options(), store
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, self.options._timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._communicators: dict[Any, Communicator] = {}
        self._count, self._joint = Counter[tuple[int, int]](), list[Queued]()
        self._joins = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("fake")]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self

    supports_coalescing = True

    def _start_coalescing(self, device: torch.device) -> None:
        self._joins = True

    def _end_coalescing(self, device: torch.device) -> Queued:
        """The last one's: those before it in its queue come first."""
        self._joins = False
        return self._joint.pop()

    def name(self) -> str:
        return NAME

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.send(tensors, peer, tag)
        return self._carried(self.rank(), peer, tensors, ())

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.recv(tensors, peer, tag)
        return self._carried(peer, self.rank(), (), tensors)

    def allreduce(self, tensors: Sequence[Tensor], how: Any) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.allreduce(tensors, how)

        def start(read: list[Tensor], made: list[Tensor]) -> Any:
            for one, other in zip(made, read, strict=True):
                moved(one.data_ptr(), other)
            return self._gloo.allreduce(made, how)

        return self._collective(tensors, tensors, start)

    def allgather(self, found: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], how: Any) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.allgather(found, tensors, how)
        return self._collective(tensors, found[0], lambda read, made: self._gloo.allgather([made], read, how))

    def all_gather_single(self, found: Tensor, own: Tensor, how: Any) -> Any:
        def start(read: list[Tensor], made: list[Tensor]) -> Any:
            return self._gloo.allgather([[*made[0].view(self.size(), -1)]], [read[0].view(-1)])

        return start([own], [found]) if own.is_cpu else self._collective([own], [found], start)

    def reduce_scatter_single(self, found: Tensor, whole: Tensor, how: Any) -> Any:
        def start(read: list[Tensor], made: list[Tensor]) -> Any:
            whole = torch.empty(read[0].shape, dtype=read[0].dtype)
            moved(whole.data_ptr(), read[0])
            made[:] = [whole.view(self.size(), -1)[self.rank()]]
            return self._gloo.allreduce([whole])  # gloo's own is over only once somebody has waited

        return start([whole], [found]) if whole.is_cpu else self._collective([whole], [found], start)

    def all_to_all_single(self, found: Tensor, own: Tensor, received: Any, sent: Any, how: Any) -> Any:
        def start(read: list[Tensor], made: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(*made, *read, received, sent, how)

        return start([own], [found]) if own.is_cpu else self._collective([own], [found], start)

    def _collective(self, read: Sequence[Tensor], written: Sequence[Tensor], start: Callable[..., Any]) -> Any:
        def started(*hosts: list[Tensor]) -> Any:
            work = start(*hosts)
            return work, work.is_completed

        queued = self._queued("all", read, written, started)
        if not self._joins:
            return queued
        self._joint[:] = [queued]
        return None

    def _carried(self, source: int, target: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Queued:
        """Both sides leave word that they have come to it."""
        self._count[source, target] += 1
        number = self._count[source, target]
        own, other = (f"{source}>{target} {number} {side}" for side in (("to", "from") if received else ("from", "to")))
        self._store.set(own, "")

        def start(read: list[Tensor], made: list[Tensor]) -> Any:
            work = self._gloo.send(read, target, number) if read else self._gloo.recv(made, source, number)
            return work, lambda: self._store.check([other])

        return self._queued({source, target}, sent, received, start)

    def _queued(self, key: Any, read: Sequence[Tensor], written: Sequence[Tensor], start: Callable[..., Any]) -> Queued:
        device = (*read, *written)[0].device
        assert all(one.is_contiguous() for one in (*read, *written))
        if str(key) not in self._communicators:
            self._communicators[str(key)] = Communicator(device)
        on = self._communicators[str(key)]
        on.stream.wait_stream(torch.accelerator.current_stream(device))
        hosts = [torch.empty_like(one, device="cpu", pin_memory=True) for one in read]
        with on.stream:
            for host, one in zip(hosts, read, strict=True):
                host.copy_(one, non_blocking=True)
            for one in written:
                one.zero_()
        made = [torch.empty_like(one, device="cpu") for one in written]
        carried, there = start(hosts, made)
        return Queued(on, carried, there, written, made)


def register() -> None:
    """Make torch.distributed know it, by its name."""
    if NAME not in dist.Backend.backend_list:
        options = OrderedGroup.Options

        def make(store: Any, rank: int, size: int, timeout: timedelta) -> OrderedGroup:
            told = options()
            told._timeout = timeout
            return OrderedGroup(store, rank, size, told)

        dist.Backend.register_backend(NAME, make, devices=["fake"])
