"""Follow values that travel: of each copy, of which value it is one, and from which device to which it moved.

SEND(y) RECV(y>1)        --> copies_of -->        origin: y>1 of y    moves: y>1 from cuda:0 to cuda:1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fpipe.graphs.language.graph import Fact, in_own_storage
from fpipe.program import Op, Value
from fpipe.runtimes.definition.device_moves import Moves
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree


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


TRANSFERS = ("SEND", "RECV", "OFFLOAD", "LOAD")
