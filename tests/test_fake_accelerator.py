"""On an accelerator that checks who has waited for whom: what fpipe's runtimes order by streams, events and memory.

That the checker reports what is not waited for is seen where a wait is taken out."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fpipe
from tests.fake_accelerator import COMPILER, built, known
from tests.fake_accelerator.group import register
from tests.fake_accelerator.mutations import Wait, waits, without
from tests.fake_accelerator.process_scenarios import PROCESS_SCENARIOS
from tests.fake_accelerator.scenarios import SCENARIOS, pipeline_of, schedules, timed
from tests.processes import Processes

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(func_only=True),
]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    faulthandler.cancel_dump_traceback_later()  # a busy machine compiles for longer than a test may take
    cache = getattr(request.config, "cache", None)
    return built(tmp_path_factory.getbasetemp() if cache is None else cache.mkdir("fake_accelerator"))


@contextmanager
def knowing(library: Path, count: int) -> Generator[Processes]:
    """Processes that know the device: known once, it stays, and other tests are to be without."""
    with Processes(count) as made:
        made.each(ready, library)
        yield made


@pytest.fixture(scope="module")
def processes(library: Path) -> Iterator[Processes]:
    with knowing(library, 1) as one:
        yield one


@pytest.fixture(scope="module")
def pair(library: Path) -> Iterator[Processes]:
    with knowing(library, 2) as two:
        yield two


def ready(rank: int, library: Path) -> None:
    known(library)
    register()


def of_a_scenario(rank: int, name: str) -> list[str]:
    return SCENARIOS[name]()


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_read_is_waited_for(processes: Processes, name: str):
    assert processes.each(of_a_scenario, name) == [[]]


def of_two(rank: int, name: str, wait: Wait | None) -> list[str]:
    with nullcontext() if wait is None else without(wait):
        try:
            return PROCESS_SCENARIOS[name](rank)
        except (RuntimeError, ValueError) as error:
            if wait is None:
                raise
            return [str(error)]


@pytest.mark.parametrize("name", PROCESS_SCENARIOS)
def test_what_processes_read_is_waited_for(pair: Processes, name: str):
    """Bits of autograd, too: gloo carried all before, whose waits hold the host up."""
    assert pair.each(of_two, name, None) == [[], []]


def noticed(rank: int, wait: Wait) -> str | None:
    """The first scenario that reports something when a wait is taken out of the runtime."""
    with without(wait):
        for name, scenario in SCENARIOS.items():
            try:
                reports = scenario()
            except RuntimeError as error:
                reports = [str(error)]
            if reports:
                return f"{name}: {reports[0]}"
    return None


@pytest.mark.parametrize("wait", waits(), ids=lambda wait: f"{wait.function}-{wait.call}-{wait.number}")
def test_each_wait_is_missed_when_it_is_gone(request: pytest.FixtureRequest, wait: Wait):
    if wait.of_processes:
        pair = request.getfixturevalue("pair")
        assert any(any(pair.each(of_two, name, wait)) for name in PROCESS_SCENARIOS)
    else:
        assert request.getfixturevalue("processes").each(noticed, wait) != [None]


def of_copies(rank: int) -> list[Any]:
    """Of an offloaded step, and of one whose weights come from a host: spans of ops, and how long the device waited."""
    offload = fpipe.offload(lambda stage, microbatch: stage == 0 and microbatch < 3)
    offloaded = timed(pipeline_of(schedules.gpipe(1), offload), ["fake:0"], "fake:0")
    host = pipeline_of(fpipe.place([0, 0], homes=lambda stage: [1]))
    host = fpipe.chain(host, fpipe.communicate(again=("params",)))
    hosted = timed(host, ["fake:0", "cpu"], "cpu")
    spans = [(op.kind, op.cell, start, end) for op, start, end in offloaded.events]
    work = sorted((start, end) for op, start, end in hosted.events if op.rank == 0 and end > start)
    return [spans, [later[0] - before[1] for before, later in pairwise(work)]]


def test_copies_run_beside_compute(processes: Processes):
    ((spans, gaps),) = processes.each(of_copies)
    copies = [(start, end) for kind, _, start, end in spans if kind in ("OFFLOAD", "LOAD")]
    work = [(start, end) for kind, _, start, end in spans if kind not in ("OFFLOAD", "LOAD")]
    assert len(copies) == 6
    assert all(end > start + 1e-4 for start, end in copies)
    assert sum(end - start for start, end in work) == pytest.approx(max(end for _, end in work))  # it never waited
    assert max(map(abs, gaps)) < 1e-9, gaps
