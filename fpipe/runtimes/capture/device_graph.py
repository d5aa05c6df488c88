"""Capture the work that a function queues on a device as one graph, and replay it.

    run()  --> captured: kernels, copies and draws, in their order, on fixed memory -->  graph.replay()

A capture runs the Python once and computes nothing. A replay computes, and runs no Python: it reads and writes the very
memory of the capture. So everything that a graph touches lies in memory that stays, or in the pool of the graph.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from fpipe.torch_private.cuda import clear_workspaces, end_allocation, register_generators

T = TypeVar("T")


def is_capturing(device: torch.device) -> bool:
    """Whether work that is queued on a device now is captured, so that the host can neither wait for it nor ask."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return bool(getattr(module, "is_current_stream_capturing", bool)())


class GraphStream:
    """A stream on which graphs are captured and replayed, and the memory pool that they share.

    Replays of graphs with one pool may not overlap: memory that the first has freed belongs to the second. One stream
    for all of them orders them, from whatever streams steps are called. A thread holds the `lock` while it uses it.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self.device, self.stream, self.lock = device, torch.Stream(device), threading.RLock()
        self._graph_class: Callable[[], Any] = module.CUDAGraph if device.type == "cuda" else module.Graph
        self._empty_cache: Callable[[], None] = getattr(module, "empty_cache", lambda: None)
        self._make_pool: Callable[[], Any] = module.graph_pool_handle
        self._pool, self._live_graphs = self._make_pool(), weakref.WeakSet[DeviceGraph]()

    @contextmanager
    def between_callers_work(self) -> Generator[None]:
        """Queue work on this stream, between the caller's earlier and later work."""
        callers_stream = torch.accelerator.current_stream(self.device)
        self.stream.wait_stream(callers_stream)
        try:
            with self.stream:
                yield
        finally:
            callers_stream.wait_stream(self.stream)

    def wait_for_caller(self) -> None:
        """Make this stream wait for the work that the caller has queued."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def capture(self, run: Callable[[], T], generators: Iterable[torch.Generator]) -> tuple[DeviceGraph, T]:
        """Capture what `run` queues on this stream, and return the graph with what `run` returns.

        Args:
            run: queues work, and neither waits for the device nor reads it.
            generators: all that it draws from. They are seeded before a replay, not in `run`.
        """
        graph = self._graph_class()
        register_generators(self.device, graph, generators)
        # Memory that the allocator has cached cannot serve the pool, nor be given back while a capture runs.
        self._empty_cache()
        # Torch cannot capture into a pool whose last graph is gone while a tensor of it lives.
        self._pool = self._pool if self._live_graphs else self._make_pool()
        # A graph that is deleted frees the workspaces of its stream. Without one here, the capture makes its own.
        clear_workspaces(self.device)
        # What Python's collector frees in the middle of a capture, such as another graph, would break it.
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            with self.between_callers_work():
                # "thread_local": other threads, such as one that loads data, may go on using the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    results = run()
                except BaseException:
                    # A broken capture has to be ended too, which raises once more.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    end_allocation(self.device, self._pool)
                    self._pool = self._make_pool()
                    raise
                graph.capture_end()
        finally:
            clear_workspaces(self.device)
            if collects_garbage:
                gc.enable()
        device_graph = DeviceGraph(graph)
        self._live_graphs.add(device_graph)
        return device_graph, results


class GraphStreams(dict[torch.device, GraphStream]):
    """The stream of graphs of each device that the signatures of a step are on."""

    def __missing__(self, device: torch.device) -> GraphStream:
        stream = self[device] = GraphStream(device)
        return stream


class DeviceGraph:
    """A captured graph, with its share of the pool, which is free again when this object is gone."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        """Queue all captured work on the current stream."""
        self._graph.replay()
