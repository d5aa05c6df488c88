"""A process group on the fake accelerator whose work its streams order, as NCCL's: nobody waits on the host for it.

    send(y0) send(y1) all_reduce(g)        -->        a stream of the communicator: y0, then y1;  of another: g

What is queued on a communicator starts when the stream that was current knows of all it reads, and when all before it
is over; `wait` makes the current stream wait, and with a timeout the host too. Sends and receives are matched by their
order, whatever their tags. The group neither keeps what it is handed nor tells the allocator: until somebody has waited
that is the caller's work.

Bytes travel by gloo. As ops on the fake device compute at once, `wait` first brings what is to be there by then, which
is no wait of the host's as the checker sees it. In a capture, both that and the start of the work are calls of the
graph, so each replay sends and receives again. As of NCCL, an operation is captured on all its processes or on none.
"""

from __future__ import annotations

import ctypes
import os
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fake_accelerator import CAPTURING, Graph, capture_call

NAME = "ordered"


def copy_unchecked(address: int, host: Tensor) -> None:
    """Copy a host tensor to an address by memmove, an access that the checker does not see."""
    ctypes.memmove(address, host.data_ptr(), host.nbytes)


class Communicator:
    """A stream with its queue of work that has not arrived; a graph has the queue of its capture.

    Work of a graph has a label by which processes compare their captures: the number of the graph and that of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.queue = torch.Stream(device), deque[QueuedWork]()
        self._work_counts = defaultdict[str, Counter[int]](Counter)  # by direction and capture

    def label_captured_work(self, direction: str, graph: Graph) -> str:
        work_counts = self._work_counts[direction]
        work_counts[graph.capture] += 1
        return f"number {work_counts[graph.capture]} of graph {len(work_counts)}"


class QueuedWork:
    """Work of a group with the interface of torch's `Work`.

    Attributes:
        host_waits: how often a wait has blocked the host.
    """

    host_waits = 0

    def __init__(
        self,
        communicator: Communicator,
        direction: str,
        start: Callable[[str], tuple[Any, Callable[[], bool]]],
        outputs: Sequence[Tensor],
        host_outputs: list[Tensor],
    ) -> None:
        self.communicator, self.start_transport, self.host_outputs = communicator, start, host_outputs
        self.destinations = [(StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr()) for tensor in outputs]
        self.transport, self.has_arrived = None, False
        with communicator.stream:
            self.is_captured = torch.get_device_module("fake").is_current_stream_capturing()
            self.label = communicator.label_captured_work(direction, CAPTURING[-1]) if self.is_captured else "plain"
            self.run_at_replay(self.start)
        self.end_event = communicator.stream.record_event()
        self.queue = communicator.queue
        if self.is_captured:
            self.queue = CAPTURING[-1].queues.setdefault(communicator, deque())
        self.queue.append(self)

    def run_at_replay(self, function: Callable[[], object]) -> None:
        """Call a function now, or in each replay of the graph that is being captured."""
        capture_call(function) if self.is_captured else function()

    def start(self) -> None:
        # A replay reuses the memory from which its predecessor may still be sending.
        if self.transport is not None and not self.has_arrived:
            self.transport.wait()
        self.has_arrived = False
        self.transport, self.is_ready = self.start_transport(self.label)

    def wait(self, timeout: timedelta | None = None) -> bool:
        stream = torch.accelerator.current_stream(self.communicator.stream.device)
        with stream:
            self.arrive()
        stream.wait_event(self.end_event)
        if timeout is not None:
            QueuedWork.host_waits += 1
            self.end_event.synchronize()
        return True

    def arrive(self) -> None:
        """Let all work arrive up to and including this one, in the order of the queue."""
        while self in self.queue:
            work = self.queue.popleft()
            self.run_at_replay(work.finish)

    def finish(self) -> None:
        """Wait for the transport, and put its bytes where they belong."""
        self.transport.wait()
        for (storage, address), host in zip(self.destinations, self.host_outputs, strict=True):
            # A graph keeps the memory of its pool.
            if self.is_captured or not storage.expired():
                copy_unchecked(address, host)
        self.has_arrived = True

    def is_completed(self) -> bool:
        if self.is_captured:
            return self.end_event.query()
        earlier = list(takewhile(lambda work: work is not self, self.queue))
        if not self.has_arrived and all(work.is_ready() for work in (*earlier, self)):
            self.arrive()
        return self.has_arrived and self.end_event.query()


class OrderedGroup(dist.ProcessGroup):
    """A group that is its own backend on the fake device, and uses gloo on the CPU."""

    class Options:
        _timeout = timedelta(seconds=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        super().__init__(rank, size)
        self.options, self._store = options or self.Options(), store
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, self.options._timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._communicators: dict[Any, Communicator] = {}
        self._start_counts, self._coalesced = Counter[str](), list[QueuedWork]()
        self._is_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("fake")]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self

    supports_coalescing = True

    def _start_coalescing(self, device: torch.device) -> None:
        self._is_coalescing = True

    def _end_coalescing(self, device: torch.device) -> QueuedWork:
        """Return the last work: its wait brings all work before it in the queue."""
        self._is_coalescing = False
        return self._coalesced.pop()

    def name(self) -> str:
        return NAME

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.send(tensors, peer, tag)
        return self._transfer(self.rank(), peer, tensors, ())

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.recv(tensors, peer, tag)
        return self._transfer(peer, self.rank(), (), tensors)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.allreduce(tensors, options)

        def start(host_inputs: list[Tensor], host_outputs: list[Tensor]) -> Any:
            for host_output, host_input in zip(host_outputs, host_inputs, strict=True):
                copy_unchecked(host_output.data_ptr(), host_input)
            return self._gloo.allreduce(host_outputs, options)

        return self._collective(tensors, tensors, start)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], options: Any) -> Any:
        if tensors[0].is_cpu:
            return self._gloo.allgather(outputs, tensors, options)

        def start(host_inputs: list[Tensor], host_outputs: list[Tensor]) -> Any:
            return self._gloo.allgather([host_outputs], host_inputs, options)

        return self._collective(tensors, outputs[0], start)

    def all_gather_single(self, output: Tensor, shard: Tensor, options: Any) -> Any:
        def start(host_inputs: list[Tensor], host_outputs: list[Tensor]) -> Any:
            return self._gloo.allgather([[*host_outputs[0].view(self.size(), -1)]], [host_inputs[0].view(-1)])

        return start([shard], [output]) if shard.is_cpu else self._collective([shard], [output], start)

    def reduce_scatter_single(self, output: Tensor, summands: Tensor, options: Any) -> Any:
        def start(host_inputs: list[Tensor], host_outputs: list[Tensor]) -> Any:
            total = torch.empty(host_inputs[0].shape, dtype=host_inputs[0].dtype)
            copy_unchecked(total.data_ptr(), host_inputs[0])
            host_outputs[:] = [total.view(self.size(), -1)[self.rank()]]
            # Not gloo's reduce_scatter: its work is completed only once somebody has waited.
            return self._gloo.allreduce([total])

        return start([summands], [output]) if summands.is_cpu else self._collective([summands], [output], start)

    def all_to_all_single(self, output: Tensor, rows: Tensor, output_sizes: Any, input_sizes: Any, options: Any) -> Any:
        def start(host_inputs: list[Tensor], host_outputs: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(*host_outputs, *host_inputs, output_sizes, input_sizes, options)

        return start([rows], [output]) if rows.is_cpu else self._collective([rows], [output], start)

    def _collective(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], start: Callable[..., Any]) -> Any:
        peers = [rank for rank in range(self.size()) if rank != self.rank()]

        def start_and_query(host_inputs: list[Tensor], host_outputs: list[Tensor], label: str) -> Any:
            number = self._count_start("all", label)
            work = start(host_inputs, host_outputs)

            def wait() -> None:
                work.wait()
                self._compare_labels("all", number, label, peers)

            return types.SimpleNamespace(wait=wait), work.is_completed

        queued_work = self._enqueue("all", "all", inputs, outputs, start_and_query)
        if not self._is_coalescing:
            return queued_work
        self._coalesced[:] = [queued_work]
        return None

    def _transfer(self, source: int, target: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> QueuedWork:
        """Queue a send or a receive."""
        direction = f"{source}>{target}"

        def start(host_inputs: list[Tensor], host_outputs: list[Tensor], label: str) -> Any:
            number, sends = self._count_start(direction, label), bool(host_inputs)
            work = (
                self._gloo.send(host_inputs, target, number) if sends else self._gloo.recv(host_outputs, source, number)
            )

            def wait() -> None:
                work.wait()
                if not sends:
                    self._compare_labels(direction, number, label, [source])

            peer_key = f"{direction} {number} {target if sends else source}"
            return types.SimpleNamespace(wait=wait), lambda: self._store.check([peer_key])

        return self._enqueue({source, target}, direction, inputs, outputs, start)

    def _count_start(self, direction: str, label: str) -> int:
        """Mark in the store that this side starts its next work, and return the number of that."""
        self._start_counts[direction] += 1
        number = self._start_counts[direction]
        self._store.set(f"{direction} {number} {self.rank()}", label)
        return number

    def _compare_labels(self, direction: str, number: int, label: str, peers: Sequence[int]) -> None:
        """Raise unless these peers have captured the same work, or none: so says the user guide of NCCL."""
        for peer in peers:
            peer_label = self._store.get(f"{direction} {number} {peer}").decode()
            if peer_label != label:
                sides = f"{label} on rank {self.rank()}, and {peer_label} on rank {peer}"
                raise RuntimeError(
                    f"fake: work {number} of {direction} is {sides}; capture it on all ranks or on none."
                )

    def _enqueue(
        self,
        key: Any,
        direction: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[..., Any],
    ) -> QueuedWork:
        device = (*inputs, *outputs)[0].device
        assert all(tensor.is_contiguous() for tensor in (*inputs, *outputs))
        if str(key) not in self._communicators:
            self._communicators[str(key)] = Communicator(device)
        communicator = self._communicators[str(key)]
        communicator.stream.wait_stream(torch.accelerator.current_stream(device))
        host_inputs = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in inputs]
        with communicator.stream:
            for host_input, tensor in zip(host_inputs, inputs, strict=True):
                host_input.copy_(tensor, non_blocking=True)
            for tensor in outputs:
                tensor.zero_()
        host_outputs = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        return QueuedWork(communicator, direction, partial(start, host_inputs, host_outputs), outputs, host_outputs)


def register() -> None:
    """Register the group as a backend of torch.distributed."""
    if NAME not in dist.Backend.backend_list:
        options = OrderedGroup.Options
        # torch 2.15 attaches a recorder to each group, by a name that a group in Python does not have.
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

        def make(store: Any, rank: int, size: int, timeout: timedelta) -> OrderedGroup:
            group_options = options()
            group_options._timeout = timeout
            return OrderedGroup(store, rank, size, group_options)

        dist.Backend.register_backend(NAME, make, devices=["fake"])
