"""Graphs on the fake accelerator refuse, by one sentence each, what CUDA refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.fake_accelerator import COMPILER
from tests.fake_accelerator.captures import (
    DEVICE,
    captured,
    captured_of,
    current_stream,
    new_graph,
    new_ones,
    suppress_errors,
)
from tests.fake_accelerator.device_processes import fixture_of
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


processes = fixture_of(1)


class Outside(NamedTuple):
    """The default stream, an event of it and another graph, from before a capture."""

    stream: torch.Stream
    event: torch.Event
    graph: Any


def run_on(stream: torch.Stream, function: Callable[[Tensor], object], x: Tensor) -> None:
    with stream:
        function(x)


def fork(x: Tensor, outside: Outside) -> None:
    side = torch.Stream(DEVICE)
    side.wait_stream(current_stream())
    run_on(side, torch.neg, x)


def wait_in_thread(x: Tensor, outside: Outside) -> None:
    thread = threading.Thread(target=lambda: suppress_errors(torch.accelerator.synchronize, 1))
    thread.start()
    thread.join()


def wait_across_captures(x: Tensor, outside: Outside) -> None:
    event, graph = current_stream().record_event(), new_graph()
    with torch.Stream(DEVICE) as stream:
        graph.capture_begin()
        suppress_errors(stream.wait_event, event)
        graph.capture_end()


WAIT = "makes the host wait, which no graph can capture"
NOT_PINNED = "uses memory that is not pinned; call pin_memory before."
NOT_IN_CAPTURE = "which is not in the capture; let it wait for an event of a captured stream."
SEEDED = "a generator is seeded or set while its stream is captured; do it before the replay."
REFUSALS: dict[str, tuple[Callable[..., object], str]] = {
    "item": (lambda x, _: x.sum().item(), f"`item` {WAIT}"),
    "equal": (lambda x, _: torch.equal(x, x), f"`equal` {WAIT}"),
    "device": (lambda x, _: torch.accelerator.synchronize(0), f"`synchronize` {WAIT}"),
    "stream": (lambda x, _: current_stream().synchronize(), f"`synchronize` {WAIT}"),
    "query of a stream": (lambda x, _: current_stream().query(), f"`synchronize` {WAIT}"),
    "event": (lambda x, _: current_stream().record_event().synchronize(), f"`event.synchronize` {WAIT}"),
    "query of an event": (lambda x, _: current_stream().record_event().query(), f"`event.query` {WAIT}"),
    "copy to the host": (lambda x, _: x.cpu(), f"`copy to the host` {WAIT}"),
    "blocking copy": (lambda x, _: x.copy_(torch.ones(4).pin_memory()), f"`copy to the device` {WAIT}"),
    "pageable memory": (lambda x, _: x.copy_(torch.ones(4), non_blocking=True), f"`copy to the device` {NOT_PINNED}"),
    "nonzero": (lambda x, _: x.nonzero(), f"`nonzero` {WAIT}"),
    "a mask": (lambda x, _: x[x > 0], f"`nonzero` {WAIT}"),
    "a written mask": (lambda x, _: x.index_put_((x > 0,), x), f"`_index_put_impl_` {WAIT}"),
    "the default stream": (
        lambda x, outside: run_on(outside.stream, torch.neg, x),
        f"`neg` runs on fake:0 stream 1, {NOT_IN_CAPTURE}",
    ),
    "another stream": (lambda x, _: run_on(torch.Stream(DEVICE), torch.neg, x), NOT_IN_CAPTURE),
    "another device": (lambda x, _: torch.zeros(4, device="fake:1"), NOT_IN_CAPTURE),
    "an unjoined stream": (fork, "a stream joined the capture, and the first stream does not wait for its last event."),
    "an event from outside": (
        lambda x, outside: current_stream().wait_event(outside.event),
        "a captured stream waits for an event from outside; record it in the capture.",
    ),
    "the default stream joins": (
        lambda x, outside: outside.stream.wait_event(current_stream().record_event()),
        "the default stream cannot join a capture; use another stream.",
    ),
    "a replay": (lambda x, outside: outside.graph.replay(), "a graph cannot be replayed within a capture."),
    "a graph that is deleted": (
        lambda x, outside: outside.graph.reset(),
        "a graph was deleted while another was captured; disable gc meanwhile.",
    ),
    "a generator": (
        lambda x, _: x.bernoulli_(0.5, generator=torch.Generator(DEVICE)),
        "`bernoulli_` draws from a generator that is not registered; call register_generator_state.",
    ),
    "a seed": (lambda x, _: torch.Generator(DEVICE).manual_seed(1), SEEDED),
    "a state": (lambda x, _: torch.Generator(DEVICE).set_state(torch.Generator(DEVICE).get_state()), SEEDED),
    "a thread": (wait_in_thread, f"`synchronize` {WAIT}"),
    "two captures": (wait_across_captures, "a captured stream waits for an event of another capture."),
}


def refuse(rank: int, name: str) -> str:
    """Return why a capture is invalid at its end, and see that the next one is not."""
    x, graph = new_ones(), captured_of(new_ones().neg)[0]
    outside = Outside(current_stream(), current_stream().record_event(), graph)
    with pytest.raises(RuntimeError) as refusal:
        captured_of(REFUSALS[name][0], x, outside)
    # An invalid capture leaves no stream captured.
    captured_of(x.mul, 2)[0].replay()
    return str(refusal.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_capture_refuses(processes: Processes, name: str):
    (error,) = processes.run(refuse, name)
    assert error.startswith("fake: the capture is invalid: ")
    assert REFUSALS[name][1] in error


def use_captured_event(function: Callable[[torch.Event], object]) -> None:
    events = list[torch.Event]()
    captured_of(lambda: events.append(current_stream().record_event()))
    function(events[0])


def begin_twice() -> None:
    graph, _ = captured_of(new_ones().neg)
    with captured(graph):
        pass


IS_CAPTURED = "of an event that was recorded in a capture; record it outside."
MISUSES: dict[str, tuple[Callable[[], object], str]] = {
    "the default stream": (
        lambda: new_graph().capture_begin(),
        "a graph cannot be captured on the default stream; use another.",
    ),
    "no capture": (
        lambda: new_graph().replay(),
        "this graph has nothing to replay; capture it first.",
    ),
    "no begin": (
        lambda: new_graph().capture_end(),
        "capture_end is called without capture_begin.",
    ),
    "an unknown mode": (
        lambda: captured_of(new_ones, capture_error_mode="local"),
        "there is no capture mode local",
    ),
    "two captures": (begin_twice, "this graph is captured already; call reset first."),
    "a wait for a captured event": (
        lambda: use_captured_event(current_stream().wait_event),
        "a stream waits for an event of a capture that has ended; record it again.",
    ),
    "a host that waits for it": (
        lambda: use_captured_event(lambda event: event.synchronize()),
        f"`event.synchronize` {IS_CAPTURED}",
    ),
    "a generator of the CPU": (
        lambda: new_ones().bernoulli_(0.5, generator=torch.Generator()),
        "expected a generator of fake, found one of cpu",
    ),
}


def misuse(rank: int, name: str) -> str:
    with pytest.raises(RuntimeError) as refusal:
        MISUSES[name][0]()
    return str(refusal.value).splitlines()[0]


@pytest.mark.parametrize("name", MISUSES)
def test_a_graph_refuses(processes: Processes, name: str):
    assert processes.run(misuse, name) == ["fake: " + MISUSES[name][1]]
