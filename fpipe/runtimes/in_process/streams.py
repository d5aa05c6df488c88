"""Compute each rank on a stream of its own, and copy between devices on others, while they compute.

    rank 0 on cuda:0: 0F0 SEND(y)       -- y, and an event -->        rank 1 on cuda:1: RECV(y) 1F0

Threads only queue work: what one stream makes and another reads, that one waits for by an event, and the allocator is
told (`record_stream`), so that the memory is not used again before.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import moved
from fpipe.runtimes.lowering.lowered import AbstractTree

Leaves = list[Any]


class ComputeStream:
    """Where a rank computes: on a device, and there on a stream of its own; on a CPU the thread itself does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    @property
    def clock(self) -> torch.device | None:
        """The device whose clock says when something ran; None where that is the host's."""
        return None if self.stream is None else self.device

    def entered(self) -> AbstractContextManager[Any]:
        """Queue on this stream inside; one thread at a time may enter it."""
        return nullcontext() if self.stream is None else self.stream

    def after_caller(self) -> None:
        """Wait for what the caller has queued on its device."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def before_caller(self) -> None:
        """Make the caller's stream wait for this one, from now on."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self.stream)

    def hand_out(self, leaves: Leaves) -> None:
        """Keep results until the caller's stream has read them, which may be later than the caller drops them."""
        if self.stream is not None:
            _record(leaves, self.device, torch.accelerator.current_stream(self.device))


class Channel:
    """The way from one rank to another: tensors are handed over on a device, or copied between two on their streams."""

    def __init__(self, sender: ComputeStream, receiver: ComputeStream) -> None:
        self.sender, self.receiver = sender, receiver
        ends = [] if sender.device == receiver.device else [sender.device, receiver.device]
        self._streams = [torch.Stream(device) for device in ends if device.type != "cpu"]

    def before_caller(self) -> None:
        """Make the caller's stream wait for the copies, from now on: they may read what the caller handed in."""
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def send(self, leaves: Leaves) -> tuple[Leaves, Any]:
        """Return the leaves on the receiver's device, and the event that it has to wait for; on the sender's thread."""
        made = None if self.sender.stream is None else self.sender.stream.record_event()
        if not self._streams or made is None:
            return leaves, made
        with ExitStack() as entered:
            for stream in self._streams:
                stream.wait_event(made)
                entered.enter_context(stream)
            there = [moved(leaf, self.sender.device, self.receiver.device, queued=True) for leaf in leaves]
        _record(leaves, self.sender.device, self._streams[0])
        leaves.clear()
        return there, self._streams[-1].record_event()

    def receive(self, leaves: Leaves, made: Any) -> Leaves:
        """Return the leaves, which the receiver's stream reads once they are there; on the receiver's thread."""
        stream = self.receiver.stream
        if stream is not None and made is not None:
            stream.wait_event(made)
            _record(leaves, self.receiver.device, stream)
        elif made is not None:  # a CPU computes at once
            made.synchronize()
        return leaves


def accelerator_of(trees: Iterable[AbstractTree]) -> torch.device | None:
    """Return the device that values are on and that is no CPU, if there is one."""
    devices = (leaf.aval.device for tree in trees for leaf in tree.leaves if isinstance(leaf, Fact))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _record(leaves: Leaves, device: torch.device, stream: torch.Stream) -> None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device == device:
            leaf.record_stream(stream)
