"""Let the ranks of a step agree on what they are about to do, through the store of their group.

    rank 0: program a     rank 1: program b     rank 2 never comes        -->        rank 2 did not come to building ..

What is left in a store waits for nobody. So a rank that never comes is named, and one that cannot go on says why. One
that is killed meanwhile says nothing, but its connections close, which gloo knows at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.runtimes.faults.agreement import About, as_sent, first_difference, way_out
from fpipe.runtimes.faults.lost_rank import Board, Host, who_is_late
from fpipe.runtimes.faults.rank_error import LostRank, RankError
from fpipe.runtimes.faults.watchdog import NEVER_SENT, Watchdog
from fpipe.torch_private.processes import backend_on, default_store, is_kept_by_process, timeout_of, world_group

_TICKS = 0.001, 0.02
_BRIEFLY = 0.5
_LOOK = 0.5
_LINGER = 1.0


class Meeting:
    """Where the ranks of a step, and its replicas if they come too, leave word for one another.

    Args:
        processes: of each replica those of its ranks, as torch.distributed numbers them.
        at: this process's place among all of them.
        group: one that it is in, of the same timeout.
        timeout: seconds to wait for another rank; without it the group's own.
        names: what each is called; by default its rank, and its replica.

    Attributes:
        board: what of the group's store is of this build alone, the last of those `built`.
    """

    def __init__(
        self,
        processes: Sequence[Sequence[int]],
        at: int,
        group: ProcessGroup,
        timeout: float | None,
        watchdog: Watchdog,
        names: Sequence[str] = (),
    ) -> None:
        every, default = [one for each in processes for one in each], default_store()
        of = [f" of replica {replica}" for replica in range(len(processes))] if len(processes) > 1 else [""]
        self.names = [*names] or [
            f"rank {rank}{word}" for word, each in zip(of, processes, strict=True) for rank in range(len(each))
        ]
        self.at, self._all, self._processes, self._closed = at, range(len(every)), every, set[int]()
        self.watchdog, self.size = watchdog, len(every)
        self.seconds = timeout_of(group).total_seconds() if timeout is None else timeout
        # The name tells these from a group that was there before; other groups of a mesh have the same name.
        name = group.group_name if len(processes) == 1 else world_group().group_name
        store = PrefixStore(f"fpipe/{name}/{every}", default)
        replica, rank = divmod(at, len(processes[0]))
        names = [self.names[at], f"replica {replica}: rank {rank}"]
        board = Board(store, _host(default, every, self.names), names)
        built = board.ask(lambda: store.add(f"built/{at}", 1), self.seconds)
        if built is None:
            raise LostRank(board.unanswered("the process group cannot be used"))
        self.built = built
        self.board, self._before = Board(PrefixStore(str(built), store), board.host, names), ""

    def agree(self, where: str, about: About, patience: float = 0.0) -> None:
        """All ranks must come to a place, such as "building the step", and be about to do the same there.

        Args:
            about: what is to be the same, by name, as far as another rank says it too.
            patience: seconds to wait for the others beyond the timeout.

        Raises:
            ValueError: it is not; who differs from which other rank, and where first.
            RankError: a rank has said instead why it cannot go on, or has not come in time.
        """
        try:
            self._agree(where, about, self.seconds + patience)
        except (ValueError, RankError):
            self.read(where)
            raise

    def read(self, where: str) -> None:
        """Tell who keeps the store that this process has read there why another goes."""
        self.board.ask(lambda: self.board.store.set(f"{_key(where, self.at)}/read", ""), _BRIEFLY)

    def let_read(self, *places: str) -> None:
        """If this process keeps the store, wait a moment until the others have read there why this rank goes."""
        store, host = self.board.store, self.board.host

        def wait() -> None:
            ends = time.monotonic() + _LINGER
            others = {at for at in self._all if at != self.at}
            while others and time.monotonic() < ends:
                others -= {at for at in others for one in places if store.check([f"{_key(one, at)}/read"])}
                time.sleep(_TICKS[0])

        if host is not None and host.rank == self.at:
            self.board.ask(wait, _LINGER + _BRIEFLY)

    def _agree(self, where: str, about: About, seconds: float) -> None:
        said = self._gathered(where, as_sent(about), seconds)
        missing = [at for at in self._all if at not in said]
        gone = next((at for at in missing if at in self._closed), None)
        refused = next((of for of in said.values() if isinstance(of, str)), None)
        if refused is not None:
            raise RankError(refused)
        if missing:
            self.watchdog.refuse_ended()
        if gone is not None:
            words = f"{self.names[gone]} is gone, on the way to {where}"
            raise LostRank(who_is_late(self.board, self.at, gone, words, gone=True))
        if missing:
            who = " and ".join(self.names[at] for at in missing)
            words = f"{who} did not come to {where} in {seconds:g} s"
            raise LostRank(who_is_late(self.board, self.at, missing[0], words))
        first = dict[str, int]()
        for at in self._all:
            for name, of in said[at].items():
                one = first.setdefault(name, at)
                if of != said[one][name]:
                    raise ValueError(
                        f"{self.names[at]} differs from {self.names[one]} in its {name.partition('|')[0]}"
                        + self._difference(where, (at, one), (of, said[one][name]), about.get(name, ""))
                        + f". This is {self.names[self.at]}; all ranks come to {where} with the same.{way_out(name)}"
                    )

    def _difference(self, where: str, ranks: tuple[int, int], said: tuple[Any, Any], mine: str | Sequence[str]) -> str:
        """Where two ranks differ first, in words that both say; they leave their lines for all to read."""
        words: Any = said
        if not isinstance(said[0], str):
            store, keys = self.board.store, [f"{_key(where, rank)}/lines" for rank in ranks]

            def exchange() -> Any:
                if self.at in ranks:
                    store.set(keys[ranks.index(self.at)], json.dumps(mine))
                ends = time.monotonic() + _LOOK
                while not store.check(keys):
                    if time.monotonic() > ends:
                        return None
                    time.sleep(_TICKS[0])
                return first_difference(*(json.loads(store.get(key)) for key in keys))

            words = self.board.ask(exchange, _LOOK + _BRIEFLY)
        return f": {words[0]} instead of {words[1]}" if words else ""

    def refuse(self, where: str, words: str) -> None:
        """Say why this rank cannot go on, to whoever waits for it there, unless it has come already."""
        key = _key(where, self.at)
        self.board.ask(lambda: self.board.store.compare_set(key, "", json.dumps(words)), _BRIEFLY)

    def _gathered(self, where: str, mine: Mapping[str, Any], seconds: float) -> dict[int, Any]:
        """Collect the word that each rank in time has left; at once if one refuses."""
        found, store = dict[int, Any](), self.board.store

        def gather() -> bool:
            store.set(_key(where, self.at), json.dumps(dict(mine)))
            ends, tick = time.monotonic() + seconds, _TICKS[0]
            look = time.monotonic() + _LOOK
            while True:
                if time.monotonic() > look:
                    self._look([rank for rank in self._all if rank not in found])
                    look = time.monotonic() + _LOOK
                for rank in self._all:
                    if rank not in found and store.check([_key(where, rank)]):
                        found[rank] = json.loads(store.get(_key(where, rank)))
                refused = any(isinstance(said, str) for said in found.values()) or self.watchdog.ended
                if refused or time.monotonic() > ends or not self._closed.issubset(found):
                    return True
                if len(found) == len(self._all):
                    if self._before:  # all have come here, so all have read that
                        store.delete_key(self._before)
                    self._before = _key(where, self.at)
                    return True
                time.sleep(tick)
                tick = min(tick * 1.5, _TICKS[1])

        if self.board.ask(gather, seconds + _BRIEFLY) is None:
            raise LostRank(self.board.unanswered(f"the ranks cannot meet at {where}"))
        return found

    def _look(self, missing: Sequence[int]) -> None:
        """See whose connections are closed: gloo refuses at once to receive from them. What is never sent stays
        asked for, in some bytes."""
        with suppress(RuntimeError):  # gloo carries nothing
            world = backend_on(world_group(), torch.device("cpu"))
            for at in missing:
                try:
                    world.recv([torch.empty(1)], self._processes[at], NEVER_SENT)
                except RuntimeError:
                    self._closed.add(at)


def _key(where: str, rank: int) -> str:
    return f"{where}/{rank}"


def _host(store: Any, processes: Sequence[int], names: Sequence[str]) -> Host | None:
    """Who keeps a store; None where nobody does, or the launcher."""
    if not is_kept_by_process(store) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    at = processes.index(0) if 0 in processes else None
    return Host(at, "process 0" if at is None else names[at])
