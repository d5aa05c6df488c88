"""Fold ops into others: sums into backwards, updates of running statistics into forwards.

    g[0,0] = B ..  g[0,1] = B ..  sum[0,1] = ADD g[0,0] g[0,1]    -->    g[0,0] = B ..  sum[0,1] = B .. g[0,0]

    y[0,0] seen[0,0] = F ..   state[0,0] = U state[0] seen[0,0]   -->    y[0,0] state[0,0] = F .. state[0]

A backward adds its gradients in place onto a sum that the step owns. A forward updates statistics where those before
are there when it runs: where forwards come in the order of the microbatches. They are written in place where the step
owns them, from the first update on; one that has to make them is only folded into a forward that it follows at once, so
that every rank holds at any time what the program says. The program keeps its ADDs and Us; this only says which of them
need no call of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.graphs.compiling.running_statistics import Norm, updating
from fpipe.graphs.language.graph import Aval, Fact, in_own_storage
from fpipe.graphs.language.labels import label_of
from fpipe.model import Stage
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, dense
from fpipe.runtimes.lowering.shapes import Shapes


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


class Update(NamedTuple):
    """An update that a forward makes.

    Attributes:
        at: the position of its U.
        norms: the stage's batch norms.
        state: what is known of the running statistics.
        mine: whether nobody else reads those before, which the step owns: they are written in place.
    """

    at: int
    norms: tuple[Norm, ...]
    state: tuple[Aval, ...]
    mine: bool


@dataclass(frozen=True)
class Folds:
    """The ops that are folded into others, and who reads what last then.

    Attributes:
        ops: of the program.
        kept: its outputs.
        sums, updates: by the position of the op that makes them.
        folded: the positions of those that are made by others.
        trees: the abstract tree of every value.
        dead: of each position the values that nobody reads after it, its outputs aside.
    """

    ops: Sequence[Op]
    kept: Collection[Value]
    sums: Sums
    updates: Mapping[int, Update]
    folded: Collection[int]
    trees: Mapping[Value, AbstractTree]
    dead: Mapping[int, tuple[Value, ...]]

    def others(self, at: int) -> list[int]:
        """The positions of the ops that are folded into one."""
        update = self.updates.get(at)
        return [*self.sums.adds.get(at, {}).values(), *([update.at] if update else [])]

    def own_writes(self, at: int) -> list[Value]:
        """The values that an op writes itself, without those for ops that are folded into it."""
        adds, noted = self.sums.adds.get(at, {}), at in self.updates
        return [v for v in self.ops[at].writes if v not in adds and not (noted and v.name == "seen")]


def folds_of(
    ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, given: Collection[int], compile: bool
) -> Folds:
    """The folds of a program; `kept` are its outputs, `given` the storages that are not the step's own."""
    sums = _sums_of(ops, kept, shapes, given)
    # Compiled code takes tensors alone, and a folded update the number that a batch weighs.
    updates, trees = ({}, sums.trees) if compile else _updates_of(ops, kept, shapes, sums.trees)
    folded = {add for adds in sums.adds.values() for add in adds.values()} | {each.at for each in updates.values()}
    dead = dict[int, tuple[Value, ...]]()
    folds = Folds(ops, kept, sums, updates, folded, trees, dead)
    last = {value: at for at in range(len(ops)) for value in _touched(folds, at)}
    for value, at in last.items():
        if value not in kept:
            dead[at] = (*dead.get(at, ()), value)
    return folds


def _touched(folds: Folds, at: int) -> Iterator[Value]:
    """The values that are written or read at a position, those of the ops that are folded into it too."""
    if at not in folds.folded:
        others = folds.others(at)
        yield from folds.own_writes(at)
        yield from (folds.ops[other].writes[0] for other in others)
        yield from folds.ops[at].reads
        yield from (folds.ops[other].reads[0] for other in others)


def _sums_of(ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, given: Collection[int]) -> Sums:
    """The sums of a program; `kept` are its outputs, and `given` the storages that are not the step's own."""
    adds, in_place, copied, trees = (
        dict[int, dict[Value, int]](),
        set[int](),
        dict[Value, Sequence[int]](),
        {**shapes.trees},
    )
    written = {value: at for at, op in enumerate(ops) for value in op.writes}
    readers = Counter(value for op in ops for value in op.reads)
    mine: set[Value] = set()  # sums that the step owns
    sent: set[Value] = set()  # the same tensors, under way and on other ranks

    def is_made(value: Value) -> bool:
        maker = ops[written.get(value, -1)]
        return value.name == "g" and maker.kind in "BW" and maker.stage not in shapes.untraced.stages

    for at, op in enumerate(ops):
        if op.kind in ("SEND", "RECV") and (op.reads[0] in mine or op.reads[0] in sent):
            trees[op.writes[0]] = shapes.copies.landed(op.writes[0], trees[op.reads[0]])
            sent.add(op.writes[0])
        if op.kind != "ADD" or len(op.reads) != 2:
            continue
        total, gradient = op.reads
        start, maker = written.get(total, -1), written.get(gradient, -1)
        if start < 0 or total in kept or readers[total] > 1 or not (total in mine or is_made(total)):
            continue
        if not _alike(trees[total], trees[gradient]):
            continue
        if total not in mine:
            taken = Counter([*given] * 2)
            both = {*ops[start].reads, *ops[start].writes}
            taken.update(leaf.storage for v in both for leaf in trees[v].leaves if isinstance(leaf, Fact))
            copied[total], trees[total] = _started(trees[total], taken)
        mine.add(op.writes[0])
        trees[op.writes[0]] = trees[total]
        here = start < maker and ops[start].rank == ops[maker].rank == op.rank
        if is_made(gradient) and here and gradient not in kept and readers[gradient] == 1:
            adds.setdefault(maker, {})[gradient] = at
        else:
            in_place.add(at)
    return Sums(adds, in_place, copied, trees)


