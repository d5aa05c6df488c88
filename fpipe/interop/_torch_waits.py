"""Add the waits that torch 2.15 wants said: that each send is over.

    0F0 0SEND_F0 0RECV_B0 0B0   -->   0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_SEND_F0

A program has no op for them: what is handed to a SEND is read until its RECV.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BACKWARD = re.compile(r"(\d+)[BI](\d+)")
_SEND = re.compile(r"\d+SEND_[FB]\d+")


def with_waits(row: Sequence[str]) -> list[str]:
    """A rank's cells with torch's own waits: a forward's send is over when its backward is, the others at the end.

    >>> with_waits(["1F0", "1SEND_F0", "1RECV_B0", "1B0", "1SEND_B0"])
    ['1F0', '1SEND_F0', '1RECV_B0', '1B0', '1WAIT_SEND_F0', '1SEND_B0', '1WAIT_SEND_B0']
    """
    done: list[str] = []
    in_flight: list[str] = []
    for cell in row:
        done.append(cell)
        if _SEND.fullmatch(cell):
            in_flight.append(cell)
        for stage, microbatch in _BACKWARD.findall(cell):
            send = f"{stage}SEND_F{microbatch}"
            if send in in_flight:
                in_flight.remove(send)
                done.append(_wait(send))
    return [*done, *map(_wait, in_flight)]


def _wait(send: str) -> str:
    return send.replace("SEND", "WAIT_SEND")
