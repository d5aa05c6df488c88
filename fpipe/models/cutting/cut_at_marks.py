"""Cut a graph of operations into stages at its marks, and find the values that each stage receives of others.

    embed  MARK  block  MARK  head        -->        [embed]  [block]  [head]

An operation belongs to the stage numbered by the marks before it. A value that it reads of an earlier stage is an edge
of the dataflow. What depends on no tensor of the caller (a mask, a size) each stage that reads it computes again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import floordiv
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fpipe.meaning.purity.write_guard import mutated_nodes
from fpipe.model import Source
from fpipe.models.cutting.marked_graph import MarkedGraph, has_effect
from fpipe.models.exporting.node_contexts import copy_nodes
from fpipe.models.exporting.source_locations import expr_of, is_computable, is_size, location_of, open_sizes
from fpipe.torch_private.fx import evaluate_expression

_SIZE: Any = torch.ops.aten.sym_size.int
_CLONE: Any = torch.ops.aten.clone.default


class Subgraph:
    """The operations that one stage or a loss runs, and the values of other stages that they read.

    Args:
        marked: the whole graph.
        results: the values that it returns.
        local_nodes: the operations that may run in it.
        params, batch: the parameters and leaves of the batch that it may read: from placeholder to name and to index.

    Attributes:
        nodes: the operations that it runs, in order.
        received: the values of other stages that it reads.
        params: the placeholders of the parameters that it reads, by name.
        batch: the indices of the batch leaves that it reads, by placeholder.
        sizes: the size nodes that it computes from the sizes of its inputs.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        results: Iterable[fx.Node],
        local_nodes: Collection[fx.Node],
        params: Mapping[fx.Node, str],
        batch: Mapping[fx.Node, int],
    ) -> None:
        self.marked = marked
        self.params: dict[str, fx.Node] = {}
        self.batch: dict[fx.Node, int] = {}
        self.received: dict[fx.Node, None] = {}
        self.sizes: dict[fx.Node, None] = {}
        # Walk back from the results, and from operations that mutate, draw or check: they run though nobody reads them.
        # A size (x.shape[0]) is read off any input that has it, so that no tensor is received for its size alone. Only
        # at the end is it known which inputs there are; sizes that none has are then followed like other operations,
        # which may add inputs, until nothing is pending.
        visited: set[fx.Node] = set()
        pending = [*results, *(node for node in marked.stage_of if node in local_nodes and has_effect(node))]
        while pending or (pending := self._drop_uncomputable_sizes()):
            node = pending.pop()
            if node in visited:
                continue
            visited.add(node)
            if is_size(node):
                self.sizes[node] = None
            elif node in params:
                self.params[params[node]] = node
            elif node in batch:
                self.batch[node] = batch[node]
            elif node in marked.replicated or node in local_nodes:
                pending += marked.reads(node)
            else:
                self.received[node] = None
        self.nodes = [node for node in marked.graph.nodes if node in visited]

    def _drop_uncomputable_sizes(self) -> list[fx.Node]:
        """Drop the sizes that do not follow from sizes of the inputs, and return the values that they are read off."""
        sources = self._size_sources()
        uncomputed = [size for size in self.sizes if not is_computable(expr_of(size), sources)]
        for size in uncomputed:
            del self.sizes[size]
        return [operand for size in uncomputed for operand in self.marked.reads(size)]

    def _size_sources(self) -> dict[Any, tuple[fx.Node, int, int]]:
        """Return for each size of the inputs a tensor with it, the dimension, and the number to divide by."""
        # A dimension of size 3*s0 also says s0, by a division. The source with the least divisor is taken.
        sources: dict[Any, tuple[fx.Node, int, int]] = {}
        for tensor in (*self.received, *self.batch):
            for dim, size in open_sizes(tensor).items():
                factor, symbol = size.as_coeff_Mul()
                for expr, divisor in {size: 1, symbol: factor}.items():
                    if divisor == int(divisor) and (expr not in sources or divisor < sources[expr][2]):
                        sources[expr] = tensor, dim, int(divisor)
        return sources

    def module(self, results: Any) -> fx.GraphModule:
        """Build a graph of these operations. It takes parameters, then leaves of the batch, then received values."""
        graph = fx.Graph()
        inputs = (*self.params.values(), *self.batch, *self.received)
        copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
        for node, copy in copies.items():
            copy.meta = dict(node.meta)
        # Each size once and first, so that equal stages have equal graphs.
        copies |= self._compute_sizes(graph, copies)

        def copy_of(node: fx.Node) -> fx.Node:
            return copies[self.marked.value(node)]

        mutated_values = (value for node in self.nodes if node.op == "call_function" for value in mutated_nodes(node))
        mutated = {base for value in mutated_values for base in self.marked.with_bases(value)}
        for node in self.received:
            # A stage is a pure function: the tensor of another stage stays unchanged, and its copy is mutated.
            if node in mutated:
                copies[node] = graph.call_function(_CLONE, (copies[node],))
        copy_nodes(graph, self.nodes, self.marked.contexts, copies, copy_of)
        _follow_device(graph)
        graph.output(fx.map_arg(results, copy_of))
        return fx.GraphModule(self.marked.module, graph)

    def _compute_sizes(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
        """Compute each size once, in nodes of a new graph; a size that the trace has fixed since is a number."""
        sources, proxy_by_expr = self._size_sources(), dict[Any, Any]()
        expr_by_node = {node: expr_of(node) for node in self.nodes if node in self.sizes}
        for expr in expr_by_node.values():
            for symbol in (expr,) if expr in sources else sorted(expr.free_symbols, key=str):
                if symbol not in proxy_by_expr:
                    tensor, dim, divisor = sources[symbol]
                    size = graph.call_function(_SIZE, (copies[tensor], dim))
                    proxy_by_expr[symbol] = fx.Proxy(
                        size if divisor == 1 else graph.call_function(floordiv, (size, divisor))
                    )
            if expr not in proxy_by_expr:
                proxy_by_expr[expr] = evaluate_expression(expr, proxy_by_expr)
        return {node: getattr(proxy_by_expr[expr], "node", proxy_by_expr[expr]) for node, expr in expr_by_node.items()}


def _follow_device(graph: fx.Graph) -> None:
    """Replace the device "meta" in operations by the device of the graph's last argument.

    A net that is traced on meta then makes its own tensors, such as masks, on the device where its stage runs.

        zeros(4, device="meta")        -->        d = x.device; zeros(4, device=d)
    """
    # Each operation has a `getattr` of its own, so that equal blocks have equal operations.
    placeholders = graph.find_nodes(op="placeholder")
    for node in [*graph.nodes] if placeholders else ():
        device_node: list[fx.Node] = []

        def runtime_device(argument: Any, node: fx.Node = node, device_node: list[fx.Node] = device_node) -> Any:
            if not isinstance(argument, torch.device) or argument.type != "meta":
                return argument
            if not device_node:
                with graph.inserting_before(node):
                    device_node.append(graph.call_function(getattr, (placeholders[-1], "device")))
                device_node[0].meta = {key: value for key, value in node.meta.items() if key != "val"}
            return device_node[0]

        args, kwargs = map_aggregate((node.args, node.kwargs), runtime_device)  # pyright: ignore[reportGeneralTypeIssues]
        if device_node:
            node.args, node.kwargs = args, dict(kwargs)


class StageGraphs:
    """A marked graph cut into one graph for each stage, and the ports between them.

    Args:
        marked: the whole graph.
        results: the output of the last stage, with values of earlier stages among it.
        batch: the indices of the leaves of the batch, by placeholder.
        excluded: operations of no stage, such as those of a loss behind the last.
        extra_results: for each stage the values that it returns besides its outputs: buffers that it writes.

    Attributes:
        subgraphs: for each stage the operations that it runs, and what they read.
        inputs: for each stage its sources, as `from_functions` takes them.
        outputs: for each stage its ports. A port is a list of values that are read by the same stages.
        port_by_value: for each value that a stage passes on, the stage and the port.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        results: Iterable[fx.Node],
        batch: Mapping[fx.Node, int],
        excluded: Collection[fx.Node],
        extra_results: Sequence[Sequence[fx.Node]],
    ) -> None:
        self.marked, self.batch, self.excluded, self.extra_results = marked, batch, excluded, extra_results
        self.params = marked.net.params
        self.subgraphs, outputs_by_stage = self._cut_backwards(results)
        self.outputs = [*(self._group_by_readers(values) for values in outputs_by_stage[:-1]), [outputs_by_stage[-1]]]
        self.port_by_value = {
            node: (stage, port)
            for stage, groups in enumerate(self.outputs)
            for port, group in enumerate(groups)
            for node in group
            # The last stage returns values of earlier stages too, which are ports of those.
            if marked.stage_of.get(node) == stage
        }
        self.inputs = [*map(self._inputs_of, self.subgraphs)]

    def _cut_backwards(self, results: Iterable[fx.Node]) -> tuple[list[Subgraph], list[list[fx.Node]]]:
        """Return the subgraph of each stage, and the values that it passes on, in the order of the graph."""
        # The last stage comes first: what a stage has to return is known once all its readers are.
        outputs_by_stage: list[dict[fx.Node, None]] = [{} for _ in range(self.marked.stage_count)]
        outputs_by_stage[-1] = dict.fromkeys(results)
        readable = {**self.params, **self.marked.net.constants}
        subgraphs: list[Subgraph] = []
        for stage in reversed(range(self.marked.stage_count)):
            local_nodes = {node for node, k in self.marked.stage_of.items() if k == stage and node not in self.excluded}
            stage_results = (*outputs_by_stage[stage], *self.extra_results[stage])
            subgraph = Subgraph(self.marked, stage_results, local_nodes, readable, self.batch)
            for node in subgraph.received:
                if node not in self.marked.stage_of:
                    raise ValueError(
                        f"stage {stage} reads a size of the target; read it off the inputs, as in x.shape[0]."
                        f"{location_of(next(iter(node.users), node))}"
                    )
                self._refuse_mutated_between(node, stage)
                outputs_by_stage[self.marked.stage_of[node]][node] = None
            subgraphs.insert(0, subgraph)
        position_by_node = {node: position for position, node in enumerate(self.marked.graph.nodes)}
        return subgraphs, [sorted(values, key=position_by_node.__getitem__) for values in outputs_by_stage]

    def _refuse_mutated_between(self, node: fx.Node, stage: int) -> None:
        """Raise ValueError if a stage between the writer of a value and this reader mutates it."""
        # That stage would mutate its own copy, and this reader would see the value from before.
        writer_stage, mutator = self.marked.stage_of[node], self.marked.mutators.get(node)
        if mutator is not None and writer_stage < self.marked.stage_of[mutator] < stage:
            raise ValueError(
                f"stage {stage} reads what stage {writer_stage} computes ({node.name}) and stage "
                f"{self.marked.stage_of[mutator]} writes in place ({mutator.target}). Compute a new tensor instead."
                f"{location_of(mutator)}"
            )

    def _group_by_readers(self, values: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Group values by the stages that read them. The group that the next stage reads comes first, as port 0."""
        values_by_readers: dict[tuple[int, ...], list[fx.Node]] = {}
        for node in values:
            readers = tuple(stage for stage, subgraph in enumerate(self.subgraphs) if node in subgraph.received)
            values_by_readers.setdefault(readers, []).append(node)
        return [values_by_readers[readers] for readers in sorted(values_by_readers)]

    def _inputs_of(self, subgraph: Subgraph) -> list[Source]:
        ports = sorted({self.port_by_value[node] for node in subgraph.received})
        batch: list[Source] = ["batch"] if subgraph.batch or not ports else []
        return [*batch, *((stage, port) if port else stage for stage, port in ports)]

    def stages_by_param(self) -> dict[str, list[int]]:
        """Return the stages that read each parameter, by its name."""
        names_by_stage = [*enumerate(subgraph.params for subgraph in self.subgraphs)]
        return {name: [k for k, names in names_by_stage if name in names] for name in self.params.values()}

    def module(self, stage: int) -> fx.GraphModule:
        """Build the graph of a stage. It returns its output, and a list of the extra results."""
        output = _unwrap_single([_unwrap_single(group) for group in self.outputs[stage]])
        return self.subgraphs[stage].module((output, [*self.extra_results[stage]]))

    def leaf_places(self, stage: int) -> list[tuple[int, int]]:
        """Return (index of the input, index of the leaf in it) for each tensor of a stage that is no parameter."""
        leaf_places = [(0, leaf) for leaf in self.subgraphs[stage].batch.values()]
        for node in self.subgraphs[stage].received:
            writer_stage, port = self.port_by_value[node]
            input_index = self.inputs[stage].index((writer_stage, port) if port else writer_stage)
            leaf_places.append((input_index, self.outputs[writer_stage][port].index(node)))
        return leaf_places


def _unwrap_single(values: Sequence[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]
