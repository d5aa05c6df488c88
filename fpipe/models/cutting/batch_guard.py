"""Refuse a batch that the trace of an example is not valid for: other sizes, dtypes or values than it has fixed.

traced with x: (s0, 4), s0 > 3        -->        x: (2, 4) is refused, x: (8, 4) is not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.stages.outputs import in_words
from fpipe.models.tracing.net_graph import NetGraph
from fpipe.models.tracing.places import open_sizes


class BatchGuard:
    """Refuse a batch that the trace of the example is not valid for.

    Args:
        net: the graph of what was traced.
        values: of this graph the placeholders of a half of the batch, then the values that come with it.
        example: the inputs, or the target, of the example, and `word`, which of the two errors say.
    """

    def __init__(self, net: NetGraph, values: Sequence[Any], example: Any, word: str) -> None:
        self.who, self.door, self.guards = net.who, net.door, net.guards
        # For each value the dimensions that the trace leaves open, as expressions; a symbol is one number throughout.
        self.sizes = [open_sizes(value) if isinstance(value, fx.Node) else {} for value in values]
        self.whole, self.word = tree.tree_map(type, example), word
        self.example = [(word + place, leaf) for place, leaf in tree.paths(example)]
        self.known: set[tuple[Any, ...]] = set()

    def fixed_rows(self) -> tuple[str, int] | None:
        """Place and rows of the first leaf that has as many rows as the batch, of which the trace leaves none open."""
        leaves = [
            (place, len(leaf), sizes)
            for (place, leaf), sizes in zip(self.example, self.sizes, strict=False)
            if isinstance(leaf, Tensor) and leaf.ndim
        ]
        return next(((place, rows) for place, rows, sizes in leaves if 0 not in sizes and rows == leaves[0][1]), None)

    def ordered(self, found: Any) -> Any:
        """The inputs with their dicts in the example's order, by which leaves are told."""
        odd = tree.misfit(self.whole, found)
        if odd is not None:
            place, wanted, here = odd
            raise ValueError(f"{self.word}{place} was {wanted} when {self.who} was traced, found {here}.")
        return tree.like(self.whole, found)

    def check(self, leaves: list[Any], others: Sequence[Any] = ()) -> None:
        """A ValueError unless dtypes, and sizes but the rows, are the example's, and what was decided by rows holds."""
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in (*leaves, *others))
        if shapes in self.known:
            return
        for (place, example), sizes, leaf in zip(self.example, self.sizes, leaves, strict=False):
            if isinstance(example, Tensor):
                self._check_tensor(place, example, sizes, leaf)
            elif leaf != example:
                way_out = (
                    f" A number that changes goes in as torch.tensor({leaf!r})."
                    if isinstance(leaf, int | float) and not isinstance(leaf, bool)
                    else ""
                )
                raise ValueError(f"{place} was {example!r} when {self.who} was traced, found {leaf!r}.{way_out}")
        self._check_open(leaves, others)
        self.known.add(shapes)

    def _check_tensor(self, place: str, example: Tensor, sizes: Mapping[int, Any], leaf: Any) -> None:
        def fixed(shape: Sequence[int]) -> list[int | None]:
            return [None if dim in sizes else size for dim, size in enumerate(shape)]

        if not isinstance(leaf, Tensor) or fixed(leaf.shape) != fixed(example.shape):
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            none = (
                "it is none of those whose rows may differ. Say Replicate() if microbatches take it whole; if not, "
                "take an example with as many rows as a microbatch has, or ask x.shape[0] for its rows, which len(x) "
                "and list(x) fix."
            )
            raise ValueError(
                f"{place} was {tuple(example.shape)} when {self.who} was traced, found {found}: "
                f"{'only rows may differ.' if 0 in sizes else none} Call {self.door} again for another shape."
            )
        if leaf.dtype != example.dtype:
            traced, found = (str(tensor.dtype).removeprefix("torch.") for tensor in (example, leaf))
            raise ValueError(
                f"{place} was {traced} when {self.who} was traced, found {found}. Cast it, or call {self.door} "
                "again for another dtype."
            )

    def _check_open(self, leaves: Sequence[Any], others: Sequence[Any]) -> None:
        """Check that what the trace left open is one number for each symbol, and that the guards hold."""
        count = len(self.example)
        placed = (
            *zip(self.sizes[count:], others, repeat("the last stage's output")),
            *zip(self.sizes, leaves, (place for place, _ in self.example), strict=False),
        )
        found = [(expr, value.shape[dim], place) for each, value, place in placed for dim, expr in each.items()]
        of = {expr: (size, place) for expr, size, place in reversed(found) if expr.is_Symbol}
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
