"""A fake accelerator checks the waits by streams, events and memory that fpipe's runtimes order.

A test takes each wait out in turn, and sees that the checker reports it.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

import fpipe
from tests.fake_accelerator import COMPILER
from tests.fake_accelerator.device_processes import fixture_of
from tests.fake_accelerator.graph_scenarios import GRAPH_SCENARIOS
from tests.fake_accelerator.mutations import Wait, find_waits, without_wait
from tests.fake_accelerator.process_scenarios import PROCESS_SCENARIOS
from tests.fake_accelerator.scenarios import SCENARIOS, pipeline_of, schedules, timeline_of
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


processes = fixture_of(1)


pair = fixture_of(2)


def run_scenario(rank: int, name: str) -> list[str]:
    return (SCENARIOS | GRAPH_SCENARIOS)[name]()


@pytest.mark.parametrize("name", SCENARIOS | GRAPH_SCENARIOS)
def test_every_read_waits_for_its_write(processes: Processes, name: str):
    assert processes.run(run_scenario, name) == [[]]


def run_process_scenario(rank: int, name: str, wait: Wait | None) -> list[str]:
    # Without a wait for the others' numbers a rank reads its own, and warns of replicas with the same rows.
    with nullcontext() if wait is None else without_wait(wait), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return PROCESS_SCENARIOS[name](rank)
        except (RuntimeError, ValueError, UserWarning) as error:
            if wait is None:
                raise
            return [str(error)]


@pytest.mark.parametrize("name", PROCESS_SCENARIOS)
def test_every_read_of_two_processes_waits_for_its_write(pair: Processes, name: str):
    """The bits of autograd, too. gloo hid missing waits: its own waits block the host."""
    assert pair.run(run_process_scenario, name, None) == [[], []]


def first_report(rank: int, wait: Wait) -> str | None:
    """Return the first scenario that reports something when a wait is taken out of the runtime."""
    with without_wait(wait):
        for name, scenario in (GRAPH_SCENARIOS if wait.of_graphs else SCENARIOS).items():
            try:
                reports = scenario()
            except (RuntimeError, TypeError, AttributeError) as error:
                reports = [str(error)]
            if reports:
                return f"{name}: {reports[0]}"
    return None


@pytest.mark.parametrize("wait", find_waits(), ids=lambda wait: f"{wait.function}-{wait.call}-{wait.number}")
def test_each_removed_wait_is_reported(request: pytest.FixtureRequest, wait: Wait):
    if wait.of_processes:
        pair = request.getfixturevalue("pair")
        assert any(any(pair.run(run_process_scenario, name, wait)) for name in PROCESS_SCENARIOS)
    else:
        assert request.getfixturevalue("processes").run(first_report, wait) != [None]


def measure_copies(rank: int) -> list[Any]:
    """Return op times of an offloaded step, and the gaps between ops of a step with weights from a host."""
    offload = fpipe.offload(lambda stage, microbatch: stage == 0 and microbatch < 3)
    offloaded = timeline_of(pipeline_of(schedules.gpipe(1), offload), ["fake:0"], "fake:0")
    host = pipeline_of(fpipe.place([0, 0], homes=lambda stage: [1]))
    host = fpipe.chain(host, fpipe.communicate(again=("params",)))
    hosted = timeline_of(host, ["fake:0", "cpu"], "cpu")
    spans = [(op.kind, op.cell, start, end) for op, start, end in offloaded.events]
    work = sorted((start, end) for op, start, end in hosted.events if op.rank == 0 and end > start)
    return [spans, [later[0] - earlier[1] for earlier, later in pairwise(work)]]


def test_copies_run_beside_compute(processes: Processes):
    ((spans, gaps),) = processes.run(measure_copies)
    copies = [(start, end) for kind, _, start, end in spans if kind in ("OFFLOAD", "LOAD")]
    work = [(start, end) for kind, _, start, end in spans if kind not in ("OFFLOAD", "LOAD")]
    assert len(copies) == 6
    assert all(end > start + 1e-4 for start, end in copies)
    assert sum(end - start for start, end in work) == pytest.approx(max(end for _, end in work))  # it never waited
    assert max(map(abs, gaps)) < 1e-9, gaps
