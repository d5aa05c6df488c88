"""Make the functions of instructions, which take lists of leaves and return lists of leaves.

    F, B, I, W  code of a stage's graph      SPLIT  views of the batch      ADD  leaf by leaf      RECV  the leaves

An instruction empties the lists it is handed, so that each tensor is gone after its last read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.graphs.compiling.add import adding, owned
from fpipe.graphs.compiling.code import compiled
from fpipe.graphs.compiling.cut import Cut, prepared
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.compiling.one_pass_norms import in_one_pass
from fpipe.graphs.language.graph import Fact, Graph, Name
from fpipe.graphs.language.labels import is_parameter
from fpipe.meaning.by_autograd import StepContext, detached, times
from fpipe.meaning.meaning import RULES, summed
from fpipe.meaning.purity.ambient import Casts, casting
from fpipe.meaning.stages.keys import generator_on, seeder
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_walk import is_list
from fpipe.runtimes.lowering.lowered import AbstractTree, Leaves


def slicing(op: Op, trees: Mapping[Value, AbstractTree]) -> Callable[..., Sequence[Leaves]] | None:
    """Function of a SPLIT that takes the slices that its rule took of shapes alone, or None where these are no slices.

    Looking for the rows of each leaf again takes 20 times as long as the slice.
    """
    parts: list[Callable[[Sequence[Leaves]], Leaves]] = []
    for value in op.writes:
        leaves = trees[value].leaves
        if not any(isinstance(leaf, Fact) for leaf in leaves):  # the weight, or a batch without tensors
            parts.append(partial(_repeat, leaves))
            continue
        place = next(k for k, read in enumerate(op.reads) if (read.name == "target") == (value.name == "t"))
        found = [*map(_range_of, leaves, trees[op.reads[place]].leaves)]
        ranges = [range_ for range_ in found if range_ is not None]
        if len(ranges) < len(found):
            return None
        parts.append(partial(_narrow, place, ranges))
    return lambda *lists: [part(lists) for part in parts]


def _range_of(leaf: Any, whole_leaf: Any) -> tuple[int, ...] | None:
    """Return dim, start and length of a leaf as a slice of the whole one: () if it is all of it, None if it is none."""
    if not isinstance(leaf, Fact):
        return ()
    (shape, stride, *_), (full, steps, *_) = leaf.aval, whole_leaf.aval
    dims = [dim for dim, (size, all_) in enumerate(zip(shape, full, strict=False)) if size != all_]
    if leaf.storage != whole_leaf.storage or stride != steps or len(dims) > 1 or (dims and not steps[dims[0]]):
        return None
    return (dims[0], leaf.offset // steps[dims[0]], shape[dims[0]]) if dims else ()


def _repeat(leaves: Sequence[Any], lists: Sequence[Leaves]) -> Leaves:
    return [*leaves]


def _narrow(place: int, ranges: Sequence[tuple[int, ...]], lists: Sequence[Leaves]) -> Leaves:
    return [leaf.narrow(*range_) if range_ else leaf for leaf, range_ in zip(lists[place], ranges, strict=True)]


def with_generators(
    run: Callable[..., Any], at: int, devices: Sequence[str], place: tuple[int, int, int | None], step: int
) -> Callable[..., Any]:
    """Let a forward that draws read generators, seeded for its stage and microbatch, where it is handed the key."""
    seed_from = seeder(*place)

    def forward(*lists: Any) -> Any:
        key = lists[at]
        seed = seed_from(key[step] if isinstance(key, tuple) else key)
        generators = [generator_on(device).manual_seed(seed) for device in devices]
        return run(*lists[:at], generators, *lists[at + 1 :])

    return forward


def with_scale(run: Callable[..., Any], at: int, weight: torch.Tensor) -> Callable[..., Any]:
    """Let a backward of the loss read the cotangent of the loss where it is handed the loss scale."""

    def backward(*lists: Any) -> Any:
        return run(*lists[:at], [times(weight, lists[at][0])], *lists[at + 1 :])

    return backward


def pass_on(*lists: Leaves) -> Sequence[Leaves]:
    """SEND within one process: the leaves in new lists."""
    copies = [leaves[:] for leaves in lists]
    _empty(lists)
    return copies


def arrive(*lists: Leaves) -> Sequence[Leaves]:
    """RECV within one process: the lists, which only it reads."""
    return lists


def rounded(cast: Callable[[Any], Any], *lists: Leaves) -> Sequence[Leaves]:
    """Transfer that casts on the wire."""
    results = [[*map(cast, leaves)] for leaves in lists]
    _empty(lists)
    return results


def add(*lists: Leaves) -> Sequence[Leaves]:
    """ADD into new memory."""
    total = summed(lists)
    _empty(lists)
    return [total]


def add_to(total: Leaves, gradient: Leaves) -> Sequence[Leaves]:
    """ADD into the memory of the total."""
    leaves = [a if a is None else a.add_(b) for a, b in zip(total, gradient, strict=True)]
    _empty((total, gradient))
    return [leaves]


def dropping(run: Callable[..., Any], count: int, places: Sequence[int]) -> Callable[..., Any]:
    """Drop received parameters after their last read: the lists in these places, of which `run` reads `count`."""

    def last(*lists: Leaves) -> Any:
        results = run(*lists[:count])
        _empty([lists[k] for k in places])
        return results

    return last


def container(abstract: AbstractTree) -> Callable[[Leaves], Any]:
    """Function that puts the leaves of a value into its containers."""
    if abstract.spec is None:
        return list
    return itemgetter(0) if abstract.spec.is_leaf() else partial(tree.unflatten, abstract.spec)


def by_rule(
    op: Op, containers: Sequence[Callable[[Leaves], Any]], context: StepContext, casts: Casts, *lists: Leaves
) -> Sequence[Leaves]:
    """Run the walk's rule under the casts of the step that it was lowered for, as a graph holds its casts."""
    with casting(casts) if casts else nullcontext():
        args = [contain(leaves) for contain, leaves in zip(containers, lists, strict=True)]
        results = RULES[op.kind](op, args, context)
    _empty(lists)
    if len(results) != len(op.writes):
        raise ValueError(f"{op.cell} writes {len(op.writes)} values, and its rule gave {len(results)}.")
    return [list(value) if is_list(op, value) else tree.leaves(value) for value in results]


