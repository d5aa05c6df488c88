"""Say which rows of a step count otherwise, or met the targets of others, where gradients are known that tell.

gradients of a step        --> odd_rows -->        "row 1 was trained with the target of row 4", and a loop that does so
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fpipe.verification.gradient_changes import of_rows, with_targets
from fpipe.verification.report import listed
from fpipe.verification.row_counts import RowGradients
from fpipe.verification.step_mistakes import Loop

_SAID = 2
"""Rows with the targets of others that are named."""


def odd_rows(loop: Loop, found: Mapping[int, Tensor]) -> Iterator[tuple[str, Loop]]:
    """Mistakes in words, and a loop that makes each; `found` are gradients of its only step, by leaf."""
    of = partial(loop.plain, loop.params, state=loop.state, key=loop.keys[0])
    each = RowGradients(loop.steps[0], of, found, loop.model.reduction)
    counts = each.counts()
    if counts is not None:
        yield _counted(counts), replace(loop, change=of_rows(counts, loop.model.reduction))
    met = each.targets()
    if met is not None:
        yield _moved(met), replace(loop, change=with_targets(torch.tensor(met)))


def _counted(counts: Sequence[int]) -> str:
    named = defaultdict[int, list[str]](list)
    for row, count in enumerate(counts):
        named[count].append(str(row))
    said = [
        f"row{'s' * (len(own) > 1)} {listed(own)} {_times(count, len(own) > 1)}"
        for count, own in sorted(named.items())
        if count != 1
    ]
    return f"{', '.join(said)}: ranks have drawn their rows each by itself, or some twice"


def _times(count: int, several: bool) -> str:
    if not count:
        return "are missing" if several else "is missing"
    return f"{'count' if several else 'counts'} {count} times"


def _moved(met: Sequence[int]) -> str:
    moved = [(row, other) for row, other in enumerate(met) if row != other]
    said = [f"row {row} with that of row {other}" for row, other in moved[1:_SAID]]
    said = [f"row {moved[0][0]} was trained with the target of row {moved[0][1]}", *said]
    more = f", and {len(moved) - _SAID} more" if len(moved) > _SAID else ""
    return f"targets belong to other inputs: {', '.join(said)}{more}"
