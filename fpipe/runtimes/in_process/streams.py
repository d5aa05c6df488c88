"""Compute each rank on a stream of its own, and copy between devices on further streams, while they compute.

    rank 0 on cuda:0: 0F0 SEND(y)       -- y, and an event -->        rank 1 on cuda:1: RECV(y) 1F0

Threads only queue work. A stream that reads what another one writes waits for an event, and `record_stream` tells the
allocator, which would otherwise give the memory to new tensors before the read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import move_tensor
from fpipe.runtimes.lowering.lowered import AbstractTree

Leaves = list[Any]


class ComputeStream:
    """The device of a rank, and a stream of its own there; None on a CPU, where the thread computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    @property
    def clock_device(self) -> torch.device | None:
        """The device whose clock times the ops of this stream; None where the host's does."""
        return None if self.stream is None else self.device

    def queue_here(self) -> AbstractContextManager[Any]:
        """Return a context manager that queues work on this stream, for one thread at a time."""
        return nullcontext() if self.stream is None else self.stream

    def wait_for_caller(self) -> None:
        """Make this stream wait for the work that the caller has queued on its device."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for this one."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.stream)

    def keep_for_caller(self, leaves: Leaves) -> None:
        """Keep the memory of results until the caller's stream has read them, even if the caller drops them before."""
        if self.stream is not None:
            _record_stream(leaves, self.device, torch.accelerator.current_stream(self.device))


class Channel:
    """A channel from one rank to another, which hands tensors over on one device, or copies them between two."""

    def __init__(self, sender: ComputeStream, receiver: ComputeStream) -> None:
        self.sender, self.receiver = sender, receiver
        copying_devices = [] if sender.device == receiver.device else [sender.device, receiver.device]
        # A copy between devices occupies a stream on each side, so that neither rank's own stream waits for it.
        self._streams = [torch.Stream(device) for device in copying_devices if device.type != "cpu"]

    def make_caller_wait(self) -> None:
        """Make the caller's stream wait for the copies, which may read tensors that the caller handed in."""
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def send(self, leaves: Leaves) -> tuple[Leaves, Any]:
        """Return the leaves on the receiver's device, and the event to wait for; called on the sender's thread."""
        computed_event = None if self.sender.stream is None else self.sender.stream.record_event()
        if not self._streams or computed_event is None:
            return leaves, computed_event
        with ExitStack() as stack:
            for stream in self._streams:
                stream.wait_event(computed_event)
                stack.enter_context(stream)
            copies = [move_tensor(leaf, self.sender.device, self.receiver.device, is_queued=True) for leaf in leaves]
        _record_stream(leaves, self.sender.device, self._streams[0])
        # The sender's memory is free once the copy, recorded above, has read it.
        leaves.clear()
        return copies, self._streams[-1].record_event()

    def receive(self, leaves: Leaves, sent_event: Any) -> Leaves:
        """Return the leaves, for the receiver's stream to read after the event; called on the receiver's thread."""
        stream = self.receiver.stream
        if stream is not None and sent_event is not None:
            stream.wait_event(sent_event)
            _record_stream(leaves, self.receiver.device, stream)
        # A CPU computes at once, so its thread waits itself.
        elif sent_event is not None:
            sent_event.synchronize()
        return leaves


def accelerator_of(trees: Iterable[AbstractTree]) -> torch.device | None:
    """Return the accelerator that values are on; None if all are on the CPU."""
    devices = (leaf.aval.device for tree in trees for leaf in tree.leaves if isinstance(leaf, Fact))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _record_stream(leaves: Leaves, device: torch.device, stream: torch.Stream) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device == device:
            leaf.record_stream(stream)
