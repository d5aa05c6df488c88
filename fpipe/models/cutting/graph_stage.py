"""A stage that is a graph of operations: it runs on parameters and inputs, if the guards of its trace hold for them.

matmul = aten.matmul(x, w); tanh = aten.tanh(matmul)        -->        f({"w": w}, x)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.graphs.language.symbols import in_words
from fpipe.graphs.purity.alike import Same
from fpipe.models.cutting.graph_copy import HoldsGraph
from fpipe.models.cutting.pieces import operations
from fpipe.models.parameters.handed_out import HandedOut
from fpipe.models.tracing.contexts import restored_on_error
from fpipe.models.tracing.traced_modes import TracedModes
from fpipe.positional_stage import PositionalStage


class GraphStage(HoldsGraph, PositionalStage):
    """A stage as a graph, whose placeholders are the parameters that it reads, and then what it takes.

    Args:
        reads: the names of the parameters that it reads; `unread`, of those that live in the stage and nobody reads.
        places: for each tensor that it takes, which of its inputs it is in, and at which leaf.
        many: whether x is a tuple of several inputs.
        guard: what the batch has to be, if it takes the batch.
        traced_modes: the modes that modules have to be in, if it is the stage that looks.

    Attributes:
        handed_out: the parameters that live in it and are a module's, as they were then.
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
        traced_modes: TracedModes | None = None,
    ) -> None:
        self.number, self.graph, self.reads, self.places = number, graph, reads, places
        self.many, self.guard, self.traced_modes = many, guard, traced_modes
        self.names = tuple((name,) for name in (*reads, *unread))
        self.handed_out = HandedOut({}, ())

    def __call__(self, params: Mapping[str, Tensor], x: Any) -> Any:
        """The stage's output."""
        return self.pure([params[name] for name in self.reads], (), x)[0]

    def pure(
        self, params: Sequence[Tensor], constants: Sequence[Tensor], x: Any, buffers: Sequence[Tensor] = ()
    ) -> tuple[Any, dict[str, Any]]:
        """The output from parameters by position; those that it does not read come last."""
        return self.run(self.handed(params[: len(self.reads)], x)), {}

    def handed(self, own: Sequence[Tensor], x: Any) -> list[Any]:
        """What the graph takes: what the stage has of its own, and leaves of its inputs."""
        given = self.given(x)
        return [*own, *(given[which][at] for which, at in self.places)]

    def run(self, handed: Sequence[Any]) -> Any:
        """What the graph returns."""
        with restored_on_error():
            return self.graph.forward(*handed)

    def given(self, x: Any) -> list[list[Any]]:
        """The leaves of each of its inputs; a ValueError if the trace is not for them."""
        if self.traced_modes is not None:
            self.traced_modes.check()
        each = x if self.many else (x,)
        if self.guard is None:
            return [tree.leaves(one) for one in each]
        first, *rest = each
        found = [tree.leaves(self.guard.ordered(first)), *map(tree.leaves, rest)]
        self.guard.check(found[0])
        return found

    def moved(self) -> Mapping[str, int]:
        """The parameters that modules have elsewhere than when they were handed out."""
        return self.handed_out.moved()

    def modes(self) -> tuple[Any, ...]:
        """The modes of modules as they are now: a step in others is not the one that was traced."""
        return () if self.traced_modes is None else self.traced_modes.now()

    def twin(self) -> Any:
        """Equal for graphs of the same operations on the same constants; one that takes the batch, or looks at modes,
        equals no other."""
        odd: list[Any] = [] if self.guard is None and self.traced_modes is None else [self]
        nodes = operations(self.graph.graph, odd, self.graph)
        return nodes, tuple(self.places), self.many, len(self.names), self.modes(), Same(self) if odd else None


