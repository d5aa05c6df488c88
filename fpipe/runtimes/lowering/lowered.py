"""Hold a program that is lowered for one signature: what is known of its values, and instructions over slots.

forward: slots 0 4 -> 7, 8        add: slots 8 11 -> 12        slots: params[0] is 0, x[0,0] is 4, y[0,0] is 7, ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.language.graph import Fact, Graph, fresh_storage
from fpipe.meaning.purity.own_memory import fills
from fpipe.program import Op, Value

Leaves = list[Any]
KEY = ("ready", "key")  # the name of the slot of a step's key


class AbstractTree(NamedTuple):
    """The abstract value of a pytree: a fact for each tensor leaf, and the containers around the leaves.

    Gradients and residuals, which are lists over leaves, have no containers.
    """

    leaves: tuple[Any, ...]
    spec: Any = None


OPAQUE = AbstractTree((None,), tree.flatten(None)[1])
"""Residuals of plain autograd, for a backward or an update: one object."""


def whole(abstract: AbstractTree, leaves: Sequence[Any]) -> Any:
    """Put leaves into their containers."""
    return list(leaves) if abstract.spec is None else tree.unflatten(abstract.spec, leaves)


def wanting_fact(leaf: Any) -> Any:
    """Return the fact of a tensor whose gradient is wanted, if it can have one; other leaves as they are."""
    if not isinstance(leaf, Fact) or not (leaf.aval.dtype.is_floating_point or leaf.aval.dtype.is_complex):
        return leaf
    return leaf._replace(aval=leaf.aval._replace(wants=True))


def aval_of(leaf: Any) -> Any:
    """Return the aval of a tensor, without its place in memory; any other leaf as it is."""
    return leaf.aval if isinstance(leaf, Fact) else leaf


def described(groups: Mapping[str, AbstractTree]) -> tuple[Any, Any]:
    """Return the avals of leaves, and the containers around them, label by label."""
    reads = tuple((label, tuple(map(aval_of, abstract.leaves))) for label, abstract in groups.items())
    return reads, tuple((label, abstract.spec) for label, abstract in groups.items())


class StorageMap(dict[int, int]):
    """The storage of a step for each storage of a trace; a new one for a storage that it has not met yet."""

    def __missing__(self, storage: int) -> int:
        new = self[storage] = fresh_storage()
        return new

    def moved(self, fact: Fact) -> Fact:
        """Return a fact of the trace in the memory of the step."""
        aval, storage, size, offset, lazy = fact
        return Fact(aval, self[storage], size, offset, lazy)


def dense(fact: Fact) -> bool:
    """Whether a tensor fills its memory, each place once."""
    return fills(fact.aval.shape, fact.aval.stride)


class Instruction(NamedTuple):
    """A function to call: the slots it reads, which of these are read again later, the slots it writes; the ops it
    stands for, the values it writes, and those that nobody reads after it."""

    run: Callable[..., Sequence[Leaves]]
    reads: tuple[int, ...]
    shared: tuple[int, ...]
    writes: tuple[int, ...]
    ops: tuple[Op, ...]
    written: tuple[Value, ...]
    dead: tuple[Value, ...]


@dataclass(frozen=True)
class Lowered:
    """A program as instructions, for one signature.

    Attributes:
        slots: where each value lives; those that no instruction writes come first.
        constants: what some slots hold from the start.
        prepare: what a step calls first, once for all microbatches: views of parameters.
        instructions: the instructions, in the order of the program.
        trees: what is known of every value.
        given: storages that are not the step's own: of the caller, and of what stages hold on to.
        given_up: those of them that results may lie in.
        drawing: the first stage that draws random numbers.
        kernels: by their first op, the instructions that are to be compiled before they run.
        collective: whether stages talk to other processes, which run the same program.
        graphs: of each stage, and of the loss under None.
        parts: by their first op, the instructions that run a part of a stage's graph: that part.
        gathered: of parameters that an op writes, the places of the leaves that graphs read; of others all are read.
    """

    slots: Mapping[Any, int]
    constants: Mapping[int, Leaves]
    prepare: Sequence[tuple[Callable[..., Any], tuple[int, ...], int]]
    instructions: Sequence[Instruction]
    trees: Mapping[Value, AbstractTree]
    given: frozenset[int]
    given_up: frozenset[int]
    drawing: int | None
    kernels: Mapping[Op, Kernel]
    collective: bool
    graphs: Mapping[int | None, Sequence[Graph]]
    parts: Mapping[Op, Graph]
    gathered: Mapping[Value, Collection[int]]
