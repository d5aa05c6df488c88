"""Say with whom a process is about to build a step, or why it builds none, to whoever may wait for it.

    process 0: build 3, with 0, 1, 2 and 3        process 1: build 3, with 0 and 1        -->        they differ

Ranks meet where they know one another (`Meeting`). One that refuses its mesh does not know who the others are, and one
that takes others for its own meets them elsewhere. So each process leaves word under its own number and that of its
build, and those that wait for it look there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from fpipe.runtimes.late import Board
from fpipe.runtimes.rank_error import RankError

_PATIENCE, _BRIEFLY = 5.0, 0.5


class Arrival:
    """One build of this process, from when it is called to its end. What it raises is left to be read.

    Raises:
        ValueError: there is no process group.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "runtime='distributed' is for processes that torch.distributed.init_process_group has joined."
            )
        self._me, self._board = dist.get_rank(), Board(PrefixStore("fpipe/arrivals", _get_default_store()), "")
        self._counted = list[tuple[Store, str]]()
        self._found: Exception | None = None
        self._with = list[int]()
        self._over = False

    def __enter__(self) -> Arrival:
        store = self._board.store
        found = self._board.ask(lambda: (store.add(f"{self._me}", 1), store.add(f"missed/{self._me}", 0)), _PATIENCE)
        self._number, self._missed = found or (0, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is None:
            said: dict[str, Any] = {"built": self._with}
        elif isinstance(error, RankError) or error is self._found:  # they are the same for all
            said = {"told": str(error)}
        else:
            said = {"failed": f"{type(error).__name__}: {error}"}
        self._board.ask(lambda: self._leave(said), _BRIEFLY)
        self._over = True

    def turn(self, board: Board, key: str, seconds: float) -> int | None:
        """Which build of some processes this is: each counts them. One that met nobody counts for the next, whoever
        that is with: so they are in step again."""
        self._counted.append((board.store, key))
        return board.ask(lambda: board.store.add(key, self._missed + 1), seconds)

    def expect(self, processes: Sequence[int]) -> None:
        """Say with whom this process is about to build."""
        self._with = [*processes]
        self._board.ask(lambda: self._say({"expects": self._with}), _PATIENCE)

    def why_not(self, missing: Sequence[tuple[int, str]], processes: Sequence[int]) -> Exception | None:
        """Why one of those missing does not come to where these processes meet, if that is known; each with its name.

        Who expects others may still come, later. Unless it waits for one that waits for it, and expects others than it.
        """
        self._found = None if self._over else self._why_not(missing, [*processes])
        return self._found

    def elsewhere(self, missing: Sequence[tuple[int, str]]) -> str:
        """Who of those that were waited for in vain builds with others, in words to go behind an error. Before, that is
        no mistake: they may come to this build next."""
        said = {} if self._over else {name: self._read(process) for process, name in missing}
        found = {name: one.get("built", one.get("expects", self._with)) for name, one in said.items()}
        return "".join(f"; {name} builds with processes {_and(of)}" for name, of in found.items() if of != self._with)

    def _why_not(self, missing: Sequence[tuple[int, str]], processes: list[int]) -> Exception | None:
        for process, name in missing:
            said = self._read(process)
            if "failed" in said:
                return RankError(f"{name} failed outside of its ops: {said['failed']}")
            if "told" in said:
                return RankError(said["told"])
            expected = said.get("expects", processes)
            for one in expected if expected != processes else ():
                other = self._read(one).get("expects", expected)
                if other != expected and process in other:
                    (a, of_a), (b, of_b) = sorted([(process, expected), (one, other)])
                    return ValueError(
                        f"process {a} is about to build a step with processes {_and(of_a)}, and process {b} with "
                        f"{_and(of_b)}: they differ in their mesh, or only one of their programs has data_parallel. "
                        "All ranks and replicas build the same program on the same mesh."
                    )
        return None

    def _read(self, process: int) -> dict[str, Any]:
        key, store = f"{process}/{self._number}", self._board.store
        return json.loads(store.get(key)) if store.check([key]) else {}

    def _say(self, what: dict[str, Any]) -> bool:
        self._board.store.set(f"{self._me}/{self._number}", json.dumps(what))
        return True

    def _leave(self, what: dict[str, Any]) -> bool:
        store = self._board.store
        if self._found or not self._counted:
            for own, key in self._counted:
                own.add(key, -self._missed - 1)
            store.add(f"missed/{self._me}", 1)
        elif self._missed:
            store.add(f"missed/{self._me}", -self._missed)
        store.delete_key(f"{self._me}/{self._number - 2}")  # others may still be at the one before this
        return self._say(what)


def _and(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
