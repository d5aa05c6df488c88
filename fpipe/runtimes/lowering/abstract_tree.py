"""Hold what is known of a value before it exists: a fact for each tensor leaf, and the containers around the leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.language.graph import Fact, fresh_storage


class AbstractTree(NamedTuple):
    """The abstract value of a pytree: facts, and containers. A list over leaves (gradients, residuals) has none."""

    leaves: tuple[Any, ...]
    spec: Any = None


OPAQUE = AbstractTree((None,), tree.flatten(None)[1])
"""Residuals of plain autograd, for a backward or an update: one object."""


def whole(abstract: AbstractTree, leaves: Sequence[Any]) -> Any:
    """Leaves in their containers."""
    return list(leaves) if abstract.spec is None else tree.unflatten(abstract.spec, leaves)


def wanting_fact(leaf: Any) -> Any:
    """A tensor whose gradient is wanted, if it can have one."""
    if not isinstance(leaf, Fact) or not (leaf.aval.dtype.is_floating_point or leaf.aval.dtype.is_complex):
        return leaf
    return leaf._replace(aval=leaf.aval._replace(wants=True))


def aval_of(leaf: Any) -> Any:
    """Aval of a tensor, without its place in memory; any other leaf is itself."""
    return leaf.aval if isinstance(leaf, Fact) else leaf


def described(groups: Mapping[str, AbstractTree]) -> tuple[Any, Any]:
    """The avals of leaves, and the containers around them, label by label."""
    reads = tuple((label, tuple(map(aval_of, abstract.leaves))) for label, abstract in groups.items())
    return reads, tuple((label, abstract.spec) for label, abstract in groups.items())


class StorageMap(dict[int, int]):
    """Which storage of a step each storage of a trace stands for: one that it has not met yet, for a new one."""

    def __missing__(self, storage: int) -> int:
        new = self[storage] = fresh_storage()
        return new

    def moved(self, fact: Fact) -> Fact:
        """A fact in the memory that its own stands for."""
        aval, storage, size, offset, lazy = fact
        return Fact(aval, self[storage], size, offset, lazy)


def dense(fact: Fact) -> bool:
    """Whether a tensor fills its memory, each place once."""
    return fills(fact.aval.shape, fact.aval.stride)


@lru_cache(maxsize=1024)
def fills(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether these steps reach each place of the memory once."""
    steps = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1)
    expected = 1
    for step, n in steps:
        if step != expected:
            return False
        expected *= n
    return True
