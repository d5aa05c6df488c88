"""A stage that was cut out of a graph: beside parameters it reads tables and buffers as the net has them.

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
from fpipe.meaning.purity.attributes import Same, value_key
from fpipe.meaning.purity.own_memory import mutated_by
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.marked_graph import draws_random
from fpipe.models.modules.modes import Modes
from fpipe.models.parameters.load import HandedOut
from fpipe.models.tracing.contexts import Context, contexts_of, copy_nodes, restored_on_error
from fpipe.models.tracing.net_graph import NetTensors
from fpipe.models.tracing.opaque import own_calls, rename_calls
from fpipe.positional_stage import PositionalStage
from fpipe.torch_private.fx import dump_graph, load_graph

# Split a stage's graph into its blocks and what is between them, each a piece that can be traced alone:
#
#     sizes, masks | wte | h.0 | h.1 | h.2          a value that two later pieces read joins all three

BLOCK = "fpipe_block"
"""Where a node's meta says which of the repeated blocks of the net it is in."""


class GraphPiece:
    """Some operations of a stage, as a graph of their own: it takes labelled values, and makes those it hands on."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        makes: Sequence[fx.Node],
        labels: Mapping[fx.Node, str],
        contexts: Mapping[fx.Node, Context],
    ) -> None:
        inside = {*nodes}
        read = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
        self.takes = {value: labels.get(value, "x") for value in read}
        self.nodes, self.makes, self.contexts = nodes, makes, contexts

    @cached_property
    def graph(self) -> fx.Graph:
        """Its operations, in their contexts."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in self.takes}
        copy_nodes(graph, self.nodes, self.contexts, copies, copies.__getitem__)
        graph.output([copies[node] for node in self.makes])
        return graph

    @cached_property
    def twin(self) -> Any:
        """Equal for pieces of the same operations."""
        unsupported: list[Any] = []
        return operations(self.graph, unsupported), Same(self) if unsupported else None

    @cached_property
    def module(self) -> fx.GraphModule:
        """Its operations as a function."""
        return fx.GraphModule({}, self.graph)

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run its operations on the leaves that it takes."""
        with restored_on_error():
            return self.module.forward(*leaves)


def pieces_of(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> list[GraphPiece]:
    """The pieces of a stage, whose placeholders are labelled `params`, `const` or `x`; none where there are no blocks,
    or something is mutated, or returned as it came."""
    contexts = contexts_of(graph)
    nodes = [*contexts]
    results = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    odd = any(node.op == "get_attr" for node in graph.nodes) or any(node.op == "placeholder" for node in results)
    if odd or not any(BLOCK in node.meta for node in nodes) or any(mutated_by(node) for node in nodes):
        return []
    trained = _differentiable(graph, labels)
    first = _before_all(nodes, trained)
    runs = groupby((node for node in nodes if node not in first), lambda node: node.meta.get(BLOCK))
    home = dict.fromkeys(first, 0) | {node: at for at, (_, run) in enumerate(runs, 1) for node in run}
    while merged := next(_torn(home, trained, results), None):
        low, high = merged
        home = {node: low if low <= at <= high else at for node, at in home.items()}
    for node in (one for one in reversed(nodes) if one in first):  # a block's own mask is there while the block runs
        readers = {home[user] for user in node.users if user in home}
        of_batch = node in results or any(one in trained for one in node.all_input_nodes)
        of_many = any(isinstance(one.meta.get("val"), tuple | list) for one in node.all_input_nodes)
        if (
            len(readers) == 1
            and not of_batch
            and not of_many
            and (isinstance(node.meta.get("val"), Tensor) or node.target is getattr)
        ):
            (home[node],) = readers
    found: list[GraphPiece] = []
    for number in sorted({*home.values()}):
        own = [node for node in nodes if home[node] == number]
        made = [one for one in own if one in results or any(home.get(user, number) != number for user in one.users)]
        found.append(GraphPiece(own, made, labels, contexts))
    return found


def _differentiable(graph: fx.Graph, labels: Mapping[fx.Node, str]) -> set[fx.Node]:
    """The values that may have a gradient: floats that follow from parameters or from floats that came."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        one = isinstance(value, Tensor)
        floats = value.is_floating_point() or value.is_complex() if one else isinstance(value, tuple | list)
        came = node.op == "placeholder" and labels[node] != "const"
        if floats and (came or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _before_all(nodes: Iterable[fx.Node], trained: set[fx.Node]) -> set[fx.Node]:
    """Sizes, masks, tables: what needs no value with a gradient and draws nothing, and so may come first."""
    found: set[fx.Node] = set()
    for node in nodes:
        early = all(one.op == "placeholder" or one in found for one in node.all_input_nodes)
        if early and node not in trained and not draws_random(node):
            found.add(node)
    return found


def _torn(home: Mapping[fx.Node, int], trained: set[fx.Node], results: set[fx.Node]) -> Iterator[tuple[int, int]]:
    """The first and the last of pieces that are one: they read one value with a gradient, or parts of one op's."""
    for value in trained:
        many = isinstance(value.meta["val"], tuple | list)
        readers = {home[user] for user in value.users if many or user in trained} - {home.get(value)}
        if readers and len(readers) + (value in results) + many > 1:
            yield min(home.get(value, min(readers)), *readers), max(readers)


def operations(graph: fx.Graph, odd: list[Any], attributes: Any = None) -> Any:
    """The operations of a graph as a value to compare: equal for the same operations on the same constants, which
    `attributes` has. `odd` takes what may change and stay the same object."""
    place = {node: at for at, node in enumerate(graph.nodes)}

    def seen(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return "node", place[arg]
        if isinstance(arg, list | tuple):
            return type(arg), tuple(map(seen, arg))
        return value_key(arg, odd if not isinstance(arg, _NAMED) else [])

    def target(node: fx.Node) -> Any:
        """The function that a node calls, or the constant that it is; of placeholders only the order counts."""
        if node.op == "get_attr":
            return Same(getattr(attributes, str(node.target)))
        return None if node.op in ("placeholder", "output") else node.target

    return tuple(
        (node.op, target(node), seen(node.args), tuple((word, seen(arg)) for word, arg in node.kwargs.items()))
        for node in graph.nodes
    )


_NAMED = torch.memory_format | torch.layout


class GraphStage(PositionalStage):
    """A stage as a graph, whose placeholders are what it reads of the net, and then what it takes.

    Args:
        number: which stage it is.
        reads: the names of what it reads of the net: parameters, constants, and the buffers that it writes.
        unread: the names of the parameters that live in the stage and nobody reads.
        places: for each tensor that it takes, which of its inputs it is in, and at which leaf.
        many: whether x is a tuple of several inputs.
        tensors: those of the net.
        guard, traced_modes: what the batch, and the modes of modules, have to be, if it is the stage that looks.
        holds: the buffers that it writes.

    Attributes:
        whole: the output of the net from what the graph returns, in the last stage.
        handed_out: the parameters that live in it and are a module's, as they were then.
        opaque: the modules that its graph calls, which it keeps.
    """

    whole: Callable[[Any], Any] | None

    def __init__(
        self,
        number: int,
        graph: fx.GraphModule,
        reads: Sequence[str],
        unread: Sequence[str],
        places: Sequence[tuple[int, int]],
        *,
        many: bool,
        tensors: NetTensors,
        guard: BatchGuard | None,
        traced_modes: Modes,
        holds: Sequence[str],
    ) -> None:
        self.number, self.graph, self.takes, self.places, self.many = number, graph, reads, places, many
        self.tensors, self.guard, self.traced_modes = tensors, guard, traced_modes
        self.holds, self.whole = list(holds), None
        self.reads = [name for name in reads if name in tensors.trains]
        self.fixed = [name for name in reads if name not in tensors.trains and name not in self.holds]
        self.names = tuple((name,) for name in (*self.reads, *unread))
        self.handed_out = HandedOut({}, ())
        self.opaque = own_calls(graph.graph)
        inside = {call.path: call.module for call in self.opaque}
        self.modules = [
            (path, one) for above, module in inside.items() for path, one in module.named_modules(prefix=above)
        ]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Dump the graph apart from the rest, without what is computed of it, so that other processes can load it."""
        plain = {name: held for name, held in vars(self).items() if name not in ("pieces", "_placeholders")}
        graphs = {name: dump_graph(held) for name, held in plain.items() if isinstance(held, fx.GraphModule)}
        return {name: held for name, held in plain.items() if name not in graphs}, graphs

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, bytes]]) -> None:
        plain, graphs = state
        vars(self).update(plain | {name: load_graph(one) for name, one in graphs.items()})
        rename_calls(self.graph, self.opaque)

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """The stage's output; with a state also the new one."""
        buffers = [(state or {})[name].clone() for name in self.holds]
        y, beside = self.pure([params[name] for name in self.reads], self.constants(), x, buffers)
        return (y, dict(zip(self.holds, beside["state"], strict=True))) if self.holds else y

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The output, and by name the state of the stage."""
        with restored_on_error():
            y, beside = self.graph.forward(*self.arguments(params, constants, x, buffers))
        y = self.whole(y) if self.whole else y
        return y, {"state": beside} if self.holds else {}

    def arguments(
        self, params: Sequence[Any], constants: Sequence[Any], x: Any, buffers: Sequence[Any] = ()
    ) -> list[Any]:
        """The arguments of the graph; of the parameters those that it does not read come last."""
        tensors = dict(zip(self.reads, params, strict=False)) | dict(zip(self.fixed, constants, strict=True))
        tensors |= dict(zip(self.holds, buffers, strict=True))
        inputs = self._input_leaves(x)
        return [*(tensors[name] for name in self.takes), *(inputs[number][leaf] for number, leaf in self.places)]

    def _input_leaves(self, x: Any) -> list[list[Any]]:
        """Return the leaves of each input; raise ValueError if the trace is not for them."""
        self.traced_modes.check()
        batch, *rest = x if self.many else (x,)
        leaves = tree.leaves(batch if self.guard is None else self.guard.ordered(batch))
        if self.guard is not None:
            self.guard.check(leaves)
        return [leaves, *map(tree.leaves, rest)]

    @cached_property
    def pieces(self) -> list[GraphPiece]:
        """Its blocks and what is between them; none where it has module state, or runs Python."""
        if self.holds or self.opaque:
            return []
        labels = ["params" if name in self.tensors.trains else "const" for name in self.takes]
        labels += ["x"] * len(self.places)
        return pieces_of(self.graph.graph, dict(zip(self._placeholders, labels, strict=True)))

    @cached_property
    def _placeholders(self) -> list[fx.Node]:
        return self.graph.graph.find_nodes(op="placeholder")

    def in_pieces(self, params: Sequence[Any], constants: Sequence[Any], x: Any) -> tuple[dict[fx.Node, Any], Any]:
        """The arguments of its graph, by placeholder, and its output with nodes of the graph for tensors."""
        made, _ = self.graph.graph.output_node().args[0]  # pyright: ignore[reportGeneralTypeIssues]
        taken = dict(zip(self._placeholders, self.arguments(params, constants, x), strict=True))
        return taken, self.whole(made) if self.whole else made

    def remembering(self) -> dict[str, Any]:
        """The fields of a `Stage` that tell of its state."""
        return {"asks": frozenset({"state"} if self.holds else ())}

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage writes, by name, as they are now."""
        return {name: self.tensors.now(name).detach() for name in self.holds}

    def home_of(self, name: str) -> tuple[Any, str]:
        """Where the net has a tensor: its owner, and the attribute."""
        return self.tensors.homes[name]

    def all_names(self) -> Iterable[str]:
        """The names of all tensors of the net."""
        return self.tensors.homes

    def constants(self) -> list[Tensor]:
        """The tensors that it reads besides parameters and state, as the net has them now."""
        return [self.tensors.now(name) for name in self.fixed]

    def literals_now(self) -> list[Tensor]:
        """The constants that its code makes of numbers."""
        return [self.tensors.literals[name] for name in self.fixed if name in self.tensors.literals]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers and frozen parameters of the net, which the first stage answers for."""
        first = self.tensors.first if self.number == 0 else {}
        yield from ((name, self.tensors.now(name)) for name in first if first[name] not in self.tensors.trains)

    def moved(self) -> Mapping[str, int]:
        """The parameters that modules have elsewhere than when they were handed out."""
        return self.handed_out.moved()

    def modes(self) -> tuple[Any, ...]:
        """The modes of modules as they are now: a step in others is not the one that was traced."""
        return self.traced_modes.now()

    def read_state(self, names: Sequence[str]) -> None:
        """Read these buffers from the state that a step is handed, which stays as it is, besides what it writes."""
        if not {*self.holds} <= {*names}:
            raise ValueError(f"stage {self.number} writes {self.holds[-1]!r} in eval mode: cut the net in that mode.")
        graph, given = self.graph.graph, self.graph.graph.find_nodes(op="placeholder")
        nodes = dict(zip(self.takes, given, strict=False))
        with graph.inserting_before(next(iter([*given[len(self.takes) :], *graph.nodes]))):
            nodes |= {name: graph.placeholder(f"state_{at}") for at, name in enumerate(names) if name not in nodes}
        output = graph.output_node()
        returned: Any = output.args[0]
        now = dict(zip(self.holds, returned[1], strict=True))
        self.takes, self.holds = [*nodes], [*names]
        self.fixed = [name for name in self.fixed if name not in names]
        output.args = ((returned[0], [now.get(name, nodes[name]) for name in names]),)
        self.graph.recompile()

    def twin(self) -> Any:
        """Equal for graphs of the same operations that read the same kinds of things in the same order; one that takes
        the batch, or looks at modes, equals no other."""
        unsupported: list[Any] = [self] if self.guard or self.traced_modes.modules else []
        nodes = operations(self.graph.graph, unsupported, self.graph)
        kinds = [{name: place for place, name in enumerate(names)} for names in (self.reads, self.fixed, self.holds)]
        takes = tuple(tuple(kind.get(name) for kind in kinds) for name in self.takes)
        shape = tuple(self.places), self.many, len(self.names), self.modes(), takes, self.whole
        return nodes, shape, Same(self) if unsupported else None
