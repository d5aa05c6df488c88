"""Graphs on the fake accelerator follow the rules of CUDA graphs: each broken rule is noticed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.fake_accelerator import COMPILER, reports_of
from tests.fake_accelerator.processes import processes_with_device
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]
DEVICE = "fake:0"


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes_with_device(request, tmp_path_factory, 1) as workers:
        yield workers


def new_ones() -> Tensor:
    return torch.ones(4, device=DEVICE)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(0)


@contextmanager
def captured(graph: Any, stream: torch.Stream | None = None, **options: Any) -> Generator[torch.Stream]:
    """Capture the body on another stream, which waits for the current one, and that for it."""
    stream = stream or torch.Stream(DEVICE)
    stream.wait_stream(current_stream())
    with stream:
        graph.capture_begin(**options)
        try:
            yield stream
        finally:
            graph.capture_end()
    current_stream().wait_stream(stream)


def captured_of(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return a graph of one call, and its result."""
    graph = torch.get_device_module(DEVICE).Graph()
    with captured(graph, **options):
        result = function(*args)
    return graph, result


# Right use.


def compute(x: Tensor, number: Tensor) -> list[Tensor]:
    """Compute by ops of all kinds: lists, `out=`, in place, a number of the CPU, views, results of several tensors."""
    matrix = torch.outer(x, x)
    torch.mul(matrix, 2, out=(doubled := matrix.new_empty(0)))
    joined = torch.cat([matrix.t(), doubled])[1:]
    joined[0].add_(number)
    values, indices = joined.sort(dim=1, descending=True)
    scaled = torch._foreach_mul([values, doubled], [2.0, 3.0])
    torch._foreach_zero_(halves := [x.clone(), x.clone()])
    halves[0].index_put_((halves[0] > 6,), torch.tensor(5.0))
    halves[0][:2] += 1
    return [values, indices, *scaled, halves[0]]


def replay_bits() -> list[str]:
    x, number = new_ones(), torch.tensor(3.0)
    graph, results = captured_of(compute, x, number)
    # The kernels have the number that was read at the capture.
    number.fill_(7)
    wrong = list[str]()
    for scale in (2.0, 5.0):
        x.copy_(torch.arange(4) * scale)
        graph.replay()
        expected = compute(torch.arange(4) * scale, torch.tensor(3.0))
        wrong += [f"{scale}: {a} {b}" for a, b in zip(results, expected, strict=True) if not torch.equal(a.cpu(), b)]
    return wrong


def leave_memory_alone() -> list[str]:
    """Nothing has run after a capture, and each replay adds."""
    x, counts = new_ones(), list[float]()
    graph, _ = captured_of(x.add_, 1)
    for _ in range(2):
        counts.append(x[0].item())
        graph.replay()
    return [f"{counts}"] if [*counts, x[0].item()] != [1, 2, 3] else []


def replay_streams() -> list[str]:
    x, y = new_ones(), new_ones()

    def run() -> Tensor:
        side, main = torch.Stream(DEVICE), current_stream()
        side.wait_stream(main)
        with side:
            product = x * 3
        total = y + 1
        main.wait_stream(side)
        product.record_stream(main)
        return total + product

    graph, result = captured_of(run)
    graph.replay()
    return [] if result.tolist() == [5] * 4 else [f"{result}"]


def replay_pinned_copies() -> list[str]:
    source, target, x = torch.ones(4).pin_memory(), torch.zeros(4).pin_memory(), new_ones()

    def run() -> None:
        x.copy_(source, non_blocking=True)
        target.copy_(x * 2, non_blocking=True)

    graph, _ = captured_of(run)
    assert target.tolist() == [0] * 4
    source.fill_(4)
    graph.replay()
    torch.accelerator.synchronize(0)
    return [] if target.tolist() == [8] * 4 else [f"{target}"]


