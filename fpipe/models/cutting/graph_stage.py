"""A stage that was cut out of a graph: beside parameters it reads tables and buffers as the net has them.

f(params, x)             = graph(params, constants, x)
f(params, x, state=s)    = graph(params, constants, s, x), s'       where it writes buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.purity.attributes import Same
from fpipe.models.cutting.batch_guard import BatchGuard
from fpipe.models.cutting.pieces import GraphPiece, operations, pieces_of
from fpipe.models.modules.modes import Modes
from fpipe.models.parameters.load import HandedOut
from fpipe.models.tracing.contexts import restored_on_error
from fpipe.models.tracing.net_graph import NetTensors
from fpipe.models.tracing.opaque import own_calls, rename_calls
from fpipe.positional_stage import PositionalStage
from fpipe.torch_private.fx import dump_graph, load_graph


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
        """All but what was found out of the graphs, and these: a model made in one process is handed to others."""
        kept = {name: one for name, one in vars(self).items() if name not in ("pieces", "_placeholders")}
        graphs = {name: dump_graph(one) for name, one in kept.items() if isinstance(one, fx.GraphModule)}
        return {name: one for name, one in kept.items() if name not in graphs}, graphs

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
        own = dict(zip(self.reads, params, strict=False)) | dict(zip(self.fixed, constants, strict=True))
        own |= dict(zip(self.holds, buffers, strict=True))
        given = self._given_leaves(x)
        return [*(own[name] for name in self.takes), *(given[which][at] for which, at in self.places)]

    def _given_leaves(self, x: Any) -> list[list[Any]]:
        """The leaves of each of its inputs; a ValueError if the trace is not for them."""
        self.traced_modes.check()
        first, *rest = x if self.many else (x,)
        found = tree.leaves(first if self.guard is None else self.guard.ordered(first))
        if self.guard is not None:
            self.guard.check(found)
        return [found, *map(tree.leaves, rest)]

    @cached_property
    def pieces(self) -> list[GraphPiece]:
        """Its blocks and what is between them; none where it has module state, or runs Python."""
        if self.holds or self.opaque:
            return []
        words = ["params" if name in self.tensors.trains else "const" for name in self.takes]
        each = zip(self._placeholders, [*words, *("x" for _ in self.places)], strict=True)
        return pieces_of(self.graph.graph, dict(each))

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
        """Those of them that its code makes of numbers."""
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
        odd: list[Any] = [self] if self.guard or self.traced_modes.modules else []
        nodes = operations(self.graph.graph, odd, self.graph)
        kinds = [{name: at for at, name in enumerate(names)} for names in (self.reads, self.fixed, self.holds)]
        takes = tuple(tuple(kind.get(name) for kind in kinds) for name in self.takes)
        shape = tuple(self.places), self.many, len(self.names), self.modes(), takes, self.whole
        return nodes, shape, Same(self) if odd else None
