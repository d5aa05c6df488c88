"""Keep in the store of a run where each process is and why the run has ended, for the others to read.

    process 1 writes "rank 1 failed in 1F3: .."        -->        processes 0 and 2 read it, and raise RankError

The fault that is written first is that of the run: whoever fails because of it reads it in place of its own.
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

from fpipe.torch_private.processes import default_store, is_kept_by_process, own_client, world_group

T = TypeVar("T")
FAULT = "fault"
MOST = 2048
"""Characters of a fault."""
_BRIEFLY, _LINGER, _TICK = 1.0, 1.0, 0.02


class Place(NamedTuple):
    """Where a process is.

    Attributes:
        words: such as "in its 1F2 of step 9".
        group, build, step: the processes that run the step, which of their steps it is, and how often it was called.
        met: how often they have agreed on that step.
        meets: whether they do so now.
        is_past: whether the process has agreed with the others on this step, as far as it wants to.
        waits_for: the processes that this one waits for.
        missing: what those have not done, such as "did not send what its 1F3 writes".
        beat: grows as long as it waits and lives.
    """

    words: str
    group: str = ""
    build: int = 0
    step: int = 0
    met: int = 0
    meets: bool = False
    is_past: bool = False
    waits_for: tuple[int, ...] = ()
    missing: str = ""
    beat: int = 0


class FaultStore:
    """The store of the default process group, as far as faults are written there.

    The process that keeps a store may be the one that is dead or hangs, so nothing waits long for an answer.

    Attributes:
        process: this one, as torch.distributed numbers it.
        names: by process how errors call it.
    """

    def __init__(self) -> None:
        default = default_store()
        self.process, self.names = dist.get_rank(), dict[int, str]()
        # A connection of its own: a client answers one call at a time, and the caller's may block in a rendezvous.
        self.store = PrefixStore(f"fpipe/{world_group().group_name}", own_client(default))
        self._is_kept = is_kept_by_process(default) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._is_silent = self._has_read = False

    def ask(self, question: Callable[[], T], seconds: float = _BRIEFLY) -> T | None:
        """Return the answer of the store; None if that fails or takes longer, and from then on."""
        answers: list[T] = []

        def asking() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if not self._is_silent:
            thread = threading.Thread(target=asking, daemon=True)
            thread.start()
            thread.join(seconds)
            self._is_silent = not answers
        return answers[0] if answers else None

    def name_of(self, process: int) -> str:
        """Return how errors call a process: by its own word where this one knows no name of it."""
        key = f"name/{process}"
        return (
            self.names.get(process)
            or self.ask(lambda: self.store.get(key).decode() if self.store.check([key]) else "")
            or f"process {process}"
        )

    def write_name(self) -> None:
        """Write how errors call this process, for those that wait for it over others."""
        name = self.name_of(self.process)
        self.ask(lambda: self.store.set(f"name/{self.process}", name))

    def fault(self) -> str:
        """Return why the run is over; nothing if it is not, or nobody knows."""
        return self.ask(lambda: self.store.get(FAULT).decode() if self.store.check([FAULT]) else "") or ""

    def write_fault(self, words: str) -> str:
        """Write why the run is over, and return the first such words."""
        words = words[:MOST]
        return self.ask(lambda: self.store.compare_set(FAULT, "", words).decode()) or words

    def write_place(self, place: Place | None) -> None:
        """Write where this process is; None if it goes on."""
        self.ask(lambda: self.store.set(f"place/{self.process}", json.dumps(place)))

    def place_of(self, process: int) -> Place | None:
        """Return where a process is, if it has stayed there."""
        key = f"place/{process}"
        written = self.ask(lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None)
        return None if written is None else Place(*written)

    def as_read_here(self, fault: str) -> str:
        """Return a fault as this process says it: the others may have given up on this one."""
        name = self.name_of(self.process)
        is_own = fault.startswith((f"{name} did not ", f"{name} is gone "))
        return f"the others gave up on this rank: {fault}" if is_own else fault

    def unanswered(self, words: str) -> str:
        """Return words, behind who keeps the store if that does not answer."""
        if not self._is_silent or not self._is_kept:
            return words
        return (
            f"{self.name_of(0)} keeps the store of the process group, which does not answer: it may be the first that "
            f"was lost; {words}"
        )

    def mark_read(self) -> None:
        """Count this process among those that know why the run is over."""
        if not self._has_read:
            self._has_read = True
            self.ask(lambda: self.store.add("read", 1))

    def linger(self) -> None:
        """Wait a moment until the others know why the run is over, if this process keeps the store."""

        def wait() -> None:
            ends = time.monotonic() + _LINGER
            while self.store.add("read", 0) < len(self.names) and time.monotonic() < ends:
                time.sleep(_TICK)

        if self._is_kept and self.process == 0:
            self.ask(wait, _LINGER + _BRIEFLY)


class RankError(RuntimeError):
    """Another rank failed, is gone or hangs: its number, op and reason are in the message. The run is over.

    >>> import fpipe
    >>> raise fpipe.RankError("rank 1 failed in its 1F2 of step 9: ValueError: no such word")
    Traceback (most recent call last):
    fpipe.runtimes.faults.fault_store.RankError: rank 1 failed in its 1F2 of step 9: ValueError: no such word
    """
