"""Put what each rank measured of a step on one clock, that of rank 0.

rank 0: 1F0 at 5.2      rank 1: 1F1 at 903.1, 898 ahead        -->        1F0 at 5.2, 1F1 at 5.1
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fpipe.runtimes.recorder import Recorder

_PINGS = 10


def ahead_of_rank_0(group: ProcessGroup, rank: int) -> float:
    """Seconds that this process's clock is ahead of rank 0's; all ranks call it. The answer that took least time is
    taken to have been on its way as long as the question."""
    carrier: Any = group
    word = torch.zeros((), dtype=torch.float64)
    found = 0.0
    for other in range(1, group.size()):
        best = float("inf")
        for _ in range(_PINGS) if rank in (0, other) else ():
            if rank == other:
                carrier.recv([word], 0, 0).wait()
                carrier.send([word.fill_(time.perf_counter())], 0, 0).wait()
                continue
            asked = time.perf_counter()
            carrier.send([word], other, 0).wait()
            carrier.recv([word], other, 0).wait()
            took = time.perf_counter() - asked
            if took < best:
                best, found = took, word.item() - asked - took / 2
        if rank == 0:
            carrier.send([word.fill_(found)], other, 0).wait()
        elif rank == other:
            carrier.recv([word], 0, 0).wait()
            found = word.item()
    return 0.0 if rank == 0 else found


def put_together(recorder: Recorder, group: ProcessGroup, rank: int, ahead: float) -> None:
    """Add to what this rank recorded what all others did; all ranks call it."""
    began = recorder.began - ahead
    mine = began, recorder.ran, recorder.account.peak[rank], [one for one in recorder.steps if one[2] == rank]
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    first = min(started for started, *_ in every)
    recorder.ran = [
        (op, start + (started - first), end + (started - first)) for started, ran, *_ in every for op, start, end in ran
    ]
    recorder.ran.sort(key=lambda event: event[1])
    recorder.account.peak = [peak for _, _, peak, _ in every]
    recorder.steps = [(when + (started - first), *rest) for started, *_, steps in every for when, *rest in steps]
