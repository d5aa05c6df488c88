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

from torch.distributed.distributed_c10d import Store

_PATIENCE = 1.0
_TICK = 0.02


def who_is_late(store: Store, rank: int, other: int, words: str) -> str:
    """What is said of the rank at the end of the chain of those that wait.

    Args:
        store: where all ranks leave whom they wait for.
        rank: this one.
        other: the one it waited for.
        words: what to say of that.
    """

    def follow(found: list[str]) -> None:
        store.set(_waiting(rank), f"{other} {words}")
        last, seen, ends = other, {rank}, time.monotonic() + _PATIENCE
        while last not in seen and time.monotonic() < ends:
            if not store.check([_waiting(last)]):
                time.sleep(_TICK)
                continue
            seen.add(last)
            following, _, told = store.get(_waiting(last)).decode().partition(" ")
            last = int(following)
            found.append(told)

    return first_told(store, _asked(follow, words))


def first_told(store: Store, words: str) -> str:
    """What the first rank to notice said; `words` if this is it, or if nobody can be asked."""
    return _asked(lambda found: found.append(store.compare_set("lost", "", words).decode()), words)


def _asked(ask: Callable[[list[str]], None], words: str) -> str:
    """What the store says last within a second and a half. Its host may be the rank that hangs, and never answer."""
    found = [words]

    def asking() -> None:
        with suppress(RuntimeError):
            ask(found)

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(_PATIENCE + 0.2)
    return found[-1]


def _waiting(rank: int) -> str:
    return f"waiting/{rank}"
