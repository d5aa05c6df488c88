"""Cut a graph of operations into stages at its marks: which operation runs where, and what it needs from whom.

    embed  MARK  block  MARK  head        -->        [embed]  [block]  [head]

An operation belongs to the stage that the marks before it say. What it reads of an earlier stage is an edge of the
dataflow; what is computed from no tensor that was given (a mask, a size) each stage computes again for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import floordiv
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fpipe.meaning.purity.own_memory import mutated_by
from fpipe.model import Source
from fpipe.models.cutting.marked_graph import MarkedGraph, has_effect
from fpipe.models.tracing.contexts import copy_nodes
from fpipe.models.tracing.places import expr_of, follows, is_size, open_sizes, place_of
from fpipe.torch_private.fx import computed

_SIZE: Any = torch.ops.aten.sym_size.int
_CLONE: Any = torch.ops.aten.clone.default


class Subgraph:
    """The operations that one stage runs, or a loss, and what they read that others compute.

    Args:
        marked: the whole graph.
        results: what the part hands on, and `own`, the operations that may run in it.
        params, batch: the parameters and leaves of the batch that it may read, by placeholder their names and places.

    Attributes:
        nodes: what it runs, in order, and `received`, what it reads of other parts.
        params: by name the placeholders that it reads, and `batch`, by placeholder the place.
        sizes: those that it computes from the sizes of what it reads.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        results: Iterable[fx.Node],
        own: Collection[fx.Node],
        params: Mapping[fx.Node, str],
        batch: Mapping[fx.Node, int],
    ) -> None:
        self.marked = marked
        self.params: dict[str, fx.Node] = {}
        self.batch: dict[fx.Node, int] = {}
        self.received: dict[fx.Node, None] = {}
        self.sizes: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        todo = [*results, *(node for node in marked.stage_of if node in own and has_effect(node))]
        while todo or (todo := self._uncomputed()):
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if is_size(node):
                self.sizes[node] = None
            elif node in params:
                self.params[params[node]] = node
            elif node in batch:
                self.batch[node] = batch[node]
            elif node in marked.replicated or node in own:
                todo += marked.reads(node)
            else:
                self.received[node] = None
        self.nodes = [node for node in marked.graph.nodes if node in seen]

    def _uncomputed(self) -> list[fx.Node]:
        """Drop sizes that do not follow from those of what is read, and return what their operations read."""
        known = self._known_sizes()
        uncomputed = [size for size in self.sizes if not follows(expr_of(size), known)]
        for size in uncomputed:
            del self.sizes[size]
        return [read for size in uncomputed for read in self.marked.reads(size)]

    def _known_sizes(self) -> dict[Any, tuple[fx.Node, int, int]]:
        """For each size of what is read a tensor that has it, in which dimension and how many times over."""
        known: dict[Any, tuple[fx.Node, int, int]] = {}
        for tensor in (*self.received, *self.batch):
            for dim, size in open_sizes(tensor).items():
                factor, symbol = size.as_coeff_Mul()
                for expr, times in {size: 1, symbol: factor}.items():
                    if times == int(times) and (expr not in known or times < known[expr][2]):
                        known[expr] = tensor, dim, int(times)
        return known

    def module(self, results: Any) -> fx.GraphModule:
        """The part as a graph of parameters, then of leaves of the batch, then of what it receives."""
        graph = fx.Graph()
        inputs = (*self.params.values(), *self.batch, *self.received)
        copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
        for node, copy in copies.items():
            copy.meta = dict(node.meta)
        # Each size once and first, so that equal stages have equal graphs.
        copies |= self._computed_sizes(graph, copies)

        def copied(node: fx.Node) -> fx.Node:
            return copies[self.marked.value(node)]

        written = (value for node in self.nodes if node.op == "call_function" for value in mutated_by(node))
        mutated = {base for value in written for base in self.marked.viewed_by(value)}
        for node in self.received:
            if node in mutated:  # what another stage has made stays as it is
                copies[node] = graph.call_function(_CLONE, (copies[node],))
        copy_nodes(graph, self.nodes, self.marked.contexts, copies, copied)
        _follow_device(graph)
        graph.output(fx.map_arg(results, copied))
        return fx.GraphModule(self.marked.module, graph)

    def _computed_sizes(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
        """Compute each size once, in nodes of a new graph; a number stands for one that the trace has fixed since."""
        known, proxies = self._known_sizes(), dict[Any, Any]()
        exprs = {node: expr_of(node) for node in self.nodes if node in self.sizes}
        for expr in exprs.values():
            for part in (expr,) if expr in known else sorted(expr.free_symbols, key=str):
                if part not in proxies:
                    tensor, dim, times = known[part]
                    size = graph.call_function(_SIZE, (copies[tensor], dim))
                    proxies[part] = fx.Proxy(size if times == 1 else graph.call_function(floordiv, (size, times)))
            if expr not in proxies:
                proxies[expr] = computed(expr, proxies)
        return {node: getattr(proxies[expr], "node", proxies[expr]) for node, expr in exprs.items()}


def _follow_device(graph: fx.Graph) -> None:
    """Let each operation that names meta ask what the graph takes last for its device: a net that was traced on meta
    makes what it makes itself where its stage runs. Each asks for itself, so that equal blocks stay equal."""
    given = graph.find_nodes(op="placeholder")
    for node in [*graph.nodes] if given else ():
        asked: list[fx.Node] = []

        def device(arg: Any, node: fx.Node = node, asked: list[fx.Node] = asked) -> Any:
            if not isinstance(arg, torch.device) or arg.type != "meta":
                return arg
            if not asked:
                with graph.inserting_before(node):
                    asked.append(graph.call_function(getattr, (given[-1], "device")))
                asked[0].meta = {key: one for key, one in node.meta.items() if key != "val"}
            return asked[0]

        args, kwargs = map_aggregate((node.args, node.kwargs), device)  # pyright: ignore[reportGeneralTypeIssues]
        if asked:
            node.args, node.kwargs = args, dict(kwargs)


class StageGraphs:
    """A marked graph, cut: each stage as a graph of its own, and who reads what of whom.

    Args:
        marked: the whole graph, and `batch`, the leaves of the batch, by placeholder their places.
        results: what the last stage hands on, values of earlier stages among them.
        excluded: operations of no stage, such as those of a loss behind the last.
        beside: of each stage what it returns beside what it hands on.

    Attributes:
        parts, inputs: of each stage what it runs and reads, and its inputs.
        outputs: of each stage its outputs, each the values that the same stages read.
        home: of each value that is handed on the stage that does, and which of its outputs it is in.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        results: Iterable[fx.Node],
        batch: Mapping[fx.Node, int],
        excluded: Collection[fx.Node],
        beside: Sequence[Sequence[fx.Node]],
    ) -> None:
        self.marked, self.batch, self.excluded, self.beside = marked, batch, excluded, beside
        self.params = marked.net.params
        self.parts, handed_on = self._parts(results)
        self.outputs = [*(self._by_readers(values) for values in handed_on[:-1]), [handed_on[-1]]]
        self.home = {
            node: (stage, port)
            for stage, groups in enumerate(self.outputs)
            for port, group in enumerate(groups)
            for node in group
            if marked.stage_of.get(node) == stage  # the last stage hands on values of earlier ones too
        }
        self.inputs = [*map(self._inputs_of, self.parts)]

    def _parts(self, results: Iterable[fx.Node]) -> tuple[list[Subgraph], list[list[fx.Node]]]:
        """The stages, found from the last one back, and what each hands on, in the order of the graph."""
        handed_on: list[dict[fx.Node, None]] = [{} for _ in range(self.marked.stages)]
        handed_on[-1] = dict.fromkeys(results)
        given = {**self.params, **self.marked.net.constants}
        parts: list[Subgraph] = []
        for stage in reversed(range(self.marked.stages)):
            own = {node for node, home in self.marked.stage_of.items() if home == stage and node not in self.excluded}
            wanted = (*handed_on[stage], *self.beside[stage])
            part = Subgraph(self.marked, wanted, own, given, self.batch)
            for node in part.received:
                if node not in self.marked.stage_of:
                    raise ValueError(
                        f"stage {stage} asks for a size of the target, which only the loss has; ask the inputs for it, "
                        f"as in x.shape[0].{place_of(next(iter(node.users), node))}"
                    )
                self._refuse_mutated_between(node, stage)
                handed_on[self.marked.stage_of[node]][node] = None
            parts.insert(0, part)
        order = {node: number for number, node in enumerate(self.marked.graph.nodes)}
        return parts, [sorted(values, key=order.__getitem__) for values in handed_on]

    def _refuse_mutated_between(self, node: fx.Node, stage: int) -> None:
        """A stage mutates a value of its own: a later one would read what was there before."""
        home, mutator = self.marked.stage_of[node], self.marked.mutators.get(node)
        if mutator is not None and home < self.marked.stage_of[mutator] < stage:
            raise ValueError(
                f"stage {stage} reads what stage {home} computes ({node.name}) and stage "
                f"{self.marked.stage_of[mutator]} writes in place ({mutator.target}). Compute a new tensor instead."
                f"{place_of(mutator)}"
            )

    def _by_readers(self, values: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Values that a stage hands on, grouped by the stages that read them; those of the next one come first."""
        groups: dict[tuple[int, ...], list[fx.Node]] = {}
        for node in values:
            readers = tuple(stage for stage, part in enumerate(self.parts) if node in part.received)
            groups.setdefault(readers, []).append(node)
        return [groups[readers] for readers in sorted(groups)]

    def _inputs_of(self, part: Subgraph) -> list[Source]:
        ports = sorted({self.home[node] for node in part.received})
        batch: list[Source] = ["batch"] if part.batch or not ports else []
        return [*batch, *((stage, port) if port else stage for stage, port in ports)]

    def readers(self) -> dict[str, list[int]]:
        """The stages that read each parameter."""
        return {
            name: [stage for stage, part in enumerate(self.parts) if name in part.params]
            for name in self.params.values()
        }

    def module(self, stage: int) -> fx.GraphModule:
        """A stage as a graph of its own that returns its output, and a list of what it returns beside."""
        output = _one_or_all([_one_or_all(group) for group in self.outputs[stage]])
        return self.parts[stage].module((output, [*self.beside[stage]]))

    def places(self, stage: int) -> list[tuple[int, int]]:
        """For each tensor that a stage takes beside parameters, which of its inputs it is in, and at which leaf."""
        found = [(0, leaf) for leaf in self.parts[stage].batch.values()]
        for node in self.parts[stage].received:
            home, port = self.home[node]
            place = self.inputs[stage].index((home, port) if port else home)
            found.append((place, self.outputs[home][port].index(node)))
        return found


def _one_or_all(values: Sequence[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]
