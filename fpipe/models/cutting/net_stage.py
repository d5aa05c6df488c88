"""A stage that was cut out of a module's graph: beside parameters it reads tables and buffers as the module has them.

f(params, x)             = graph(params, constants, x), seen        where an update of its own writes the buffers
f(params, x, state=s)    = graph(params, constants, s, x), s'       where an output reads what is written
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from fpipe.models.cutting.graph_copy import HoldsGraph
from fpipe.models.cutting.graph_stage import BatchGuard, GraphStage
from fpipe.models.cutting.net_graph import Held
from fpipe.models.cutting.pieces import GraphPiece, pieces_of
from fpipe.models.tracing.traced_modes import TracedModes


class NetStage(GraphStage):
    """A stage as a graph, whose placeholders are what it reads of the net, and then what it takes.

    Args:
        number, graph, unread, places, many, guard, traced_modes: as for a `GraphStage`.
        reads: what it reads of the net, by name: parameters, constants, and the buffers that it writes.
        held: the tensors of the net, and `literals`, those that its code makes of numbers.
        holds: the buffers that its forward writes.
        update: what writes the others, as a graph of buffers and constants by name, and of what the forward has seen.
        whole: the output of the net from what the graph returns, in the last stage.
    """

    def __init__(
        self,
        number: int,
        graph: fx.GraphModule,
        reads: Sequence[str],
        unread: Sequence[str],
        places: Sequence[tuple[int, int]],
        *,
        many: bool,
        guard: BatchGuard | None,
        traced_modes: TracedModes | None,
        held: Held,
        literals: Mapping[str, Tensor],
        holds: Sequence[str] = (),
        update: Update | None = None,
        whole: Callable[[Any], Any] | None = None,
    ) -> None:
        trained = [name for name in reads if name in held.trains]
        super().__init__(number, graph, trained, unread, places, many=many, guard=guard, traced_modes=traced_modes)
        self.takes = list(reads)
        self.held, self.literals, self.whole, self.change = held, literals, whole, update
        self.holds, self.writes = list(holds), [*holds, *(update.buffers if update else ())]
        self.fixed = [name for name in reads if name not in held.trains and name not in self.holds]

    def __call__(self, params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Tensor] | None = None) -> Any:
        """The stage's output; with a state also the new one, with an update also what that needs."""
        buffers = [(state or {})[name].clone() for name in self.holds]
        y, beside = self.pure([params[name] for name in self.reads], self.constants(), x, buffers)
        if self.holds:
            return y, dict(zip(self.holds, beside["state"], strict=True))
        return (y, beside["seen"]) if self.change else y

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The output, and by name what the stage gives beside: its state, or what its update needs."""
        made = self.run(self.taken(params, constants, x, buffers))
        y, beside = made if self.holds or (self.change and self.change.count) else (made, [])
        y = self.whole(y) if self.whole else y
        if self.holds:
            return y, {"state": beside}
        return y, {"seen": [one.detach() for one in beside]} if self.change else {}

    def taken(self, params: Sequence[Any], constants: Sequence[Any], x: Any, buffers: Sequence[Any] = ()) -> list[Any]:
        """What the graph takes, in its order."""
        own = dict(zip(self.reads, params, strict=False)) | dict(zip(self.fixed, constants, strict=True))
        own |= dict(zip(self.holds, buffers, strict=True))
        return self.handed([own[name] for name in self.takes], x)

    @property
    def pieces(self) -> list[GraphPiece]:
        """Its blocks and what is between them; none where it has module state."""
        return [] if self.writes else self._pieces

    @cached_property
    def _pieces(self) -> list[GraphPiece]:
        words = ["params" if name in self.held.trains else "const" for name in self.takes]
        return pieces_of(self.graph.graph, dict(zip(self._given, [*words, *("x" for _ in self.places)], strict=True)))

    @cached_property
    def _given(self) -> list[fx.Node]:
        """The placeholders of its graph."""
        return self.graph.graph.find_nodes(op="placeholder")

    def in_pieces(self, params: Sequence[Any], constants: Sequence[Any], x: Any) -> tuple[dict[fx.Node, Any], Any]:
        """What its graph takes, by placeholder, and its output with nodes of the graph for tensors."""
        (output,) = self.graph.graph.find_nodes(op="output")
        made: Any = output.args[0]
        taken = dict(zip(self._given, self.taken(params, constants, x), strict=True))
        return taken, self.whole(made) if self.whole else made

    def update(self, state: Mapping[str, Tensor], seen: Sequence[Tensor]) -> dict[str, Tensor]:
        """The buffers after a forward, from those before and what the forward has seen."""
        assert self.change is not None
        return self.change(state, seen)

    def remembering(self) -> dict[str, Any]:
        """What a `Stage` says about its state."""
        if self.change is not None:
            return {"asks": frozenset(), "update": self.update, "notes": True}
        return {"asks": frozenset({"state"} if self.holds else ())}

    def state(self) -> dict[str, Tensor]:
        """The buffers that the stage writes, by name, as they are now."""
        return {name: self.held.now(name).detach() for name in self.writes}

    def constants(self) -> list[Tensor]:
        """What it reads besides parameters and state, as the net has it now."""
        return [self._now(name) for name in self.fixed]

    def literals_now(self) -> list[Tensor]:
        """Those of them that its code makes of numbers."""
        return [self.literals[name] for name in self.fixed if name in self.literals]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers and frozen parameters of the net, which the first stage answers for."""
        names = self.held.first if self.number == 0 else ()
        yield from ((name, self.held.now(name)) for name in names if self.held.first[name] not in self.held.trains)

    def twin(self) -> Any:
        """Equal for graphs of the same operations that read the same kinds of things in the same order."""
        fixed, trained = {name: at for at, name in enumerate(self.fixed)}, {n: at for at, n in enumerate(self.reads)}
        held = {name: at for at, name in enumerate(self.holds)}
        takes = tuple((trained.get(name), fixed.get(name), held.get(name)) for name in self.takes)
        return super().twin(), takes, self.whole, self.change is None

    def _now(self, name: str) -> Tensor:
        return self.literals[name] if name in self.literals else self.held.now(name)


class Update(HoldsGraph):
    """What writes the buffers that no output reads.

    Args:
        graph: of buffers and constants, and then of what the forward has seen; it writes the buffers and returns them.
        takes: the names of the first.
        buffers: those that it writes, in the order in which it returns them.
        constant: a constant as it is now.
        count: of how many things it needs to know that the forward has seen.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        takes: Sequence[str],
        buffers: Sequence[str],
        constant: Callable[[str], Tensor],
        count: int,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.graph, self.takes, self.buffers = graph, list(takes), list(buffers)
        self.constant, self.count, self.shapes = constant, count, shapes

    def __call__(self, state: Mapping[str, Tensor], seen: Sequence[Tensor]) -> dict[str, Tensor]:
        """The new buffers; the old ones stay as they are."""
        for name, shape in self.shapes.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"state {name!r} has shape {shape} in the net, found {tuple(state[name].shape)}. Hand in the state "
                    "that from_module gave, or Result.state."
                )
        copies = {name: state[name].clone() for name in self.buffers}
        own = [copies[name] if name in copies else self.constant(name) for name in self.takes]
        made = self.graph.forward(*own, *seen)
        new = dict(zip(self.buffers, made, strict=True))
        return {name: new.get(name, held) for name, held in state.items()}
