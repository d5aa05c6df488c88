"""Cut a stage and its gradient into F, I and W: each result takes what it needs, and nothing is computed twice.

    y, loss     need these ops:                                        F
    dx          needs these beyond F:                                  I       F -> res -> I
    g           needs these beyond F and I:                            W       I -> wres -> W
    dx and g    need these beyond F:                                   B       F -> res -> B

What crosses a cut are tensors as they are, parameters aside, which every part is given. A view of a parameter is made
again on the other side, since it costs nothing and holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch

from fpipe.graphs.language.graph import Graph, Name, Node, checks
from fpipe.graphs.language.labels import is_cotangent, is_gradient, is_parameter, is_result
from fpipe.graphs.tracing.draws import drawn
from fpipe.program import ALL_BUT
from fpipe.torch_internals import OpOverload


@dataclass(frozen=True, eq=False)
class Cut:
    """The parts of a traced stage.

    Args:
        graph: the stage and its gradient.
        wanted: the labels of the cotangents that somebody reads (`dx`, `dx:1`, `dcarry`), and the places of the leaves
            that have one; the others are not computed.
        saved: None, or the names of ops whose results F keeps, beside what it was given, what is marked and what is
            drawn at random. The backward computes the rest again, each op just before it is needed: layer by layer.
    """

    graph: Graph
    wanted: tuple[tuple[str, tuple[int, ...]], ...]
    saved: tuple[str, ...] | None = None

    def forward(self, writes: Sequence[str]) -> Graph:
        """Return F or R; `writes` are among y, loss, count, aux, state, carry and res."""
        return self._part([label for label in self.graph.reads if not is_cotangent(label)], writes)

    def backward(self) -> Graph:
        """Return B, which computes all gradients."""
        return self._part([*self._params, *self._cotangents, "res"], [*dict(self.wanted), *self._gradients])

    def backward_input(self) -> Graph:
        """Return I, which computes the cotangents of the stage's inputs, and what W reads."""
        return self._part([*self._params, *self._cotangents, "res"], [*dict(self.wanted), "wres"])

    def backward_weight(self) -> Graph:
        """Return W, which computes the gradients of parameters."""
        return self._part([*self._params, "wres"], self._gradients)

    @property
    def early(self) -> list[Name]:
        """Return the gradients of parameters that I cannot leave to W, since their op also makes what I needs."""
        return [name for name in self._leaves(self._gradients) if name in self._input_ops]

    def _part(self, reads: Sequence[str], writes: Sequence[str]) -> Graph:
        graph = self.graph
        crossing = {"res": tuple(self.residuals), "wres": tuple(self.weight_residuals)}
        inputs = {label: graph.reads[label] if label in graph.reads else crossing[label] for label in reads}
        outputs = {label: crossing[label] if label in crossing else self.written(label) for label in writes}
        known = {name for leaves in inputs.values() for name in leaves if name is not None}
        is_forward, is_backward = {*inputs}.isdisjoint(crossing), any(map(is_cotangent, inputs))
        effects = self._forward_effects if is_forward else checks(graph)[1] if is_backward else []
        ops = graph.behind((*(leaf for leaves in outputs.values() for leaf in leaves), *effects), known)
        nodes = _narrowed([node for node in graph.nodes if node.name in ops], graph)
        if self.saved is not None and any(map(is_cotangent, reads)):
            nodes = _when_needed(nodes, self._forward_ops)
        return replace(graph, nodes=tuple(nodes), reads=inputs, writes=outputs)

    @cached_property
    def _forward_effects(self) -> list[Name]:
        """The ops that a forward runs though nobody reads them: it draws all its numbers, and makes all its checks."""
        return [*(node.name for node in drawn(self.graph)), *checks(self.graph)[0]]

    @cached_property
    def _params(self) -> list[str]:
        return [label for label in self.graph.reads if is_parameter(label)]

    @cached_property
    def _cotangents(self) -> list[str]:
        return [label for label in self.graph.reads if is_cotangent(label)]

    @cached_property
    def _gradients(self) -> list[str]:
        return [label for label in self.graph.writes if is_gradient(label)]

    def written(self, label: str) -> tuple[Any, ...]:
        """Return the leaves under a label, of cotangents only those that are wanted."""
        leaves, places = self.graph.writes[label], dict(self.wanted).get(label)
        return leaves if places is None else tuple(leaf if k in places else None for k, leaf in enumerate(leaves))

    def _leaves(self, labels: Iterable[str]) -> list[Name]:
        return [leaf for label in labels for leaf in self.written(label) if isinstance(leaf, Name)]

    @cached_property
    def _forward_ops(self) -> set[Name]:
        outputs = [label for label in self.graph.writes if is_result(label)]
        return self._with_parts(self.graph.behind([*self._leaves(outputs), *self._forward_effects]))

    @cached_property
    def _input_ops(self) -> set[Name]:
        wanted = [*self._leaves(dict(self.wanted)), *checks(self.graph)[1]]
        return self._with_parts(self.graph.behind(wanted, self._forward_ops))

    def _with_parts(self, ops: set[Name]) -> set[Name]:
        """Add the parts of what ops write: a tensor of a tuple crosses a cut alone, not the tuple.

        The parts of an op that can run again for the rest are left to their readers.
        """
        written = {node.name: node for node in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op is getitem and node.args[0] in ops and _mask_of(written[node.args[0]], self.graph) is None:
                ops.add(node.name)
        return ops

    @cached_property
    def _weight_ops(self) -> set[Name]:
        """The ops that g needs beyond F and I. An op that can make one of its results alone runs again for others."""
        known = self._forward_ops | self._input_ops
        ops = self.graph.behind(self._leaves(self._gradients), known)
        written = {node.name: node for node in self.graph.nodes}
        for name in [*ops]:
            node = written[name]
            if node.op is getitem and _mask_of(written[node.args[0]], self.graph) is not None:
                ops |= {node.args[0]}
        return ops

    @cached_property
    def residuals(self) -> list[Name]:
        """The values that F leaves for the backward."""
        backward = self._input_ops | self._weight_ops
        made = self._leaves([*dict(self.wanted), *self._gradients])
        if self.saved is not None:
            return self._crossing(self.graph.behind(made, self._kept), made, self._kept)
        return self._crossing(backward, made, self._forward_ops | self._held)

    @cached_property
    def weight_residuals(self) -> list[Name]:
        """The values that I leaves for W."""
        cotangents = {name for label in self._cotangents for name in self.graph.reads[label] if name is not None}
        known = self._forward_ops | self._input_ops | self._held | cotangents
        return self._crossing(self._weight_ops, self._leaves(self._gradients), known)

    @cached_property
    def _kept(self) -> set[Name]:
        known = {node.name for node in self.graph.nodes if _is_saved(node, self.saved or ())}
        known |= {node.name for node in self.graph.nodes if node.op is getitem and node.args[0] in known}
        known |= {leaf for leaf in self.graph.writes.get("kept", ()) if isinstance(leaf, Name)}
        return self._held | {name for name in known & self._forward_ops if name in self.graph.facts}

    @cached_property
    def _held(self) -> set[Name]:
        labels = [label for label in self.graph.reads if label not in (*self._params, *self._cotangents)]
        return {name for label in labels for name in self.graph.reads[label] if name is not None}

    def _crossing(self, ops: set[Name], made: Iterable[Name], known: set[Name]) -> list[Name]:
        """Return the `known` values that `ops` and results read, in the order of the graph."""
        read = {name for node in self.graph.nodes if node.name in ops for name in node.reads} | {*made}
        crossing = (read & known) - ops - views_of_params(self.graph)
        return [name for name in (*self.graph.inputs(), *(node.name for node in self.graph.nodes)) if name in crossing]


def views_of_params(graph: Graph) -> set[Name]:
    """Return the views of parameters and of buffers, and views of views."""
    known = {name for label in graph.reads if is_parameter(label) for name in graph.reads[label]}
    storages = {graph.facts[name].storage for name in known if name is not None}
    views: set[Name] = set()
    for node in graph.nodes:
        fact = graph.facts.get(node.name)
        if fact is not None and fact.storage in storages and {*node.reads} <= known | views:
            views.add(node.name)
    return views


def prepared(graph: Graph) -> tuple[Graph, Graph]:
    """Split off the views of parameters, which a step makes once for all microbatches."""
    views = views_of_params(graph)
    labels = [label for label in graph.reads if is_parameter(label)]
    rest = [node for node in graph.nodes if node.name not in views]
    read = {name for node in rest for name in node.reads}
    read |= {leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    given = [name for label in labels for name in graph.reads[label] if name is not None]
    ready = tuple(name for name in (*given, *(node.name for node in graph.nodes)) if name in read & {*given, *views})
    needed = graph.behind(ready)
    first = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name in needed),
        reads={label: graph.reads[label] for label in labels},
        writes={"ready": ready},
    )
    reads = {label: leaves for label, leaves in graph.reads.items() if label not in labels}
    return first, replace(graph, nodes=tuple(rest), reads={"ready": ready, **reads})


