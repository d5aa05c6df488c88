"""Find out which rows of a batch a gradient counts, how often, and with whose targets.

gradient = 0 of row 0, 2 of row 1, 1 of row 2 ..        -->        [0, 2, 1, ..]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Reduction
from fpipe.single_device.microbatch import cut
from fpipe.single_device.result import Result
from fpipe.verification.gradient_changes import Parts
from fpipe.verification.report import wide

_MOST, _MOST_PAIRS = 128, 1024
"""Rows, and pairs of a row and a target, from which on they are not told apart: each takes a backward."""

_LONGEST = 4096
"""Numbers of a gradient from which on sums of some of them stand for all."""


class RowGradients:
    """Gradients of single rows beside one of a whole batch, which is a sum of such.

    Args:
        parts: the microbatches of a step, each with its rows.
        gradients: computes those of some microbatches.
        found: gradients from elsewhere, by the number of their leaf.
        reduction: how the model's loss is reduced.
    """

    def __init__(
        self,
        parts: Parts,
        gradients: Callable[[Parts], Result],
        found: Mapping[int, Tensor],
        reduction: Reduction,
    ) -> None:
        self.rows = [cut(part, index, size)[0] for part, size in parts for index in range(size)]
        self.gradients, self.leaves = gradients, [*found]
        numel = sum(leaf.numel() for leaf in found.values())
        known = reduction != "count" and not any(leaf.is_complex() for leaf in found.values())
        self.tells = known and 1 < len(self.rows) <= min(_MOST, numel)
        generator = torch.Generator().manual_seed(0)
        short = numel <= _LONGEST or not self.tells
        self.places = None if short else torch.randint(_LONGEST, (numel,), generator=generator)
        self.signs = None if short else torch.randint(2, (numel,), generator=generator) * 2.0 - 1.0
        self.whole = self._flat([found[at] for at in self.leaves]) if self.tells else torch.zeros(0)
        self.whole = self.whole * (len(self.rows) if reduction == "mean" else 1)

    def counts(self) -> list[int] | None:
        """How often each row counts; None where that is not one answer, or each counts once."""
        each = self._each(self.rows) if self.tells else None
        if each is None:
            return None
        columns = torch.stack(each, 1)
        counts, _, rank, _ = torch.linalg.lstsq(columns, self.whole.unsqueeze(1), driver="gelsd")
        whole = counts.round().flatten().int().tolist()
        known = int(rank) == len(each) and min(whole) >= 0 < max(whole)
        return whole if known and {*whole} != {1} else None

    def targets(self) -> list[int] | None:
        """For each row the row whose target it met; None where no row met another's.

        How the gradient of a row changes with its target spans a space of few dimensions. Where those of all rows are
        independent, the gradient of the batch has one part in each, and the target that comes nearest is the row's.
        """
        pairs = self.tells and all(isinstance(row, tuple) and len(row) == 2 for row in self.rows)
        own, kinds = _kinds([target for _, target in self.rows]) if pairs else ([], [])
        if len(kinds) < 2 or len(own) * len(kinds) > _MOST_PAIRS:
            return None
        changes, rest = list[Tensor](), self.whole
        for (x, _), mine in zip(self.rows, own, strict=True):
            each = self._each([(x, target) for target in kinds])
            if each is None:
                return None
            rest = rest - each[mine]
            changes.append(torch.stack(each, 1) - each[mine].unsqueeze(1))
        spaces = [_basis(change) for change in changes]
        parts = torch.linalg.lstsq(torch.cat(spaces, 1), rest.unsqueeze(1), driver="gelsd").solution
        split = parts.split([space.shape[1] for space in spaces])
        met = [
            int((change - space @ part).norm(dim=0).argmin())
            for change, space, part in zip(changes, spaces, split, strict=True)
        ]
        return _rows_of(own, met)

    def _each(self, rows: Sequence[Any]) -> list[Tensor] | None:
        """The gradient of each row; None where a leaf has none, or one that is not finite."""
        each = list[Tensor]()
        for row in rows:
            leaves = tree.leaves(tuple(self.gradients([(row, 1)]).grads))
            grads = [leaves[at] for at in self.leaves]
            if any(grad is None or not grad.isfinite().all() for grad in grads):
                return None
            each.append(self._flat(grads))
        return each

    def _flat(self, grads: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([wide(grad).flatten() for grad in grads]).cpu()
        if self.places is None or self.signs is None:
            return whole
        return whole.new_zeros(_LONGEST).index_add_(0, self.places, whole * self.signs)


def _kinds(targets: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """Different targets, and which of them each row has."""
    kinds, own = list[Any](), list[int]()
    for target in targets:
        own.append(next((k for k, one in enumerate(kinds) if _are_equal(one, target)), len(kinds)))
        kinds += [target] * (own[-1] == len(kinds))
    return own, kinds


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _basis(change: Tensor) -> Tensor:
    """Orthogonal directions of some columns."""
    directions, sizes, _ = torch.linalg.svd(change, full_matrices=False)
    return directions[:, sizes > 1e-5 * sizes[0]] if sizes[0] else directions[:, :0]


def _rows_of(own: Sequence[int], met: Sequence[int]) -> list[int] | None:
    """Rows for the targets that rows met: of equal ones one that is free, its own if that is among them."""
    moved = [row for row, (mine, kind) in enumerate(zip(own, met, strict=True)) if mine != kind]
    order, free = [*range(len(own))], [*moved]
    for row in moved:
        same = [other for other in free if own[other] == met[row]]
        order[row] = same[0] if same else own.index(met[row])
        free = [other for other in free if other != order[row]]
    return order if moved else None
