"""Cut a stage and its gradient into F, I and W: each result takes the ops it needs, and nothing is computed twice.

    y, loss     need these ops:                                        F
    dx          needs these beyond F:                                  I       F -> res -> I
    g           needs these beyond F and I:                            W       I -> wres -> W
    dx and g    need these beyond F:                                   B       F -> res -> B

Residuals are the tensors that cross a cut. Parameters do not cross it, since each part reads them directly; nor do
views of parameters, which cost nothing and hold no memory. With `hoists` casts of parameters, and what else depends on
them alone, do not cross it either: a step computes them once, for the parts on both sides (`hoist.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch

from fpipe.graphs.compiling.hoist import values_of_params, views_of_params
from fpipe.graphs.language.graph import Graph, Name, Node, checks_by_direction, contiguous_stride
from fpipe.graphs.language.labels import is_cotangent, is_gradient, is_parameter, is_result
from fpipe.graphs.tracing.random_ops import random_nodes_of
from fpipe.program import ALL_BUT
from fpipe.torch_internals import OpOverload


@dataclass(frozen=True, eq=False)
class Cut:
    """The parts of a traced stage.

    Args:
        graph: the stage and its gradient.
        wanted_cotangents: the labels of the cotangents that somebody reads (`dx`, `dx:1`, `dcarry`), with the indices
            of their leaves; others are not computed.
        saved_ops: None to keep all residuals. Otherwise the names of ops whose results F keeps, next to its inputs,
            marked values and random numbers; the backward computes the rest again, layer by layer.
        hoists: whether values that are computed from parameters alone are no residuals.
    """

    graph: Graph
    wanted_cotangents: tuple[tuple[str, tuple[int, ...]], ...]
    saved_ops: tuple[str, ...] | None = None
    hoists: bool = False

    def forward(self, writes: Sequence[str]) -> Graph:
        """Return F or R; `writes` are among y, loss, count, aux, state, carry and res."""
        return self._part([label for label in self.graph.reads if not is_cotangent(label)], writes)

    def backward(self) -> Graph:
        """Return B, which computes all gradients."""
        return self._part([*self._params, *self._cotangents, "res"], [*dict(self.wanted_cotangents), *self._gradients])

    def backward_input(self) -> Graph:
        """Return I, which computes the cotangents of the stage's inputs, and the residuals of W."""
        return self._part([*self._params, *self._cotangents, "res"], [*dict(self.wanted_cotangents), "wres"])

    def backward_weight(self) -> Graph:
        """Return W, which computes the gradients of parameters."""
        return self._part([*self._params, "wres"], self._gradients)

    @property
    def gradients_made_by_input(self) -> list[Name]:
        """Return the gradients of parameters that I cannot leave to W, since one op makes them and a cotangent."""
        return [name for name in self._names_under(self._gradients) if name in self._input_ops]

    def _part(self, reads: Sequence[str], writes: Sequence[str]) -> Graph:
        graph = self.graph
        crossing = {"res": tuple(self.residuals), "wres": tuple(self.weight_residuals)}
        inputs = {label: graph.reads[label] if label in graph.reads else crossing[label] for label in reads}
        outputs = {label: crossing[label] if label in crossing else self.leaves_under(label) for label in writes}
        given_names = {name for leaves in inputs.values() for name in leaves if name is not None}
        # The part has the ops that its results need, and ops without readers that eager runs too: draws and checks. A W
        # reads residuals and no cotangents, and has neither.
        is_forward, is_backward = {*inputs}.isdisjoint(crossing), any(map(is_cotangent, inputs))
        effects = self._forward_effects if is_forward else checks_by_direction(graph)[1] if is_backward else []
        ops = graph.ops_needed_by((*(leaf for leaves in outputs.values() for leaf in leaves), *effects), given_names)
        nodes = _narrow_masks([node for node in graph.nodes if node.name in ops], graph)
        if self.saved_ops is not None and any(map(is_cotangent, reads)):
            nodes = _delay_recomputed(nodes, self._forward_ops)
        return replace(graph, nodes=tuple(nodes), reads=inputs, writes=outputs)

    @cached_property
    def _forward_effects(self) -> list[Name]:
        """Return the ops that a forward runs even without readers, as eager does: all its draws and all its checks."""
        return [*(node.name for node in random_nodes_of(self.graph)), *checks_by_direction(self.graph)[0]]

    @cached_property
    def _params(self) -> list[str]:
        return [label for label in self.graph.reads if is_parameter(label)]

    @cached_property
    def _cotangents(self) -> list[str]:
        return [label for label in self.graph.reads if is_cotangent(label)]

    @cached_property
    def _gradients(self) -> list[str]:
        return [label for label in self.graph.writes if is_gradient(label)]

    def leaves_under(self, label: str) -> tuple[Any, ...]:
        """Return the leaves that the stage writes under a label, with None for cotangents that nobody wants."""
        leaves, wanted_indices = self.graph.writes[label], dict(self.wanted_cotangents).get(label)
        if wanted_indices is None:
            return leaves
        return tuple(leaf if index in wanted_indices else None for index, leaf in enumerate(leaves))

    def _names_under(self, labels: Iterable[str]) -> list[Name]:
        return [leaf for label in labels for leaf in self.leaves_under(label) if isinstance(leaf, Name)]

    @cached_property
    def _forward_ops(self) -> set[Name]:
        outputs = [label for label in self.graph.writes if is_result(label)]
        return self._with_parts(self.graph.ops_needed_by([*self._names_under(outputs), *self._forward_effects]))

    @cached_property
    def _input_ops(self) -> set[Name]:
        roots = [*self._names_under(dict(self.wanted_cotangents)), *checks_by_direction(self.graph)[1]]
        return self._with_parts(self.graph.ops_needed_by(roots, self._forward_ops))

    def _with_parts(self, ops: set[Name]) -> set[Name]:
        """Add the `getitem`s of ops that write a tuple, so that its tensors cross a cut, and not the tuple."""
        # An op with a mask of its results can run again, for other results, on the other side: leave its parts there.
        node_by_name = {node.name: node for node in self.graph.nodes}
        for node in self.graph.nodes:
            is_part = node.op is getitem and node.args[0] in ops
            if is_part and _mask_index(node_by_name[node.args[0]], self.graph) is None:
                ops.add(node.name)
        return ops

    @cached_property
    def _weight_ops(self) -> set[Name]:
        """Return the ops that g needs beyond F and I."""
        # An op with a mask, such as convolution_backward, runs in I for the cotangent and in W for the gradients.
        earlier_ops = self._forward_ops | self._input_ops
        ops = self.graph.ops_needed_by(self._names_under(self._gradients), earlier_ops)
        node_by_name = {node.name: node for node in self.graph.nodes}
        for name in [*ops]:
            node = node_by_name[name]
            if node.op is getitem and _mask_index(node_by_name[node.args[0]], self.graph) is not None:
                ops |= {node.args[0]}
        return ops

    @cached_property
    def residuals(self) -> list[Name]:
        """Return the values that F leaves for the backward."""
        gradients = self._names_under([*dict(self.wanted_cotangents), *self._gradients])
        if self.saved_ops is not None:
            recomputing_ops = self.graph.ops_needed_by(gradients, self._saved_values)
            return self._crossing(recomputing_ops, gradients, self._saved_values)
        backward_ops = self._input_ops | self._weight_ops
        return self._crossing(backward_ops, gradients, self._forward_ops | self._forward_inputs)

    @cached_property
    def weight_residuals(self) -> list[Name]:
        """Return the values that I leaves for W."""
        cotangents = {name for label in self._cotangents for name in self.graph.reads[label] if name is not None}
        available = self._forward_ops | self._input_ops | self._forward_inputs | cotangents
        return self._crossing(self._weight_ops, self._names_under(self._gradients), available)

    @cached_property
    def _saved_values(self) -> set[Name]:
        # The results of the named ops and the tensors of their tuples, and values that a checkpoint's policy marked.
        saved = {node.name for node in self.graph.nodes if _is_saved(node, self.saved_ops or ())}
        saved |= {node.name for node in self.graph.nodes if node.op is getitem and node.args[0] in saved}
        saved |= {leaf for leaf in self.graph.writes.get("kept", ()) if isinstance(leaf, Name)}
        return self._forward_inputs | {name for name in saved & self._forward_ops if name in self.graph.facts}

    @cached_property
    def _forward_inputs(self) -> set[Name]:
        labels = [label for label in self.graph.reads if label not in (*self._params, *self._cotangents)]
        return {name for label in labels for name in self.graph.reads[label] if name is not None}

    @cached_property
    def values_of_params(self) -> set[Name]:
        """Return the values that parts compute from parameters and constants alone, and do not take from each other."""
        if not self.hoists:
            return views_of_params(self.graph)
        return values_of_params(self.graph, replace(self, hoists=False).residuals)

    def _crossing(self, ops: set[Name], results: Iterable[Name], available: set[Name]) -> list[Name]:
        """Return the values that are `available` before a cut and are read by `ops`, or returned, behind it."""
        values = self.values_of_params
        readers = [node for node in self.graph.nodes if node.name in ops and node.name not in values]
        crossing = ({*results}.union(*(node.reads for node in readers)) & available) - ops - values
        return [name for name in (*self.graph.inputs(), *(node.name for node in self.graph.nodes)) if name in crossing]


