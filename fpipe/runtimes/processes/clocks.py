"""Put what each rank measured of a step on one clock, that of rank 0.

rank 0: 1F0 at 5.2      rank 1: 1F1 at 903.1, 898 ahead        -->        1F0 at 5.2, 1F1 at 5.1
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.meaning.recorder import Held, Notes, Recorder

_PINGS = 50  # on a busy machine the least of ten was off by more than an op took


def ahead_of_rank_0(group: ProcessGroup, rank: int, device: torch.device) -> float:
    """Seconds that this process's clock is ahead of rank 0's; all ranks call it. The answer that took least time is
    taken to have been on its way as long as the question."""
    carrier: Any = group
    word = torch.zeros((), dtype=torch.float64, device=device)
    found = 0.0
    for other in range(1, group.size()):
        best = float("inf")
        for _ in range(_PINGS) if rank in (0, other) else ():
            if rank == other:
                _gone(carrier.recv, word, 0)
                _gone(carrier.send, word.fill_(time.perf_counter()), 0)
                continue
            asked = time.perf_counter()
            _gone(carrier.send, word, other)
            theirs = _gone(carrier.recv, word, other)
            took = time.perf_counter() - asked
            if took < best:
                best, found = took, theirs - asked - took / 2
        if rank == 0:
            _gone(carrier.send, word.fill_(found), other)
        elif rank == other:
            found = _gone(carrier.recv, word, 0)
    return 0.0 if rank == 0 else found


def _gone(carry: Callable[..., Any], word: Tensor, peer: int) -> float:
    """The number, once it has come or gone. On a device a wait alone does not hold up the host, whose clock this is."""
    carry([word], peer, 0).wait()
    return word.item()


def put_together(
    recorder: Recorder, notes: Notes, group: ProcessGroup, rank: int, ahead: float, device: torch.device
) -> None:
    """Add to what this rank noted what all others did, in the first step also what they hold; all ranks call it. It
    travels on a device that the group carries."""
    if recorder.held is None:
        own = recorder.counted(notes)
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        changes = [one for other, found in enumerate(every) for one in found.changes if one[1] == other]
        recorder.held = Held(tuple(found.peak[other] for other, found in enumerate(every)), changes)
    began = [notes.began - ahead if other == rank else 0.0 for other in range(group.size())]
    own_times = [now - ahead if now else 0.0 for now in notes.times]  # each row is of one rank: a sum has them all
    both = torch.tensor([*own_times, *began], dtype=torch.float64, device=device)
    dist.all_reduce(both, group=group)
    (*notes.times,) = both[: len(own_times)].tolist()
    notes.began = both[len(own_times) :].min().item()
