"""Fold sums into backwards, and let forwards overwrite module state that the step has made.

    g[0,0] = B ..  g[0,1] = B ..  sum[0,1] = ADD g[0,0] g[0,1]    -->    g[0,0] = B ..  sum[0,1] = B .. g[0,0]

A backward adds its gradients in place onto a sum that the step owns. The program keeps its ADDs; this only says which
of them need no call of their own. A forward may write the next running statistics over those before, if nobody else
reads these, from the second microbatch on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.compiling.one_pass_norms import in_one_pass, overwritten
from fpipe.graphs.language.graph import Fact, in_own_storage
from fpipe.graphs.language.labels import label_of
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, dense
from fpipe.runtimes.lowering.stage_calls import Shapes


class Sums(NamedTuple):
    """The ADDs that a backward makes itself, and those of the others that add in place.

    Attributes:
        adds: for the position of a backward, its gradients that go into a sum, and the position of the ADD.
        in_place: the positions of ADDs whose first operand the step owns, and nobody reads after them.
        copied: for the first gradient of a sum, the places of its leaves that lie in memory that something else lies in
            too, and so are copied before something is added to them.
        trees: the abstract tree of every value, each sum in the memory of its first gradient.
    """

    adds: Mapping[int, Mapping[Value, int]]
    in_place: Collection[int]
    copied: Mapping[Value, Sequence[int]]
    trees: Mapping[Value, AbstractTree]


@dataclass(frozen=True)
class Folds:
    """The ops that are folded into others, and who reads what last then.

    Attributes:
        ops: of the program.
        kept: its outputs.
        sums: by the position of the op that makes them.
        overwrites: for the position of a forward the leaves of its module state that it writes in place.
        folded: the positions of those that are made by others.
        trees: the abstract tree of every value.
        dead: of each position the values that nobody reads after it, its outputs aside.
    """

    ops: Sequence[Op]
    kept: Collection[Value]
    sums: Sums
    overwrites: Mapping[int, tuple[int, ...]]
    folded: Collection[int]
    trees: Mapping[Value, AbstractTree]
    dead: Mapping[int, tuple[Value, ...]]

    def adds_of(self, at: int) -> list[int]:
        """Return the positions of the ADDs that are folded into an op."""
        return [*self.sums.adds.get(at, {}).values()]

    def own_writes(self, at: int) -> list[Value]:
        """Return the values that an op writes itself, without gradients that it adds to sums."""
        adds = self.sums.adds.get(at, {})
        return [value for value in self.ops[at].writes if value not in adds]


def folds_of(
    ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, given: Collection[int], compile: bool
) -> Folds:
    """Return the folds of a program; `kept` are its outputs, `given` the storages that are not the step's own."""
    sums = _sums_of(ops, kept, shapes, given)
    overwrites, trees = ({}, sums.trees) if compile else _overwrites_of(ops, kept, shapes, sums.trees, given)
    folded = {add for adds in sums.adds.values() for add in adds.values()}
    dead = dict[int, tuple[Value, ...]]()
    folds = Folds(ops, kept, sums, overwrites, folded, trees, dead)
    last = {value: at for at in range(len(ops)) for value in _touched(folds, at)}
    for value, at in last.items():
        if value not in kept:
            dead[at] = (*dead.get(at, ()), value)
    return folds


def _touched(folds: Folds, at: int) -> Iterator[Value]:
    """Yield the values that an op writes and reads, and those of the ADDs that are folded into it."""
    if at not in folds.folded:
        adds = [folds.ops[add] for add in folds.adds_of(at)]
        yield from folds.own_writes(at)
        yield from (op.writes[0] for op in adds)
        yield from folds.ops[at].reads
        yield from (op.reads[0] for op in adds)


