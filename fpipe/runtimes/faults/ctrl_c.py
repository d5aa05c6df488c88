"""Let Ctrl-C come only between transfers: what is cut off in one would be sent twice, or never.

Ctrl-C       SEND(y)  |  1F3  |  SEND(dx)        -->        SEND(y) and 1F3 end, and then KeyboardInterrupt

Python runs no handler while a thread waits in C. So that another thread can end such a wait, each Ctrl-C is also heard
there, at once.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any


class CtrlC:
    """Notes it while it is entered. `heed` does then what Ctrl-C does elsewhere, and so does the end.

    Attributes:
        pressed: when it came, of those that are not heeded yet; known to whoever calls `listen`. A handler of the
            caller's own may want something else than to end the step, so nothing is heard then.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._noted: tuple[int, FrameType | None] | None = None
        self.pressed: list[float] = []
        self._hears, self._tells = socket.socketpair()
        for end in (self._hears, self._tells):
            end.setblocking(False)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._note)
            if before is signal.default_int_handler:
                self._hear(self._tells.fileno())

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            if self._before is signal.default_int_handler:
                self._hear(-1)
            signal.signal(signal.SIGINT, self._before)
            try:
                self.heed()
            finally:
                self._before = None

    def heed(self) -> None:
        """Ctrl-C, if there was one."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            with self._lock:
                self._take()
                self.pressed.clear()
            self._before(*noted)

    def listen(self, seconds: float) -> None:
        """Wait until Ctrl-C comes, or `wake` is called, or so long."""
        if select.select([self._hears], [], [], seconds)[0]:
            with self._lock:
                self._take()

    def wake(self) -> None:
        """End `listen`."""
        with suppress(OSError):
            self._tells.send(b"\0")

    def close(self) -> None:
        """Hear nothing any longer."""
        self._hears.close()
        self._tells.close()

    def _take(self) -> None:
        with suppress(BlockingIOError):
            self.pressed += [time.monotonic()] * self._hears.recv(64).count(signal.SIGINT)

    def _hear(self, by: int) -> None:
        """Have Python write the number of each signal there, unless somebody else asked for that."""
        other = signal.set_wakeup_fd(by, warn_on_full_buffer=False)
        if other not in (-1, self._tells.fileno()):
            signal.set_wakeup_fd(other)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:  # the second time at once: an op may go on for ever
            self._before(number, frame)
        self._noted = number, frame
