"""Run a stage that was cut out of a graph; besides parameters it reads constants and buffers of the net.

f(params, x)             = graph(params, constants, x)
f(params, x, state=s)    = graph(params, constants, s, x), s'       where it writes buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.purity.attributes import IdentityKey, Modes, value_key
from fpipe.meaning.purity.write_guard import is_wrapper, mutated_nodes
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.marked_graph import node_draws_random
from fpipe.models.exporting.net_graph import NetTensors
from fpipe.models.exporting.node_contexts import Context, contexts_of, copy_nodes, restored_on_error
from fpipe.models.exporting.opaque_ops import opaque_calls_of, rename_calls
from fpipe.models.parameters.load import ParamAddresses
from fpipe.positional_stage import PositionalStage
from fpipe.torch_internals import direct_members
from fpipe.torch_private.fx import dump_graph, load_graph

# Split a stage's graph into pieces, its blocks and what is between them. Each piece can be traced alone, and equal
# pieces share one trace:
#
#     sizes, masks | wte | h.0 | h.1 | h.2
#
# A value with a gradient that two later pieces read joins all three: autograd would add the two cotangents in an order
# that pieces traced alone do not know, and the bits would differ.

BLOCK = "fpipe_block"
"""The key of a node's meta under which stands the number of its block."""


