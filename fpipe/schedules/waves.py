"""Microbatches that go down the ranks and back, two slots apart, so that no two of them ever meet on a rank.

Number what a microbatch does from 0: its forwards, one after the other, then its backwards. Number q of the i-th
microbatch gets slot q + 2i. On one rank, numbers of one parity are 2p apart, so p microbatches (p/2 in each of two
directions) fill every other slot, and those of the other parity the slots between:

    slot      0   1   2   3   4   5   6   7   8   9
    rank 0 | 0F0  .  0F1  .   .   .   .  0B0  .  0B1        down: number q is on rank q, then back
           |  .   .   .  3F2 3B2 3F3 3B3  .   .   .         up: the other way round

These are the orders of Chimera and of Hanayo, which turns Chimera's two directions into one wave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fpipe.limits import whole
from fpipe.program import Program, ProgramError, building
from fpipe.schedules.blocks import BlockTicks, in_blocks
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.schedules.search_request import searched
from fpipe.timing.costs import Costs, the_costs
from fpipe.transforms._rewrite import Transform, transforming
from fpipe.transforms.cells import Key
from fpipe.transforms.place import stage_ranks, two_ways
from fpipe.transforms.reorder import by_table, in_rows

Way = tuple[Iterable[int], Sequence[tuple[int, Sequence[int]]]]
"""Microbatches, and the ranks they visit, each with the stages it runs then."""


def _even(ranks: int, stages: int, microbatches: int) -> str | None:
    if ranks % 2:
        return (
            f"the number of ranks is even, found {ranks}: on an odd number the two directions meet in the same slot of "
            "a rank. Use one rank more or less, or fpipe.schedules.one_f_one_b."
        )
    if microbatches % 2:
        return f"the number of microbatches is even, found {microbatches}: one half goes down, the other half up."
    return None


@published(
    "Chimera",
    "Li, Hoefler, SC 2021, figure 3, table 2",
    idle="(p-2)(m/p+1)F for B+W=2F and p | m; at m=p bubble (p-2)/(3p/2+p-2)",
    peak="min(p/2, p-r, m/2) + min(p/2, r+1, m/2)",
    accepts="p and m even",
    refuses=_even,
)
def chimera(ranks: int) -> Transform:
    """Two pipelines in opposite directions, each in the bubbles of the other (Chimera, SC 2021, figure 3).

    Every stage is on two ranks, r and p-1-r; its gradients meet in an ADD. The first half of the microbatches goes
    down, the second up, p/2 of each at a time: a unit. With more microbatches units follow each other, and fewer leave
    slots empty (paper, section 3.5). For m=p and B+W=2F the bubble is (p-2)/(3p/2+p-2).

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.chimera(4))(fpipe.program(4))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1  .  3F2 3B2 3F3 3B3 0B0  .  0B1
    rank 1 |  .  1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1  .
    rank 2 |  .  1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3  .
    rank 3 | 0F2 0F3  .  3F0 3B0 3F1 3B1 0B2  .  0B3
    """

    @transforming
    def transform(program: Program) -> Program:
        with building():
            down, homes = two_ways(program.stages, ranks)
            shares = [[stage for stage, rank in enumerate(down) if rank == own] for own in range(ranks)]
            half = program.microbatches // 2
            ways = [
                (range(half), [*enumerate(shares)]),
                (range(half, 2 * half), [(ranks - 1 - rank, share) for rank, share in enumerate(shares)]),
            ]
            return by_table(program, _in_slots(ways, ranks, unit=ranks // 2), move=True, homes=homes)

    return transform


def _turns(ranks: int, stages: int, microbatches: int) -> str | None:
    if ranks < 2:
        return "a wave turns at the first and the last of at least 2 ranks, found 1. Use fpipe.schedules.one_f_one_b."
    if stages < 2 * ranks:
        return (
            f"a wave goes down the ranks and back up, through {2 * ranks} stages on {ranks} ranks; this program has "
            f"{stages}. Cut the model finer, or use fewer ranks."
        )
    return None


@published(
    "Hanayo",
    "Liu et al. 2023, arXiv 2308.15762",
    idle="(p-1)(m/p+1)F/w for w waves, B+W=2F and p | m; at m=p (2p-2)/w",
    peak="min(m, p - (p-1-r)/v) for v=2w",
    accepts="p >= 2; at least 2 stages a rank, 2w for w waves",
    stages_per_rank=2,
    refuses=_turns,
    stages_per={"waves": 2},
)
def hanayo(ranks: int, waves: int | None = None) -> Transform:
    """Chimera's order without replicas: the stages go down the ranks and back up, in one or more waves (Hanayo, 2023).

    Each of the `waves` takes two stages (or as many groups of neighbours) on every rank, so that no transfer is needed
    where a wave turns. More waves, less bubble, more transfers: (2p-2)/waves forwards of a device's share for m=p and
    B+W=2F. More than p microbatches run in units of p, of which the next starts in the drain of the one before.

    Args:
        ranks: at least 2.
        waves: how often a microbatch goes down and back up; by default as often as the stages allow.

    Raises:
        ProgramError: fewer stages than the waves pass.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.hanayo(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  5F0 5B0 5F1 5B1 5F2 5B2 0B0  .  0B1  .  0B2
    rank 1 |  .  1F0 1F1  .  4F0 1F2 4F1 4B0 4F2 4B1 1B0 4B2 1B1  .  1B2  .
    rank 2 |  .   .  2F0 3F0 2F1 3F1 2F2 3F2 3B0 2B0 3B1 2B1 3B2 2B2  .   .
    """
    if waves is not None:
        whole("waves", waves)

    @transforming
    def transform(program: Program) -> Program:
        most = program.stages // (2 * ranks)
        if waves is not None and waves > most:
            raise ProgramError(
                f"hanayo: waves={waves} on {ranks} ranks passes {2 * ranks * waves} stages, found {program.stages}. "
                "Cut the model finer, or use fewer waves or ranks."
            )
        turning = [*range(ranks), *reversed(range(ranks))] * (waves or most)
        chunks = stage_ranks("linear", program.stages, len(turning))
        shares = [[stage for stage, chunk in enumerate(chunks) if chunk == own] for own in range(len(turning))]
        rows = _in_slots([(range(program.microbatches), [*zip(turning, shares, strict=True)])], ranks, unit=ranks)
        return in_rows([turning[chunk] for chunk in chunks], None, lambda program, placement: rows)(program)

    return transform


def _in_slots(ways: Iterable[Way], ranks: int, *, unit: int) -> list[list[Key]]:
    """The cells of each rank by their slots; units of microbatches follow each other without a gap."""
    slots: list[list[tuple[int, str, int, Sequence[int]]]] = [[] for _ in range(ranks)]
    for microbatches, visits in ways:
        turn = 2 * len(visits)
        for count, microbatch in enumerate(microbatches):
            start = count // unit * turn + 2 * (count % unit)
            for number, (rank, stages) in enumerate(visits):
                slots[rank].append((start + number, "F", microbatch, stages))
                slots[rank].append((start + turn - 1 - number, "B", microbatch, stages[::-1]))
    return [
        [(kind, stage, microbatch, None) for _, kind, microbatch, stages in sorted(row) for stage in stages]
        for row in slots
    ]


# Down the ranks and back up: the first and the last stage share a rank, so the longest life and the shortest do.

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
    searches=True,
)
def one_f_one_b_v(ranks: int, *, costs: Costs | None = None) -> Transform:
    """1F1B over a V of stages: two thirds of its memory, without splitting a backward (arXiv 2405.15362).

    Stage s is on rank s on the way down and on rank 2p-1-s on the way up. A microbatch goes through as fast as the
    ticks allow that are still free on each rank; the next follows one rank's work later. No rank holds more than
    floor(4(p+1)/3) of its chunks, and the idle time is about five sixths of 1F1B's. The order is made for a backward
    that takes twice as long as a forward, and for no transfers. It is the order of the authors' code but where p is a
    multiple of three: there theirs holds one chunk more, and takes less (13 for 13.5 at p=m=3, F=B=W=1).

    Told the costs, an order is searched that holds no more; where p is a multiple of three, one chunk more.

    Args:
        ranks: how many.
        costs: seconds by which to search an order.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b_v(3))(fpipe.program(6))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  5F0 5B0 5F1 5B1  .   .  5F2 5B2 0B0  .  0B1  .  0B2
    rank 1 |  .  1F0 1F1 1F2 4F0  .  4F1 4B0  .  4B1 4F2 1B0  .  4B2 1B1  .  1B2  .
    rank 2 |  .   .  2F0 3F0 2F1 3F1 2F2  .  3B0 3F2 2B0 3B1 2B1  .  3B2 2B2  .   .
    """

    def drawn(wait: int) -> Transform:
        def rows(program: Program, placement: list[int]) -> list[list[Key]]:
            mirror = wait > 0  # where nothing waits, a tighter end gains no tick, and loses some with transfers
            ticks = (_FORWARD, _BACKWARD)
            return in_blocks(_block(ranks, wait), _INTERVAL, ticks, placement, program.microbatches, mirror=mirror)

        return in_rows("v", ranks, rows)

    if costs is None:
        return drawn(0 if ranks % 3 else 2)  # the places come round with every third rank, soonest after this wait
    cap = (4 * (ranks + 1) // 3 + (ranks % 3 == 0)) / 2
    starts = drawn(0), drawn(2)
    return searched("one_f_one_b_v", "v", ranks, the_costs(costs), cap, split_backward=False, starts=starts)


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
