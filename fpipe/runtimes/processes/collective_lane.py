"""Wait for collectives of a lane, on the host or by streams, and name the process that does not take part in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.lane import Lane, Launched


class CollectiveLane(Lane):
    """The collectives of a rank, over groups by their names."""

    def __init__(self, watchdog: Watchdog, groups: Mapping[str, ProcessGroup], on_streams: bool) -> None:
        super().__init__(self.wait_on, on_streams)
        self.watchdog, self.on_streams = watchdog, on_streams
        self._groups, self._waits = groups, dict[tuple[str, str], PeerWait]()

    def wait_on(self, launched: Launched, what: str) -> None:
        """Wait for a collective; with NCCL the current stream does."""
        self.watchdog.wait_for(launched.work, self.wait_of(launched.group, what), self.on_streams)

    def wait_of(self, name: str, what: str) -> PeerWait:
        """Return the wait for the processes of a group."""
        wait = self._waits.get((name, what))
        if wait is None:
            group = self._groups[name]
            processes = tuple(dist.get_process_group_ranks(group))
            wait = self._waits[name, what] = PeerWait(processes, f"did not take part in {what}", group=group)
        return wait

    def end(self, posted: Collection[int] = ()) -> None:
        """Wait for what nobody has read, with NCCL on the host too, and note when all was over; what is `posted` began
        when its rank was done with that."""
        self.wait_for_all()
        for name, (work, what) in self.last_by_group.items():
            self.watchdog.settle(work, self.wait_of(name, what))
        self.notes.add(posted)