def _alike(one: AbstractTree, other: AbstractTree) -> bool:
    """Whether two gradients have something for the same leaves."""
    return all((a is None) == (b is None) for a, b in zip(one.leaves, other.leaves, strict=True))


def _started(first: AbstractTree, taken: Mapping[int, int]) -> tuple[tuple[int, ...], AbstractTree]:
    """The places of a first gradient's leaves that need a copy, being in `taken` memory, and the sum in its own."""
    leaves = list(first.leaves)
    copied = tuple(
        k for k, leaf in enumerate(leaves) if leaf is not None and (taken[leaf.storage] > 1 or not dense(leaf))
    )
    for k in copied:
        known = leaves[k].aval
        leaves[k] = in_own_storage(known._replace(stride=torch.empty(known.shape, device="meta").stride()))
    return copied, AbstractTree(tuple(leaves))


def _updates_of(
    ops: Sequence[Op], kept: Collection[Value], shapes: Shapes, trees: Mapping[Value, AbstractTree]
) -> tuple[Mapping[int, Update], Mapping[Value, AbstractTree]]:
    """The updates that forwards make, by their position, and the trees with statistics that are written in place."""
    of, trees = dict[int, Update](), {**trees}
    written = {value: at for at, op in enumerate(ops) for value in op.writes}
    readers = Counter(value for op in ops for value in op.reads)
    mine: set[Value] = set()  # running statistics that the step owns
    for at, op in enumerate(ops):
        if op.kind != "U" or op.how or len(op.reads) != 2 or shapes.is_untraced(op._replace(kind="F")):
            continue
        before, seen = op.reads
        maker = written.get(seen, -1)
        alone = readers[seen] == 1 and seen not in kept
        here = maker > written.get(before, -1) and ops[maker].kind == "F" and ops[maker].rank == op.rank
        norms = _norms(shapes.context.model.stages[op.stage or 0], trees[before], trees[seen])
        if norms is None:
            continue
        mine.add(op.writes[0])
        own = before in mine and readers[before] == 1 and before not in kept
        if not (alone and here and (own or at == maker + 1)):
            continue
        found = _found(at, ops[maker], norms, trees[before], own, shapes)
        if found is None:
            continue
        of[maker] = found
        written[op.writes[0]] = maker
        if own:
            trees[op.writes[0]] = trees[before]
    return of, trees


def _found(
    at: int, forward: Op, norms: tuple[Norm, ...], before: AbstractTree, mine: bool, shapes: Shapes
) -> Update | None:
    """The update, if the graph of the forward can make it."""
    leaves = before.leaves
    if not all(isinstance(leaf, Fact) and dense(leaf) for leaf in leaves):
        return None
    state = tuple(leaf.aval for leaf in leaves)
    cut = shapes.cuts[forward[1:4]]
    labels = tuple(label_of(value) for value in forward.writes if value.name != "seen")

    def can() -> bool:
        try:  # a norm whose output nobody reads is no op of this forward
            updating(cut.forward(labels), cut.graph.writes["seen"], norms, state, False)
        except LookupError:
            return False
        return True

    return Update(at, norms, state, mine) if cut.graph.once(("updating", labels, norms, state), can) else None


def _norms(stage: Stage, state: AbstractTree, seen: AbstractTree) -> tuple[Norm, ...] | None:
    """The batch norms of a stage, if all that it remembers is theirs, and each batch weighs the same."""
    cut = stage.forward
    if not isinstance(cut, PositionalStage) or not cut.can_fold or any(norm.momentum is None for _, norm in cut.norms):
        return None
    places: dict[str, int] = tree.unflatten(state.spec, range(len(state.leaves)))
    calls: Sequence[Sequence[int]] = tree.unflatten(seen.spec, range(len(seen.leaves)))
    found: list[Norm] = []
    for (path, _), each in zip(cut.norms, calls, strict=True):
        mean, var = (places.get(f"{path}.{name}") for name in ("running_mean", "running_var"))
        if mean is None or var is None:
            return None
        found.append(Norm(tuple(each), mean, var, places.get(f"{path}.num_batches_tracked")))
    used: list[Any] = [place for norm in found for place in norm[1:] if place is not None]
    return tuple(found) if sorted(used) == [*range(len(state.leaves))] else None
