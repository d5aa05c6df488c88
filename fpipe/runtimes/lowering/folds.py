"""Find the ADDs that backwards can do themselves, and the module state that forwards can overwrite.

    g[0,0] = B ..  g[0,1] = B ..  sum[0,1] = ADD g[0,0] g[0,1]    -->    g[0,0] = B ..  sum[0,1] = B .. g[0,0]

A backward that adds its gradients in place to a sum of the step saves one gradient of memory and one pass over it. The
program keeps its ADDs: `Folds` only says which of them need no call. From the second microbatch on, a forward may write
running statistics over the previous ones, if nobody else reads those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.compiling.one_pass_norms import fuse_statistics, overwritten_state
from fpipe.graphs.language.graph import Fact, fact_in_own_storage
from fpipe.graphs.language.labels import label_of
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.lowered import AbstractTree, is_dense_fact
from fpipe.runtimes.lowering.stage_calls import Shapes


class Sums(NamedTuple):
    """How each ADD runs: inside a backward, in place, or (if it is in neither mapping) into new memory.

    Attributes:
        adds: for the position of a backward, its gradients that go into a sum, and the position of the ADD.
        in_place: the positions of ADDs whose first operand the step owns, and nobody reads after them.
        copied: for the first gradient of a sum, the indices of leaves that share their memory with another tensor. They
            are copied before anything is added to them.
        trees: the abstract tree of every value, each sum in the memory of its first gradient.
    """

    adds: Mapping[int, Mapping[Value, int]]
    in_place: Collection[int]
    copied: Mapping[Value, Sequence[int]]
    trees: Mapping[Value, AbstractTree]


@dataclass(frozen=True)
class Folds:
    """The ops that run inside others, and the last reader of each value with these folds.

    Attributes:
        ops: the ops of the program, which positions count.
        outputs: the outputs of the program.
        sums: how each ADD runs.
        overwrites: for the position of a forward, the indices of state leaves that it writes in place.
        folded: the positions of ops that run inside another op.
        trees: the abstract tree of every value.
        dead: for a position, the values that nobody reads after it; outputs of the program never die.
    """

    ops: Sequence[Op]
    outputs: Collection[Value]
    sums: Sums
    overwrites: Mapping[int, tuple[int, ...]]
    folded: Collection[int]
    trees: Mapping[Value, AbstractTree]
    dead: Mapping[int, tuple[Value, ...]]

    def adds_of(self, position: int) -> list[int]:
        """Return the positions of the ADDs that are folded into an op."""
        return [*self.sums.adds.get(position, {}).values()]

    def direct_writes(self, position: int) -> list[Value]:
        """Return the values that an op writes itself, without the gradients that it adds to sums."""
        adds = self.sums.adds.get(position, {})
        return [value for value in self.ops[position].writes if value not in adds]


def find_folds(
    ops: Sequence[Op], outputs: Collection[Value], shapes: Shapes, external_storages: Collection[int], compile: bool
) -> Folds:
    """Return the folds of a program; `external_storages` belong to the caller or to stages, not to the step."""
    sums = _find_sums(ops, outputs, shapes, external_storages)
    overwrites: Mapping[int, tuple[int, ...]] = {}
    trees = sums.trees
    # Code for inductor keeps norms apart from the update of their statistics, and overwrites no state.
    if not compile:
        overwrites, trees = _find_state_overwrites(ops, outputs, shapes, trees, external_storages)
    folded = {add for adds in sums.adds.values() for add in adds.values()}
    dead = dict[int, tuple[Value, ...]]()
    folds = Folds(ops, outputs, sums, overwrites, folded, trees, dead)
    # The last access counts, a write too: what nobody reads dies at its writer.
    accesses = ((value, position) for position in range(len(ops)) for value in _accessed_values(folds, position))
    last_position_by_value = dict(accesses)
    for value, position in last_position_by_value.items():
        if value not in outputs:
            dead[position] = (*dead.get(position, ()), value)
    return folds


def _accessed_values(folds: Folds, position: int) -> Iterator[Value]:
    """Yield the values that an op and the ADDs folded into it write and read."""
    if position not in folds.folded:
        adds = [folds.ops[add] for add in folds.adds_of(position)]
        yield from folds.direct_writes(position)
        yield from (op.writes[0] for op in adds)
        yield from folds.ops[position].reads
        yield from (op.reads[0] for op in adds)


def _find_sums(
    ops: Sequence[Op], outputs: Collection[Value], shapes: Shapes, external_storages: Collection[int]
) -> Sums:
    """Find the ADDs that can write over their first operand.

    Sums of gradients are chains: sum[0,1] = ADD g[0,0] g[0,1], sum[0,2] = ADD sum[0,1] g[0,2], and so on. A chain owns
    the memory of its first gradient (or a copy of it), and every further gradient is added there in place: by its own
    backward, if that runs on the rank of the sum and after it, or else by an ADD.
    """
    adds, in_place = dict[int, dict[Value, int]](), set[int]()
    copied, trees = dict[Value, Sequence[int]](), {**shapes.trees}
    writer_position = {value: position for position, op in enumerate(ops) for value in op.writes}
    reader_count = Counter(value for op in ops for value in op.reads)
    # Sums in the memory of their chain, and what SENDs and RECVs make of these.
    chain_sums, transferred_sums = set[Value](), set[Value]()

    def is_read_once(value: Value) -> bool:
        return value not in outputs and reader_count[value] == 1

    def is_traced_gradient(value: Value) -> bool:
        if value.name != "g" or value not in writer_position:
            return False
        writer = ops[writer_position[value]]
        return writer.kind in "BW" and writer.stage not in shapes.untraced.stages

    def is_ready_for_backward(total: Value, gradient: Value, rank: int) -> bool:
        total_position, backward_position = writer_position[total], writer_position[gradient]
        return total_position < backward_position and ops[total_position].rank == ops[backward_position].rank == rank

    for position, op in enumerate(ops):
        # 1. In one process a sum that travels stays in the memory of its chain. Nothing is added to its copies.
        if op.kind in ("SEND", "RECV") and (op.reads[0] in chain_sums or op.reads[0] in transferred_sums):
            trees[op.writes[0]] = shapes.copies.as_received(op.writes[0], trees[op.reads[0]])
            transferred_sums.add(op.writes[0])
        if op.kind != "ADD" or len(op.reads) != 2:
            continue
        total, gradient = op.reads
        # 2. Skip ADDs that may not write over their operand. A chain begins with a gradient of traced code, which can
        # copy it if it lies in memory of others.
        begins_chain = total not in chain_sums
        if not is_read_once(total) or (begins_chain and not is_traced_gradient(total)):
            continue
        if not _have_same_gaps(trees[total], trees[gradient]):
            continue
        if begins_chain:
            backward = ops[writer_position[total]]
            # External storages count as used twice from the start: the chain may not write them.
            uses = Counter([*external_storages] * 2)
            backward_leaves = (leaf for v in {*backward.reads, *backward.writes} for leaf in trees[v].leaves)
            uses.update(leaf.storage for leaf in backward_leaves if isinstance(leaf, Fact))
            copied[total], trees[total] = _owned_sum(trees[total], uses)
        # 3. Add in place: in the backward that makes the gradient, or by the ADD itself.
        new_total = op.writes[0]
        chain_sums.add(new_total)
        trees[new_total] = trees[total]
        is_foldable = is_read_once(gradient) and is_traced_gradient(gradient)
        if is_foldable and is_ready_for_backward(total, gradient, op.rank):
            adds.setdefault(writer_position[gradient], {})[gradient] = position
        else:
            in_place.add(position)
    return Sums(adds, in_place, copied, trees)


def _have_same_gaps(total: AbstractTree, gradient: AbstractTree) -> bool:
    """Whether the same leaves of both are None: parameters without a gradient."""
    return all((a is None) == (b is None) for a, b in zip(total.leaves, gradient.leaves, strict=True))


def _owned_sum(gradient: AbstractTree, uses: Mapping[int, int]) -> tuple[tuple[int, ...], AbstractTree]:
    """Return the indices of leaves of a first gradient that need a copy, and the sum in storages of its own."""
    leaves = list(gradient.leaves)
    copied = tuple(k for k, leaf in enumerate(leaves) if leaf and (uses[leaf.storage] > 1 or not is_dense_fact(leaf)))
    for k in copied:
        aval = leaves[k].aval
        leaves[k] = fact_in_own_storage(aval._replace(stride=torch.empty(aval.shape, device="meta").stride()))
    return copied, AbstractTree(tuple(leaves))


def _find_state_overwrites(
    ops: Sequence[Op],
    outputs: Collection[Value],
    shapes: Shapes,
    trees: Mapping[Value, AbstractTree],
    external_storages: Collection[int],
) -> tuple[Mapping[int, tuple[int, ...]], Mapping[Value, AbstractTree]]:
    """Return, by position of a forward, the state leaves that it may overwrite, and the trees that this makes."""
    # The first forward of a stage reads the caller's state and writes a new one, which the step owns: its leaves are
    # dense and alone in their memory. The next forward may write over those, if it is their only reader.
    overwrites, trees = dict[int, tuple[int, ...]](), {**trees}
    readers = Counter(value for op in ops for value in op.reads)
    owned: dict[Value, tuple[int, ...]] = {}
    for position, op in enumerate(ops):
        old_state = next((value for value in op.reads if value.name == "state"), None)
        new_state = next((value for value in op.writes if value.name == "state"), None)
        if op.kind != "F" or old_state is None or new_state is None or shapes.is_untraced(op):
            continue
        owned_leaves = owned.get(old_state, ()) if readers[old_state] == 1 and old_state not in outputs else ()
        if owned_leaves:
            cut, labels = shapes.cuts[op[1:4]], tuple(map(label_of, op.writes))
            find = partial(_overwritten_state, cut, labels, owned_leaves)
            state_indices = cut.graph.compute_once(("overwritten", cut, labels, owned_leaves), find)
            overwrites[position] = tuple(state_indices.values())
            leaves = [*trees[new_state].leaves]
            for k, state_index in state_indices.items():
                leaves[k] = trees[old_state].leaves[state_index]
            trees[new_state] = trees[new_state]._replace(leaves=tuple(leaves))
        values = {*op.reads, *op.writes} - {old_state} if owned_leaves else {*op.reads, *op.writes}
        storages = Counter(leaf.storage for value in values for leaf in trees[value].leaves if isinstance(leaf, Fact))
        facts = [(k, leaf) for k, leaf in enumerate(trees[new_state].leaves) if isinstance(leaf, Fact)]
        facts = [(k, fact) for k, fact in facts if is_dense_fact(fact) and fact.storage not in external_storages]
        owned[new_state] = tuple(k for k, fact in facts if storages[fact.storage] == 1)
    return overwrites, trees


def _overwritten_state(cut: Cut, labels: Sequence[str], owned_leaves: Collection[int]) -> Mapping[int, int]:
    return overwritten_state(fuse_statistics(cut.forward(labels), owned_leaves))
