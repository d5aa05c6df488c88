"""Let the processes of a step agree on what they are about to do: by a hash, and if that differs line by line.

    rank 0: program a     rank 1: program b        -->        both: rank 1 differs from rank 0 in its program: .. and ..

Where gloo connects them, hashes travel there, and whoever dies meanwhile is noticed at once. Before that, and where
nothing does, they are written to the store.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.runtimes.faults.agreement import About, as_sent, first_difference, way_out
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog

T = TypeVar("T")
_TICKS = 0.001, 0.02
_LINES = 0.5
"""Seconds in which the lines that differ are to be there: all have come."""


class Meeting:
    """Where processes agree on one build of a step.

    Args:
        watchdog: of this process.
        processes: as torch.distributed numbers them.
        names: how errors call them.

    Attributes:
        key: the processes in words, and the number of this build among theirs.
        carrier: a backend of gloo that connects exactly them, in their order, once there is one.
    """

    def __init__(self, watchdog: Watchdog, processes: Sequence[int], names: Sequence[str]) -> None:
        faults, process = watchdog.faults, watchdog.faults.process
        self._watchdog, self._processes, self._names = watchdog, [*processes], names
        self._index = self._processes.index(process)
        group = ",".join(map(str, processes))
        build = self._ask(lambda: faults.store.add(f"built/{group}/{process}", 1))
        self.key = group, build
        self.carrier: Any = None
        self._store, self._keys = PrefixStore(f"meet/{group}/{build}", faults.store), list[str]()

    def agree(self, where: str, about: About, patience: float = 0.0) -> None:
        """Wait until all processes come to a place, such as "building the step", about to do the same there.

        Args:
            about: what is to be the same, by name, as far as another process says it too.
            patience: seconds to wait for the others beyond the timeout.

        Raises:
            ValueError: it is not; who differs from which other, and where first.
            RankError: the run is over.
        """
        watchdog, sent = self._watchdog, as_sent(about)
        # Replicas, and processes along an axis, meet in their own time: who is past that is not ahead.
        meets = self.key == watchdog.key
        wait = PeerWait(
            tuple(self._processes), f"did not come to {where}", f"at {where}", meets, patience, self.carrier
        )
        if len(self._processes) == 1:
            return
        if self.carrier is None or not self._have_one_hash([self.key, where, sent], wait):
            before, watchdog.wait = watchdog.wait, wait
            self._refuse_difference(where, self._gathered(where, sent), about)
            watchdog.wait = before
        watchdog.met[self.key] += 1

    def _have_one_hash(self, sent: Sequence[Any], wait: PeerWait) -> bool:
        digest = hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).digest()
        own_hash = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        hashes = own_hash.new_empty(len(self._processes), len(own_hash))
        try:
            work = self.carrier.allgather([[*hashes]], [own_hash])
        except RuntimeError as error:
            raise self._watchdog.lost(error, wait) from error
        self._watchdog.wait_for(work, wait)
        return bool((hashes == own_hash).all())

    def _gathered(self, where: str, sent: Any) -> list[Any]:
        """Return the facts of each process, once all have written them."""
        store, keys, tick = self._store, [f"{where}/{process}" for process in self._processes], _TICKS[0]

        def write() -> int:
            store.set(keys[self._index], json.dumps(sent))
            return store.add(f"{where}/come", 1)

        count = self._ask(write)
        while count < len(keys):
            self._watchdog.refuse_ended()
            time.sleep(tick)
            tick = min(tick * 1.5, _TICKS[1])
            count = self._ask(lambda: store.add(f"{where}/come", 0))
        # All have come here, so all have read what was written before.
        old_keys, self._keys = self._keys, [keys[self._index], *([f"{where}/come"] * (self._index == 0))]
        self._ask(lambda: [store.delete_key(key) for key in old_keys])
        return [json.loads(text) for text in self._ask(lambda: store.multi_get(keys))]

    def _refuse_difference(self, where: str, facts_by_process: Sequence[Any], about: About) -> None:
        """Raise ValueError for the first process of which a fact differs from that of an earlier one."""
        first_with = dict[str, int]()
        for index, facts in enumerate(facts_by_process):
            for name, fact in facts.items():
                earlier = first_with.setdefault(name, index)
                expected = facts_by_process[earlier][name]
                if fact != expected:
                    difference = self._difference(where, (index, earlier), (fact, expected), about.get(name, ""))
                    raise ValueError(
                        f"{self._names[index]} differs from {self._names[earlier]} in its {name.partition('|')[0]}"
                        f"{difference}. This is {self._names[self._index]}; all ranks come to {where} with the same."
                        f"{way_out(name)}"
                    )

    def _difference(self, where: str, pair: tuple[int, int], facts: tuple[Any, Any], lines: str | Sequence[str]) -> str:
        """Return where two differ first. Where these facts are hashes, the two write their lines, for all to read."""
        if isinstance(facts[0], str):
            return f": {facts[0]} instead of {facts[1]}"
        store, keys = self._store, [f"{where}/{index}/lines" for index in pair]

        def exchange() -> str:
            if self._index in pair:
                store.set(keys[pair.index(self._index)], json.dumps(lines))
            deadline = time.monotonic() + _LINES
            while not store.check(keys):
                if time.monotonic() > deadline:
                    return ""
                time.sleep(_TICKS[0])
            line, expected = first_difference(*(json.loads(store.get(key)) for key in keys))
            return f": {line} instead of {expected}"

        return self._watchdog.faults.ask(exchange, 2 * _LINES) or ""

    def _ask(self, question: Callable[[], T]) -> T:
        answer = self._watchdog.faults.ask(question)
        if answer is None:
            self._watchdog.refuse_ended()  # who keeps the store may leave once the fault is read
            raise RankError(self._watchdog.faults.unanswered("the ranks cannot meet"))
        return answer
