"""Give each cell of rows of runs a step: one after the cell before it on its rank, and after what it reads elsewhere.

rank 0 | F0 F1 F2 B0 F3 B1 .. .. B2 B3        the cells of a run stand at regular distances, turn after turn, and so
rank 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..        do those that they read: a few numbers say it of all turns
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fpipe.orders.runs import KINDS, Columns

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")


class Needs(NamedTuple):
    """Reads of parts from other ranks, in columns of whole numbers.

    At turns `turn`, `turn + every`, .., `times` of them, part `part` reads what run `source` has made: `lag` steps
    before it at the first of them, were both runs to begin at once, and `more` further back at each one after.
    """

    part: Tensor
    turn: Tensor
    every: Tensor
    times: Tensor
    source: Tensor
    lag: Tensor
    more: Tensor


def spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For things that come so many times: which one it is each time, and for which time.

    >>> import torch
    >>> [each.tolist() for each in spread(torch.tensor([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    import torch

    which = torch.arange(len(counts)).repeat_interleave(counts)
    return which, torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]


class Steps:
    """The steps of runs: after how many what ranks do comes round (`cycle`), and how many a turn of each run takes
    (`size`)."""

    def __init__(self, known: Columns) -> None:
        import torch

        self.known = known
        often = known.turns > 1
        lengths: list[int] = known.cells[often].unique().tolist() or [1]
        common = math.lcm(*lengths)
        self.cycle = common if common <= 2 * max(lengths) else max(lengths)
        whole = torch.zeros(max(lengths) + 1, dtype=torch.int64)
        for length in lengths:
            whole[length] = next(n for n in range(length, self.cycle + 1) if self.cycle % n == 0)
        self.size = torch.where(often, whole[known.cells * often], known.cells)
        self.needs = self._needs()

    def _needs(self) -> Needs:
        import torch

        known, size = self.known, self.size
        stages = int(known.stage.max()) + 1
        forward = known.kind == KINDS.index("F")
        parts = (known.kind != KINDS.index("W")).nonzero()[:, 0]
        track = known.stage[parts] + stages * ~forward[parts]
        wanted = track + torch.where(forward[parts], -1, 1)
        inside = torch.where(forward[parts], known.stage[parts] > 0, known.stage[parts] < stages - 1)
        made = parts[track.argsort(stable=True)]
        counts = track.bincount(minlength=2 * stages)
        begin = counts.cumsum(0) - counts
        many = torch.where(inside, counts[wanted.clamp(0, 2 * stages - 1)], 0)
        which, turn = spread(many)
        part, maker = parts[which], made[begin[wanted[which]] + turn]
        part, maker = (each[known.rank[known.run[part]] != known.rank[known.run[maker]]] for each in (part, maker))
        run, source = known.run[part], known.run[maker]
        first, step, low, pace = known.first[part], known.step[part], known.first[maker], known.step[maker]
        turn = (-((first - low).div(step, rounding_mode="floor"))).clamp(min=0)
        high = low + (known.turns[source] - 1) * pace
        last = torch.minimum(known.turns[run] - 1, (high - first).div(step, rounding_mode="floor"))
        for _ in range(int(pace.max()) if len(pace) else 0):  # to the first turn that reads one of its microbatches
            turn += (first + turn * step - low) % pace != 0
        kept = (turn <= last) & ((first + turn * step - low) % pace == 0)
        part, maker, run, source, first, step, low, pace, turn, last = (
            each[kept] for each in (part, maker, run, source, first, step, low, pace, turn, last)
        )
        every = torch.lcm(step, pace) // step
        there = size[source]
        lag = turn * size[run] + known.slot[part] - (first + turn * step - low) // pace * there - known.slot[maker]
        more = every * size[run] - every * step // pace * there
        return Needs(part, turn, every, (last - turn) // every + 1, source, lag, more)

    @cached_property
    def begins(self) -> Tensor:
        """The step at which each run begins: the least at which all its cells come after what they read."""
        import torch

        known, needs = self.known, self.needs
        same = (known.rank[1:] == known.rank[:-1]).nonzero()[:, 0]
        least = 1 - torch.minimum(needs.lag, needs.lag + (needs.times - 1) * needs.more)
        to = torch.cat([same + 1, known.run[needs.part]])
        of = torch.cat([same, needs.source])
        distance = torch.cat([(self.size * known.turns)[same], least])
        # what the first turn of a run reads has begun before; others only tell how far behind it has to stay
        early = torch.cat([torch.ones_like(same), (needs.turn == 0).long()])
        pairs, number = torch.unique(to * len(known.turns) + of, return_inverse=True)
        far = torch.full_like(pairs, -(2**62)).scatter_reduce_(0, number, distance, "amax")
        first = torch.zeros_like(pairs).scatter_reduce_(0, number, early, "amax").bool()
        to, of = pairs // len(known.turns), pairs % len(known.turns)
        begins = [0] * len(known.turns)
        before = _grouped(to, list(zip(of.tolist(), far.tolist(), strict=True)), len(begins))
        order = _in_order(to[first], of[first], len(begins))
        most = 2 * int((self.size * known.turns).sum())
        while True:
            for number in order:
                least = 0
                for run, distance in before[number]:
                    reached = begins[run] + distance
                    if reached > least:
                        least = reached
                if least > begins[number]:
                    begins[number] = least
            found = torch.tensor(begins)
            if not (found[of] + far > found[to]).any():
                return found
            if max(begins) > most:
                raise ValueError("these rows have no common period: turns of their runs overtake each other.")
            order.reverse()  # what a run overtakes far behind is found on the way back


def _grouped(of: Tensor, each: Sequence[T], count: int) -> list[Sequence[T]]:
    """Things in the order of `of`, as lists of those of 0, 1, .."""
    ends = [0, *of.bincount(minlength=count).cumsum(0).tolist()]
    return [each[low:high] for low, high in pairwise(ends)]


def _in_order(to: Tensor, of: Tensor, count: int) -> list[int]:
    """Runs, each behind those that it follows; those that follow each other in a circle last."""
    by_source = of.argsort(stable=True)
    after = _grouped(of, to[by_source].tolist(), count)
    waits: list[int] = to.bincount(minlength=count).tolist()
    order = [number for number, left in enumerate(waits) if not left]
    for number in order:
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                order.append(other)
    return order + [number for number, left in enumerate(waits) if left > 0]
