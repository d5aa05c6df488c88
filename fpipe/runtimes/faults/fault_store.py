"""Share through the store of a run what each process does and why the run has ended.

    process 1 writes "rank 1 failed in 1F3: .."        -->        processes 0 and 2 read it, and raise RankError

The fault that is written first is the run's: a process that fails because of it reports it instead of its own error.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.torch_private.processes import clone_client, default_store, is_served_by_process, world_group

T = TypeVar("T")
FAULT_KEY = "fault"
MAX_FAULT_LENGTH = 2048
_ANSWER_SECONDS, _READING_SECONDS, _POLL_SECONDS = 1.0, 1.0, 0.02


class ProcessStatus(NamedTuple):
    """The status of a process, for the others to read.

    Attributes:
        description: such as "in its 1F2 of step 9".
        group, build, step: the processes that run the step, the number of its build among theirs, and of its call.
        agreements: how often they have agreed on this build.
        is_agreeing: whether the process waits for the others to agree.
        has_agreed: whether the process has agreed with the others on this step, or needs not.
        waits_for: the processes that this one waits for.
        omission: what those have not done, such as "did not send what its 1F3 writes".
        heartbeat: a number that grows as long as the process waits and lives.
    """

    description: str
    group: str = ""
    build: int = 0
    step: int = 0
    agreements: int = 0
    is_agreeing: bool = False
    has_agreed: bool = False
    waits_for: tuple[int, ...] = ()
    omission: str = ""
    heartbeat: int = 0


class FaultStore:
    """The names, statuses and fault of a run's processes, in the store of the default process group.

    Attributes:
        process: the rank of this process in the default group.
        names: how errors call a process.
    """

    def __init__(self) -> None:
        default = default_store()
        self.process, self.names = dist.get_rank(), dict[int, str]()
        # A connection of its own: a client serves one call at a time, and the caller's may block in a rendezvous.
        self.store = PrefixStore(f"fpipe/{world_group().group_name}", clone_client(default))
        # Under torchrun the agent keeps the store, which outlives the processes of the run.
        self._is_kept_by_process = (
            is_served_by_process(default) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
        self._is_unresponsive = self._has_read = False

    def ask(self, question: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T | None:
        """Return the answer of the store; None if that fails or takes longer, and from then on."""
        # The process that keeps the store may be the one that is dead or hangs, and calls of a TCPStore then block for
        # its own timeout of minutes. So ask in a thread, which is left behind, and never ask again.
        answers: list[T] = []

        def ask_store() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if not self._is_unresponsive:
            thread = threading.Thread(target=ask_store, daemon=True)
            thread.start()
            thread.join(seconds)
            self._is_unresponsive = not answers
        return answers[0] if answers else None

    def name_of(self, process: int) -> str:
        """Return how errors call a process: by the name that it wrote where this process knows none."""
        key = f"name/{process}"
        return (
            self.names.get(process)
            or self.ask(lambda: self.store.get(key).decode() if self.store.check([key]) else "")
            or f"process {process}"
        )

    def write_name(self) -> None:
        """Write how errors call this process, for processes that wait for it only through others."""
        name = self.name_of(self.process)
        self.ask(lambda: self.store.set(f"name/{self.process}", name))

    def read_fault(self) -> str:
        """Return why the run is over; empty if it is not, or the store does not answer."""
        return self.ask(lambda: self.store.get(FAULT_KEY).decode() if self.store.check([FAULT_KEY]) else "") or ""

    def write_fault(self, fault: str) -> str:
        """Write why the run is over, unless it is written already, and return the fault of the run."""
        fault = fault[:MAX_FAULT_LENGTH]
        # Atomic: of processes that fail at once one is first, and all return its fault.
        return self.ask(lambda: self.store.compare_set(FAULT_KEY, "", fault).decode()) or fault

    def write_status(self, status: ProcessStatus | None) -> None:
        """Write the status of this process; None if it goes on."""
        self.ask(lambda: self.store.set(f"status/{self.process}", json.dumps(status)))

    def status_of(self, process: int) -> ProcessStatus | None:
        """Return the status of a process; None if it changes too quickly to be written."""
        key = f"status/{process}"
        fields = self.ask(lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None)
        return None if fields is None else ProcessStatus(*fields)

    def reword_fault(self, fault: str) -> str:
        """Return a fault as this process reports it: it may be the one that the others gave up on."""
        name = self.name_of(self.process)
        is_about_self = fault.startswith((f"{name} did not ", f"{name} is gone "))
        return f"the others gave up on this rank: {fault}" if is_about_self else fault

    def blame_store(self, message: str) -> str:
        """Return a message, behind the process that keeps the store if that does not answer."""
        if not self._is_unresponsive or not self._is_kept_by_process:
            return message
        return (
            f"{self.name_of(0)} keeps the store of the process group, which does not answer: it may be the first that "
            f"was lost; {message}"
        )

    def mark_read(self) -> None:
        """Count this process as one that knows why the run is over."""
        if not self._has_read:
            self._has_read = True
            self.ask(lambda: self.store.add("read", 1))

    def wait_for_readers(self) -> None:
        """Give the others a moment to read the fault, if this process keeps the store."""

        # The store ends with this process: the others would find it gone, and not why.
        def wait() -> None:
            deadline = time.monotonic() + _READING_SECONDS
            while self.store.add("read", 0) < len(self.names) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

        if self._is_kept_by_process and self.process == 0:
            self.ask(wait, _READING_SECONDS + _ANSWER_SECONDS)


class RankError(RuntimeError):
    """Another rank failed, is gone or hangs: its number, op and reason are in the message. The run is over.

    >>> import fpipe
    >>> raise fpipe.RankError("rank 1 failed in its 1F2 of step 9: ValueError: no such word")
    Traceback (most recent call last):
    fpipe.runtimes.faults.fault_store.RankError: rank 1 failed in its 1F2 of step 9: ValueError: no such word
    """