def _is_saved(node: Node, saved: Sequence[str]) -> bool:
    if isinstance(node.kwargs.get("generator"), Name):
        return True
    if saved[:1] == (ALL_BUT,):
        return isinstance(node.op, OpOverload) and str(node.op) not in saved
    return str(node.op) in saved


def _when_needed(nodes: list[Node], recomputed: set[Name]) -> list[Node]:
    """Move recomputed ops to just before the first op that reads what they write."""
    waiting = {node.name: node for node in nodes if node.name in recomputed}
    order: list[Node] = []

    def bring(names: Iterable[Name]) -> None:
        todo = [*names]
        while todo:
            node = waiting.get(todo[-1])
            missing = [name for name in node.reads if name in waiting] if node else []
            todo += missing
            if node and not missing:
                order.append(waiting.pop(node.name))
            if not missing:
                todo.pop()

    for node in nodes:
        if node.name not in recomputed:
            bring(node.reads)
            order.append(node)
    bring([*waiting])
    return order


def _narrowed(nodes: list[Node], graph: Graph) -> list[Node]:
    """Let ops that take a mask of their results make only those that somebody reads."""
    used: dict[Name, set[int]] = {}
    for node in nodes:
        if node.op is getitem:
            used.setdefault(node.args[0], set()).add(node.args[1])
    narrowed: list[Node] = []
    for node in nodes:
        at = _mask_of(node, graph)
        if at is not None and node.name in used:
            mask = [wanted and place in used[node.name] for place, wanted in enumerate(node.args[at])]
            node = node._replace(args=(*node.args[:at], mask, *node.args[at + 1 :]))
        narrowed.append(node)
    return narrowed


def _mask_of(node: Node, graph: Graph) -> int | None:
    """Return the place of an op's mask of results among its arguments, if the op computes each result alone."""
    if not isinstance(node.op, OpOverload) or node.op not in _SEPARABLE or not isinstance(node.args[-1], list):
        return None
    if node.op is _GROUP_NORM:  # of channels-last data it writes out of bounds (torch 2.13)
        known = graph.facts[node.args[1]].aval
        if known.stride != torch.empty(known.shape, device="meta").stride():
            return None
    return len(node.args) - 1


_aten: Any = torch.ops.aten
# With a mask these compute each result alone, to the same bits; tests/test_layers.py looks.
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