def distinct(leaves: Leaves) -> Leaves:
    """Leaves as distinct objects: an object that all microbatches share would be taken whole, not averaged."""
    return [*map(detached, leaves)]


def _empty(lists: Sequence[Leaves]) -> None:
    for leaves in lists:
        leaves.clear()


class Recipe(NamedTuple):
    """A function of a stage's graph that ops ask for; those that ask for the same share it.

    Attributes:
        kind: F, B, I or W.
        labels: of what it writes.
        adds: of the gradients that it adds to a sum.
        copied: by label the places of leaves that it writes into memory of their own.
        overwrites: the leaves of its module state that it may write in place.
        params_are_received: whether an op writes its parameters, such as a RECV: they are not there when a step
            starts, so nothing is prepared of them.
        kernels: the flags that choose kernels; None of what never runs, whose sums are not tried.
        compile: whether inductor compiles it.
    """

    kind: str
    labels: tuple[str, ...]
    adds: tuple[str, ...]
    copied: tuple[tuple[str, int], ...]
    overwrites: tuple[int, ...]
    params_are_received: bool
    kernels: Any
    compile: bool


class Code(NamedTuple):
    """A function and its graph, and the function and graph that prepare the views of parameters that it reads."""

    run: Callable[..., Any]
    graph: Graph
    prepare: Callable[..., Any]
    prepares: Graph


def code_of(cut: Cut, recipe: Recipe, name: str) -> Code:
    """Return the code of a recipe."""
    kind, labels, adds, copied, overwrites, params_are_received, flags, compile = recipe
    if kind == "F":
        graph = cut.forward(labels)
        if "loss" in labels:  # F.mse_loss and its like leave the loss in memory of their input's size
            copied = (*copied, ("loss", 0))
        graph = graph if compile else in_one_pass(graph, overwrites)
    else:
        graph = {"B": cut.backward, "I": cut.backward_input, "W": cut.backward_weight}[kind]()
    graph = owned(graph, copied) if copied else graph
    graph = adding(graph, adds, flags, exact=not compile) if adds else graph
    first, rest = (_without_unread(graph),) * 2 if params_are_received else prepared(graph)
    run = Kernel(rest, name) if compile and rest.nodes else compiled(rest, name[0])
    if params_are_received:
        return Code(run, rest, run, rest)
    return Code(run, rest, compiled(first, "prepare") if first.nodes else _picked(first), first)


def _without_unread(graph: Graph) -> Graph:
    """Put None for each parameter that no op of the graph reads, so that it need not be received."""
    read = {name for node in graph.nodes for name in node.reads}
    read |= {leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    reads = {
        label: tuple(name if name in read else None for name in leaves) if is_parameter(label) else leaves
        for label, leaves in graph.reads.items()
    }
    return replace(graph, reads=reads)


def _picked(graph: Graph) -> Callable[..., Sequence[list[Any]]]:
    """Return the function of a graph without ops, which hands on what it reads."""
    places = {name: (k, at) for k, leaves in enumerate(graph.reads.values()) for at, name in enumerate(leaves)}
    picked = [places[name] for name in graph.writes["ready"]]
    return lambda *lists: ([lists[k][at] for k, at in picked],)
