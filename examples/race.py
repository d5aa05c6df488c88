"""Race a schedule of your own against named ones and torch's, for the table and the figure of a paper.

    python -m fpipe race examples/race.py one_f_one_b zbv torch:ZBVZeroBubble --model examples/race.py:net -p 2 \\
        -m 4/8 --length 16/32 --memory-cap 2/4 --output results
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fpipe


def patient(ranks: int, *, cap: float | None = None) -> Callable[[fpipe.Program], fpipe.Program]:
    """Order two stages a rank in a V, within a cap of microbatches, which `race --memory-cap` sets."""
    limit = max(2, ranks - 1) if cap is None else cap

    def key(op: fpipe.Op, state: fpipe.schedules.RankState) -> tuple[int, int, int] | float:
        # A forward on its way down waits if it would take the last room, for one on its way up frees memory.
        if op.kind == "F" and op.stage < ranks and state.held_microbatches + 1 > limit:
            return math.inf
        return "IFW".index(op.kind), op.microbatch, -op.stage

    ordered = fpipe.schedules.from_priority(key, ranks, placement="v", cap=limit)
    return fpipe.chain(fpipe.split_backward(), ordered)


fpipe.schedules.register("patient", patient, stages_per_rank=2)


def net(microbatches: int, length: int) -> tuple[nn.Sequential, object, tuple[Tensor, Tensor]]:
    """Return a net that any number of stages can share, its loss, and two rows for each microbatch."""
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8))
    shape = 2 * microbatches, length, 32
    return nn.Sequential(*blocks), nn.functional.mse_loss, (torch.randn(shape), torch.randn(shape))
