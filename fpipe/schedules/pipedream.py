"""PipeDream and PipeDream-2BW: several training steps in one pipeline, with parameters of earlier steps.

Both run the microbatches of all steps as one 1F1B, so that the pipeline fills once and drains once. They differ in
which version of its parameters a stage reads, and so in how many versions it holds.
"""

from __future__ import annotations

from fpipe.schedules.basic import one_f_one_b
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.steps import steps as several


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
