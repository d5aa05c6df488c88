"""Find the rank that is to blame when one is gone, or was not heard of in time.

    rank 0 waits for 1, 1 for 2, and 2 for nobody        -->        rank 2 did not send y[2,3]

Ranks that wait for one another give up at about the same time, and each only knows whom it waited for itself. And who
notices that a rank is gone leaves too, which others notice in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
LOST = "lost"
_PATIENCE = 1.0
_TICK = 0.02


class Board:
    """The store of a group, where ranks leave word for one another. Who keeps it may be the one that is lost.

    Args:
        store: it.
        host: who keeps it, in words to go behind an error if it does not answer.
    """

    def __init__(self, store: Store, host: str) -> None:
        self.store, self.host, self._silent = store, host, False

    def ask(self, ask: Callable[[], T], seconds: float) -> T | None:
        """What asking the store gives; None if that fails or takes longer, and from then on."""
        found: list[T] = []

        def asking() -> None:
            with suppress(RuntimeError):
                found.append(ask())

        if not self._silent:
            thread = threading.Thread(target=asking, daemon=True)
            thread.start()
            thread.join(seconds)
            self._silent = not found
        return found[0] if found else None


def who_is_late(board: Board, rank: int, other: int, words: str, patience: float = _PATIENCE) -> str:
    """What is said of the rank at the end of the chain of those that wait.

    Args:
        board: where all ranks leave whom they wait for.
        rank: this one.
        other: the one it waited for.
        words: what to say of that.
        patience: seconds to wait for what those say that are waited for.
    """

    def follow() -> str:
        store = board.store
        store.set(_waiting(rank), f"{other} {words}")
        last, seen, told, ends = other, {rank}, words, time.monotonic() + patience
        while last not in seen and time.monotonic() < ends:
            if not store.check([_waiting(last)]):
                time.sleep(_TICK)
                continue
            seen.add(last)
            following, _, told = store.get(_waiting(last)).decode().partition(" ")
            last = int(following)
        return store.compare_set(LOST, "", told).decode()

    return board.ask(follow, patience + 0.2) or words + board.host


def who_is_gone(board: Board, rank: int, other: int, words: str) -> str:
    """The same where a connection is closed: the other one may have left since it waited for a third in vain."""
    return who_is_late(board, rank, other, words, _PATIENCE / 4)


def timed_out(error: RuntimeError) -> bool:
    """Whether a rank was not heard of in time, or else is gone."""
    return "imed out" in str(error) or "imeout" in str(error)


def first_told(board: Board, words: str) -> str:
    """What the first rank to notice said; `words` if this is it, or if nobody can be asked."""
    told = board.ask(lambda: board.store.compare_set(LOST, "", words).decode(), _PATIENCE)
    return told or words + board.host


def _waiting(rank: int) -> str:
    return f"waiting/{rank}"
