"""List orders in which rows meet the targets of others by mistake.

targets 0 1 2 3 4 5 6 7        --> dealt out to 2 -->        0 2 4 6 1 3 5 7
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SEEDS = (0, 1, 2, 3, 42)
"""Seeds that people begin with."""


def orders(rows: int, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    """Mistakes in words, and for each row the one whose target it meets; each order once, simple ones first.

    >>> for words, order in orders(4, 2):
    ...     print(order.tolist(), words)
    ...     if "reverse" in words:
    ...         break
    [2, 3, 0, 1] targets are those of the next microbatch
    [1, 2, 3, 0] targets are those of the next row
    [3, 0, 1, 2] targets are those of the row before
    [3, 2, 1, 0] targets come in the reverse order of the rows
    """
    seen = {(*range(rows),)}
    for words, order in _orders(torch.arange(rows), microbatches):
        if (one := (*order.tolist(),)) not in seen:
            seen.add(one)
            yield words, order


def _orders(right: Tensor, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    rows = len(right)
    if rows % microbatches == 0:
        size = rows // microbatches
        yield "targets are those of the next microbatch", right.roll(-size)
        yield "targets are those of the microbatch before", right.roll(size)
    yield "targets are those of the next row", right.roll(-1)
    yield "targets are those of the row before", right.roll(1)
    yield "targets come in the reverse order of the rows", right.flip(0)
    for k in (microbatches, 2, 4, 8):
        if 1 < k < rows and rows % k == 0:
            of, dealt = f"{k} microbatches or replicas", right.view(-1, k).T.flatten()
            yield f"targets are those of the next of {of}", right.roll(-(rows // k))
            yield f"targets are dealt out one by one to {of}, inputs in blocks", dealt
            yield f"inputs are dealt out one by one to {of}, targets in blocks", dealt.argsort()
    for seed in SEEDS:
        drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        yield f"targets are shuffled by torch.randperm of seed {seed}, inputs are not", drawn
        yield f"inputs are shuffled by torch.randperm of seed {seed}, targets are not", drawn.argsort()
