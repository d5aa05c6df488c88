"""Processes of one gloo group, each of which does what a test asks of all of them, without a port of their own."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from fpipe.runtimes.faults.fault_store import FaultStore

LIMIT = 45
SOON = 2
"""Seconds within which all ranks end when one raises or is killed, and after the timeout when one hangs."""
ASK = signal.SIGUSR1
"""Asks a process for the stacks of its threads."""
_NEEDED = [
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "fpipe.models.from_sequential",
    "fpipe.models.parameters.load",
    "fpipe.runtimes.build",
    "fpipe.runtimes.in_process.local",
    "fpipe.runtimes.processes.distributed",
    "tests.processes",
]


class Processes:
    """So many of them; `each` calls a function of a module in all, as `function(rank, *args)`.

    Their store is a file, or with `tcp` kept by rank 0, as where ranks are started by hand.
    """

    def __init__(self, size: int, timeout: float = 40, tcp: bool = False) -> None:
        self.folder, self.is_over = tempfile.TemporaryDirectory(), False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_NEEDED)
        self.pipes, ends = zip(*(context.Pipe() for _ in range(size)), strict=True)
        at = f"tcp://127.0.0.1:{free_port()}" if tcp else Path(self.folder.name, "group").as_uri()
        self.all = [
            context.Process(target=serve, args=(rank, size, at, end, timeout, self.stacks(rank)), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for one, end in zip(self.all, ends, strict=True):
            one.start()
            end.close()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, args, self.is_over))
        self.is_over = False

    def results(self) -> list[Any]:
        """What each returned or raised; None of one that a test has killed."""
        return [result(pipe) for pipe in self.pipes]

    def each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each returned. One that dies is told at once, while others may wait for it; so is one that says nothing,
        both with their Python stacks."""
        self.start(function, *args)
        found: dict[int, Any] = {}
        while missing := [rank for rank in range(len(self.all)) if rank not in found]:
            ready = wait([self.pipes[rank] for rank in missing], LIMIT)
            if not ready:
                raise TimeoutError(f"no word of ranks {missing} in {LIMIT} s\n{self.running(missing)}")
            for rank in missing:
                if self.pipes[rank] in ready:
                    found[rank] = result(self.pipes[rank], lambda rank=rank: self.gone(rank), self)
        for rank in sorted(found):
            if isinstance(found[rank], Exception):
                raise found[rank]
        return [found[rank] for rank in range(len(self.all))]

    def stacks(self, rank: int) -> Path:
        """Where a process writes the stacks of its threads as it dies of a signal, or is asked for them."""
        return Path(self.folder.name, f"stacks{rank}")

    def gone(self, rank: int) -> NoReturn:
        self.all[rank].join(SOON)
        code = self.all[rank].exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        raise RuntimeError(f"rank {rank} died with exit code {code}{name}\n{self.stacks(rank).read_text()}")

    def running(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self.all[rank].pid, ASK)
        time.sleep(SOON / 2)
        return "\n".join(f"rank {rank}:\n{self.stacks(rank).read_text()}" for rank in ranks)

    def close(self) -> None:
        for one, pipe in zip(self.all, self.pipes, strict=True):
            pipe.close()
            one.join(5)
            one.kill()
            one.join(5)
        self.folder.cleanup()


def processes(size: int) -> object:
    """A fixture: so many processes of one group, for all tests of a file."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[Processes]:
        with Processes(size) as group:
            yield group

    return made


@contextmanager
def beside_each_other(groups: int, size: int, **how: Any) -> Iterator[list[Processes]]:
    """Several groups, for tests that wait most of their time."""
    with ExitStack() as stack:
        yield [stack.enter_context(Processes(size, **how)) for _ in range(groups)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def result(pipe: Connection, gone: Callable[[], Any] = lambda: None, group: Processes | None = None) -> Any:
    """What a process returned or raised, or what `gone` says of one that is no more; the group hears of a run's end."""
    try:
        if not pipe.poll(LIMIT):
            raise TimeoutError(f"no word of a process in {LIMIT} s")
        found, error, trace, is_over = pipe.recv()
    except (EOFError, ConnectionError):
        return gone()
    if group is not None:
        group.is_over |= is_over
    if error is not None:
        error.add_note(trace)
        return error
    return found


def serve(rank: int, size: int, at: str, pipe: Connection, timeout: float, stacks: Path) -> None:
    gc.freeze()  # modules are no garbage: with them each full collection takes half a second
    file = stacks.open("w")
    faulthandler.enable(file)
    faulthandler.register(ASK, file)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    JOINED.update(backend="gloo", init_method=at, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    dist.init_process_group(**JOINED)
    while True:
        try:
            function, args, is_over = pipe.recv()
        except EOFError:
            break
        if is_over:
            renew()
        try:
            answer = function(rank, *args), None, ""
        except Exception as error:
            answer = None, plain(error), traceback.format_exc()
        # Whoever fails has written why by now; a rank that only begins may read what another failed in already.
        is_over = at.startswith("file:") and dist.is_initialized() and bool(FaultStore().read_fault())
        pipe.send((*answer, is_over))
    if dist.is_initialized():
        dist.destroy_process_group()


JOINED: dict[str, Any] = {}
"""How this process has joined its group."""


def renew() -> None:
    """Join a new group, as a launcher does that starts all ranks again: after an error the run is over."""
    gc.collect()
    dist.destroy_process_group()
    JOINED["init_method"] += "+"
    dist.init_process_group(**JOINED)


def timed(call: Callable[[], Any]) -> tuple[str, float]:
    """What a call raises, or that it worked, and after how many seconds."""
    started, said = time.perf_counter(), "worked"
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.perf_counter() - started


def counted() -> list[int]:
    """How many tensors, threads and files this process has."""
    gc.collect()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    return [tensors, threading.active_count(), len(os.listdir("/proc/self/fd"))]


def left(held: Callable[[], list[int]], before: list[int]) -> list[int]:
    """How much more is held than before, once that no longer falls: a worker thread of c10d lets go of what it has
    summed a moment after `wait()` has returned, which on a busy machine may be a second."""
    ends = time.monotonic() + 5 * SOON
    while True:
        more = [max(0, now - then) for now, then in zip(held(), before, strict=True)]
        if not any(more) or time.monotonic() > ends:
            return more
        time.sleep(0.01)


def plain(error: Exception) -> Exception:
    """An error that another process can read: of its own class where that takes one message."""
    words = "\n".join([str(error), *getattr(error, "__notes__", [])])
    known = isinstance(error, RuntimeError | ValueError | ArithmeticError)
    return type(error)(words) if known else RuntimeError(words)