def draw_as_seeded() -> list[str]:
    """A replay draws the numbers that the ops draw without a graph, from its seed and offset."""
    generator, x = torch.Generator(DEVICE), new_ones()
    graph = torch.get_device_module(DEVICE).Graph()
    graph.register_generator_state(generator)

    def run() -> list[Tensor]:
        keyed = torch.empty(4, device=DEVICE).bernoulli_(0.5, generator=generator)
        normal = torch.randn(4, device=DEVICE, generator=generator)
        return [keyed, normal, torch.nn.functional.dropout(x, 0.5), torch.rand(4, device=DEVICE)]

    with captured(graph):
        results = run()

    def seed(keyed: int, default: int) -> None:
        generator.manual_seed(keyed)
        torch.manual_seed(default)

    wrong = list[str]()
    for seeds in ((1, 2), (3, 4)):
        seed(*seeds)
        expected = [run(), run()]
        seed(*seeds)
        for number, tensors in enumerate(expected):
            graph.replay()
            if not all(map(torch.equal, results, tensors)):
                wrong.append(f"replay {number} of {seeds}: {results}, not {tensors}")
    return wrong


def draw_by_a_shared_state() -> list[str]:
    """An op that takes no generator draws as a registered one whose state the default generator shares meanwhile."""
    generator, x = torch.Generator(DEVICE), new_ones()
    default = torch.get_device_module(DEVICE).default_generators[0]

    def run() -> Tensor:
        state = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        result = torch.nn.functional.dropout(x, 0.5)
        default.graphsafe_set_state(state)
        return result

    graph = torch.get_device_module(DEVICE).Graph()
    graph.register_generator_state(generator)
    with captured(graph):
        result = run()
    wrong, offset = list[str](), default.get_offset()
    for seed in range(6):
        generator.manual_seed(seed)
        expected = run()
        generator.manual_seed(seed)
        graph.replay()
        wrong += [] if torch.equal(result, expected) else [f"{seed}: {result}, not {expected}"]
    return wrong + ([] if default.get_offset() == offset else ["the default generator has drawn"])


def keep_addresses() -> list[str]:
    """A pool hands out its own memory again, to later captures as well, and to nobody else."""
    x, pool, stream = new_ones(), torch.get_device_module(DEVICE).graph_pool_handle(), torch.Stream(DEVICE)

    def run() -> tuple[int, Tensor]:
        freed_address = (x + 1).data_ptr()
        return freed_address, x + 2

    graph, (freed_address, result) = captured_of(run, pool=pool, stream=stream)
    later_graph, (later_freed_address, later_result) = captured_of(run, pool=pool, stream=stream)
    outside = [new_ones().data_ptr() for _ in range(20)]
    wrong = ["not the pool's"] if not graph.pool() == later_graph.pool() == pool else []
    wrong += ["not reused"] if result.data_ptr() != freed_address else []
    wrong += ["handed out twice"] if result.data_ptr() in (later_result.data_ptr(), later_freed_address) else []
    return wrong + (["left its pool"] if {freed_address, later_freed_address} & {*outside} else [])


def capture_again() -> list[str]:
    x = new_ones()
    graph, _ = captured_of(x.add_, 1)
    graph.reset()
    with captured(graph):
        x.mul_(3)
    graph.replay()
    return [] if x.tolist() == [3] * 4 else [f"{x}"]


def wait_in_another_thread() -> list[str]:
    """By mode, a capture refuses the waits of its own thread alone."""
    x = new_ones()

    def run() -> Tensor:
        thread = threading.Thread(target=torch.accelerator.synchronize, args=(1,))
        thread.start()
        thread.join()
        return x + 1

    graph, result = captured_of(run, capture_error_mode="thread_local")
    graph.replay()
    return [] if result.tolist() == [2] * 4 else [f"{result}"]


RIGHT_USES: dict[str, Callable[[], list[str]]] = {
    "bits": replay_bits,
    "memory": leave_memory_alone,
    "streams": replay_streams,
    "pinned copies": replay_pinned_copies,
    "draws": draw_as_seeded,
    "draws by a shared state": draw_by_a_shared_state,
    "addresses": keep_addresses,
    "captured again": capture_again,
    "another thread": wait_in_another_thread,
}


