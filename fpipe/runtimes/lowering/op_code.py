"""Make the function of an op of its stage's graph, once for all ops that ask for the same.

Recipe(kind="B", adds=("g",))        --> code_of(cut, ..) -->        dx, sum = backward_adding(res, dy, sum)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fpipe.graphs.compiling.add import adding, owned
from fpipe.graphs.compiling.code import compiled
from fpipe.graphs.compiling.cut import Cut, prepared
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.compiling.one_pass_norms import in_one_pass
from fpipe.graphs.language.graph import Graph, Name
from fpipe.graphs.language.labels import is_parameter


class Recipe(NamedTuple):
    """A function that an op asks for.

    Attributes:
        kind: F, B, I or W.
        labels: of what it writes.
        adds: of the gradients that it adds to a sum.
        copied: by label the places of leaves that it writes into memory of their own.
        overwrites: the leaves of its module state that it may write in place.
        landed: whether an op writes its parameters, such as a RECV: they are not there when a step starts, so nothing
            is prepared of them.
        kernels: the flags that choose kernels; None of what never runs, whose sums are not tried.
        compile: whether inductor compiles it.
    """

    kind: str
    labels: tuple[str, ...]
    adds: tuple[str, ...]
    copied: tuple[tuple[str, int], ...]
    overwrites: tuple[int, ...]
    landed: bool
    kernels: Any
    compile: bool


class Code(NamedTuple):
    """A function and its graph, and the call that makes the views of parameters that it reads, with its own."""

    run: Callable[..., Any]
    graph: Graph
    prepare: Callable[..., Any]
    prepares: Graph


def code_of(cut: Cut, recipe: Recipe, name: str) -> Code:
    """The code of a recipe."""
    kind, labels, adds, copied, overwrites, landed, flags, compile = recipe
    if kind == "F":
        graph = cut.forward(labels)
        if "loss" in labels:  # F.mse_loss and its like leave the loss in memory of their input's size
            copied = (*copied, ("loss", 0))
        graph = graph if compile else in_one_pass(graph, overwrites)
    else:
        graph = {"B": cut.backward, "I": cut.backward_input, "W": cut.backward_weight}[kind]()
    graph = owned(graph, copied) if copied else graph
    graph = adding(graph, adds, flags, exact=not compile) if adds else graph
    first, rest = (_without_unread(graph),) * 2 if landed else prepared(graph)
    run = Kernel(rest, name) if compile and rest.nodes else compiled(rest, name[0])
    if landed:
        return Code(run, rest, run, rest)
    return Code(run, rest, compiled(first, "prepare") if first.nodes else _picked(first), first)


def _without_unread(graph: Graph) -> Graph:
    """The graph with None for each parameter that none of its ops reads, and that so need not be there."""
    read = {name for node in graph.nodes for name in node.reads}
    read |= {leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    reads = {
        label: tuple(name if name in read else None for name in leaves) if is_parameter(label) else leaves
        for label, leaves in graph.reads.items()
    }
    return replace(graph, reads=reads)


def _picked(graph: Graph) -> Callable[..., Sequence[list[Any]]]:
    """The function of a graph without ops, which hands on what it reads."""
    places = {name: (k, at) for k, leaves in enumerate(graph.reads.values()) for at, name in enumerate(leaves)}
    picked = [places[name] for name in graph.writes["ready"]]
    return lambda *lists: ([lists[k][at] for k, at in picked],)
