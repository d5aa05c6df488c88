"""Choose where the stages of a net end: after named modules, or so that the costs of stages are as even as possible.

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

from fpipe.graphs.language.flops import flops_of_call, may_multiply
from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.graphs.tracing.marks import MARK
from fpipe.model import Stage
from fpipe.models.cutting.graph_stage import BLOCK
from fpipe.models.exporting.dtensor_ops import DTENSOR, collective_of
from fpipe.models.exporting.module_calls import (
    ModuleCall,
    describe_calls,
    last_calls_of,
    module_calls_of,
    split_into_blocks,
)
from fpipe.models.exporting.opaque_ops import OPAQUE, opaque_call_of
from fpipe.program import Op
from fpipe.timing.balance import balance
from fpipe.timing.costs import Costs
from fpipe.torch_private.dispatch import C10D, C10D_AUTOGRAD
from fpipe.torch_private.fx import example_number
from fpipe.torch_private.processes import axis_of, group_named

# Find the collectives of a net that can be stages of their own: over a dimension of a mesh, with a wait just behind.


def collectives_of(nodes: Sequence[fx.Node]) -> dict[int, CollectiveStage]:
    """Return the collectives that can be stages of their own, by position in `nodes`.

    They are even all-to-alls, gathers and sums with their wait just behind, and collectives of DTensors, which wait
    themselves. A collective at the very end of the net stays in its stage: the loss waits for it at once, so there is
    nothing to overlap it with.
    """
    exchange_by_position: dict[int, CollectiveStage] = {}
    for position, (node, next_node) in enumerate(pairwise(nodes)):
        if (dtensor_exchange := collective_of(node)) is not None:
            exchange_by_position[position] = dtensor_exchange
            continue
        is_waited_for = next_node.target is C10D.wait_tensor.default and next_node.args[0] is node
        if is_waited_for and (kind := _collective_kind(node)) and any(user.op != "output" for user in next_node.users):
            group: Any = group_named(str(node.args[-1]))
            exchange_by_position[position] = CollectiveStage(
                kind, axis_of(group), group.group_name, group.size(), group.rank()
            )
    return exchange_by_position


def as_exchange(stage: Stage, function: CollectiveStage) -> Stage:
    """Turn a stage that has nothing but a collective into a stage as `fpipe.exchange` makes it."""
    run: Any = stage.forward
    ((_, leaf_index),) = run.leaf_places
    attributes = (("exchange", function.kind), ("axis", function.axis))
    return Stage(
        replace(function, leaf_index=leaf_index), name=function.__name__, names=stage.names, exchange=attributes
    )


def _collective_kind(node: fx.Node) -> str | None:
    """Return the kind of collective of an operation, None if no stage can be it."""
    kind, args = _KINDS.get(node.target), tuple[Any, ...](node.args)
    if kind == "all_to_all":
        return kind if len({*map(str, [*args[1], *args[2]])}) == 1 else None  # as many rows to each
    return None if kind in ("reduce_scatter", "all_reduce") and args[1] != "sum" else kind


_KINDS: dict[Any, str] = {
    C10D.all_to_all_single.default: "all_to_all",
    C10D_AUTOGRAD.all_to_all_single.default: "all_to_all",
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D_AUTOGRAD.all_gather_into_tensor.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D_AUTOGRAD.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.all_reduce.default: "all_reduce",
}


class CutPlan(NamedTuple):
    """Where a net is cut.

    Attributes:
        last_calls: the module calls after which stages end, besides boundaries in forward and collectives.
        module_words: for each stage the modules that it runs, for people.
        exchanges: the collective that a stage is, by stage, for those that are one.
    """

    last_calls: list[ModuleCall]
    module_words: list[str]
    exchanges: dict[int, CollectiveStage]


def place_cuts(
    graph: fx.Graph,
    params: Mapping[fx.Node, str],
    stages: int | None,
    cuts: Sequence[str] | None,
    costs: Mapping[str, float] | Costs | None,
    collectives: bool = False,
) -> CutPlan:
    """Insert marks into the graph of a net as `from_module` says, and number the blocks of its nodes."""
    # 1) Number the blocks, the repeated modules of the net. Pieces of a stage are traced by block.
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    root = module_calls_of(nodes, params.values())
    for block_number, block in enumerate(split_into_blocks(root, 2)):
        for node in nodes[block.start : block.end + 1]:
            node.meta[BLOCK] = block_number
    # 2) Choose the ends of stages: as named, as marked in forward, or by costs.
    mark_positions = [position for position, node in enumerate(nodes) if node.target is MARK]
    if cuts is not None or mark_positions:
        ends = last_calls_of(root, cuts or ())
        count = len(ends) + len(mark_positions) + 1
        if stages not in (None, count):
            mark_sources = "the boundaries in forward" if cuts is None else "cuts= and the boundaries in forward"
            raise ValueError(f"stages={stages}, but {mark_sources} make {count} stages; leave one out.")
    else:
        ends = _balanced(nodes, params, root, stages or 1, costs)
    ends.sort(key=lambda call: call.end)
    # 3) A collective that is a stage has a mark before it and one behind it, where another mark does not stand already.
    #    It is one node for DTensors; otherwise the wait is a second node.
    exchange_by_position = collectives_of(nodes) if collectives else {}
    exchange_bounds = {*exchange_by_position}
    exchange_bounds |= {k + 1 if nodes[k].target is DTENSOR else k + 2 for k in exchange_by_position}
    exchange_bounds -= {0, len(nodes), *mark_positions, *(position + 1 for position in mark_positions)}
    # 4) Insert the marks. All positions are of `nodes`, the list from before.
    new_marks = sorted({call.end + 1 for call in ends} | exchange_bounds)
    for position in new_marks:
        with graph.inserting_before(nodes[position]):
            graph.call_function(MARK, ([],))
    # 5) The stage of an exchange is the number of marks up to its position.
    bounds = sorted([*new_marks, *mark_positions])
    parts = zip([0, *bounds], [*bounds, len(nodes)], strict=True)
    exchanges = {bisect_right(bounds, position): exchange for position, exchange in exchange_by_position.items()}
    return CutPlan(ends, [describe_calls(root, start, end - 1) for start, end in parts], exchanges)


def _balanced(
    nodes: Sequence[fx.Node],
    params: Mapping[fx.Node, str],
    root: ModuleCall,
    stages: int,
    costs: Mapping[str, float] | Costs | None,
) -> list[ModuleCall]:
    """Return the blocks after which stages end, so that the most expensive stage costs as little as possible."""
    blocks = split_into_blocks(root, stages)
    if stages > len(blocks):
        raise ValueError(f"the net has {len(blocks)} modules to cut after, which make as many stages; found {stages=}.")
    block_ends = [*(call.end + 1 for call in blocks[:-1]), len(nodes)]
    parts = [slice(start, end) for start, end in zip([0, *block_ends], block_ends, strict=False)]
    block_costs: Sequence[float]
    if costs is None:
        param_bytes, flops = [_param_bytes(nodes[part], params) for part in parts], flops_of_nodes(nodes)
        # Compare by operations first, then by bytes of parameters: a factor above the sum of all bytes orders pairs.
        factor = 1 + sum(param_bytes)
        block_costs = [sum(flops[part]) * factor + size for part, size in zip(parts, param_bytes, strict=True)]
    elif isinstance(costs, Costs):
        block_costs = _measured_costs(costs, len(blocks))
    else:
        block_costs = _costs_by_path(costs, blocks)
    last_blocks = [*accumulate(balance(block_costs, stages))][:-1]
    return [blocks[end - 1] for end in last_blocks]


def _costs_by_path(costs: Mapping[str, float], blocks: Sequence[ModuleCall]) -> list[float]:
    paths = dict.fromkeys(call.path for call in blocks)
    missing = next((path for path in paths if path not in costs), None)
    unknown = next((path for path in costs if path not in paths), None)
    if missing is not None or unknown is not None:
        mistake = f"says nothing of block {missing!r}" if unknown is None else f"names {unknown!r}, which is no block"
        raise ValueError(f"costs= {mistake}; the blocks are {', '.join(paths)}.")
    return [costs[call.path] for call in blocks]


def _measured_costs(costs: Costs, block_count: int) -> list[float]:
    """Return the seconds of forward and backward of each block, which was a stage when they were measured."""
    costs = costs.mean_microbatch()
    measured_stages = len(costs.forward) if isinstance(costs.forward, Sequence) else 1
    if measured_stages != block_count:
        raise ValueError(
            f"costs= has been measured for {measured_stages} stages, and the net has {block_count} blocks; profile "
            f"the model of from_module(net, {block_count}, ...)."
        )
    return [sum(costs.seconds(Op(kind, stage, 0, None, 0, (), ())) for kind in "FB") for stage in range(block_count)]


def _param_bytes(nodes: Sequence[fx.Node], params: Mapping[fx.Node, str]) -> int:
    value_by_param: dict[Any, Any] = {p: p.meta["val"] for node in nodes for p in node.all_input_nodes if p in params}
    return sum(int(x.numel()) * x.element_size() for x in value_by_param.values() if isinstance(x, Tensor))


def flops_of_nodes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the floating-point operations of each node."""
    # Equal operations on equal shapes are counted once, and products only: others are not worth the count.
    flops_by_call: dict[Any, int] = {}
    costs: list[int] = []
    for node in nodes:
        tensors = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]
        if node.target is OPAQUE:
            costs.append(opaque_call_of(node).flops)
        elif len(tensors) < 2 or not may_multiply(node.target):
            costs.append(0)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _abstract)
            costs.append(flops_of_call(node.target, args, kwargs, flops_by_call))
    return costs


def _abstract(node: fx.Node) -> Any:
    """Return a meta tensor in the place of a tensor, and the example's number in the place of an open size."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        shape, strides = (tuple(map(example_number, sizes)) for sizes in (value.shape, value.stride()))
        # An op that autocast would cast reads halves next to float32, which fails outside of it.
        dtype = torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return example_number(value) if isinstance(value, torch.SymInt) else value
