"""A group on the fake accelerator sends and receives again in each replay of a graph, as NCCL does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_accelerator import COMPILER, capture_call, reports_of
from tests.fake_accelerator.captures import captured_of
from tests.fake_accelerator.group import NAME
from tests.fake_accelerator.processes import processes_with_device
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes_with_device(request, tmp_path_factory, 2) as two:
        yield two


def exchange(rank: int, x: Tensor, group: dist.ProcessGroup, waits: bool = True) -> Tensor:
    """Send x + 1 to rank 1, which adds its x; return the sum of both ranks' results."""
    result = x + 1
    if rank == 0:
        work = dist.isend(result, 1, group=group)
    else:
        work = dist.irecv(received := torch.empty_like(x), 0, group=group)
    if waits:
        work.wait()
    result = result if rank == 0 else received + x
    dist.all_reduce(result, group=group)
    return result


def replay_exchanges(rank: int) -> list[str]:
    group, wrong = dist.new_group(backend=NAME), list[str]()
    x = torch.zeros(4, device="fake:0")

    def run() -> None:
        exchange(rank, x, group)
        graph, result = captured_of(exchange, rank, x, group)
        for number in range(3):
            x.fill_(number + 10 * rank)
            graph.replay()
            expected = 2 * (number + 1) + number + 10
            if result.tolist() != [expected] * 4:
                wrong.append(f"{number}: {result}, not {expected}")
        # Steps without the graph and replays may alternate.
        x.fill_(rank)
        if exchange(rank, x, group).tolist() != [3] * 4:
            wrong.append("after a replay")
        graph.replay()

    return reports_of(run) + wrong


def test_each_replay_sends_again(pair: Processes):
    assert pair.run(replay_exchanges) == [[], []]


def capture_one_side(rank: int) -> str:
    """Replay the receive of a message that is sent without a graph."""
    group, x = dist.new_group(backend=NAME), torch.zeros(4, device="fake:0")

    def receive() -> None:
        dist.irecv(x, 0, group=group).wait()

    if rank == 0:
        dist.isend(x, 1, group=group).wait()
        return ""
    with pytest.raises(RuntimeError) as error:
        captured_of(receive)[0].replay()
    return str(error.value)


def test_both_sides_capture_a_message(pair: Processes):
    assert pair.run(capture_one_side) == ["", "fake: message 0>1 1 is captured by one side alone."]


def leave_unjoined(rank: int) -> str:
    group = dist.new_group(backend=NAME)
    with pytest.raises(RuntimeError) as refusal:
        captured_of(exchange, rank, torch.zeros(4, device="fake:0"), group, False)
    return str(refusal.value)


def test_a_capture_waits_for_its_messages(pair: Processes):
    """The communicator's stream has joined the capture."""
    for error in pair.run(leave_unjoined):
        assert "a stream joined the capture, and the first stream does not wait for its last event." in error


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
