"""Compare the claims of the processes of a step: by one hash, and if that differs, line by line.

    rank 0: program a     rank 1: program b        -->        both: rank 1 differs from rank 0 in its program: .. and ..

Where gloo connects the processes, the hashes travel there, and a peer that dies is noticed at once. Before that, and
where gloo connects none, they are written to the store.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from fpipe.runtimes.faults.agreement import Claims, advice_on, first_unequal_lines, hash_lines
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog

T = TypeVar("T")
# The first interval between two looks at the store, and the longest.
_POLL_SECONDS = 0.001, 0.02
# How long to wait for the lines that differ: both processes have come already, and write them at once.
_LINES_SECONDS = 0.5


class Meeting:
    """The processes of one build of a step, which compare their claims before they run it.

    Args:
        watchdog: of this process.
        processes: their ranks in the default group.
        names: how errors call them.

    Attributes:
        key: the processes as text, and the number of this build among theirs.
        gloo_backend: a backend of gloo that connects exactly them, in their order, once there is one.
    """

    def __init__(self, watchdog: Watchdog, processes: Sequence[int], names: Sequence[str]) -> None:
        faults, process = watchdog.faults, watchdog.faults.process
        self._watchdog, self._processes, self._names = watchdog, [*processes], names
        self._index = self._processes.index(process)
        group = ",".join(map(str, processes))
        build = self._ask(lambda: faults.store.add(f"built/{group}/{process}", 1))
        self.key = group, build
        self.gloo_backend: Any = None
        self._store, self._keys = PrefixStore(f"meet/{group}/{build}", faults.store), list[str]()
        self._gather_count = 0

    def agree(self, sync_point: str, claims: Claims, patience: float = 0.0) -> None:
        """Wait until all processes come to a point, such as "building the step", and compare their claims there.

        Args:
            sync_point: the point, as errors call it.
            claims: what must be the same, by name, on all processes that make a claim of that name.
            patience: seconds to wait for the others beyond the timeout.

        Raises:
            ValueError: two claims differ; the message says whose, and where first.
            RankError: the run is over.
        """
        watchdog, hashed_claims = self._watchdog, hash_lines(claims)
        # Only the ranks of the step itself go through its agreements in lockstep. Replicas, and processes along an
        # axis, have meetings of their own, and one that is past its own is not in another step.
        is_agreeing = self.key == watchdog.key
        omission, phase = f"did not come to {sync_point}", f"at {sync_point}"
        wait = PeerWait(tuple(self._processes), omission, phase, is_agreeing, patience, self.gloo_backend)
        if len(self._processes) == 1:
            return
        if self.gloo_backend is None or not self._hashes_are_equal([self.key, sync_point, hashed_claims], wait):
            outer_wait, watchdog.wait = watchdog.wait, wait
            self._refuse_difference(sync_point, self._gather_claims(hashed_claims), claims)
            watchdog.wait = outer_wait
        watchdog.agreement_counts[self.key] += 1

    # A rank that is told "not equal" goes on to `_gather_claims`, and so do all others: they have the same hashes.
    def _hashes_are_equal(self, statement: Sequence[Any], wait: PeerWait) -> bool:
        # 32 bytes from each process, whatever the number of claims.
        hash_bytes = hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).digest()
        own_hash = torch.frombuffer(bytearray(hash_bytes), dtype=torch.uint8)
        hashes = own_hash.new_empty(len(self._processes), len(own_hash))
        try:
            work = self.gloo_backend.allgather([[*hashes]], [own_hash])
        except RuntimeError as error:
            raise self._watchdog.as_rank_error(error, wait) from error
        self._watchdog.wait_for(work, wait)
        return bool((hashes == own_hash).all())

    def _gather_claims(self, hashed_claims: Any) -> list[Any]:
        """Return the claims of each process through the store, once all have written them."""
        # Keys are numbered: processes that come to unlike points find each other, and hear in which claim they differ.
        self._gather_count += 1
        store, number = self._store, self._gather_count
        keys = [f"{number}/{process}" for process in self._processes]
        poll_seconds, longest_poll = _POLL_SECONDS

        # Write first, then count: a process that reads the full count finds all claims.
        def write() -> int:
            store.set(keys[self._index], json.dumps(hashed_claims))
            return store.add(f"{number}/come", 1)

        count = self._ask(write)
        while count < len(keys):
            self._watchdog.refuse_ended()
            time.sleep(poll_seconds)
            poll_seconds = min(poll_seconds * 1.5, longest_poll)
            count = self._ask(lambda: store.add(f"{number}/come", 0))
        # Keys are deleted one meeting late: all processes have come here, so all have read those of the one before.
        old_keys, self._keys = self._keys, [keys[self._index], *([f"{number}/come"] * (self._index == 0))]
        self._ask(lambda: [store.delete_key(key) for key in old_keys])
        return [json.loads(text) for text in self._ask(lambda: store.multi_get(keys))]

    def _refuse_difference(self, sync_point: str, claims_by_process: Sequence[Any], claims: Claims) -> None:
        first_index_by_name = dict[str, int]()
        for index, process_claims in enumerate(claims_by_process):
            for name, claim in process_claims.items():
                first_index = first_index_by_name.setdefault(name, index)
                expected = claims_by_process[first_index][name]
                if claim != expected:
                    pair, own_claim = (index, first_index), claims.get(name, "")
                    difference = self._describe_difference(pair, (claim, expected), own_claim)
                    member, first_member = self._names[index], self._names[first_index]
                    raise ValueError(
                        f"{member} differs from {first_member} in its {name.partition('|')[0]}{difference}. This is "
                        f"{self._names[self._index]}; all ranks come to {sync_point} with the same.{advice_on(name)}"
                    )

    def _describe_difference(
        self, pair: tuple[int, int], pair_of_claims: tuple[Any, Any], lines: str | Sequence[str]
    ) -> str:
        if isinstance(pair_of_claims[0], str):
            return f": {pair_of_claims[0]} instead of {pair_of_claims[1]}"
        # These claims are hashes of many lines. Only now that they differ do the two write the lines, for all to read.
        store, keys = self._store, [f"{self._gather_count}/{index}/lines" for index in pair]

        def exchange() -> str:
            if self._index in pair:
                store.set(keys[pair.index(self._index)], json.dumps(lines))
            deadline = time.monotonic() + _LINES_SECONDS
            while not store.check(keys):
                if time.monotonic() > deadline:
                    return ""
                time.sleep(_POLL_SECONDS[0])
            line, expected = first_unequal_lines(*(json.loads(store.get(key)) for key in keys))
            return f": {line} instead of {expected}"

        return self._watchdog.faults.ask(exchange, 2 * _LINES_SECONDS) or ""

    def _ask(self, question: Callable[[], T]) -> T:
        answer = self._watchdog.faults.ask(question)
        if answer is None:
            # The process that keeps the store may have left since the fault was read.
            self._watchdog.refuse_ended()
            raise RankError(self._watchdog.faults.blame_store("the ranks cannot meet"))
        return answer
