"""A program lowered for one signature: abstract trees of its values, and instructions over numbered slots.

forward: slots 0 4 -> 7, 8        add: slots 8 11 -> 12        slots: params[0] is 0, x[0,0] is 4, y[0,0] is 7, ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.language.graph import Fact, fresh_storage
from fpipe.graphs.tracing.open_sizes import SizedGraph
from fpipe.meaning.purity.write_guard import is_dense
from fpipe.program import Op, Value

Leaves = list[Any]
KEY = ("seed", "key")  # the name of the slot of a step's key


class AbstractTree(NamedTuple):
    """The abstract value of a pytree: a fact for each tensor leaf, and the containers around the leaves.

    Gradients and residuals, which are lists over leaves, have no containers.
    """

    leaves: tuple[Any, ...]
    spec: Any = None


OPAQUE = AbstractTree((None,), tree.flatten(None)[1])
"""The abstract tree of residuals of plain autograd: one object, which only its backward understands."""


def unflatten_value(abstract: AbstractTree, leaves: Sequence[Any]) -> Any:
    """Put the leaves of a value into its containers."""
    return list(leaves) if abstract.spec is None else tree.unflatten(abstract.spec, leaves)


def fact_wanting_grad(leaf: Any) -> Any:
    """Mark the fact of a floating-point or complex tensor as wanting a gradient; return any other leaf unchanged."""
    if not isinstance(leaf, Fact) or not (leaf.aval.dtype.is_floating_point or leaf.aval.dtype.is_complex):
        return leaf
    return leaf._replace(aval=leaf.aval._replace(wants_grad=True))


def aval_of_leaf(leaf: Any) -> Any:
    """Return the aval of a fact, without its memory; return any other leaf unchanged."""
    return leaf.aval if isinstance(leaf, Fact) else leaf


def avals_and_specs(groups: Mapping[str, AbstractTree]) -> tuple[Any, Any]:
    """Return the avals of leaves and the containers around them, both as hashable pairs with a label."""
    reads = tuple((label, tuple(map(aval_of_leaf, abstract.leaves))) for label, abstract in groups.items())
    return reads, tuple((label, abstract.spec) for label, abstract in groups.items())


class StorageMap(dict[int, int]):
    """The storage number of a step for each storage number of a trace; unknown ones get a fresh number."""

    def __missing__(self, storage: int) -> int:
        step_storage = self[storage] = fresh_storage()
        return step_storage

    def translate(self, fact: Fact) -> Fact:
        """Return a fact of the trace, in the memory of the step."""
        aval, storage, size, offset, lazy = fact
        return Fact(aval, self[storage], size, offset, lazy)


def is_dense_fact(fact: Fact) -> bool:
    """Whether a tensor fills its memory: no gaps, and no two indices at one address."""
    return is_dense(fact.aval.shape, fact.aval.stride)


class Instruction(NamedTuple):
    """A function to call, and where its arguments and results are.

    Attributes:
        run: the function, of a list of leaves for each slot that it reads; returns a list for each that it writes.
        reads: the slots that it reads.
        shared: the indices among `reads` of slots that are read again later, so that it gets copies of their lists.
        writes: the slots that it writes, which follow those of the instruction before it.
        ops: the op that it runs, and the ADDs that are folded into it.
        written_values: the values in the slots that it writes.
        dead: the values that nobody reads after it.
    """

    run: Callable[..., Sequence[Leaves]]
    reads: tuple[int, ...]
    shared: tuple[int, ...]
    writes: tuple[int, ...]
    ops: tuple[Op, ...]
    written_values: tuple[Value, ...]
    dead: tuple[Value, ...]


@dataclass(frozen=True)
class Lowered:
    """A program as instructions, for one signature.

    Attributes:
        slots: the slot of each value; slots that no instruction writes come first.
        constants: the content of slots that is the same in each step.
        instructions: the instructions, in the order of the program.
        trees: the abstract tree of every value.
        external_storages: storages of the caller, and of constants that stages hold.
        donated_storages: the external storages that results may lie in.
        first_drawing_stage: the first stage that draws random numbers.
        kernels: the kernels to compile before the first step, by the first op of their instruction.
        is_collective: whether stages talk to other processes, which run the same program.
        graphs: the graphs of each stage, and of the loss under None, with the sizes of this signature.
        parts: the part of a stage's graph that an instruction runs, by its first op.
        is_filled: whether its graphs are open traces of other sizes, filled with the sizes of this signature.
        is_closed: whether a trace was made that could not be opened: further sizes will need a trace each.
        read_leaves: for parameters that an op writes, the indices of leaves that graphs read; of others all are read.
    """

    slots: Mapping[Any, int]
    constants: Mapping[int, Leaves]
    instructions: Sequence[Instruction]
    trees: Mapping[Value, AbstractTree]
    external_storages: frozenset[int]
    donated_storages: frozenset[int]
    first_drawing_stage: int | None
    kernels: Mapping[Op, Kernel]
    is_collective: bool
    graphs: Mapping[int | None, Sequence[SizedGraph]]
    parts: Mapping[Op, SizedGraph]
    read_leaves: Mapping[Value, Collection[int]]
    is_filled: bool
    is_closed: bool
