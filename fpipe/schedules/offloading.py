"""Schedules that hold less: residuals wait for their backward in another rank's memory, or on the host."""

from __future__ import annotations

from fpipe.schedules.basic import one_f_one_b
from fpipe.schedules.in_turn import even_chunks
from fpipe.schedules.interleaved import group_interleaved
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.offload import offload


@published("BPipe", "Kim et al. 2023 (ICML), section 3", idle="(p-1)T", peak="min(m, p-r), ceil((p+2)/2) at most")
def bpipe(ranks: int) -> Transform:
    """1F1B in which rank p-1-r lends memory to rank r, so that every rank holds about half the largest peak.

    In 1F1B ranks r and p-1-r together hold p+1 microbatches. A rank that would hold more than ceil((p+2)/2) moves
    residuals to its partner's memory: those that it reads last, as soon as they are written. It loads them just before
    their backward. The moves are one-sided OFFLOADs in the copy lane; the partner does nothing. If a move takes no
    longer than a forward, the step takes as long as 1F1B.

    >>> import fpipe
    >>> eight = fpipe.split(8)(fpipe.program(4))
    >>> print(fpipe.simulate(fpipe.schedules.one_f_one_b(4)(eight)))
    makespan 33, span 33, bubble 27.3%, peak per rank [4, 3, 2, 1]
    >>> program = fpipe.schedules.bpipe(4)(eight)
    >>> print(fpipe.simulate(program, fpipe.Costs(offload=1)))
    makespan 33, span 33, bubble 27.3%, peak per rank [3, 3, 2, 3]
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 0F3  .   .   .  0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4  .  0B5  .  0B6  .  0B7
    rank 1 |  .  1F0 1F1 1F2  .   .  1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5  .  1B6  .  1B7  .
    rank 2 |  .   .  2F0 2F1  .  2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6  .  2B7  .   .
    rank 3 |  .   .   .  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7  .   .   .
    >>> print(*(cell for cell in program.table(comms=True)[0][3:15] if "SPLIT" not in cell))
    0F1 OFFLOAD(res[0,1]@3) 0F2 0F3 OFFLOAD(res[0,3]@3) 0B0 0F4 LOAD(res[0,1]@3@0) 0B1
    """
    # (p+3)//2 is ceil((p+2)/2), the paper's cap.
    return chain(one_f_one_b(ranks), offload(cap=(ranks + 3) // 2, destination=lambda rank: ranks - 1 - rank))


@published(
    "PipeOffload",
    "Wan et al. 2025, arXiv 2503.01328, section 3",
    idle="(p-1)(F+B)/v, p divides m",
    peak="2/v, or `cap`",
    accepts="stages a multiple of p; any m",
    stages_per_rank=2,
    refuses=even_chunks,
)
def pipe_offload(ranks: int, *, group: int | None = None, cap: float | None = None, lead: int = 0) -> Transform:
    """Group-interleaved 1F1B whose residuals wait on the host.

    Residuals leave after their forward and return during the op before their backward. If a copy takes no longer than a
    forward and p divides m, the copies cost no time. A rank with v chunks holds 2/v microbatches at any depth: the
    chunk in use, and one that is copied.

    Args:
        ranks: the number of ranks.
        group: of `group_interleaved`, the base.
        cap: the microbatches a rank may hold. Then only as many leave as needed, those first that wait longest (the
            paper's selective offload); by default all that would be away for at least one op of their rank (its full
            offload).
        lead: how many ops earlier a LOAD starts than the op before its reader; each costs a chunk held.

    >>> import fpipe
    >>> eight, costs = fpipe.split(8)(fpipe.program(8)), fpipe.Costs(0.5, 0.5, 0.5, offload=0.5)
    >>> print(fpipe.simulate(fpipe.schedules.group_interleaved(4)(eight), costs))
    makespan 27, span 27, bubble 11.1%, peak per rank [4, 3.5, 3, 2.5]
    >>> print(fpipe.simulate(fpipe.schedules.pipe_offload(4)(eight), costs))
    makespan 27, span 27, bubble 11.1%, peak per rank [1, 1, 1, 1]
    >>> print(fpipe.simulate(fpipe.schedules.pipe_offload(4, cap=2)(eight), costs))
    makespan 27, span 27, bubble 11.1%, peak per rank [2, 2, 2, 2]
    >>> three = fpipe.schedules.pipe_offload(3)(fpipe.split(3)(fpipe.program(6)))
    >>> print(fpipe.plot(three))
    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2  .   .  3I0 3W0  .  3I1 3W1  .  3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1 |  .  1F0 1F1 1F2 4F0 4F1  .  4I0 4W0 4F2 4I1 4W1  .  4I2 4W2 1I0 1W0 1I1 1W1 1I2 1W2  .
    rank 2 |  .   .  2F0 2F1 2F2 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 2I0 2W0 2I1 2W1 2I2 2W2  .   .
    >>> print(*three.table(comms=True)[0][11:18])
    3F1 OFFLOAD(res[3,1]@host) 3F2 OFFLOAD(res[3,2]@host) LOAD(res[3,0]@host@0) 3I0 3W0
    """
    # "worthwhile": every residual that would be away for at least one op of its rank.
    return chain(group_interleaved(ranks, group), offload("worthwhile", cap=cap, lead=lead))
