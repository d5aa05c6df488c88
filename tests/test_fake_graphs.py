"""Graphs on the fake accelerator replay by the rules of CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fake_accelerator import COMPILER, reports_of
from tests.fake_accelerator.captures import (
    DEVICE,
    captured,
    captured_of,
    current_stream,
    new_graph,
    new_ones,
)
from tests.fake_accelerator.device_processes import fixture_of
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


processes = fixture_of(1)


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


def allocate_pinned_memory() -> list[str]:
    """Pinned memory of a capture is not used again: a copy of the graph reads it at each replay."""
    x, y = new_ones(), new_ones()

    def run() -> None:
        for number, tensor in enumerate((x, y)):
            tensor.copy_(torch.full((4,), number + 2.0).pin_memory(), non_blocking=True)

    graph, _ = captured_of(run)
    torch.zeros(4).pin_memory()
    graph.replay()
    return [] if (x + y).tolist() == [5] * 4 else [f"{x} {y}"]


def train_by_autograd() -> list[str]:
    """The backward runs in a thread of torch, on the captured stream of its forward."""
    weight, x = torch.ones(4, device=DEVICE, requires_grad=True), new_ones()
    weight.grad = torch.zeros_like(weight)
    graph, _ = captured_of(lambda: (weight * x).square().sum().backward())
    for number in (2, 3):
        x.fill_(number)
        graph.replay()
    return [] if weight.grad.tolist() == [2 * (4 + 9)] * 4 else [f"{weight.grad}"]


def draw_as_seeded() -> list[str]:
    """A replay draws the numbers that the ops draw without a graph, from its seed and offset."""
    generator, x = torch.Generator(DEVICE), new_ones()
    graph = new_graph()
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

    graph = new_graph()
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
    "memory pinned within": allocate_pinned_memory,
    "autograd": train_by_autograd,
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
