"""Cut the graph of a net into stages: `f(params, x)` of each, what it takes, and the buffers that it writes.

wte  h.0  h.1  MARK  h.2  h.3  head        -->        [wte h.0 h.1]  [h.2 h.3 head]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.model import Source
from fpipe.models.cutting.cut_at_marks import StageGraphs, one_or_all
from fpipe.models.cutting.graph_stage import BatchGuard
from fpipe.models.cutting.marked_graph import MarkedGraph
from fpipe.models.cutting.net_graph import Held, NetGraph
from fpipe.models.cutting.net_stage import NetStage, Update
from fpipe.models.cutting.net_state import Written, statistics_of, written_by
from fpipe.models.tracing.open_sizes import open_sizes
from fpipe.models.tracing.traced_modes import TracedModes

WHO, DOOR = "the net", "from_module"


class CutNet:
    """A net as stages.

    Args:
        net: its graph, with marks where a stage ends.
        held: its tensors.
        inputs: the placeholders of its inputs, in the containers of a batch's, and `example`, an example of them.
        result: what the last stage returns, a pytree of nodes.
        modes: those of its modules; the first stage looks whether they are the same.

    Attributes:
        stages: `f(params, x)` of each.
        inputs: what each stage takes, as `from_functions` has it.
        owned: of each stage the parameters that it is the first to read; those that nobody reads are the first stage's.
        ties: the parameters that several stages read, each as its (stage, name).
    """

    def __init__(
        self, net: NetGraph, held: Held, inputs: Any, example: Any, result: Any, modes: TracedModes | None
    ) -> None:
        self.net, self.held, self.example, self.modes = net, held, example, modes
        self.nodes = tree.leaves(inputs)
        leaves, self.spec = tree.flatten(result)
        self.leaves: list[Any] = leaves
        results = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))
        statistics = statistics_of(net.module.graph)
        marked = MarkedGraph(net.module, WHO, [node for node in net.constants if node not in statistics])
        results = [marked.value(node) for node in results]
        self.written = written_by(marked, net.constants, held.buffers, results)
        gone = {node for home in self.written for node in home.ops if not home.held}
        self.cut = StageGraphs(
            marked,
            results,
            net.params,
            {leaf: place for place, leaf in enumerate(self.nodes) if isinstance(leaf, fx.Node)},
            gone,
            net.constants,
            [[*home.held] or home.seen() for home in self.written],
        )
        self.marked = marked
        self.owned, self.ties = self.cut.owned, self.cut.ties
        self.inputs: list[Source | tuple[Source, ...]] = [one_or_all(one) for one in self.cut.inputs]
        self.stages = [self._stage(number) for number in range(marked.stages)]

    def _stage(self, number: int) -> NetStage:
        """A stage as a function."""
        part, home = self.cut.parts[number], self.written[number]
        return NetStage(
            number,
            self.cut.module(number),
            [*part.params],
            [name for name in self.owned[number] if name not in part.params],
            self.cut.places(number),
            many=isinstance(self.inputs[number], tuple),
            guard=self._guard() if part.batch else None,
            traced_modes=None if number else self.modes,
            held=self.held,
            literals=self.net.literals,
            holds=[*home.held.values()],
            update=self._update(home) if home.part else None,
            whole=self._whole() if number == len(self.cut.parts) - 1 else None,
        )

    def _update(self, home: Written) -> Update:
        """What writes the buffers of a stage that no output reads."""
        assert home.part is not None
        graph = home.part.module(list(home.apart))
        shapes = {name: tuple(node.meta["val"].shape) for node, name in home.apart.items()}
        constant = partial(_constant, self.held, self.net.literals)
        return Update(graph, [*home.part.params], [*home.apart.values()], constant, len(home.seen()), shapes)

    def _whole(self) -> Whole:
        """The output of the net from what the last stage's graph returns."""
        (values,) = self.cut.outputs[-1]
        places = [values.index(self.marked.value(leaf)) if isinstance(leaf, fx.Node) else None for leaf in self.leaves]
        return Whole(len(values), places, self.leaves, self.spec)

    def _guard(self) -> BatchGuard:
        """What the inputs have to be."""
        sizes = [open_sizes(leaf) if isinstance(leaf, fx.Node) else {} for leaf in self.nodes]
        return BatchGuard(self.example, "inputs", sizes, self.net.guards, WHO, DOOR)


def _constant(held: Held, literals: Mapping[str, Tensor], name: str) -> Tensor:
    return literals[name] if name in literals else held.now(name)


class Whole:
    """Puts what a graph returns, a value or a tuple of `count`, into the containers of a net's output.

    Args:
        places: for each leaf of the output which value it is, None for one that is no tensor.
        leaves, spec: these leaves as they are, and the containers.
    """

    def __init__(self, count: int, places: Sequence[int | None], leaves: Sequence[Any], spec: tree.Spec) -> None:
        self.count, self.places, self.spec = count, places, spec
        self.leaves = [leaf if at is None else None for at, leaf in zip(places, leaves, strict=True)]

    def __call__(self, made: Any) -> Any:
        """The output of the net."""
        values = made if self.count > 1 else (made,)
        each = zip(self.places, self.leaves, strict=True)
        return tree.unflatten(self.spec, [leaf if at is None else values[at] for at, leaf in each])