def _sums_of(ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, given: Collection[int]) -> Sums:
    adds, in_place = dict[int, dict[Value, int]](), set[int]()
    copied, trees = dict[Value, Sequence[int]](), {**shapes.trees}
    written = {value: at for at, op in enumerate(ops) for value in op.writes}
    readers = Counter(value for op in ops for value in op.reads)
    owned: set[Value] = set()
    sent: set[Value] = set()  # owned sums in flight and on other ranks

    def is_traced(value: Value) -> bool:
        writer = ops[written.get(value, -1)]
        return value.name == "g" and writer.kind in "BW" and writer.stage not in shapes.untraced.stages

    for at, op in enumerate(ops):
        if op.kind in ("SEND", "RECV") and (op.reads[0] in owned or op.reads[0] in sent):
            trees[op.writes[0]] = shapes.copies.as_received(op.writes[0], trees[op.reads[0]])
            sent.add(op.writes[0])
        if op.kind != "ADD" or len(op.reads) != 2:
            continue
        total, gradient = op.reads
        start, writer = written.get(total, -1), written.get(gradient, -1)
        if start < 0 or total in kept or readers[total] > 1 or not (total in owned or is_traced(total)):
            continue
        pairs = zip(trees[total].leaves, trees[gradient].leaves, strict=True)
        if any((a is None) != (b is None) for a, b in pairs):
            continue
        if total not in owned:
            uses = Counter([*given] * 2)  # of each storage; what is not the step's own is as if used twice
            values = {*ops[start].reads, *ops[start].writes}
            uses.update(leaf.storage for v in values for leaf in trees[v].leaves if isinstance(leaf, Fact))
            copied[total], trees[total] = _owned_sum(trees[total], uses)
        owned.add(op.writes[0])
        trees[op.writes[0]] = trees[total]
        is_local = start < writer and ops[start].rank == ops[writer].rank == op.rank
        if is_traced(gradient) and is_local and gradient not in kept and readers[gradient] == 1:
            adds.setdefault(writer, {})[gradient] = at
        else:
            in_place.add(at)
    return Sums(adds, in_place, copied, trees)


def _owned_sum(first: AbstractTree, uses: Mapping[int, int]) -> tuple[tuple[int, ...], AbstractTree]:
    """Return which leaves of a first gradient need a copy, and the sum in storages that nothing else uses."""
    leaves = list(first.leaves)
    copied = tuple(k for k, leaf in enumerate(leaves) if leaf and (uses[leaf.storage] > 1 or not dense(leaf)))
    for k in copied:
        known = leaves[k].aval
        leaves[k] = in_own_storage(known._replace(stride=torch.empty(known.shape, device="meta").stride()))
    return copied, AbstractTree(tuple(leaves))


def _overwrites_of(
    ops: Sequence[Op],
    kept: Collection[Value],
    shapes: Shapes,
    trees: Mapping[Value, AbstractTree],
    given: Collection[int],
) -> tuple[Mapping[int, tuple[int, ...]], Mapping[Value, AbstractTree]]:
    """Find the state that forwards may overwrite, since nobody else reads it; and the trees with it in place."""
    overwrites, trees = dict[int, tuple[int, ...]](), {**trees}
    readers = Counter(value for op in ops for value in op.reads)
    owned: dict[Value, tuple[int, ...]] = {}
    for at, op in enumerate(ops):
        before, after = (next((v for v in values if v.name == "state"), None) for values in (op.reads, op.writes))
        if op.kind != "F" or before is None or after is None or shapes.is_untraced(op):
            continue
        free = owned.get(before, ()) if readers[before] == 1 and before not in kept else ()
        if free:
            cut, labels = shapes.cuts[op[1:4]], tuple(map(label_of, op.writes))
            places = cut.graph.once(("overwritten", cut, labels, free), partial(_overwritten_by, cut, labels, free))
            overwrites[at] = tuple(places.values())
            leaves = [*trees[after].leaves]
            for k, place in places.items():
                leaves[k] = trees[before].leaves[place]
            trees[after] = trees[after]._replace(leaves=tuple(leaves))
        values = {*op.reads, *op.writes} - {before} if free else {*op.reads, *op.writes}
        storages = Counter(leaf.storage for value in values for leaf in trees[value].leaves if isinstance(leaf, Fact))
        owned[after] = tuple(
            k
            for k, leaf in enumerate(trees[after].leaves)
            if isinstance(leaf, Fact) and dense(leaf) and storages[leaf.storage] == 1 and leaf.storage not in given
        )
    return overwrites, trees


def _overwritten_by(cut: Cut, labels: Sequence[str], free: Collection[int]) -> Mapping[int, int]:
    return overwritten(in_one_pass(cut.forward(labels), free))
