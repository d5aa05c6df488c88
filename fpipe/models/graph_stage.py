"""A stage that is a graph of operations: it runs on parameters and inputs, if the guards of its trace hold for them.

matmul = aten.matmul(x, w); tanh = aten.tanh(matmul)        -->        f({"w": w}, x)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe import tree
from fpipe.graphs.alike import Same, alike
from fpipe.graphs.symbols import in_words
from fpipe.model import PositionalStage
from fpipe.models.contexts import restored_on_error


class GraphStage(PositionalStage):
    """A stage as a graph, whose placeholders are the parameters that it reads, and then what it takes.

    Args:
        reads: the names of the parameters that it reads; `unread`, of those that live in the stage and nobody reads.
        places: for each tensor that it takes, which of its inputs it is in, and at which leaf.
        many: whether x is a tuple of several inputs.
        guard: what the batch has to be, if it takes the batch.
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
    ) -> None:
        self.number, self.graph, self.reads, self.places = number, graph, reads, places
        self.many, self.guard = many, guard
        self.names = tuple((name,) for name in (*reads, *unread))

    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """The stage's output."""
        return self.pure([params[name] for name in self.reads], (), x)[0]

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The output from parameters by position; those that it does not read come last."""
        given = [tree.leaves(one) for one in (x if self.many else (x,))]
        if self.guard is not None:
            self.guard.check(given[0])
        with restored_on_error():
            return self.graph.forward(*params[: len(self.reads)], *[given[which][at] for which, at in self.places]), {}

    def twin(self) -> Any:
        """Equal for graphs of the same operations on the same constants; one that takes the batch, and so has guards,
        equals no other."""
        place = {node: at for at, node in enumerate(self.graph.graph.nodes)}
        odd: list[Any] = [] if self.guard is None else [self]

        def seen(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return "node", place[arg]
            if isinstance(arg, list | tuple):
                return type(arg), tuple(map(seen, arg))
            return alike(arg, odd if not isinstance(arg, _NAMED) else None)

        nodes = tuple(
            (
                node.op,
                self._target(node),
                seen(node.args),
                tuple((word, seen(arg)) for word, arg in node.kwargs.items()),
            )
            for node in self.graph.graph.nodes
        )
        return nodes, tuple(self.places), self.many, len(self.names), Same(self) if odd else None

    def _target(self, node: fx.Node) -> Any:
        """What a node calls, or which constant it is; of placeholders only the order counts."""
        if node.op == "get_attr":
            return Same(getattr(self.graph, str(node.target)))
        return None if node.op in ("placeholder", "output") else node.target


_NAMED = torch.memory_format | torch.layout


class BatchGuard:
    """Refuses a batch that the trace of the example is not valid for.

    Args:
        example: the inputs, or the target, of the example.
        word: which of the two errors say.
        guards: what was decided by the number of rows, each with the symbol in it.
    """

    def __init__(self, example: Any, word: str, guards: Sequence[Any]) -> None:
        self.example = [(word + place, leaf) for place, leaf in tree.paths(example)]
        self.guards = guards
        self.known: set[tuple[Any, ...]] = set()

    def check(self, leaves: list[Any]) -> None:
        """A ValueError unless all sizes but the rows are the example's, and the guards hold for the rows."""
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if shapes in self.known:
            return
        for (place, example), leaf in zip(self.example, leaves, strict=True):
            if isinstance(example, Tensor):
                if not isinstance(leaf, Tensor) or leaf.shape[1:] != example.shape[1:] or leaf.ndim != example.ndim:
                    found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise ValueError(
                        f"{place} was {tuple(example.shape)} when loss_fn was traced, found {found}: only rows may "
                        "differ. Call from_loss again for another shape."
                    )
            elif leaf != example:
                raise ValueError(f"{place} was {example!r} when loss_fn was traced, found {leaf!r}.")
        for guard, symbol in self.guards:
            rows = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
            if not guard.subs(symbol, rows):
                raise ValueError(
                    f"loss_fn takes another branch for {rows} rows than for the example: {in_words(guard)} is false."
                )
        self.known.add(shapes)
