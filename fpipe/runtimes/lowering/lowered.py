"""A program as instructions over numbered slots, as `lower` leaves it for one signature.

forward: slots 0 4 -> 7, 8        add: slots 8 11 -> 12        slots: params[0] is 0, x[0,0] is 4, y[0,0] is 7, ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.language.graph import Graph
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree

Leaves = list[Any]
KEY = ("ready", "key")  # what the slot of a step's key is called


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