class GraphPiece:
    """Some operations of a stage as a graph of their own, from labelled values to the values that others read."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        labels: Mapping[fx.Node, str],
        contexts: Mapping[fx.Node, Context],
    ) -> None:
        node_set = {*nodes}
        inputs = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in node_set)
        self.label_by_input = {value: labels.get(value, "x") for value in inputs}
        self.nodes, self.outputs, self.contexts = nodes, outputs, contexts

    @cached_property
    def graph(self) -> fx.Graph:
        """The operations as a graph, each in its context of autocast and grad mode."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in self.label_by_input}
        copy_nodes(graph, self.nodes, self.contexts, copies, copies.__getitem__)
        graph.output([copies[node] for node in self.outputs])
        return graph

    @cached_property
    def twin(self) -> Any:
        """A key that is equal for pieces of the same operations."""
        unsupported: list[Any] = []
        return operation_keys(self.graph, unsupported), IdentityKey(self) if unsupported else None

    @cached_property
    def module(self) -> fx.GraphModule:
        """The operations as a function."""
        return fx.GraphModule({}, self.graph)

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the operations on the leaves that the piece takes."""
        with restored_on_error():
            return self.module.forward(*leaves)


def pieces_of(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> list[GraphPiece]:
    """Return the pieces of a stage, whose placeholders are labelled `params`, `const` or `x`.

    There are none if the graph has no blocks, mutates a value, or returns an input.
    """
    contexts = contexts_of(graph)
    nodes = [*contexts]
    results = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    has_constant = any(node.op == "get_attr" for node in graph.nodes)
    returns_input = any(node.op == "placeholder" for node in results)
    has_blocks = any(BLOCK in node.meta for node in nodes)
    if has_constant or returns_input or not has_blocks or any(mutated_nodes(node) for node in nodes):
        return []
    # 1) Piece 0 has what needs no gradient and can run before everything; then each run of one block is a piece.
    differentiable = _differentiable(graph, labels)
    early_nodes = _early_nodes(nodes, differentiable)
    block_runs = groupby((node for node in nodes if node not in early_nodes), lambda node: node.meta.get(BLOCK))
    piece_of = dict.fromkeys(early_nodes, 0)
    piece_of |= {node: piece for piece, (_, run) in enumerate(block_runs, 1) for node in run}
    # 2) Merge pieces until no value with a gradient is read by two.
    while piece_range := next(_pieces_to_merge(piece_of, differentiable, results), None):
        low, high = piece_range
        piece_of = {node: low if low <= piece <= high else piece for node, piece in piece_of.items()}
    # 3) Move what only one piece reads, such as a block's own mask, into that piece, so that it lives while the block
    #    runs. Readers come before what they read, hence the reversed order.
    for node in reversed([node for node in nodes if node in early_nodes]):
        reader_pieces = {piece_of[user] for user in node.users if user in piece_of}
        reads_differentiable = any(value in differentiable for value in node.all_input_nodes)
        reads_tuple = any(isinstance(value.meta.get("val"), tuple | list) for value in node.all_input_nodes)
        is_movable = isinstance(node.meta.get("val"), Tensor) or node.target is getattr
        if len(reader_pieces) == 1 and is_movable and not (node in results or reads_differentiable or reads_tuple):
            (piece_of[node],) = reader_pieces
    # 4) A piece returns the results among its values, and the values that other pieces read.
    pieces: list[GraphPiece] = []
    for piece in sorted({*piece_of.values()}):
        piece_nodes = [node for node in nodes if piece_of[node] == piece]
        outputs = [
            node
            for node in piece_nodes
            if node in results or any(piece_of.get(user, piece) != piece for user in node.users)
        ]
        pieces.append(GraphPiece(piece_nodes, outputs, labels, contexts))
    return pieces


def _differentiable(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> set[fx.Node]:
    """Return the values that may have a gradient: floats computed from parameters or from inputs that are floats."""
    differentiable: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor)
        is_float = value.is_floating_point() or value.is_complex() if is_tensor else isinstance(value, tuple | list)
        is_differentiable_input = node.op == "placeholder" and labels[node] != "const"
        if is_float and (is_differentiable_input or not differentiable.isdisjoint(node.all_input_nodes)):
            differentiable.add(node)
    return differentiable


def _early_nodes(nodes: Iterable[fx.Node], differentiable: set[fx.Node]) -> set[fx.Node]:
    """Return the operations that may run first, such as sizes, masks and tables: no gradient, no random draws."""
    early_nodes: set[fx.Node] = set()
    for node in nodes:
        reads_only_early = all(value.op == "placeholder" or value in early_nodes for value in node.all_input_nodes)
        if reads_only_early and node not in differentiable and not node_draws_random(node):
            early_nodes.add(node)
    return early_nodes


def _pieces_to_merge(
    piece_by_node: Mapping[fx.Node, int], differentiable: set[fx.Node], results: set[fx.Node]
) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of pieces that read one value with a gradient, or results of one op."""
    for value in differentiable:
        is_tuple = isinstance(value.meta["val"], tuple | list)
        readers = {piece_by_node[user] for user in value.users if is_tuple or user in differentiable} - {
            piece_by_node.get(value)
        }
        if readers and len(readers) + (value in results) + is_tuple > 1:
            yield min(piece_by_node.get(value, min(readers)), *readers), max(readers)


