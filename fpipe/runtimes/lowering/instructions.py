"""Make the functions of instructions, which take lists of leaves and return lists of leaves.

    F, B, I, W  code of a stage's graph      SPLIT  views of the batch      ADD  leaf by leaf      RECV  the leaves

A function owns the lists that it is called with, and empties them: the last reference to a tensor is in one of them, so
its memory is free again inside the function, after the last read, and not when the function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.graphs.compiling.add import add_into_sums, copy_results
from fpipe.graphs.compiling.code import OpenCode
from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.compiling.hoist import without_hoisted
from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.compiling.one_pass_norms import fuse_statistics
from fpipe.graphs.language.graph import Fact, Graph, Name
from fpipe.graphs.tracing.open_sizes import SizedGraph, SizeNumbers
from fpipe.meaning.by_autograd import StepContext, detach_leaf, scale_cotangent
from fpipe.meaning.meaning import RULES, sum_gradients
from fpipe.meaning.purity.ambient import AutocastSettings, autocast_as
from fpipe.meaning.purity.keys import make_seeder, thread_generator
from fpipe.meaning.step import Keys
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_walk import is_list
from fpipe.runtimes.lowering.hoists import Hoist
from fpipe.runtimes.lowering.lowered import AbstractTree, Leaves


def make_split(op: Op, trees: Mapping[Value, AbstractTree]) -> Callable[..., Sequence[Leaves]] | None:
    """Return the function of a SPLIT as plain slices, or None if a leaf that it writes is no slice.

    The rule of SPLIT has run on shapes alone, so the range of each slice is known. To look for the rows of each leaf in
    every step would take 20 times as long as the slice.
    """
    parts: list[Callable[[Sequence[Leaves]], Leaves]] = []
    for value in op.writes:
        leaves = trees[value].leaves
        # The weight of a microbatch, or a batch without tensors: the same in each step.
        if not any(isinstance(leaf, Fact) for leaf in leaves):
            parts.append(partial(_repeat, leaves))
            continue
        is_target = value.name == "t"
        read_index = next(k for k, read_value in enumerate(op.reads) if (read_value.name == "target") == is_target)
        leaf_ranges = [*map(_range_of, leaves, trees[op.reads[read_index]].leaves)]
        ranges = [range_ for range_ in leaf_ranges if range_ is not None]
        if len(ranges) < len(leaf_ranges):
            return None
        parts.append(partial(_narrow, read_index, ranges))
    return lambda *lists: [part(lists) for part in parts]


def _range_of(leaf: Any, whole_leaf: Any) -> tuple[int, ...] | None:
    """Return (dim, start, length) of a leaf as a slice of a whole leaf: () for all of it, None if it is no slice."""
    if not isinstance(leaf, Fact):
        return ()
    (shape, stride, *_), (whole_shape, whole_stride, *_) = leaf.aval, whole_leaf.aval
    # A slice along one dim lies in the storage of the whole and has its strides; the offset tells where it starts. With
    # a stride of 0 (an expanded tensor) the offset tells nothing.
    dims = [dim for dim, (size, whole_size) in enumerate(zip(shape, whole_shape, strict=False)) if size != whole_size]
    is_view = leaf.storage == whole_leaf.storage and stride == whole_stride
    if not is_view or len(dims) > 1 or (dims and not whole_stride[dims[0]]):
        return None
    return (dims[0], leaf.offset // whole_stride[dims[0]], shape[dims[0]]) if dims else ()


def _repeat(leaves: Sequence[Any], lists: Sequence[Leaves]) -> Leaves:
    return [*leaves]


def _narrow(read_index: int, ranges: Sequence[tuple[int, ...]], lists: Sequence[Leaves]) -> Leaves:
    return [leaf.narrow(*range_) if range_ else leaf for leaf, range_ in zip(lists[read_index], ranges, strict=True)]


def with_generators(
    run: Callable[..., Any], index: int, devices: Sequence[str], coordinates: tuple[int, int, int | None], step: int
) -> Callable[..., Any]:
    """Replace the key, at `index` among a forward's lists, by generators seeded for its stage and microbatch.

    `coordinates` are stage, microbatch and slice. A program of several steps may have a key for each: `step` is its
    index.
    """
    seed_from = make_seeder(*coordinates)

    def forward(*lists: Any) -> Any:
        key = lists[index]
        if isinstance(key, InstructionGenerators):
            generators = key.generators_of(seed_from, step, devices)
        else:
            seed = seed_from(key[step] if isinstance(key, tuple) else key)
            generators = [thread_generator(device).manual_seed(seed) for device in devices]
        return run(*lists[:index], generators, *lists[index + 1 :])

    return forward


class InstructionGenerators:
    """A generator for each random instruction of a step, in place of a key.

    A graph of a device draws from generators that it registers, and cannot seed them itself: they are seeded before it
    runs. So no two instructions share one, not even an F and the R that draws the same numbers.
    """

    def __init__(self) -> None:
        self._generators_by_draw: dict[tuple[Callable[[int], int], int], list[torch.Generator]] = {}
        self._key: Keys = None

    def seed(self, key: Keys) -> None:
        """Seed all generators from a key, which also seeds new ones."""
        self._key = key
        for (seed_from, step), generators in self._generators_by_draw.items():
            self._seed(generators, seed_from, step)

    def generators_of(
        self, seed_from: Callable[[int], int], step: int, devices: Sequence[str]
    ) -> list[torch.Generator]:
        """Return the generators of the instruction whose seeds `seed_from` makes; they are new at its first run."""
        generators = self._generators_by_draw.get((seed_from, step))
        if generators is None:
            generators = [torch.Generator(device) for device in devices]
            self._generators_by_draw[seed_from, step] = generators
            self._seed(generators, seed_from, step)
        # The instruction empties the list that it is handed.
        return generators[:]

    def registered(self) -> list[torch.Generator]:
        """Return the generators of all instructions that have run."""
        return [generator for generators in self._generators_by_draw.values() for generator in generators]

    def _seed(self, generators: Sequence[torch.Generator], seed_from: Callable[[int], int], step: int) -> None:
        key: Any = self._key[step] if isinstance(self._key, tuple) else self._key
        for generator in generators:
            generator.manual_seed(seed_from(key))


def with_scale(run: Callable[..., Any], index: int, weight: torch.Tensor) -> Callable[..., Any]:
    """Replace the loss scale, at `index` among a backward's lists, by the loss's cotangent: weight times scale."""

    def backward(*lists: Any) -> Any:
        return run(*lists[:index], [scale_cotangent(weight, lists[index][0])], *lists[index + 1 :])

    return backward


def send_locally(*lists: Leaves) -> Sequence[Leaves]:
    """Run a SEND within one process: move the leaves into new lists."""
    copies = [leaves[:] for leaves in lists]
    _empty(lists)
    return copies


def receive_locally(*lists: Leaves) -> Sequence[Leaves]:
    """Run a RECV within one process: return the lists of its SEND, which have no other reader."""
    return lists


def cast_transfer(cast: Callable[[Any], Any], *lists: Leaves) -> Sequence[Leaves]:
    """Run a transfer that casts floating-point leaves on the wire."""
    results = [[*map(cast, leaves)] for leaves in lists]
    _empty(lists)
    return results


def add(*lists: Leaves) -> Sequence[Leaves]:
    """Run an ADD into new memory."""
    total = sum_gradients(lists)
    _empty(lists)
    return [total]


def add_in_place(total: Leaves, gradient: Leaves) -> Sequence[Leaves]:
    """Run an ADD into the memory of the total, which the step owns."""
    leaves = [a if a is None or b is None else a.add_(b) for a, b in zip(total, gradient, strict=True)]
    _empty((total, gradient))
    return [leaves]


def with_drops(run: Callable[..., Any], count: int, indices: Sequence[int]) -> Callable[..., Any]:
    """Empty the lists at `indices` after `run`, which reads the first `count` lists and does not empty parameters."""

    def run_and_drop(*lists: Leaves) -> Any:
        results = run(*lists[:count])
        _empty([lists[k] for k in indices])
        return results

    return run_and_drop


def make_unflatten(abstract: AbstractTree) -> Callable[[Leaves], Any]:
    """Return the function that puts the leaves of a value into its containers."""
    if abstract.spec is None:
        return list
    return itemgetter(0) if abstract.spec.is_leaf() else partial(tree.unflatten, abstract.spec)


def run_rule(
    op: Op, containers: Sequence[Callable[[Leaves], Any]], context: StepContext, casts: AutocastSettings, *lists: Leaves
) -> Sequence[Leaves]:
    """Run the rule by which the walk computes an op, under the autocast settings of the step's signature."""
    with autocast_as(casts) if casts else nullcontext():
        args = [contain(leaves) for contain, leaves in zip(containers, lists, strict=True)]
        results = RULES[op.kind](op, args, context)
    _empty(lists)
    if len(results) != len(op.writes):
        raise ValueError(f"{op.cell} writes {len(op.writes)} values, and its rule gave {len(results)}.")
    return [list(value) if is_list(op, value) else tree.leaves(value) for value in results]


