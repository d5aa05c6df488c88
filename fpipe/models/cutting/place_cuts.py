"""Say where the stages of a net end: after the modules that were named, or so that the blocks cost as even as they can.

stages=2:  h.0 h.1 h.2 h.3        -->        h.0 h.1  MARK  h.2 h.3
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fpipe.graphs.language.flops import flops_of_call, multiplies
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.model import Stage
from fpipe.models.cutting.graph_stage import BLOCK
from fpipe.models.tracing.boundary import MARK
from fpipe.models.tracing.dtensor_ops import DTENSOR, exchange_of
from fpipe.models.tracing.module_calls import Call, blocks_of, calls_of, ends_of, in_words
from fpipe.models.tracing.opaque import OPAQUE, call_of_node
from fpipe.program import Op
from fpipe.timing.balance import balance
from fpipe.timing.costs import Costs
from fpipe.torch_private.dispatch import C10D, C10D_AUTOGRAD
from fpipe.torch_private.fx import example_number
from fpipe.torch_private.processes import axis_of, group_named

# Find the collectives of a net that can be stages of their own: over a dimension of a mesh, and then waited for.


def collectives_of(nodes: Sequence[fx.Node]) -> dict[int, Exchanged]:
    """The places of collectives, each with its wait just behind it: an even all-to-all, a gather, sums; and of those of
    DTensors, which wait. One that the net ends with stays in its stage: the loss waits for it at once."""
    found: dict[int, Exchanged] = {}
    for at, (node, behind) in enumerate(pairwise(nodes)):
        if (by := exchange_of(node)) is not None:
            found[at] = by
            continue
        waits = behind.target is C10D.wait_tensor.default and behind.args[0] is node
        if waits and (word := _word(node)) and any(user.op != "output" for user in behind.users):
            group: Any = group_named(str(node.args[-1]))
            found[at] = Exchanged(word, axis_of(group), group.group_name, group.size(), group.rank())
    return found


def as_exchange(stage: Stage, function: Exchanged) -> Stage:
    """A stage that was cut out with nothing but a collective in it as `fpipe.exchange` makes one."""
    run: Any = stage.forward
    ((_, leaf),) = run.places
    words = (("exchange", function.kind), ("axis", function.axis))
    return Stage(replace(function, leaf=leaf), name=function.__name__, names=stage.names, exchange=words)


def _word(node: fx.Node) -> str | None:
    """The kind of collective that an operation is, if a stage can be it."""
    word, args = _KINDS.get(node.target), tuple[Any, ...](node.args)
    if word == "all_to_all":
        return word if len({*map(str, [*args[1], *args[2]])}) == 1 else None  # as many rows to each
    return None if word in ("reduce_scatter", "all_reduce") and args[1] != "sum" else word


_KINDS: dict[Any, str] = {
    C10D.all_to_all_single.default: "all_to_all",
    C10D_AUTOGRAD.all_to_all_single.default: "all_to_all",
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D_AUTOGRAD.all_gather_into_tensor.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D_AUTOGRAD.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.all_reduce.default: "all_reduce",
}


class Placed(NamedTuple):
    """Where a net was cut: the calls after which stages end, in words what each stage runs, and which collective the
    stages are that are one."""

    ends: list[Call]
    words: list[str]
    exchanges: dict[int, Exchanged]


def place_cuts(
    graph: fx.Graph,
    params: Mapping[fx.Node, str],
    stages: int | None,
    cuts: Sequence[str] | None,
    costs: Mapping[str, float] | Costs | None,
    collectives: bool = False,
) -> Placed:
    """Put marks into a graph of a net that may have some, as `from_module` is told to, and say of its nodes which block
    they are in."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    root = calls_of(nodes, params.values())
    for number, block in enumerate(blocks_of(root, 2)):
        for node in nodes[block.start : block.end + 1]:
            node.meta[BLOCK] = number
    own = [at for at, node in enumerate(nodes) if node.target is MARK]
    if cuts is not None or own:
        ends = ends_of(root, cuts or ())
        count = len(ends) + len(own) + 1
        if stages not in (None, count):
            what = "the boundaries in forward" if cuts is None else "cuts= and the boundaries in forward"
            raise ValueError(f"stages={stages}, but {what} make {count} stages; leave one of the two out.")
    else:
        ends = _balanced(nodes, params, root, stages or 1, costs)
    ends.sort(key=lambda call: call.end)
    found = collectives_of(nodes) if collectives else {}
    ends_at = {at + 1 if nodes[at].target is DTENSOR else at + 2 for at in found}  # behind its wait
    around = {*found, *ends_at} - {0, len(nodes), *(at + 1 for at in own), *own}
    marks = sorted({call.end + 1 for call in ends} | around)
    for at in marks:
        with graph.inserting_before(nodes[at]):
            graph.call_function(MARK, ([],))
    bounds = sorted([*marks, *own])
    parts = zip([0, *bounds], [*bounds, len(nodes)], strict=True)
    exchanges = {bisect_right(bounds, at): one for at, one in found.items()}
    return Placed(ends, [in_words(root, start, end - 1) for start, end in parts], exchanges)


