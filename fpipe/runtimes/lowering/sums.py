"""Find the additions that a backward can make itself: gradients added in place onto a sum that the step owns.

    g[0,0] = B ..  g[0,1] = B ..  sum[0,1] = ADD g[0,0] g[0,1]    -->    g[0,0] = B ..  sum[0,1] = B .. g[0,0]

The program keeps its ADDs; this only says which of them need no call of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

from fpipe.graphs.language.graph import Fact, in_own_storage
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, dense


class Sums:
    """Which ADDs a backward makes itself, and which of the others add in place.

    Attributes:
        adds: for the position of a backward, its gradients that go into a sum, and the position of the ADD.
        in_place: the positions of ADDs whose first operand the step owns, and nobody reads after them.
        copied: for the first gradient of a sum, the places of its leaves that lie in memory that something else lies in
            too, and so are copied before something is added to them.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        kept: Collection[Value],
        trees: dict[Value, AbstractTree],
        untraced: Collection[int],
        given: Collection[int],
        landed: Callable[[Value, AbstractTree], AbstractTree],
    ) -> None:
        self.ops, self.trees, self.given = ops, trees, given
        self.adds: dict[int, dict[Value, int]] = {}
        self.in_place: set[int] = set()
        self.copied: dict[Value, tuple[int, ...]] = {}
        written = {value: at for at, op in enumerate(ops) for value in op.writes}
        readers = Counter(value for op in ops for value in op.reads)
        mine: set[Value] = set()  # sums that the step owns
        sent: set[Value] = set()  # the same tensors, under way and on other ranks
        for at, op in enumerate(ops):
            if op.kind in ("SEND", "RECV") and (op.reads[0] in mine or op.reads[0] in sent):
                trees[op.writes[0]] = landed(op.writes[0], trees[op.reads[0]])
                sent.add(op.writes[0])
            if op.kind != "ADD" or len(op.reads) != 2:
                continue
            total, gradient = op.reads
            start, maker = written.get(total, -1), written.get(gradient, -1)
            first = total.name == "g" and ops[start].kind in "BW" and ops[start].stage not in untraced
            if start < 0 or total in kept or readers[total] > 1 or not (total in mine or first):
                continue
            if not self.alike(total, gradient):
                continue
            if total not in mine:
                self.start(total, ops[start])
            mine.add(op.writes[0])
            trees[op.writes[0]] = trees[total]
            made = gradient.name == "g" and ops[maker].kind in "BW" and ops[maker].stage not in untraced
            here = start < maker and ops[start].rank == ops[maker].rank == op.rank
            if made and here and gradient not in kept and readers[gradient] == 1:
                self.adds.setdefault(maker, {})[gradient] = at
            else:
                self.in_place.add(at)

    def alike(self, one: Value, other: Value) -> bool:
        """Whether two gradients have something for the same leaves."""
        pairs = zip(self.trees[one].leaves, self.trees[other].leaves, strict=True)
        return all((first is None) == (second is None) for first, second in pairs)

    def start(self, total: Value, op: Op) -> None:
        """Note which leaves of a sum's first gradient need a copy."""
        values = {*op.reads, *op.writes}
        taken = Counter(leaf.storage for v in values for leaf in self.trees[v].leaves if isinstance(leaf, Fact))
        leaves = list(self.trees[total].leaves)
        taken.update([*self.given] * 2)
        copied = [
            k for k, leaf in enumerate(leaves) if leaf is not None and (taken[leaf.storage] > 1 or not dense(leaf))
        ]
        for k in copied:
            known = leaves[k].aval
            leaves[k] = in_own_storage(known._replace(stride=torch.empty(known.shape, device="meta").stride()))
        self.trees[total] = AbstractTree(tuple(leaves))
        self.copied[total] = tuple(copied)
