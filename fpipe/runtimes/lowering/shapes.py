"""A program as it is known before it runs, and the copies of its values.

y[0,0]>1 = SEND y[0,0];  y[0,0]@1 = RECV y[0,0]>1        -->        origin: y[0,0]@1 is y[0,0], of: y[0,0] has both
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Fact, in_own_storage
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.devices import Moves
from fpipe.program import Op, Program, Value
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree
from fpipe.runtimes.lowering.stage_calls import StageCalls, StageRun, Untraced

Coordinates = tuple[int | None, int | None, int | None]
"""Stage, microbatch and slice of an op."""
TRANSFERS = ("SEND", "RECV", "OFFLOAD", "LOAD")


class Copies(NamedTuple):
    """The copies of a program's values.

    Attributes:
        origin: of a copy, the value that it is a copy of.
        of: of a value, its copies.
        moves: of a copy on another device, from which to which.
    """

    origin: Mapping[Value, Value]
    of: Mapping[Value, Sequence[Value]]
    moves: Moves

    def landed(self, value: Value, known: AbstractTree) -> AbstractTree:
        """The abstract tree of a value as it arrives: on another device it is in memory of its own."""
        home, there = self.moves.get(value, (None, None))
        if there is None or known is OPAQUE:
            return known
        leaves = (
            in_own_storage(leaf.aval._replace(device=there))
            if isinstance(leaf, Fact) and leaf.aval.device == home
            else leaf
            for leaf in known.leaves
        )
        return known._replace(leaves=tuple(leaves))

    def each(self, value: Value) -> list[Value]:
        """The value that one is a copy of, and all its copies."""
        source = self.origin.get(value, value)
        return [source, *self.of.get(source, ())]


def copies_of(ops: Iterable[Op], moves: Moves) -> Copies:
    """The copies that transfers make, where `moves` has those between two devices."""
    origin, of = dict[Value, Value](), dict[Value, list[Value]]()
    landing = dict[Value, tuple[torch.device, torch.device]]()
    for op in ops:
        for read, written in zip(op.reads, op.writes, strict=True) if op.kind in TRANSFERS else ():
            source = origin[written] = origin.get(read, read)
            of.setdefault(source, []).append(written)
            if op.kind == "RECV" and read in moves:
                landing[written] = moves[read]
    return Copies(origin, of, landing)


@dataclass(frozen=True)
class Shapes:
    """A program as it is known before it runs.

    Attributes:
        context, untraced: of the step.
        copies: what travels.
        calls: of its stages.
        trees: the abstract tree of every value.
        runs: each stage on each microbatch, and `cuts` how it is cut for that.
        loss_storage: the storage of the loss's cotangent.
    """

    context: StepContext
    untraced: Untraced
    copies: Copies
    calls: StageCalls
    trees: Mapping[Value, AbstractTree]
    runs: Mapping[Coordinates, StageRun]
    cuts: Mapping[Coordinates, Cut]
    loss_storage: int

    def is_untraced(self, op: Op) -> bool:
        """Whether an op is of a stage that runs under autograd."""
        return self.untraced.has(op, self.context.model)


def ops_of(program: Program, context: StepContext) -> list[Op]:
    """The ops that are lowered: pairs as their parts, without FREEs, and without carries that nobody asks for."""
    ops = [part for op in program.ops for part in op.parts or (op,) if part.kind != "FREE"]
    if program.slices == 1:
        return ops
    return [_without_carry(op) if "carry" not in context.model.stages[op.stage or 0].asks else op for op in ops]


def _without_carry(op: Op) -> Op:
    """An op of a stage that asks for no carry."""
    if op.kind not in ("F", "R", "B", "I"):
        return op
    reads, writes = (tuple(v for v in values if v.name not in ("carry", "dcarry")) for values in (op.reads, op.writes))
    return op._replace(reads=reads, writes=writes)
