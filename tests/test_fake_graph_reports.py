"""The checker of the fake accelerator reports mistakes in the use of a graph.

Each function keeps a rule or breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fake_accelerator import COMPILER, reports_of
from tests.fake_accelerator.captures import (
    DEVICE,
    captured_of,
    current_stream,
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
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay overwrote; clone it",
    ),
    "overwritten result, read within": (
        overwrite_a_result_read_within,
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay overwrote; clone it",
    ),
    "state in the pool": (
        keep_state_in_the_pool,
        "pool: `sum` on fake:0 stream 1 reads a result of a graph that a later replay overwrote; clone it",
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
