"""Cut the graph of a net into stages: the function `f(params, x)` of each, its inputs and the buffers that it writes.

wte  h.0  h.1  MARK  h.2  h.3  head        -->        [wte h.0 h.1]  [h.2 h.3 head]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.purity.attributes import Modes, NamedModules
from fpipe.meaning.purity.fingerprint import may_depend_on_mode
from fpipe.model import Source, as_stage_input
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.cut_at_marks import StageGraphs
from fpipe.models.cutting.graph_stage import GraphStage
from fpipe.models.cutting.marked_graph import MarkedGraph, buffers_written_by_stage
from fpipe.models.cutting.place_cuts import flops_of_nodes
from fpipe.models.exporting.net_graph import NetTensors
from fpipe.models.parameters.load import ParamAddresses
from fpipe.torch_private.fx import example_number


class CutNet:
    """A net that is cut into stage functions, with their inputs, parameters and ties.

    Args:
        marked: its graph, with marks where a stage ends.
        tensors: the tensors of the net.
        params: the parameters that the front door returns.
        inputs: the placeholders of its inputs, in the containers of the batch.
        example: an example of these inputs.
        result: the output of the last stage, a pytree of nodes.
        modules: the modules of the net by path; the first stage checks that their modes are those of the trace.
        excluded: operations of no stage, such as those of a loss behind the last.

    Attributes:
        stages: the function `f(params, x)` of each stage.
        inputs: the sources of each stage, as `from_functions` takes them.
        owned: for each stage the names of the parameters that it is the first to read, and of the untrained ones that
            it reads. Parameters that nobody reads are the first stage's.
        ties: the parameters that several stages read, each as a list of (stage, name).
        readers: the stages that read each parameter, in the order of the net's parameters.
    """

    def __init__(
        self,
        marked: MarkedGraph,
        tensors: NetTensors,
        params: Mapping[str, Tensor],
        inputs: Any,
        example: Any,
        result: Any,
        modules: NamedModules,
        excluded: Collection[fx.Node] = (),
    ) -> None:
        net, self.marked, self.tensors = marked.net, marked, tensors
        leaves, spec = tree.flatten(result)
        leaves = [marked.value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        results = [*dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node))]
        self.written_buffers = buffers_written_by_stage(marked, net.constants, tensors.buffers)
        nodes = tree.leaves(inputs)
        batch_index = {leaf: index for index, leaf in enumerate(nodes) if isinstance(leaf, fx.Node)}
        self.stage_graphs = StageGraphs(
            marked, results, batch_index, {*excluded}, [[*name_by_node] for name_by_node in self.written_buffers]
        )
        self.readers = readers = self.stage_graphs.stages_by_param()
        # A parameter lives in the first stage that reads it; with later readers it is tied. One that does not train is
        # no tie: each stage that reads it has a leaf of its own, without a gradient to add.
        first_stage = {name: min(stages, default=0) for name, stages in readers.items()}
        untrained_readers = {name: readers[name] for name in first_stage if name in tensors.untrained}
        self.owned = [
            [name for name in first_stage if first_stage[name] == stage or stage in untrained_readers.get(name, ())]
            for stage in range(marked.stage_count)
        ]
        tied_readers = {
            name: stages for name, stages in readers.items() if len(stages) > 1 and name not in untrained_readers
        }
        self.ties = [[(stage, name) for stage in stages] for name, stages in tied_readers.items()]
        self.inputs: list[Source | tuple[Source, ...]] = [as_stage_input(group) for group in self.stage_graphs.inputs]
        self.guard = BatchGuard(net, nodes, example, "inputs")
        mode_modules = [(path, module) for path, module in modules if may_depend_on_mode(module)]
        self.stages = [self._stage(number, () if number else mode_modules) for number in range(marked.stage_count)]
        for stage, names in zip(self.stages, self.owned, strict=True):
            owned_params = {name: params[name] for name in names}
            stage.param_addresses = ParamAddresses(owned_params, [module for _, module in modules])
        self.stages[-1].unflatten_output = _output_unflattener(self.stage_graphs.outputs[-1][0], leaves, spec)

    def _stage(self, number: int, mode_modules: NamedModules) -> GraphStage:
        subgraph, net = self.stage_graphs.subgraphs[number], self.marked.net
        consequence = f"the trace stays as it was. Call {net.door} again in this mode."
        return GraphStage(
            number,
            self.stage_graphs.module(number),
            [*subgraph.params],
            [name for name in self.owned[number] if name not in subgraph.params],
            self.stage_graphs.leaf_places(number),
            has_several_inputs=isinstance(self.inputs[number], tuple),
            tensors=self.tensors,
            guard=self.guard if subgraph.batch else None,
            traced_modes=Modes(mode_modules, f"{net.who} was traced", consequence),
            holds=[*self.written_buffers[number].values()],
        )


def with_untrained(marked: MarkedGraph, tensors: NetTensors) -> NetTensors:
    """Make constants on meta parameters of the graph that do not train.

    A buffer or frozen parameter on meta has no values yet. As a leaf of `params` the caller can give it some; as a
    constant the stage would read the net's own. Buffers that an operation writes are state, and stay.

    Raises:
        ValueError: a tensor on meta is neither parameter nor buffer, such as a plain attribute.
    """
    net = marked.net
    valueless = next((name for name, literal in tensors.literals.items() if literal.is_meta), None)
    if valueless is not None:
        raise ValueError(
            f"{valueless!r} is a tensor on meta that is no parameter or buffer of the net. Say register_buffer where "
            "the net makes it."
        )
    untrained_by_node = {
        node: name
        for node, name in net.constants.items()
        if name in tensors.canonical_names and tensors.current_tensor(name).is_meta and node not in marked.mutators
    }
    for node in untrained_by_node:
        net.params[node] = net.constants.pop(node)
    names = frozenset(untrained_by_node.values())
    return tensors._replace(param_names=tensors.param_names | names, untrained=names)


@dataclass(frozen=True, eq=False)
class OutputUnflattener:
    """A function that puts the values which a graph returns into the containers of the net's output.

    Attributes:
        is_tuple: whether the graph returns a tuple of values, and not one.
        value_indices: for each leaf of the output the index of its value, None for a leaf that is no tensor.
        leaves: the leaves that are no tensors.
        spec: the containers.
    """

    is_tuple: bool
    value_indices: Sequence[int | None]
    leaves: Sequence[Any]
    spec: tree.Spec

    def __call__(self, graph_result: Any) -> Any:
        """Return the output of the net."""
        values = graph_result if self.is_tuple else (graph_result,)
        indices_and_leaves = zip(self.value_indices, self.leaves, strict=True)
        leaves = [leaf if index is None else values[index] for index, leaf in indices_and_leaves]
        return tree.unflatten(self.spec, leaves)


def _output_unflattener(values: Sequence[fx.Node], leaves: Sequence[Any], spec: tree.Spec) -> OutputUnflattener | None:
    """Return the function that rebuilds the net's output, or None if the graph returns it in this form already."""
    value_indices = [values.index(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves]
    is_same_structure = spec == tree.flatten(tuple(value_indices) if len(values) > 1 else 0)[1]
    if is_same_structure and value_indices == [*range(len(values))]:
        return None
    return OutputUnflattener(
        len(values) > 1, value_indices, [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
    )


class CutReport:
    """A report of the modules, work and traffic of each stage, made when it is printed: counting operations is slow.

    stage 1: blocks.2, blocks.3
        1,168 parameters (4.6 KiB), 33% of the operations
        takes float32[8, 5, 8] (1.2 KiB) of stage 0
    """

    def __init__(self, net: CutNet, module_words: Sequence[str]) -> None:
        self.net, self.module_words = net, module_words

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # A copy is the printed text: it needs no graph of the whole net.
        return str, (str(self),)

    def __str__(self) -> str:
        costs = [sum(flops_of_nodes([*self._computed(stage)])) for stage in range(len(self.module_words))]
        return "\n".join(line for i, cost in enumerate(costs) for line in self._lines(i, cost / max(1, sum(costs))))

    def _lines(self, stage: int, share: float) -> Iterable[str]:
        part = self.net.stage_graphs.subgraphs[stage]
        yield f"stage {stage}: {self.module_words[stage]}"
        leaves = [self.net.tensors.current_tensor(name) for name in self.net.owned[stage]]
        size = _size(sum(leaf.numel() * leaf.element_size() for leaf in leaves))
        facts = [f"{sum(leaf.numel() for leaf in leaves):,} parameters ({size})"]
        facts += [f"{share:.0%} of the operations"] if share else []
        state_names = self.net.stages[stage].state_names
        facts += [f"{len(state_names)} buffers of state"] if state_names else []
        ties = (group for group in self.net.ties for reader, _ in group[1:] if reader == stage)
        facts += [f"{name} is that of stage {owner}" for (owner, name), *_ in ties]
        yield f"    {', '.join(facts)}"
        batch = [f"{_shape(node)} of the batch" for node in part.batch]
        stage_of = self.net.marked.stage_of
        received = [f"{_shape(node)} ({_size(_bytes(node))}) of stage {stage_of[node]}" for node in part.received]
        yield f"    takes {', '.join((*batch, *received))}"
        # Replicated operations, such as masks, run in each stage that reads them.
        earlier_nodes = {node for earlier_stage in range(stage) for node in self._computed(earlier_stage)}
        recomputed_count = sum(node in earlier_nodes and _bytes(node) > 0 for node in self._computed(stage))
        if recomputed_count:
            yield f"    makes {recomputed_count} tensors again, which follow from sizes and constants"

    def _computed(self, stage: int) -> Iterable[fx.Node]:
        subgraph = self.net.stage_graphs.subgraphs[stage]
        return (node for node in subgraph.nodes if node.op == "call_function" and node not in subgraph.received)


def _shape(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}{[*map(example_number, value.shape)]}"


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(map(example_number, value.shape)) * value.element_size() if isinstance(value, Tensor) else 0


def _size(count: int) -> str:
    """Format bytes in the largest unit with at least one.

    >>> _size(900), _size(1200), _size(3 << 30)
    ('900 B', '1.2 KiB', '3.0 GiB')
    """
    power = min(3, (max(1, count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB'][power]}" if power else f"{count} B"