def operation_keys(graph: fx.Graph, unsupported: list[Any], attributes: Any = None) -> Any:
    """Return a key that is equal for graphs of the same operations on the same constants.

    Args:
        graph: the graph.
        unsupported: a list to which values are added that no key can stand for, such as objects that may change.
        attributes: the module with the constants of the graph.
    """
    position_by_node = {node: position for position, node in enumerate(graph.nodes)}

    def argument_key(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return "node", position_by_node[argument]
        if isinstance(argument, list | tuple):
            return type(argument), tuple(map(argument_key, argument))
        return value_key(argument, unsupported if not isinstance(argument, _NAMED) else [])

    def target_key(node: fx.Node) -> Any:
        # The function that a node calls, or the constant that it is. Names of placeholders do not count.
        if node.op == "get_attr":
            return IdentityKey(getattr(attributes, str(node.target)))
        return None if node.op in ("placeholder", "output") else node.target

    return tuple(
        (
            node.op,
            target_key(node),
            argument_key(node.args),
            tuple((keyword, argument_key(argument)) for keyword, argument in node.kwargs.items()),
        )
        for node in graph.nodes
    )


_NAMED = torch.memory_format | torch.layout


class GraphStage(PositionalStage):
    """A stage function that is a graph. Its placeholders are tensors of the net, then leaves of its inputs.

    Args:
        number: the number of the stage.
        graph: its operations.
        reads: the names of the net's tensors that it reads: parameters, constants, and the buffers that it writes.
        unread: the names of parameters in its pytree that no stage reads.
        leaf_places: for each leaf that it takes, (index of the input, index of the leaf in it).
        has_several_inputs: whether x is a tuple of several inputs.
        tensors: the tensors of the net.
        guard: the check of the batch, if the stage reads it.
        traced_modes: the modes that modules must have, which the first stage checks.
        holds: the names of the buffers that it writes.

    Attributes:
        unflatten_output: rebuilds the net's output from what the graph returns, in the last stage.
        has_loss: whether that output is a pair with the loss.
        param_addresses: its parameters that are a module's, as they were when the front door returned them.
        opaque: the modules that its graph calls, which it keeps alive.
        wrapper_names: its constants of another class, such as quantized weights.
    """

    unflatten_output: Callable[[Any], Any] | None

    def __init__(
        self,
        number: int,
        graph: fx.GraphModule,
        reads: Sequence[str],
        unread: Sequence[str],
        leaf_places: Sequence[tuple[int, int]],
        *,
        has_several_inputs: bool,
        tensors: NetTensors,
        guard: BatchGuard | None,
        traced_modes: Modes,
        holds: Sequence[str],
    ) -> None:
        self.number, self.graph, self.read_names = number, graph, reads
        self.leaf_places, self.has_several_inputs = leaf_places, has_several_inputs
        self.tensors, self.guard, self.traced_modes = tensors, guard, traced_modes
        self.state_names, self.unflatten_output, self.has_loss = list(holds), None, False
        self.reads = [name for name in reads if name in tensors.param_names]
        constants = [name for name in reads if name not in tensors.param_names and name not in self.state_names]
        self.wrapper_names = [name for name in constants if is_wrapper(tensors.current_tensor(name))]
        self.fixed = [name for name in constants if name not in self.wrapper_names]
        self.names = tuple((name,) for name in (*self.reads, *unread))
        self.param_addresses = ParamAddresses({}, ())
        self.opaque = opaque_calls_of(graph.graph)
        module_by_path = {path: module for call in self.opaque for path, module in call.module_by_path.items()}
        named_modules = (module.named_modules(prefix=prefix) for prefix, module in module_by_path.items())
        self.modules = [path_and_module for modules in named_modules for path_and_module in modules]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Dump graphs in torch's format and drop caches, so that other processes can load the stage."""
        attributes = {name: value for name, value in vars(self).items() if name not in ("pieces", "_placeholders")}
        graphs = {name: dump_graph(value) for name, value in attributes.items() if isinstance(value, fx.GraphModule)}
        return {name: value for name, value in attributes.items() if name not in graphs}, graphs

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, bytes]]) -> None:
        attributes, dump_by_name = state
        vars(self).update(attributes | {name: load_graph(dump) for name, dump in dump_by_name.items()})
        rename_calls(self.graph, self.opaque)

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return the stage's output, with a state also the new state, and a loss of its own last."""
        buffers = [(state or {})[name].clone() for name in self.state_names]
        y, extra_results = self.pure([params[name] for name in self.reads], self.constants(), x, buffers)
        if self.state_names:
            extra_results["state"] = dict(zip(self.state_names, extra_results["state"], strict=True))
        return (y, *extra_results.values()) if extra_results else y

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """Compute the output, the `state` after it, and the `loss` of its own, from tensors by position."""
        with restored_on_error():
            graph_output, buffers_after = self.graph.forward(*self.arguments(params, constants, x, buffers))
        y, losses = self._split_loss(graph_output)
        return y, ({"state": buffers_after} if self.state_names else {}) | losses

    def _split_loss(self, graph_output: Any) -> tuple[Any, dict[str, Any]]:
        """Return the output of the net as its graph returns it, and the `loss` if that is separate."""
        y = self.unflatten_output(graph_output) if self.unflatten_output else graph_output
        return (y[0], {"loss": y[1]}) if self.has_loss else (y, {})

    def arguments(
        self, params: Sequence[Any], constants: Sequence[Any], x: Any, buffers: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the arguments of the graph."""
        # `params` has the unread parameters at its end, which the zip leaves out.
        tensors = dict(zip(self.reads, params, strict=False)) | dict(zip(self.fixed, constants, strict=True))
        tensors |= dict(zip(self.state_names, buffers, strict=True))
        tensors |= dict(zip(self.wrapper_names, self.wrappers(), strict=True))
        inputs = self._input_leaves(x)
        return [*(tensors[name] for name in self.read_names), *(inputs[i][j] for i, j in self.leaf_places)]

    def _input_leaves(self, x: Any) -> list[list[Any]]:
        """Return the leaves of each input; raise ValueError if the trace is not for them."""
        self.traced_modes.check()
        batch, *other_inputs = x if self.has_several_inputs else (x,)
        leaves = tree.leaves(batch if self.guard is None else self.guard.in_example_order(batch))
        if self.guard is not None:
            self.guard.check(leaves)
        return [leaves, *map(tree.leaves, other_inputs)]

    @cached_property
    def pieces(self) -> list[GraphPiece]:
        """Its blocks and the operations between them; none with module state, opaque modules or quantized weights."""
        if self.state_names or self.modules or self.wrapper_names:
            return []
        labels = ["params" if name in self.tensors.param_names else "const" for name in self.read_names]
        labels += ["x"] * len(self.leaf_places)
        return pieces_of(self.graph.graph, dict(zip(self._placeholders, labels, strict=True)))

    @cached_property
    def _placeholders(self) -> list[fx.Node]:
        return self.graph.graph.find_nodes(op="placeholder")

    def map_to_pieces(
        self, params: Sequence[Any], constants: Sequence[Any], x: Any
    ) -> tuple[dict[fx.Node, Any], Any, dict[str, Any]]:
        """Return the arguments of its graph by placeholder, and its output and loss, which are nodes for tensors."""
        graph_output, _ = self.graph.graph.output_node().args[0]  # pyright: ignore[reportGeneralTypeIssues]
        argument_by_placeholder = dict(zip(self._placeholders, self.arguments(params, constants, x), strict=True))
        return argument_by_placeholder, *self._split_loss(graph_output)

    def with_params_bound(self, params: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
        """Call a function, such as a backward that recomputes, while `params` are bound in its opaque modules."""
        return self.with_tensors_bound([params[name] for name in self.reads], self.constants(), function)

    def with_tensors_bound(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], function: Callable[[], Any]
    ) -> Any:
        """Call a function, such as the backward of a trace, while these tensors are bound in its opaque modules."""
        tensor_by_name = dict(zip(self.reads, params, strict=False)) | dict(zip(self.fixed, constants, strict=True))
        owned_ids = {id(module) for _, module in self.modules}
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for first_name, tensor in tensor_by_name.items() if owned_ids else ():
                for owner, attribute in map(self.home_of, self.tensors.names(first_name)):
                    dicts: Any = direct_members(owner)[:2] if id(owner) in owned_ids else ()
                    for tensors in dicts:
                        if attribute in tensors:
                            replaced.append((tensors, attribute, tensors[attribute]))
                            tensors[attribute] = tensor
            return function()
        finally:
            for tensors, attribute, original in replaced:
                tensors[attribute] = original

    def state_fields(self) -> dict[str, Any]:
        """Return the fields of a `Stage` that declare its state, and how it runs a backward that calls its modules."""
        bound = {"with_params_bound": self.with_params_bound} if self.modules else {}
        return {"keywords": frozenset({"state"} if self.state_names else ()), **bound}

    def state(self) -> dict[str, Tensor]:
        """Return the current values of the buffers that the stage writes, by name."""
        return {name: self.tensors.current_tensor(name).detach() for name in self.state_names}

    def home_of(self, name: str) -> tuple[Any, str]:
        """Return the owner of a tensor of the net, and the attribute."""
        return self.tensors.attribute_by_name[name]

    def all_names(self) -> Iterable[str]:
        """Return the names of all tensors of the net."""
        return self.tensors.attribute_by_name

    def constants(self) -> list[Tensor]:
        """Return the current values of its constants."""
        return [self.tensors.current_tensor(name) for name in self.fixed]

    def wrappers(self) -> list[Tensor]:
        """Return the current values of its constants that are of another class, which its traces keep."""
        return [self.tensors.current_tensor(name) for name in self.wrapper_names]

    def literal_constants(self) -> list[Tensor]:
        """Return the constants that the traced code made of Python numbers, as torch.tensor(3) does."""
        return [self.tensors.literals[name] for name in self.fixed if name in self.tensors.literals]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers and frozen parameters of the net for the first stage, and none for others."""
        name_by_first = self.tensors.canonical_names if self.number == 0 else {}
        names = [name for name in name_by_first if name_by_first[name] not in self.tensors.param_names]
        yield from ((name, self.tensors.current_tensor(name)) for name in names)

    def moved_params(self) -> Mapping[str, int]:
        """Return the parameters whose memory is another than when they were handed out."""
        return self.param_addresses.moved()

    def modes(self) -> tuple[Any, ...]:
        """Return the current modes of the modules that it checks: a step in others is not the one that was traced."""
        return self.traced_modes.current()

    def return_state(self, names: Sequence[str]) -> None:
        """Add buffers to the state of the stage that it reads and returns unchanged."""
        # A net cut in eval mode writes fewer buffers than in training. So that both models take one state, the stages
        # of the eval net take and return the buffers that those of the training net write.
        if not {*self.state_names} <= {*names}:
            raise ValueError(
                f"stage {self.number} writes {self.state_names[-1]!r} in eval mode: cut the net in that mode."
            )
        graph, placeholders = self.graph.graph, self.graph.graph.find_nodes(op="placeholder")
        node_by_name = dict(zip(self.read_names, placeholders, strict=False))
        with graph.inserting_before(next(iter([*placeholders[len(self.read_names) :], *graph.nodes]))):
            for index, name in enumerate(names):
                if name not in node_by_name:
                    node_by_name[name] = graph.placeholder(f"state_{index}")
        output = graph.output_node()
        returned: Any = output.args[0]
        output_by_name = dict(zip(self.state_names, returned[1], strict=True))
        self.read_names, self.state_names = [*node_by_name], [*names]
        self.fixed = [name for name in self.fixed if name not in names]
        output.args = ((returned[0], [output_by_name.get(name, node_by_name[name]) for name in names]),)
        self.graph.recompile()

    def sharing_key(self) -> Any:
        """Return a key that is equal for stages with the same operations on the same kinds of inputs in one order."""
        # A stage that checks the batch or modes is equal to itself alone.
        unsupported: list[Any] = [self] if self.guard or self.traced_modes.modules else []
        node_keys = operation_keys(self.graph.graph, unsupported, self.graph)
        index_by_name_of_kind = [
            {name: index for index, name in enumerate(names)} for names in (self.reads, self.fixed, self.state_names)
        ]
        read_kinds = tuple(tuple(indices.get(name) for indices in index_by_name_of_kind) for name in self.read_names)
        inputs = (tuple(self.leaf_places), self.has_several_inputs, len(self.names), read_kinds)
        wrappers, identity = tuple(map(IdentityKey, self.wrappers())), IdentityKey(self) if unsupported else None
        return node_keys, inputs, self.modes(), self.unflatten_output, wrappers, identity
