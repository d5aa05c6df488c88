"""Hold which stages run under autograd, since they cannot be traced, and what they were seen to write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import aval, in_own_storage, is_strided
from fpipe.program import Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree


@dataclass
class Untraced:
    """The stages that run under autograd, and the values of a walk in which they did.

    Attributes:
        stages: their numbers, each with the reason.
        trees: the abstract tree of every value that was written in a walk.
        lost: a value that nothing can be known of was among them.
        known_only: whether only traces are used that were made before.
    """

    stages: dict[int, str] = field(default_factory=dict[int, str])
    trees: dict[Value, AbstractTree] = field(default_factory=dict[Value, AbstractTree])
    lost: bool = False
    known_only: bool = False

    def see(self, value: Value, made: Any) -> None:
        """Note what a value was. Its tensors are taken to be each in memory of its own."""
        leaves, containers = ([], None) if value.name in ("res", "wres") else tree.flatten(made)
        if containers is not None and not any(map(callable, leaves)):
            if not all(is_strided(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
                self.lost = True
                return
            known = tuple(in_own_storage(aval(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            self.trees[value] = AbstractTree(known, None if value.name in ("g", "dx", "dcarry") else containers)
