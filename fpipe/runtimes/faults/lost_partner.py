"""Find the process that is to blame when replicas cannot add up, or an exchange does not end: torch says only that.

    replicas 0 and 2 notice, and say so        -->        replica 1: rank 0 is gone

Whoever notices leaves a mark in the store, and closes its connections, so that others notice too who would wait for it.
Who failed left word before it went, and ranks of the replica that is to blame know better who it is: they say it first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.runtimes.faults.lost_rank import LOST, Board, place_of, seen_last, tell_outside, timed_out

_PATIENCE, _SOON, _TICK = 1.4, 0.2, 0.02


def who_is_lost(
    board: Board,
    own: tuple[Board, int],
    group: ProcessGroup,
    known: Sequence[tuple[str, int]],
    error: RuntimeError,
    what: str,
) -> str:
    """Words about the process that is gone, or was not heard of in time.

    Args:
        board: where all that may know it leave word.
        own: where those of this pipeline do, who may wait for this process and give up on it; its number there.
        group: those that were to do something together.
        known: of each of them what it is called, and its number on the board.
        error: what torch says.
        what: what this process was waiting for.
    """
    late, others = timed_out(error), [number for number in range(group.size()) if number != group.rank()]
    store = board.store

    def words(numbers: list[int]) -> str:
        who = " or ".join(known[number][0] for number in numbers or others)
        return f"{who} did not take part in {what} in time" if late else f"{who} is gone, on the way to {what}"

    def mark(number: int) -> str:
        return f"noticed/{known[number][1]}"

    def missing() -> list[int]:
        return [one for one in lost if not store.check([mark(one)])] or lost

    def look() -> str:
        ends = time.monotonic() + (_PATIENCE if late else _PATIENCE / 4)
        if late:
            time.sleep(_SOON)
            tell_outside(*own, words(missing()))
        while time.monotonic() < ends and not store.check([LOST]):
            time.sleep(_TICK)
        found = missing()
        place = place_of(store, known[found[0]][1]) if len(found) == 1 else None
        return store.compare_set(LOST, "", words(found) + seen_last(place)).decode()

    board.ask(lambda: store.set(mark(group.rank()), ""), _PATIENCE)
    lost = others if late else _closed(group, others)
    return board.ask(look, _PATIENCE + 0.2) or board.unanswered(words(lost))


def _closed(group: Any, others: list[int]) -> list[int]:
    """Those whose process has closed its connection. A receive that times out closes those of this one."""
    found: list[int] = []
    waiting: list[tuple[int, Tensor, Any]] = []
    for other in others:
        buffer = torch.empty(1)
        try:
            waiting.append((other, buffer, group.recv([buffer], other, 0)))
        except RuntimeError:
            found.append(other)
    time.sleep(_TICK)  # what is closed is known then
    for other, _, work in waiting:
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            found += [] if timed_out(error) else [other]
    return found