def as_distinct(leaves: Leaves) -> Leaves:
    """Return the leaves as distinct objects: MERGE takes an object that all microbatches share for a constant."""
    return [*map(detach_leaf, leaves)]


def _empty(lists: Sequence[Leaves]) -> None:
    for leaves in lists:
        leaves.clear()


class Recipe(NamedTuple):
    """The properties of an op that decide its code: ops of one stage with equal recipes share one function.

    Attributes:
        kind: F, B, I or W.
        labels: the labels that it writes.
        adds: the labels of gradients that it adds to a sum.
        copied: the leaves, by label and index, that it writes into memory of their own.
        overwrites: the indices of state leaves that it may write in place.
        kernels: the flags that choose kernels; None for code that never runs, whose sums are not tried.
        compile: whether inductor compiles it.
    """

    kind: str
    labels: tuple[str, ...]
    adds: tuple[str, ...]
    copied: tuple[tuple[str, int], ...]
    overwrites: tuple[int, ...]
    kernels: Any
    compile: bool


class Code(NamedTuple):
    """The code of a part of a stage, and the graph that it was generated from."""

    code: OpenCode | Kernel
    graph: Graph

    def with_numbers(self, numbers: SizeNumbers) -> Callable[..., Any]:
        """Return the function for the sizes of a call. Inductor's has sizes of its own: its graphs are not open."""
        return self.code if isinstance(self.code, Kernel) else self.code.with_numbers(numbers)


