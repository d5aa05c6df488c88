"""Let a batch norm write its running statistics as it normalises, as eager does: one pass over its input, not two.

y = batch_norm(x, w, b)                      --> updating -->        mean, var = copies of the old
mean, var = update(old mean, old var, x)                             y = batch_norm(x, w, b, mean, var)

A stage is cut with its norms split, for forwards in any order; only a program says that they come in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from fpipe.graphs.language.graph import Aval, Graph, Name, Node, in_own_storage
from fpipe.meaning.purity.ambient import kernels, raw_ops
from fpipe.meaning.purity.schema import BATCH_NORMS

_aten: Any = torch.ops.aten
OLD, NEW, FACTOR = "running", "running", "factor"
"""The labels of what such a graph reads and writes beside the rest: the running statistics, and for each norm how much
a batch weighs in them."""


class Norm(NamedTuple):
    """A batch norm of a stage: the places of its inputs, one for each call, among what the stage notes, and of its
    running statistics among the leaves of the state; not all norms count batches."""

    calls: tuple[int, ...]
    mean: int
    var: int
    batches: int | None


def updating(graph: Graph, noted: Sequence[Any], norms: Sequence[Norm], state: Sequence[Aval], mine: bool) -> Graph:
    """A forward that reads the running statistics too, and writes what they become: if `mine`, in place.

    `noted` are the inputs of its norms. A LookupError says that a norm is not one op of the graph that could write its
    statistics, or not to the same bits.
    """
    old = [Name(f"{OLD}_{place}") for place in range(len(state))]
    factors = [Name(f"{FACTOR}_{number}") for number in range(len(norms))]
    facts = {**graph.facts} | {name: in_own_storage(known) for name, known in zip(old, state, strict=True)}
    first: list[Node] = []
    now: dict[int, Name] = {}

    def own(place: int) -> Name:
        """The statistic as a tensor that may be written."""
        if place not in now:
            now[place] = old[place] if mine else Name(f"{old[place]}_new")
            if not mine:
                facts[now[place]] = in_own_storage(state[place])
                first.append(Node(now[place], _aten.clone.default, (old[place],), {}))
        return now[place]

    changed: dict[Name, Node] = {}
    for factor, norm in zip(factors, norms, strict=True):
        for call in norm.calls:
            found = (n for n in graph.nodes if _normalises(n, noted[call]) and n.name not in changed)
            node = next(found, None)
            if node is None:
                raise LookupError("it is not one op")
            given = tuple(None if name is None else graph.facts[name].aval for name in node.args[:3])
            if not _same_bits(node.op, given, (state[norm.mean], state[norm.var]), node.args[7:], kernels()):
                raise LookupError("another kernel normalises where statistics are kept")
            args = (*node.args[:3], own(norm.mean), own(norm.var), True, factor, *node.args[7:])
            changed[node.name] = node._replace(args=args)
            if norm.batches is not None:
                batches = own(norm.batches)
                first.append(Node(Name(f"{batches}_up{len(first)}"), _aten.add_.Scalar, (batches, 1), {}))
    nodes = (*first, *(changed.get(node.name, node) for node in graph.nodes))
    reads = {**graph.reads, OLD: tuple(old), FACTOR: tuple(factors)}
    writes = {**graph.writes, NEW: tuple(now.get(place, name) for place, name in enumerate(old))}
    return replace(graph, nodes=nodes, facts=facts, reads=reads, writes=writes)


def _normalises(node: Node, x: Any) -> bool:
    """Whether an op is a batch norm of x that keeps no statistics."""
    return node.op in BATCH_NORMS and not node.kwargs and node.args[0] == x and node.args[3:6] == (None, None, True)


@cache
def _same_bits(op: Any, given: tuple[Aval | None, ...], state: tuple[Aval, ...], rest: Any, flags: Any) -> bool:
    """Whether one op does what the norm and the update do apart, seen on these shapes, orders in memory and threads."""
    chance = torch.Generator("cpu").manual_seed(0)

    def draw(known: Aval | None) -> Any:
        if known is None:
            return None
        return known.empty().copy_(torch.rand(known.shape, generator=chance, dtype=known.dtype, device="cpu"))

    tensors, kept = [*map(draw, given)], [*map(draw, state)]
    mean, var = (each.clone() for each in kept)
    with raw_ops():
        two = op(*tensors, None, None, True, 0.1, *rest)
        torch.batch_norm_update_stats(tensors[0], mean, var, 0.1)
        one = op(*tensors, *kept, True, 0.1, *rest)
    return all(map(torch.equal, (*two, mean, var), (*one, *kept)))
