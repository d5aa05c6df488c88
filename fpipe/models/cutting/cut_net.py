"""Cut the graph of a net into stages: `f(params, x)` of each, what it takes, and the buffers that it writes.

wte  h.0  h.1  MARK  h.2  h.3  head        -->        [wte h.0 h.1]  [h.2 h.3 head]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from fpipe.models.cutting.marked_graph import MarkedGraph, written_by
from fpipe.models.cutting.place_cuts import costs_of
from fpipe.models.modules.modes import Modes
from fpipe.models.parameters.load import HandedOut
from fpipe.models.tracing.net_graph import NetTensors
from fpipe.torch_private.fx import example_number


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
        self.guard = BatchGuard(net, nodes, example, "inputs")
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
    untrained = {
        node: name
        for node, name in net.constants.items()
        if name in tensors.first and tensors.now(name).is_meta and node not in marked.mutators
    }
    for node in untrained:
        net.params[node] = net.constants.pop(node)
    names = frozenset(untrained.values())
    return tensors._replace(trains=tensors.trains | names, untrained=names)


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
        places = zip(self.places, self.leaves, strict=True)
        return tree.unflatten(self.spec, [leaf if place is None else values[place] for place, leaf in places])


def _whole_of(values: Sequence[fx.Node], leaves: Sequence[Any], spec: tree.Spec) -> Whole | None:
    """The output of a net from what the last stage's graph returns, if that is another: `leaves` in containers."""
    places = [values.index(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves]
    plain = spec == tree.flatten(tuple(places) if len(values) > 1 else 0)[1]
    if plain and places == [*range(len(values))]:
        return None
    return Whole(len(values) > 1, places, [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec)


class CutReport:
    """The modules, work and traffic of each stage; printed only when asked, since counting operations takes a while.

    stage 1: blocks.2, blocks.3
        1,168 parameters (4.6 KiB), 33% of the operations
        takes float32[8, 5, 8] (1.2 KiB) of stage 0
    """

    def __init__(self, cut: CutNet, words: Sequence[str]) -> None:
        self.cut, self.words = cut, words

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy needs no graph of the whole net

    def __str__(self) -> str:
        costs = [sum(costs_of([*self._computed(stage)])) for stage in range(len(self.words))]
        return "\n".join(
            line for stage, cost in enumerate(costs) for line in self._lines(stage, cost / max(1, sum(costs)))
        )

    def _lines(self, stage: int, share: float) -> Iterable[str]:
        marked, part = self.cut.marked, self.cut.cut.parts[stage]
        yield f"stage {stage}: {self.words[stage]}"
        leaves = [self.cut.tensors.now(name) for name in self.cut.owned[stage]]
        size = _size(sum(leaf.numel() * leaf.element_size() for leaf in leaves))
        words = [f"{sum(leaf.numel() for leaf in leaves):,} parameters ({size})"]
        words += [f"{share:.0%} of the operations"] if share else []
        written = self.cut.stages[stage].holds
        words += [f"{len(written)} buffers of state"] if written else []
        ties = (group for group in self.cut.ties for at, _ in group[1:] if at == stage)
        words += [f"{name} is that of stage {owner}" for (owner, name), *_ in ties]
        yield f"    {', '.join(words)}"
        batch = [f"{_shape(node)} of the batch" for node in part.batch]
        taken = [f"{_shape(node)} ({_size(_bytes(node))}) of stage {marked.stage_of[node]}" for node in part.received]
        yield f"    takes {', '.join((*batch, *taken))}"
        earlier = {node for before in range(stage) for node in self._computed(before)}
        again = sum(node in earlier and _bytes(node) > 0 for node in self._computed(stage))
        if again:
            yield f"    makes {again} tensors again, which follow from sizes and constants"

    def _computed(self, stage: int) -> Iterable[fx.Node]:
        part = self.cut.cut.parts[stage]
        return (node for node in part.nodes if node.op == "call_function" and node not in part.received)


def _shape(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{[*map(example_number, value.shape)]}"


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(map(example_number, value.shape)) * value.element_size() if isinstance(value, Tensor) else 0


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is one.

    >>> _size(900), _size(1200), _size(3 << 30)
    ('900 B', '1.2 KiB', '3.0 GiB')
    """
    power = min(3, (max(1, count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB'][power]}" if power else f"{count} B"