def run_right_use(rank: int, name: str) -> list[str]:
    wrong = list[str]()
    return reports_of(lambda: wrong.extend(RIGHT_USES[name]())) + wrong


@pytest.mark.parametrize("name", RIGHT_USES)
def test_a_graph_replays(processes: Processes, name: str):
    assert processes.run(run_right_use, name) == [[]]


# What a capture refuses.


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


def suppress_errors(function: Callable[..., object], *args: Any) -> None:
    with suppress(RuntimeError):
        function(*args)


def wait_across_captures(x: Tensor, outside: Outside) -> None:
    event, graph = current_stream().record_event(), torch.get_device_module(DEVICE).Graph()
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
    "an unjoined stream": (fork, "a stream has joined the capture and not joined back"),
    "an event from outside": (
        lambda x, outside: current_stream().wait_event(outside.event),
        "a captured stream waits for an event from outside the capture; record it within.",
    ),
    "the default stream joins": (
        lambda x, outside: outside.stream.wait_event(current_stream().record_event()),
        "the default stream cannot join a capture; use another stream.",
    ),
    "a replay": (lambda x, outside: outside.graph.replay(), "a graph cannot be replayed within a capture."),
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
        lambda: torch.get_device_module(DEVICE).Graph().capture_begin(),
        "a graph cannot be captured on the default stream; use another.",
    ),
    "no capture": (
        lambda: torch.get_device_module(DEVICE).Graph().replay(),
        "this graph has nothing to replay; capture it first.",
    ),
    "no begin": (
        lambda: torch.get_device_module(DEVICE).Graph().capture_end(),
        "capture_end is called without capture_begin.",
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


# What the checker reports.


def free_an_input(keeps: bool) -> None:
    inputs = [new_ones()]
    graph, _ = captured_of(lambda: inputs[0] + 1)
    address = inputs[0].data_ptr()
    if not keeps:
        inputs.clear()
    # A runtime that compares addresses may rely on it that another tensor is elsewhere.
    assert address not in [new_ones().data_ptr() for _ in range(20)]
    suppress_errors(graph.replay)


def free_an_input_in_another_pool(keeps: bool) -> None:
    """A reset frees the memory of the pool, once its tensors are gone."""
    writer, results = captured_of(lambda: [new_ones()])
    writer.replay()
    reader, _ = captured_of(lambda: results[0] + 1)
    if not keeps:
        writer.reset()
    results.clear()
    suppress_errors(reader.replay)


def overwrite_a_result(clones: bool) -> None:
    x = new_ones()
    graph, result = captured_of(x.mul, 2)
    graph.replay()
    copy = result.clone() if clones else result
    graph.replay()
    copy.sum()


def overwrite_a_result_read_within(clones: bool) -> None:
    """A graph that reads its own result does not keep it for the caller."""
    x = new_ones()

    def run() -> Tensor:
        result = x * 2
        x.copy_(result)
        return result

    graph, result = captured_of(run)
    graph.replay()
    copy = result.clone() if clones else result
    graph.replay()
    copy.sum()


def keep_state_in_the_pool(joins: bool) -> None:
    """A replay may go on from the last one's results; only a caller's read is of an overwritten result."""
    x = new_ones()
    graph, state = captured_of(lambda: x * 1)
    graph.replay()
    later, _ = captured_of(lambda: state.add_(1), pool=graph.pool()) if joins else captured_of(lambda: state + 1)
    for _ in range(3):
        later.replay()
    if not joins:
        graph.replay()
        graph.replay()
    state.sum()


def share_a_pool(orders: bool) -> None:
    """The first graph writes over the second's result, as both use memory that the first has freed."""
    x, options = (
        new_ones(),
        {"pool": torch.get_device_module(DEVICE).graph_pool_handle(), "stream": torch.Stream(DEVICE)},
    )
    freeing_graph, _ = captured_of(lambda: (x + 1).sum(), **options)
    reusing_graph, result = captured_of(x.mul, 2, **options)
    for graph in (freeing_graph, reusing_graph) if orders else (reusing_graph, freeing_graph):
        graph.replay()
    result.sum()


def read_before_replay(replays: bool) -> None:
    x = new_ones()
    graph, result = captured_of(x.mul, 2)
    if replays:
        graph.replay()
    result.sum()


def order_within(waits: bool) -> None:
    x = new_ones()

    def run() -> None:
        side, main = torch.Stream(DEVICE), current_stream()
        side.wait_stream(main)
        with side:
            x.add_(1)
        if waits:
            main.wait_stream(side)
        x.sum()
        main.wait_stream(side)

    captured_of(run)[0].replay()


def order_outside(waits: bool) -> None:
    x, side = new_ones(), torch.Stream(DEVICE)
    graph, _ = captured_of(x.mul, 2)
    side.wait_stream(current_stream())
    with side:
        x.fill_(3)
    x.record_stream(side)
    if waits:
        current_stream().wait_stream(side)
    graph.replay()


def order_after(waits: bool) -> None:
    x, side = new_ones(), torch.Stream(DEVICE)
    graph, result = captured_of(x.mul, 2)
    graph.replay()
    if waits:
        side.wait_stream(current_stream())
    with side:
        result.sum()


def free_within(records: bool) -> None:
    """Memory that another captured stream still reads goes to the next tensor of its stream."""
    x = new_ones()

    def run() -> None:
        side, main = torch.Stream(DEVICE), current_stream()
        tensor = x + 1
        side.wait_stream(main)
        with side:
            tensor.sum()
        if records:
            tensor.record_stream(side)
        del tensor
        x.mul(2)
        main.wait_stream(side)

    captured_of(run)[0].replay()


REPORTS: dict[str, tuple[Callable[[bool], None], str]] = {
    "freed input": (
        free_an_input,
        "freed: a replay reads, by `add`, memory that was freed after the capture; keep its tensor",
    ),
    "freed input in another pool": (
        free_an_input_in_another_pool,
        "freed: a replay reads, by `add`, memory that was freed after the capture; keep its tensor",
    ),
    "overwritten result": (
        overwrite_a_result,
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay has overwritten; clone it",
    ),
    "overwritten result, read within": (
        overwrite_a_result_read_within,
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay has overwritten; clone it",
    ),
    "state in the pool": (
        keep_state_in_the_pool,
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay has overwritten; clone it",
    ),
    "shared pool": (
        share_a_pool,
        "pool: `sum` on fake:0 stream 1 reads memory of a graph that a replay has since used for other tensors",
    ),
    "no replay": (
        read_before_replay,
        "pool: `sum` on fake:0 stream 1 reads memory of a graph that no replay has written",
    ),
    "order within": (order_within, "order: `sum` on fake:0 graph N reads what `add` on fake:0 graph N writes, "),
    "order outside": (order_outside, "order: `mul` on fake:0 graph N reads what `fill_` on fake:0 stream N writes, "),
    "order after": (order_after, "order: `sum` on fake:0 stream N reads what `mul` on fake:0 graph N writes, "),
    "freed within": (free_within, "order: `mul` on fake:0 graph N writes what `sum` on fake:0 graph N reads, "),
}


def report(rank: int, name: str, keeps_rule: bool) -> list[str]:
    return reports_of(lambda: REPORTS[name][0](keeps_rule))


@pytest.mark.parametrize("name", REPORTS)
def test_the_checker_reports_a_replay(processes: Processes, name: str):
    assert processes.run(report, name, True) == [[]]
    ((message,),) = processes.run(report, name, False)
    assert re.sub(r"(graph|stream) \d\d+", r"\1 N", message).startswith(REPORTS[name][1])
