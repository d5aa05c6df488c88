"""Cut the graph of a net into stages: `f(params, x)` of each, what it takes, and the buffers that it writes.

wte  h.0  h.1  MARK  h.2  h.3  head        -->        [wte h.0 h.1]  [h.2 h.3 head]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.purity.attributes import Modules
from fpipe.meaning.purity.fingerprint import may_depend_on_mode
from fpipe.model import Source, one_or_all
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.cut_at_marks import StageGraphs
from fpipe.models.cutting.graph_stage import GraphStage
from fpipe.models.cutting.marked_graph import MarkedGraph
from fpipe.models.cutting.net_state import written_by
from fpipe.models.modules.modes import Modes
from fpipe.models.parameters.load import HandedOut
from fpipe.models.tracing.net_graph import NetGraph, NetTensors
from fpipe.models.tracing.places import open_sizes


class CutNet:
    """A net as stages.

    Args:
        marked: its graph, with marks where a stage ends.
        tensors: those of the net, as it has them, and `params`, the parameters that are handed out.
        inputs: the placeholders of its inputs, in the containers of a batch's, and `example`, an example of them.
        result: what the last stage returns, a pytree of nodes.
        modules: those of the net, with their paths; the first stage looks whether their modes are the same.
        excluded: operations of no stage, such as those of a loss behind the last.

    Attributes:
        stages: `f(params, x)` of each.
        inputs: what each stage takes, as `from_functions` has it.
        owned: of each stage the parameters that it is the first to read, and what does not train, if it reads it; those
            that nobody reads are the first stage's.
        ties: the parameters that several stages read, each as its (stage, name).
        readers: the stages that read each parameter, in the order in which the net has these.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        tensors: NetTensors,
        params: Mapping[str, Tensor],
        inputs: Any,
        example: Any,
        result: Any,
        modules: Modules,
        excluded: Collection[fx.Node] = (),
    ) -> None:
        net, self.marked, self.tensors = marked.net, marked, tensors
        leaves, spec = tree.flatten(result)
        leaves = [marked.value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        results = [*dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node))]
        self.written = written_by(marked, net.constants, tensors.buffers)
        nodes = tree.leaves(inputs)
        places = {leaf: place for place, leaf in enumerate(nodes) if isinstance(leaf, fx.Node)}
        self.cut = StageGraphs(marked, results, places, {*excluded}, [[*home] for home in self.written])
        self.readers = readers = self.cut.readers()
        first = {name: min(stages, default=0) for name, stages in readers.items()}
        untrained = {name: readers[name] for name in first if name in tensors.untrained}
        self.owned = [
            [name for name in first if first[name] == stage or stage in untrained.get(name, ())]
            for stage in range(marked.stages)
        ]
        tied = {name: stages for name, stages in readers.items() if len(stages) > 1 and name not in untrained}
        self.ties = [[(stage, name) for stage in stages] for name, stages in tied.items()]
        self.inputs: list[Source | tuple[Source, ...]] = [one_or_all(one) for one in self.cut.inputs]
        self.guard = guard_of(net, nodes, example, "inputs")
        turning = [one for one in modules if may_depend_on_mode(one[1])]
        self.stages = [self._stage(number, () if number else turning) for number in range(marked.stages)]
        for stage, own in zip(self.stages, self.owned, strict=True):
            stage.handed_out = HandedOut({name: params[name] for name in own}, [module for _, module in modules])
        self.stages[-1].whole = _whole_of(self.cut.outputs[-1][0], leaves, spec)

    def _stage(self, number: int, turning: Modules) -> GraphStage:
        """A stage as a function."""
        part, home, net = self.cut.parts[number], self.written[number], self.marked.net
        why = f"the trace goes on as it was. Call {net.door} again in this mode."
        return GraphStage(
            number,
            self.cut.module(number),
            [*part.params],
            [name for name in self.owned[number] if name not in part.params],
            self.cut.places(number),
            many=isinstance(self.inputs[number], tuple),
            tensors=self.tensors,
            guard=self.guard if part.batch else None,
            traced_modes=Modes(turning, f"{net.who} was traced", why),
            holds=[*home.values()],
        )


def with_untrained(marked: MarkedGraph, tensors: NetTensors) -> NetTensors:
    """The tensors of a net, where those on meta that no operation writes are parameters of the graph too: leaves
    without a gradient, since they have no values yet. A ValueError for another tensor there, such as an attribute."""
    net = marked.net
    lost = next((name for name, literal in tensors.literals.items() if literal.is_meta), None)
    if lost is not None:
        raise ValueError(
            f"{lost!r} is a tensor on meta, without values, that is no parameter or buffer of the net, so nothing can "
            "give it some. Say register_buffer where the net makes it."
        )
    found = {
        node: name
        for node, name in net.constants.items()
        if name in tensors.first and tensors.now(name).is_meta and node not in marked.mutators
    }
    for node in found:
        net.params[node] = net.constants.pop(node)
    names = frozenset(found.values())
    return tensors._replace(trains=tensors.trains | names, untrained=names)


def guard_of(net: NetGraph, values: Sequence[Any], example: Any, word: str) -> BatchGuard:
    """The guard of a half of the batch, and of values that come with it."""
    sizes = [open_sizes(value) if isinstance(value, fx.Node) else {} for value in values]
    return BatchGuard(example, word, sizes, net.guards, net.who, net.door)


@dataclass(frozen=True, eq=False)
class Whole:
    """Puts what a graph returns, a value or a tuple of `several`, into the containers of a net's output.

    Attributes:
        places: for each leaf of the output which value it is, None for one that is no tensor.
        leaves, spec: these leaves as they are, and the containers.
    """

    several: bool
    places: Sequence[int | None]
    leaves: Sequence[Any]
    spec: tree.Spec

    def __call__(self, made: Any) -> Any:
        """The output of the net."""
        values = made if self.several else (made,)
        each = zip(self.places, self.leaves, strict=True)
        return tree.unflatten(self.spec, [leaf if at is None else values[at] for at, leaf in each])


def _whole_of(values: Sequence[fx.Node], leaves: Sequence[Any], spec: tree.Spec) -> Whole | None:
    """The output of a net from what the last stage's graph returns, if that is another: `leaves` in containers."""
    places = [values.index(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves]
    plain = spec == tree.flatten(tuple(places) if len(values) > 1 else 0)[1]
    if plain and places == [*range(len(values))]:
        return None
    return Whole(len(values) > 1, places, [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec)
