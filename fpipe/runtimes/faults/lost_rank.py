"""Find the rank that is to blame when one is gone, or was not heard of in time.

    rank 0 waits for 1, 1 for 2, and 2 for nobody        -->        rank 2 did not send y[2,3]

Ranks that wait for one another give up at about the same time, and each only knows whom it waited for itself. And who
notices that a rank is gone leaves too, which others notice in turn.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
LOST = "lost"
_PATIENCE = 1.0
_BRIEFLY = 0.5
_TICK = 0.02
_MOST, _CUT = 2048, " .."


class Place(NamedTuple):
    """Where a rank stays: whether it only waits for another there, and the words for it."""

    waits: bool
    words: str


class Host(NamedTuple):
    """The rank that keeps a store: its number among those that ask, if it is one of them, and its name."""

    rank: int | None
    name: str


class Board:
    """The store of a group, where ranks leave word for one another, this one by its `names`. The host that keeps it may
    be the one that is lost; there is none where nobody does, or the launcher."""

    def __init__(self, store: Store, host: Host | None, names: Sequence[str]) -> None:
        self.store, self.host, self.names, self._silent = store, host, names, False

    def as_heard(self, told: str) -> str:
        """Words of all about a rank that is lost, as that one says them if it still can."""
        mine = any(told.startswith(f"{name} ") for name in self.names)
        return f"the others gave up on this rank: {told}" if mine else told

    def ask(self, ask: Callable[[], T], seconds: float) -> T | None:
        """Answer of the store; None if that fails or takes longer, and from then on."""
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

    def shortened(self, text: str, size: int) -> str:
        """A text in at most so many bytes, cut between two words; the store has more of it then."""
        if len(text.encode()) <= size:
            return text
        short, more = _cut(text, size), _cut(text, _MOST)
        self.ask(lambda: self.store.set(f"said/{short}", more), _BRIEFLY)
        return short

    def whole(self, text: str) -> str:
        """Text that was shortened, or all that there is of it."""
        if not text.endswith(_CUT):
            return text
        key = f"said/{text}"
        return self.ask(lambda: self.store.get(key).decode() if self.store.check([key]) else text, _BRIEFLY) or text

    def unanswered(self, words: str, other: int | None = None) -> str:
        """Words about another rank where the store does not answer: who keeps that is named first."""
        if self.host is None:
            return words
        if other is not None and other == self.host.rank:
            return f"{words}; nor does the store of the process group answer, which it keeps"
        return (
            f"{self.host.name} keeps the store of the process group, which does not answer: it may be the first that "
            f"was lost; {words}"
        )


def tell_place(board: Board, rank: int, place: Place | None) -> None:
    """Leave word of where a rank stays, if it does."""
    board.ask(lambda: board.store.set(_place(rank), json.dumps(place)), _PATIENCE)


def tell_outside(board: Board, rank: int, words: str) -> None:
    """Leave word that a rank waits for a process that has no number on this board."""
    board.ask(lambda: board.store.set(_waiting(rank), json.dumps((rank, words))), _PATIENCE)


def place_of(store: Store, rank: int) -> Place | None:
    """Where a rank stays, if it has told that."""
    told = json.loads(store.get(_place(rank))) if store.check([_place(rank)]) else None
    return told and Place(*told)


def seen_last(place: Place | None) -> str:
    """Words to go behind what is said of a rank."""
    return "" if place is None else f"; it was last seen {place.words}"


def told_lost(board: Board) -> str | None:
    """Words of the first rank to notice, if one has."""
    store = board.store
    return board.ask(lambda: store.get(LOST).decode() if store.check([LOST]) else "", _PATIENCE) or None


def who_is_late(board: Board, rank: int, other: int, words: str, gone: bool = False) -> str:
    """Words about the rank at the end of the chain of those that wait, and where that was last seen.

    Args:
        board: where all ranks leave whom they wait for.
        rank, other: this one, and the one it waited for.
        words: what to say of that.
        gone: its connection is closed. It may have given up on a third rank, which it is about to say if it waited.
    """

    def follow() -> str:
        store = board.store
        store.set(_waiting(rank), json.dumps((other, words)))
        place = place_of(store, other) if gone else None
        patience = _PATIENCE if not gone else _PATIENCE / 4 if place is not None and place.waits else 0.0
        last, told, passed, ends = other, words, {rank}, time.monotonic() + patience
        while last not in passed and not store.check([LOST]):
            if store.check([_waiting(last)]):
                passed.add(last)
                last, told = json.loads(store.get(_waiting(last)))
            elif time.monotonic() < ends:
                time.sleep(_TICK)
            else:
                break
        return store.compare_set(LOST, "", told + seen_last(place_of(store, last))).decode()

    told = board.ask(follow, _PATIENCE + 0.2)
    return board.unanswered(words, other) if told is None else board.as_heard(told)


def timed_out(error: RuntimeError) -> bool:
    """Whether a rank was not heard of in time, or else is gone."""
    return "imed out" in str(error) or "imeout" in str(error)


def first_told(board: Board, words: str) -> str:
    """Words of the first rank to notice; `words` if this is it, or if nobody can be asked."""
    told = board.ask(lambda: board.store.compare_set(LOST, "", words).decode(), _PATIENCE)
    return told or board.unanswered(words)


def _cut(text: str, size: int) -> str:
    if len(text.encode()) <= size:
        return text
    head = text.encode()[: size - len(_CUT)].decode(errors="ignore")
    words = head.rpartition(" ")[0]
    return (words if len(words) > len(head) // 2 else head) + _CUT  # one long word is cut itself


def _waiting(rank: int) -> str:
    return f"waiting/{rank}"


def _place(rank: int) -> str:
    return f"place/{rank}"
