"""GPipe, 1F1B and eager 1F1B, with one chunk a rank and full backwards; PipeDream, 1F1B over several training steps.

PipeDream and PipeDream-2BW run the microbatches of all steps as one 1F1B, so that the pipeline fills once and drains
once. They differ in which version of its parameters a stage reads, and so in how many versions it holds."""

from __future__ import annotations

from fpipe.schedules.in_turn import in_turn
from fpipe.schedules.registry import published
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.reorder import from_rows
from fpipe.transforms.steps import steps as several


@published("GPipe", "Huang et al. 2019, figure 2c", idle="(p-1)(T+2c)", peak="m")
def gpipe(ranks: int) -> Transform:
    """All forwards, then all backwards.

    The bubble is (p-1)/(m+p-1) for p ranks and m microbatches. Each rank holds every microbatch at the peak.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
    rank 1 |  .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
    rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .
    """
    # Every forward belongs to the warm-up.
    return from_rows("linear", ranks, in_turn(lambda context: context.forwards))


@published(
    "1F1B (DAPPLE, PipeDream-flush)",
    "Narayanan et al. 2021 (Megatron-LM), figure 3",
    idle="(p-1)T + [2(p-1)m/p + 2(p-2)]c, the latter for p | m",
    peak="min(m, p-r)",
)
def one_f_one_b(ranks: int) -> Transform:
    """Warm up, then alternate one forward and one backward, then drain.

    Rank r of p warms up with p-r-1 forwards, so it never holds more than p-r microbatches. The bubble is GPipe's. m may
    be less than p.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
    rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
    rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
    """
    # The first gradient comes back after a forward on each later rank: so many forwards fill the wait.
    return from_rows("linear", ranks, in_turn(lambda context: context.later_ranks))


@published(
    "Eager 1F1B",
    "Zhuang et al. 2023 (cross-mesh resharding, arXiv 2211.05322), in Alpa",
    idle="(p-1)(T+2c)",
    peak="min(m, 2(p-r)-1)",
)
def eager_1f1b(ranks: int) -> Transform:
    """1F1B with twice the warm-up, so that transfers hide behind forwards.

    Rank r of p warms up with 2(p-r-1) forwards and holds up to 2(p-r)-1 microbatches. With transfers of c seconds it
    idles as long as GPipe, while 1F1B waits for two transfers in every round.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.eager_1f1b(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 0F3  .  0B0  .  0B1  .  0B2  .  0B3
    rank 1 |  .  1F0 1F1 1F2 1B0 1F3 1B1  .  1B2  .  1B3  .
    rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
    """
    # A second forward for each hop hides the transfers there and back.
    return from_rows("linear", ranks, in_turn(lambda context: 2 * context.later_ranks))


def pipedream(ranks: int, *, steps: int) -> Transform:
    """1F1B with weight stashing (PipeDream, Narayanan et al. 2019, section 3.3).

    Stage s of S reads the parameters of S-1-s steps before, the same ones forward and backward. The paper's steps have
    one microbatch each: `split(1)`.

    >>> import fpipe
    >>> parts = fpipe.split(1), fpipe.merge(outputs=False), fpipe.update("SGD"), fpipe.schedules.pipedream(3, steps=5)
    >>> print(fpipe.plot(fpipe.chain(*parts)(fpipe.program(3))))
    rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1 0F4 0B2  .  0B3  .  0B4
    rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2 1F4 1B3  .  1B4  .
    rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4  .   .
    """
    return chain(several(steps, stale="stash"), one_f_one_b(ranks))


def pipedream_2bw(ranks: int, *, steps: int) -> Transform:
    """1F1B with double-buffered weights (PipeDream-2BW, Narayanan et al. 2021, section 3.1).

    Each step reads the parameters of one step before, so two versions suffice. A step has at least as many microbatches
    as there are ranks.

    >>> import fpipe
    >>> parts = fpipe.split(2), fpipe.merge(outputs=False), fpipe.update("SGD")
    >>> program = fpipe.chain(*parts, fpipe.schedules.pipedream_2bw(2, steps=3))(fpipe.program(2))
    >>> print(*(op for op in program.ops if op.kind == "UPDATE" and op.stage == 0), sep="\\n")
    params[0,1] opt[0,1] = UPDATE[0,1] params[0] opt[0] sum[0,1] lr {by='SGD'} @ 0
    params[0,3] opt[0,3] = UPDATE[0,3] params[0,1] opt[0,1] sum[0,3] lr:1 {by='SGD'} @ 0
    params[0,5] opt[0,5] = UPDATE[0,5] params[0,3] opt[0,3] sum[0,5] lr:2 {by='SGD'} @ 0
    >>> print(*(op for op in program.ops if op.kind == "F" and op.stage == 0 and op.microbatch == 4), sep="\\n")
    y[0,4] res[0,4] = F[0,4] params[0,1] x[0,4] @ 0
    """
    return chain(several(steps, stale=1), one_f_one_b(ranks))
