"""Start processes that know the fake accelerator."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fpipe.runtimes.capture import device_graph
from tests.fake_accelerator import build_library, register_device
from tests.fake_accelerator.group import register
from tests.processes import Processes


@contextmanager
def processes_with_device(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, count: int
) -> Generator[Processes]:
    """Start processes with the fake device: once registered it stays, and other tests must run without it."""
    # A busy machine compiles for longer than a test may take.
    faulthandler.cancel_dump_traceback_later()
    cache = getattr(request.config, "cache", None)
    library = build_library(tmp_path_factory.getbasetemp() if cache is None else cache.mkdir("fake_accelerator"))
    with Processes(count) as workers:
        workers.run(prepare_process, library)
        yield workers


def prepare_process(rank: int, library: Path) -> None:
    register_device(library)
    register()
    # Of CUDA alone; here the device has them too.
    device_graph.clear_workspaces = lambda device: torch.ops.fake_accelerator.clear_workspaces()


def fixture_of(count: int) -> Any:
    """Return a fixture of processes that the tests of a module share."""

    @pytest.fixture(scope="module")
    def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
        with processes_with_device(request, tmp_path_factory, count) as workers:
            yield workers

    return start
