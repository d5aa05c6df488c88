"""Capture a call as a graph of the fake accelerator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

DEVICE = "fake:0"


def new_graph() -> Any:
    return torch.get_device_module(DEVICE).Graph()


def new_ones() -> Tensor:
    return torch.ones(4, device=DEVICE)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(0)


@contextmanager
def captured(graph: Any, stream: torch.Stream | None = None, **options: Any) -> Generator[torch.Stream]:
    """Capture the body on another stream, which waits for the current one, and that for it."""
    stream = stream or torch.Stream(DEVICE)
    stream.wait_stream(current_stream())
    # Garbage of other tests has graphs, which may not be deleted during a capture.
    gc.disable()
    try:
        with stream:
            graph.capture_begin(**options)
            try:
                yield stream
            finally:
                graph.capture_end()
    finally:
        gc.enable()
    current_stream().wait_stream(stream)


def captured_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return a graph of one call, and its result."""
    graph = new_graph()
    with captured(graph, **options):
        result = function(*args)
    return graph, result


def suppress_errors(function: Callable[..., object], *args: Any) -> None:
    with suppress(RuntimeError):
        function(*args)
