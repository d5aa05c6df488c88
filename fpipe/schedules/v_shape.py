"""Down the ranks and back up: the first and the last stage share a rank, so the longest life and the shortest do."""

from __future__ import annotations

from itertools import permutations

from fpipe.orders.linear_pipeline import cells_of, linear_pipeline_of, shortest
from fpipe.program import Program
from fpipe.schedules.blocks import BlockTicks, in_blocks
from fpipe.schedules.by_cost import greedy
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.timing.costs import Costs, the_costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows

_FORWARD, _BACKWARD = 1, 2
_INTERVAL = 2 * (_FORWARD + _BACKWARD)  # a rank's work on one microbatch: two stages


@published(
    "1F1B-V",
    "Qi et al. 2024 (controllable memory, arXiv 2405.15362), appendix",
    idle="p=2, 4, 8 at F=B=W=1: 2, 7.5, 16.5; at most (p-1)T",
    peak="min(m, floor(4(p+1)/3)/2)",
    accepts="2p stages; any m",
    stages_per_rank=2,
    refuses=two_stages,
)
def one_f_one_b_v(ranks: int, *, costs: Costs | None = None) -> Transform:
    """1F1B over a V of stages: two thirds of its memory, without splitting a backward (arXiv 2405.15362).

    Stage s is on rank s on the way down and on rank 2p-1-s on the way up. A microbatch goes through as fast as the
    ticks allow that are still free on each rank; the next follows one rank's work later. No rank holds more than
    floor(4(p+1)/3) of its chunks, and the idle time is about five sixths of 1F1B's. The order is made for a backward
    that takes twice as long as a forward, and for no transfers. It is the order of the authors' code but where p is a
    multiple of three: there theirs holds one chunk more, and takes less (13 for 13.5 at p=m=3, F=B=W=1).

    Told the costs, the shortest of many orders is taken: the block with or without a wait where it turns, pulled tight
    at both ends or at its start alone, and those in which a rank runs what it can, for each list of what comes first.
    Where p is a multiple of three, that may hold one chunk more.

    Args:
        ranks: how many.
        costs: seconds by which to choose.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b_v(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  5F0 5B0 5F1 5B1  .   .  5F2 5B2 0B0  .  0B1  .  0B2
    rank 1 |  .  1F0 1F1 1F2 4F0  .  4F1 4B0  .  4B1 4F2 1B0  .  4B2 1B1  .  1B2  .
    rank 2 |  .   .  2F0 3F0 2F1 3F1 2F2  .  3B0 3F2 2B0 3B1 2B1  .  3B2 2B2  .   .
    """

    seconds = the_costs(costs)

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        def drawn(wait: int, mirror: bool) -> list[list[Key]]:
            ticks = (_FORWARD, _BACKWARD)
            return in_blocks(_block(ranks, wait), _INTERVAL, ticks, placement, program.microbatches, mirror=mirror)

        own = 0 if ranks % 3 else 2  # the places come round with every third rank, and soonest after this wait
        if costs is None:  # where nothing waits, a tighter end gains no tick, and loses some with transfers
            return drawn(own, own > 0)
        cap = (4 * (ranks + 1) // 3 + (ranks % 3 == 0)) / 2
        pipeline = linear_pipeline_of(program, placement, seconds, cap, 0.0, "one_f_one_b_v", fused=True)
        tables = [drawn(wait, mirror) for wait in (own, 2 - own) for mirror in (True, False)]
        found = greedy(pipeline, permutations(range(4)))
        return shortest(pipeline, [*tables, *(cells_of(pipeline, order.rows, "FB") for order in found)])

    return in_rows("v", ranks, rows)


def _block(ranks: int, wait: int) -> BlockTicks:
    """One microbatch through the V, which may wait an even number of ticks where it turns: each op at the first tick
    whose place in the interval is free.

    Rank r has its forwards at the places r and 2p-1-r (or two later) of the interval: an odd distance apart, so that
    the two backwards fit into what is left.
    """
    last = 2 * ranks - 1
    block = {("F", stage): stage + (wait if stage >= ranks else 0) for stage in range(2 * ranks)}
    now = block["F", last] + _FORWARD
    for stage in reversed(range(2 * ranks)):
        rank = min(stage, last - stage)
        down, up = block["F", rank] % _INTERVAL, block["F", last - rank] % _INTERVAL
        places: list[int] = []
        tick = down
        while len(places) < 2:
            tick += _FORWARD
            if tick % _INTERVAL == up:
                tick += _FORWARD
            places.append(tick % _INTERVAL)
            tick += _BACKWARD - _FORWARD
        if stage < ranks:
            places.remove(block["B", last - rank] % _INTERVAL)
        now += min((place - now) % _INTERVAL for place in places)
        block["B", stage] = now
        now += _BACKWARD
    return block
