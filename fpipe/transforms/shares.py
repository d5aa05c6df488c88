"""How many forwards of a rank make one microbatch of it: the unit that memory is counted in."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from operator import itemgetter

from fpipe.program import Program, parts_of


def shares(program: Program) -> list[int]:
    """How many forwards one microbatch has on each rank (chunks times slices), which together count 1.

    A forward counts where its residuals are made: a stage that is recomputed, maybe on another rank, at its R.
    """
    ops = parts_of(program.ops)
    kinds = list(map(itemgetter(0), ops))
    forwards = compress(ops, map("F".__eq__, kinds))
    if "R" in kinds:
        made = [op for op in ops if op[0] in "FR" and any(value[0] == "res" for value in op[6])]
        forwards = made or forwards
    share = [1] * program.ranks
    for (rank, _), count in Counter(map(itemgetter(4, 2), forwards)).items():
        share[rank] = max(share[rank], count)
    return share