class BatchGuard:
    """Refuses a batch that the trace of the example is not valid for.

    Args:
        example: the inputs, or the target, of the example.
        word: which of the two errors say.
        sizes: for each of its leaves, and then for each value that comes along, the dimensions that the trace leaves
            open, as expressions; a symbol is one number throughout.
        guards: what was decided by these symbols.
        who, door: what errors call what was traced, and what has traced it.
    """

    def __init__(
        self,
        example: Any,
        word: str,
        sizes: Sequence[Mapping[int, Any]],
        guards: Sequence[Any],
        who: str = "loss_fn",
        door: str = "from_loss",
    ) -> None:
        self.who, self.door, self.whole, self.word = who, door, tree.tree_map(_place, example), word
        self.example = [(word + place, leaf) for place, leaf in tree.paths(example)]
        self.sizes, self.guards = sizes, guards
        self.known: set[tuple[Any, ...]] = set()

    def ordered(self, found: Any) -> Any:
        """The inputs with their dicts in the example's order, by which leaves are told."""
        odd = tree.misfit(self.whole, found)
        if odd is not None:
            place, wanted, here = odd
            raise ValueError(f"{self.word}{place} was {wanted} when {self.who} was traced, found {here}.")
        return tree.like(self.whole, found)

    def check(self, leaves: list[Any], others: Sequence[Any] = ()) -> None:
        """A ValueError unless all dtypes, and all sizes but the rows, are the example's, and all that was decided by
        rows holds."""
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in (*leaves, *others))
        if shapes in self.known:
            return
        for (place, example), sizes, leaf in zip(self.example, self.sizes, leaves, strict=False):
            if isinstance(example, Tensor):
                if not isinstance(leaf, Tensor) or _but(leaf.shape, sizes) != _but(example.shape, sizes):
                    found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    fixed = (
                        "it is none of those whose rows may differ. Say Replicate() if microbatches take it whole; "
                        "if not, take an example with as many rows as a microbatch has, or ask x.shape[0] for its "
                        "rows, which len(x) and list(x) fix."
                    )
                    raise ValueError(
                        f"{place} was {tuple(example.shape)} when {self.who} was traced, found {found}: "
                        f"{'only rows may differ.' if sizes else fixed} Call {self.door} again for another shape."
                    )
                if leaf.dtype != example.dtype:
                    raise ValueError(
                        f"{place} was {_dtype(example)} when {self.who} was traced, found {_dtype(leaf)}. Cast it, or "
                        f"call {self.door} again for another dtype."
                    )
            elif leaf != example:
                raise ValueError(f"{place} was {example!r} when {self.who} was traced, found {leaf!r}.")
        self._check_open([*others, *leaves])
        self.known.add(shapes)

    def _check_open(self, values: Sequence[Any]) -> None:
        """What the trace left open is one number for each symbol, of which the guards hold."""
        count = len(self.example)
        sizes = [*self.sizes[count:], *self.sizes[:count]]
        places = ["the last stage's output"] * (len(sizes) - count) + [place for place, _ in self.example]
        found = [
            (expr, value.shape[dim], place)
            for each, value, place in zip(sizes, values, places, strict=True)
            for dim, expr in each.items()
        ]
        of: dict[Any, tuple[int, str]] = {}
        for expr, size, place in found:
            if expr.is_Symbol:
                of.setdefault(expr, (size, place))
        numbers = {symbol: size for symbol, (size, _) in of.items()}
        for expr, size, place in found:
            if expr.free_symbols <= numbers.keys() and (expected := expr.subs(numbers)) != size:
                other, home = of[min(expr.free_symbols, key=str)]
                raise ValueError(
                    f"{place} has {size} rows, expected {expected} to go with the {other} of {home}: {self.who} puts "
                    f"the two together, as x + y does. Cut both alike, or call {self.door} on an example with rows "
                    "like these."
                )
        for guard in self.guards:
            if guard.free_symbols <= numbers.keys() and not guard.subs(numbers):
                said = {str(symbol): of[symbol] for symbol in sorted(guard.free_symbols, key=lambda one: of[one][1])}
                text = str(guard)
                for symbol, (_, place) in said.items() if len(said) > 1 else ():
                    text = text.replace(symbol, f"len({place})")
                rows = " and ".join(str(size) for size, _ in said.values())
                raise ValueError(
                    f"{self.who} takes another branch for {rows} rows than for the example: {in_words(text)} is false."
                )


def _place(leaf: Any) -> int:
    """Stands for any leaf."""
    return 0


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _but(shape: Sequence[int], dims: Collection[int]) -> list[int | None]:
    """The sizes but for those of some dimensions."""
    return [None if dim in dims else size for dim, size in enumerate(shape)]