def _is_saved(node: Node, saved: Sequence[str]) -> bool:
    if isinstance(node.kwargs.get("generator"), Name):
        return True
    if saved[:1] == (ALL_BUT,):
        return isinstance(node.op, OpOverload) and str(node.op) not in saved
    return str(node.op) in saved


def _delay_recomputed(nodes: list[Node], recomputed: set[Name]) -> list[Node]:
    """Move each recomputed op to just before its first reader, so that only one layer's values live at a time."""
    unscheduled = {node.name: node for node in nodes if node.name in recomputed}
    order: list[Node] = []

    # Depth first without recursion, since a chain of ops may be longer than Python's stack: an op is scheduled when all
    # recomputed ops that it reads are, and stays on the stack until then.
    def schedule(names: Iterable[Name]) -> None:
        pending = [*names]
        while pending:
            node = unscheduled.get(pending[-1])
            missing = [name for name in node.reads if name in unscheduled] if node else []
            pending += missing
            if node and not missing:
                order.append(unscheduled.pop(node.name))
            if not missing:
                pending.pop()

    for node in nodes:
        if node.name not in recomputed:
            schedule(node.reads)
            order.append(node)
    schedule([*unscheduled])
    return order


def _narrow_masks(nodes: list[Node], graph: Graph) -> list[Node]:
    """Clear in the masks of ops the results that nobody reads, so that they are not computed."""
    used: dict[Name, set[int]] = {}
    for node in nodes:
        if node.op is getitem:
            used.setdefault(node.args[0], set()).add(node.args[1])
    narrowed: list[Node] = []
    for node in nodes:
        mask_index = _mask_index(node, graph)
        if mask_index is not None and node.name in used:
            mask = [is_wanted and index in used[node.name] for index, is_wanted in enumerate(node.args[mask_index])]
            node = node._replace(args=(*node.args[:mask_index], mask, *node.args[mask_index + 1 :]))
        narrowed.append(node)
    return narrowed


def _mask_index(node: Node, graph: Graph) -> int | None:
    """Return the index of an op's mask of results among its arguments, if it computes each result separately."""
    if not isinstance(node.op, OpOverload) or node.op not in _SEPARABLE or not isinstance(node.args[-1], list):
        return None
    # With a mask and channels-last data this op writes out of bounds (torch 2.13).
    if node.op is _GROUP_NORM:
        input_aval = graph.facts[node.args[1]].aval
        if input_aval.stride != contiguous_stride(input_aval.shape):
            return None
    return len(node.args) - 1


_aten: Any = torch.ops.aten
# With a mask these ops compute each result separately, to the same bits, as tests/test_layers.py checks.
_SEPARABLE = tuple(
    getattr(_aten, name).default
    for name in (
        "convolution_backward",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
        "_fused_rms_norm_backward",
    )
    if hasattr(_aten, name)
)
_GROUP_NORM = _aten.native_group_norm_backward.default
