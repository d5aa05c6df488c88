"""Fold ops into others: sums into backwards, updates of running statistics into forwards.

g[0,1] = B ..  sum[0,1] = ADD g[0,0] g[0,1]    -->    one instruction, which reads g[0,0] and writes sum[0,1]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree
from fpipe.runtimes.lowering.shapes import Shapes
from fpipe.runtimes.lowering.sums import Sums, sums_of
from fpipe.runtimes.lowering.updates import Update, updates_of


@dataclass(frozen=True)
class Folds:
    """The ops that are folded into others, and who reads what last then.

    Attributes:
        ops: of the program.
        kept: its outputs.
        sums, updates: by the position of the op that makes them.
        folded: the positions of those that are made by others.
        trees: the abstract tree of every value.
        last: of each value the position of its last reader, or of its writer.
        dead: of each position the values that nobody reads after it.
    """

    ops: Sequence[Op]
    kept: Collection[Value]
    sums: Sums
    updates: Mapping[int, Update]
    folded: Collection[int]
    trees: Mapping[Value, AbstractTree]
    last: Mapping[Value, int]
    dead: Mapping[int, Sequence[Value]]

    def others(self, at: int) -> list[int]:
        """The positions of the ops that are folded into one."""
        update = self.updates.get(at)
        return [*self.sums.adds.get(at, {}).values(), *([update.at] if update else [])]

    def own_writes(self, at: int) -> list[Value]:
        """The values that an op writes itself, without those for ops that are folded into it."""
        adds, noted = self.sums.adds.get(at, {}), at in self.updates
        return [v for v in self.ops[at].writes if v not in adds and not (noted and v.name == "seen")]


def folds_of(ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, given: Collection[int]) -> Folds:
    """The folds of a program; `kept` are its outputs, and `given` the storages that are not the step's own."""
    sums = sums_of(ops, kept, shapes, given)
    updates, trees = updates_of(ops, kept, shapes, sums.trees)
    folded = {add for adds in sums.adds.values() for add in adds.values()} | {each.at for each in updates.values()}
    last, dead = dict[Value, int](), dict[int, list[Value]]()
    folds = Folds(ops, kept, sums, updates, folded, trees, last, dead)
    for at in range(len(ops)):
        last.update((value, at) for value in _touched(folds, at))
    for value, at in last.items():
        dead.setdefault(at, []).append(value)
    return folds


def _touched(folds: Folds, at: int) -> Iterator[Value]:
    """The values that are written or read at a position, those of the ops that are folded into it too."""
    if at not in folds.folded:
        others = folds.others(at)
        yield from folds.own_writes(at)
        yield from (folds.ops[other].writes[0] for other in others)
        yield from folds.ops[at].reads
        yield from (folds.ops[other].reads[0] for other in others)