def part_of_cut(cut: Cut, recipe: Recipe) -> Graph:
    """Return a part of a stage's graph, with the sums that it adds its gradients to."""
    kind, labels, adds, copied, overwrites, flags, compile = recipe
    # 1. The part of the graph.
    if kind == "F":
        graph = cut.forward(labels)
        # F.mse_loss and its like leave the loss, one number, in memory of their input's size.
        if "loss" in labels:
            copied = (*copied, ("loss", 0))
        graph = graph if compile else fuse_statistics(graph, overwrites)
    else:
        graph = {"B": cut.backward, "I": cut.backward_input, "W": cut.backward_weight}[kind]()
    # 2. First gradients of sums get memory of their own, and further ones are added to the sums.
    graph = copy_results(graph, copied) if copied else graph
    return add_into_sums(graph, adds, flags, exact=not compile) if adds else graph


def generate_code(part: SizedGraph, values: Collection[Name], hoist: Hoist | None, compile: bool, name: str) -> Code:
    """Generate the code of a part of a stage, which reads hoisted values in place of parameters."""
    graph = without_hoisted(part.graph, values, hoist.groups if hoist else ())
    is_compiled = compile and graph.nodes
    return Code(Kernel(graph, name) if is_compiled else OpenCode(part._replace(graph=graph), name[0]), graph)