def _balanced(
    nodes: Sequence[fx.Node],
    params: Mapping[fx.Node, str],
    root: Call,
    stages: int,
    costs: Mapping[str, float] | Costs | None,
) -> list[Call]:
    """The blocks after which stages end, so that the largest costs as little as can be."""
    blocks = blocks_of(root, stages)
    if stages > len(blocks):
        raise ValueError(f"the net has {len(blocks)} modules to cut after, which make as many stages; found {stages=}.")
    ends = [*(call.end + 1 for call in blocks[:-1]), len(nodes)]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    row: Sequence[float]
    if costs is None:  # bytes of parameters count where operations do not
        sizes, each = [_bytes(nodes[part], params) for part in parts], costs_of(nodes)
        row = [sum(each[part]) * (1 + sum(sizes)) + size for part, size in zip(parts, sizes, strict=True)]
    elif isinstance(costs, Costs):
        row = _measured(costs, len(blocks))
    else:
        row = _by_path(costs, blocks)
    last = [*accumulate(balance(row, stages))][:-1]
    return [blocks[end - 1] for end in last]


def _by_path(costs: Mapping[str, float], blocks: Sequence[Call]) -> list[float]:
    paths = dict.fromkeys(call.path for call in blocks)
    missing = next((path for path in paths if path not in costs), None)
    odd = next((path for path in costs if path not in paths), None)
    if missing is not None or odd is not None:
        found = f"says nothing of block {missing!r}" if odd is None else f"names {odd!r}, which is no block"
        raise ValueError(f"costs= {found}; the blocks are {', '.join(paths)}.")
    return [costs[call.path] for call in blocks]


def _measured(costs: Costs, blocks: int) -> list[float]:
    """The seconds of the forward and backward of each block."""
    found = len(costs.forward) if isinstance(costs.forward, Sequence) else 1
    if found != blocks:
        raise ValueError(
            f"costs= has been measured for {found} stages, and the net has {blocks} blocks; profile the model that "
            f"from_module(net, {blocks}, ...) makes, a stage for each block."
        )
    return [sum(costs.seconds(Op(kind, stage, 0, None, 0, (), ())) for kind in "FB") for stage in range(blocks)]


def _bytes(nodes: Sequence[fx.Node], params: Mapping[fx.Node, str]) -> int:
    read: dict[Any, Any] = {one: one.meta["val"] for node in nodes for one in node.all_input_nodes if one in params}
    return sum(int(value.numel()) * value.element_size() for value in read.values() if isinstance(value, Tensor))


def costs_of(nodes: Sequence[fx.Node]) -> list[int]:
    """The floating-point operations of each node; equal operations on equal shapes are counted once."""
    known: dict[Any, int] = {}
    costs: list[int] = []
    for node in nodes:
        tensors = [read for read in node.all_input_nodes if isinstance(read.meta.get("val"), Tensor)]
        if node.target is OPAQUE:
            costs.append(call_of_node(node).flops)
        elif len(tensors) < 2 or not multiplies(node.target):
            costs.append(0)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _abstract)
            costs.append(flops_of_call(node.target, args, kwargs, known))
    return costs


def _abstract(node: fx.Node) -> Any:
    """A tensor without data that stands for a value, a number for an open size."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        shape, strides = (tuple(map(example_number, sizes)) for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return example_number(value) if isinstance(value, torch.SymInt) else value
