"""A group on the fake accelerator sends and receives again in each replay of a graph, as NCCL does."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.torch_private.processes import coalesce
from tests.fake_accelerator import COMPILER, capture_call, reports_of
from tests.fake_accelerator.captures import captured, captured_of, new_graph, new_ones
from tests.fake_accelerator.device_processes import fixture_of
from tests.fake_accelerator.group import NAME
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


pair = fixture_of(2)


def new_group() -> Any:
    return dist.new_group([0, 1], backend=NAME)


def send_and_return(rank: int, x: Tensor, group: Any) -> Tensor:
    """Send the double of rank 0 to rank 1, which adds one and sends the sum back, while both send their inputs."""
    works = [dist.isend(x, 1 - rank, group), dist.irecv(received := torch.empty_like(x), 1 - rank, group)]
    for work in works:
        work.wait()
    message = x * 2
    if rank == 0:
        dist.send(message, 1, group)
        dist.recv(message, 1, group)
    else:
        dist.recv(message, 0, group)
        message = message + 1
        dist.send(message, 0, group)
    return torch.cat([message + 1, received])


def all_reduce(rank: int, x: Tensor, group: Any) -> Tensor:
    total = x * 2
    dist.all_reduce(total, group=group)
    return total + 1


def all_gather(rank: int, x: Tensor, group: Any) -> Tensor:
    parts, whole = [torch.empty_like(x) for _ in range(2)], x.new_empty(8)
    dist.all_gather(parts, x * 2, group=group)
    dist.all_gather_into_tensor(whole, x * 3, group=group)
    return torch.cat([*parts, whole])


def reduce_scatter(rank: int, x: Tensor, group: Any) -> Tensor:
    part = x.new_empty(2)
    dist.reduce_scatter_tensor(part, x * 2, group=group)
    return part + 1


def all_to_all(rank: int, x: Tensor, group: Any) -> Tensor:
    rows = torch.empty_like(x)
    dist.all_to_all_single(rows, x * 2, group=group)
    return rows + 1


def all_reduce_jointly(rank: int, x: Tensor, group: Any) -> Tensor:
    totals = [x * 2, x * 3]
    with coalesce(group, [x.device, x.device]) as works:
        for total in totals:
            dist.all_reduce(total, group=group, async_op=True)
    for work in works:
        work.wait()
    return torch.cat(totals)


def index_by_received(rank: int, x: Tensor, group: Any) -> Tensor:
    """Read at indices that are in range only where they are zero, or have been received."""
    indices = torch.full((4,), 10**9, device=x.device)
    if rank == 0:
        dist.send(x.long() % 4, 1, group)
        return x
    dist.recv(indices, 0, group)
    return x[indices]


Operation = Callable[[int, Tensor, Any], Any]
OPERATIONS: dict[str, tuple[Operation, Callable[[int, list[Tensor]], Tensor]]] = {
    "send and recv": (send_and_return, lambda rank, inputs: torch.cat([inputs[0] * 2 + 2, inputs[1 - rank]])),
    "all_reduce": (all_reduce, lambda rank, inputs: sum(inputs) * 2 + 1),
    "all_gather": (
        all_gather,
        lambda rank, inputs: torch.cat([*inputs] * 2) * torch.tensor([2, 3]).repeat_interleave(8),
    ),
    "reduce_scatter": (reduce_scatter, lambda rank, inputs: sum(inputs).chunk(2)[rank] * 2 + 1),
    "all_to_all": (all_to_all, lambda rank, inputs: torch.cat([x.chunk(2)[rank] for x in inputs]) * 2 + 1),
    "coalesced": (all_reduce_jointly, lambda rank, inputs: torch.cat([sum(inputs) * 2, sum(inputs) * 3])),
    "indices": (index_by_received, lambda rank, inputs: inputs[1][inputs[0].long() % 4] if rank else inputs[0]),
}


def replay_bits(rank: int, name: str) -> list[str]:
    """Replay three times on other inputs, each time followed by the operation without the graph."""
    (operation, expect), group, wrong = OPERATIONS[name], new_group(), list[str]()

    def run() -> None:
        x = new_ones()
        graph, replayed = captured_of(operation, rank, x, group)
        for number in range(3):
            inputs = [torch.arange(4.0) * (number + 1) + source for source in range(2)]
            x.copy_(inputs[rank])
            graph.replay()
            expected = expect(rank, inputs)
            for result in (replayed.cpu(), operation(rank, x, group).cpu()):
                wrong.extend([] if torch.equal(result, expected) else [f"{number}: {result}, not {expected}"])

    return reports_of(run) + wrong


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_replay_sends_again(pair: Processes, name: str):
    assert pair.run(replay_bits, name) == [[], []]


def start_transfer(rank: int, message: Tensor, group: Any) -> Any:
    return dist.isend(message, 1, group) if rank == 0 else dist.irecv(message, 0, group)


def write_before_wait(rank: int, x: Tensor, group: Any) -> None:
    work = start_transfer(rank, x, group)
    x.fill_(3)
    work.wait()


def write_before_second_wait(rank: int, x: Tensor, group: Any) -> None:
    first, second = start_transfer(rank, x * 2, group), start_transfer(rank, x, group)
    first.wait()
    x.fill_(3)
    second.wait()


def wait_and_write(rank: int, x: Tensor, group: Any) -> None:
    doubled = x * 2
    first, second = start_transfer(rank, x, group), start_transfer(rank, doubled, group)
    first.wait()
    x.fill_(3)
    second.wait()


def transfer(rank: int, x: Tensor, group: Any) -> None:
    start_transfer(rank, x, group).wait()


def report_replay(rank: int, operation: Operation, is_captured: bool) -> list[str]:
    x, group = new_ones(), new_group()
    if not is_captured:
        return reports_of(lambda: operation(rank, x, group))
    graph, _ = captured_of(operation, rank, x, group)
    return reports_of(graph.replay)


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("operation", [write_before_wait, write_before_second_wait])
def test_a_write_before_the_wait_is_reported(pair: Processes, operation: Operation, is_captured: bool):
    for reports, use in zip(
        pair.run(report_replay, operation, is_captured), ("copy to the host", "zero_"), strict=True
    ):
        assert re.match(f"order: `fill_` on .* writes what `{use}` on .* and has not waited for it", reports[0])


def test_work_is_waited_for_alone(pair: Processes):
    """Memory of the first of two works may be written after a wait for that work alone."""
    assert pair.run(report_replay, wait_and_write, True) == [[], []]


HOST_WAIT = "makes the host wait, which no graph can capture; wait before capture_begin."
REFUSALS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no wait": (id, "a stream joined the capture, and the first stream does not wait for its last event."),
    "is_completed": (lambda work: work.is_completed(), f"`event.query` {HOST_WAIT}"),
    "a timeout": (lambda work: work.wait(timedelta(seconds=5)), f"`event.synchronize` {HOST_WAIT}"),
}


def refuse(rank: int, name: str) -> str:
    """Return why a capture is invalid, and see that it has left nothing to send to the next one."""
    x, group, graph = new_ones(), new_group(), new_graph()
    with pytest.raises(RuntimeError) as refusal, captured(graph):
        REFUSALS[name][0](start_transfer(rank, x, group))
    with captured(graph):
        transfer(rank, x, group)
    x.fill_(rank)
    graph.replay()
    assert x.tolist() == [0] * 4
    return str(refusal.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_capture_refuses(pair: Processes, name: str):
    for error in pair.run(refuse, name):
        assert error.startswith(f"fake: the capture is invalid: {REFUSALS[name][1]}")


def run_beside_replay(rank: int, operation: Operation, is_plain: bool) -> str:
    """Replay on rank 0 what runs on rank 1 without a graph, or as another graph."""
    x, group = new_ones(), new_group()
    graphs = [captured_of(operation, rank, x, group)[0] for _ in range(2)]
    try:
        operation(rank, x, group) if rank and is_plain else graphs[rank].replay()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize(("operation", "direction"), [(transfer, "0>1"), (all_reduce, "all")])
def test_all_ranks_capture_an_operation(pair: Processes, operation: Operation, direction: str, is_plain: bool):
    """A sender does not wait to hear of its receiver."""
    labels = "number 1 of graph 1", "plain" if is_plain else "number 1 of graph 2"
    expected = [
        f"fake: work 1 of {direction} is {labels[rank]} on rank {rank}, and {labels[1 - rank]} on rank {1 - rank};"
        " capture it on all ranks or on none."
        for rank in range(2)
    ]
    assert pair.run(run_beside_replay, operation, is_plain) == (expected if direction == "all" else ["", expected[1]])


def fail_in_replay(rank: int) -> list[str]:
    """Capture a call that fails in each replay, which raises its error."""
    calls = list[int]()

    def fail() -> None:
        calls.append(len(calls))
        raise KeyError(len(calls))

    graph, _ = captured_of(capture_call, fail)
    errors = list[str]()
    for _ in range(2):
        with pytest.raises(KeyError) as error:
            graph.replay()
        errors.append(str(error.value))
    return errors


def test_the_error_of_a_captured_call_is_raised_by_the_replay(pair: Processes):
    assert pair.run(fail_in_replay) == [["1", "2"]] * 2
