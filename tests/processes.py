"""Processes of one gloo group that run functions for a test, without a port of their own."""

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

ANSWER_SECONDS = 45
SOON = 2
"""Seconds within which all ranks end when one raises or is killed, and after the timeout when one hangs."""
DUMP_STACKS = signal.SIGUSR1
"""The signal at which a process writes the stacks of its threads."""
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
    """A group of processes; `run` calls a function of a module in all, as `function(rank, *args)`.

    Their store is a file, or with `tcp` a server in rank 0, as where ranks are started by hand.
    """

    def __init__(self, size: int, timeout: float = 40, tcp: bool = False) -> None:
        self.folder, self.is_over = tempfile.TemporaryDirectory(), False
        context = forkserver()
        self.pipes, ends = zip(*(context.Pipe() for _ in range(size)), strict=True)
        init_method = f"tcp://127.0.0.1:{free_port()}" if tcp else Path(self.folder.name, "group").as_uri()
        self.all = [
            context.Process(target=serve, args=(rank, size, init_method, end, timeout, self.stacks(rank)), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process, end in zip(self.all, ends, strict=True):
            process.start()
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
        """Return the value or error of each process, None for one that a test has killed."""
        return [receive_answer(pipe) for pipe in self.pipes]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function in all processes and return their values.

        A process that dies is reported at once, though others may wait for it; so is one that does not answer. Both
        come with their Python stacks.
        """
        self.start(function, *args)
        answers: dict[int, Any] = {}
        while missing := [rank for rank in range(len(self.all)) if rank not in answers]:
            ready = wait([self.pipes[rank] for rank in missing], ANSWER_SECONDS)
            if not ready:
                raise TimeoutError(f"no answer of ranks {missing} in {ANSWER_SECONDS} s\n{self.live_stacks(missing)}")
            for rank in missing:
                if self.pipes[rank] in ready:
                    answers[rank] = receive_answer(self.pipes[rank], lambda rank=rank: self.raise_death(rank), self)
        for rank in sorted(answers):
            if isinstance(answers[rank], Exception):
                raise answers[rank]
        return [answers[rank] for rank in range(len(self.all))]

    def stacks(self, rank: int) -> Path:
        """Return the file for the stacks of a process that dies of a signal or is asked for them."""
        return Path(self.folder.name, f"stacks{rank}")

    def raise_death(self, rank: int) -> NoReturn:
        self.all[rank].join(SOON)
        code = self.all[rank].exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        raise RuntimeError(f"rank {rank} died with exit code {code}{name}\n{self.stacks(rank).read_text()}")

    def live_stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self.all[rank].pid, DUMP_STACKS)
        time.sleep(SOON / 2)
        return "\n".join(f"rank {rank}:\n{self.stacks(rank).read_text()}" for rank in ranks)

    def close(self) -> None:
        for process, pipe in zip(self.all, self.pipes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
            process.join(5)
        self.folder.cleanup()


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return the context of processes that begin with torch imported, in a fiftieth of the time of an interpreter."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_NEEDED)
    return context


def exit_code_of(function: Callable[..., None], *args: Any) -> int | None:
    """Call a function in a process without a group, and return how the process ended."""
    process = forkserver().Process(target=function, args=args)
    process.start()
    process.join(ANSWER_SECONDS)
    return process.exitcode


def processes(size: int) -> object:
    """Return a fixture: processes of one group for all tests of a file."""

    @pytest.fixture(scope="module")
    def group_fixture() -> Iterator[Processes]:
        with Processes(size) as group:
            yield group

    return group_fixture


@contextmanager
def several_groups(groups: int, size: int, **options: Any) -> Iterator[list[Processes]]:
    """Start several groups, for tests that mostly wait for timeouts."""
    with ExitStack() as stack:
        yield [stack.enter_context(Processes(size, **options)) for _ in range(groups)]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def receive_answer(pipe: Connection, on_death: Callable[[], Any] = lambda: None, group: Processes | None = None) -> Any:
    """Receive the value or error of a process, or call `on_death`; tell the group if the run is over."""
    try:
        if not pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"no answer of a process in {ANSWER_SECONDS} s")
        answer, error, trace, is_over = pipe.recv()
    except (EOFError, ConnectionError):
        return on_death()
    if group is not None:
        group.is_over |= is_over
    if error is not None:
        error.add_note(trace)
        return error
    return answer


def serve(rank: int, size: int, init_method: str, pipe: Connection, timeout: float, stacks: Path) -> None:
    # Keeps imported modules out of garbage collection: with them each full collection takes half a second.
    gc.freeze()
    file = stacks.open("w")
    faulthandler.enable(file)
    faulthandler.register(DUMP_STACKS, file)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Without a barrier a rank that leaves its group at once would close connections that another still waits to open.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    torch.set_num_threads(1)
    GROUP_OPTIONS.update(
        backend="gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    dist.init_process_group(**GROUP_OPTIONS)
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
            answer = None, picklable_error(error), traceback.format_exc()
        # Whoever fails has written why by now; a rank that only begins may read what another failed in already.
        run_is_over = init_method.startswith("file:") and dist.is_initialized() and bool(FaultStore().read_fault())
        pipe.send((*answer, run_is_over))
    if dist.is_initialized():
        dist.destroy_process_group()


GROUP_OPTIONS: dict[str, Any] = {}
"""The options with which this process has joined its group."""


def renew() -> None:
    """Join a new group, as after a restart by a launcher: an error has ended the run."""
    gc.collect()
    dist.destroy_process_group()
    GROUP_OPTIONS["init_method"] += "+"
    dist.init_process_group(**GROUP_OPTIONS)


def time_call(call: Callable[[], Any]) -> tuple[str, float]:
    """Return the error of a call as text, or "worked", and the seconds it took."""
    start, outcome = time.perf_counter(), "worked"
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        outcome = f"{type(error).__name__}: {error}"
    return outcome, time.perf_counter() - start


def count_resources() -> list[int]:
    """Count the tensors, threads and open files of this process."""
    gc.collect()
    tensors = sum(issubclass(type(heap_object), torch.Tensor) for heap_object in gc.get_objects())
    return [tensors, threading.active_count(), len(os.listdir("/proc/self/fd"))]


def settled_growth(count: Callable[[], list[int]], baseline: list[int]) -> list[int]:
    """Return the growth of each count over its baseline, once it is zero or has had ten seconds to fall.

    A worker thread of c10d frees what it has summed a moment after `wait()` has returned, on a busy machine a second.
    """
    ends = time.monotonic() + 5 * SOON
    while True:
        growth = [max(0, current - initial) for current, initial in zip(count(), baseline, strict=True)]
        if not any(growth) or time.monotonic() > ends:
            return growth
        time.sleep(0.01)


def picklable_error(error: Exception) -> Exception:
    """Return an error that another process can unpickle, of the same class if that takes one message."""
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    takes_one_message = isinstance(error, RuntimeError | ValueError | ArithmeticError)
    return type(error)(message) if takes_one_message else RuntimeError(message)
