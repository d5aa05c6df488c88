"""Let Ctrl-C come only between transfers: what is cut off in one would be sent twice, or never.

Ctrl-C       SEND(y)  |  1F3  |  SEND(dx)        -->        SEND(y) and 1F3 end, and then KeyboardInterrupt
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class CtrlC:
    """Notes it while it is entered. `heed` does then what Ctrl-C does elsewhere, and so does the end."""

    def __init__(self) -> None:
        self._before: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            try:
                self.heed()
            finally:
                self._before = None

    def heed(self) -> None:
        """Ctrl-C, if there was one."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._before(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:  # the second time at once: an op may go on for ever
            self._before(number, frame)
        self._noted = number, frame
