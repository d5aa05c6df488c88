"""Refuse a batch that the trace of an example is not valid for: other sizes, dtypes or values than it has fixed.

traced with x: (s0, 4), s0 > 3        -->        x: (2, 4) is refused, x: (8, 4) is not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.meaning.purity.outputs import with_rows_named
from fpipe.models.exporting.net_graph import NetGraph
from fpipe.models.exporting.source_locations import open_sizes


class BatchGuard:
    """A check of the inputs, or of the target, against the sizes, dtypes and numbers that a trace has fixed.

    Args:
        net: the graph of what was traced.
        values: its placeholders for this half of the batch, then the values that are passed along with it.
        example: this half of the example batch.
        batch_part: "inputs" or "target", for errors.
    """

    def __init__(self, net: NetGraph, values: Sequence[Any], example: Any, batch_part: str) -> None:
        self.who, self.door, self.guards = net.who, net.door, net.guards
        # For each value a dict from dimension to the expression of its size, such as {0: 2*s0}, for the dimensions that
        # the trace leaves open. A symbol stands for one number in the inputs and the target alike.
        self.sizes = [open_sizes(value) if isinstance(value, fx.Node) else {} for value in values]
        self.structure, self.batch_part = tree.tree_map(type, example), batch_part
        self.example = [(batch_part + path, leaf) for path, leaf in tree.paths(example)]
        # Sizes and guards are sympy expressions, too slow for each step. A signature that has passed passes again.
        self.accepted_shapes: set[tuple[Any, ...]] = set()

    def fixed_rows(self) -> tuple[str, int] | None:
        """Return path and rows of the first leaf with as many rows as the batch whose number the trace has fixed."""
        pairs = zip(self.example, self.sizes, strict=False)
        leaves = [(path, len(x), sizes) for (path, x), sizes in pairs if isinstance(x, Tensor) and x.ndim]
        return next(((path, rows) for path, rows, sizes in leaves if 0 not in sizes and rows == leaves[0][1]), None)

    def in_example_order(self, inputs: Any) -> Any:
        """Return the inputs with their dicts in the example's order, in which the graph takes the leaves."""
        mismatch = tree.find_mismatch(self.structure, inputs)
        if mismatch is not None:
            path, expected, actual = mismatch
            raise ValueError(f"{self.batch_part}{path} was {expected} when {self.who} was traced, found {actual}.")
        return tree.in_order_of(self.structure, inputs)

    def check(self, leaves: list[Any], extra_values: Sequence[Any] = ()) -> None:
        """Raise ValueError unless the trace is valid for these leaves.

        Dtypes, numbers and all sizes but the open ones must be the example's, and the guards, which are the comparisons
        of open sizes that decided a branch, must hold.
        """
        shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in (*leaves, *extra_values))
        if shapes in self.accepted_shapes:
            return
        for (path, example), sizes, leaf in zip(self.example, self.sizes, leaves, strict=False):
            if isinstance(example, Tensor):
                self._check_tensor(path, example, sizes, leaf)
            elif leaf != example:
                is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
                hint = f" A number that changes goes in as torch.tensor({leaf!r})." if is_number else ""
                raise ValueError(f"{path} was {example!r} when {self.who} was traced, found {leaf!r}.{hint}")
        self._check_open_sizes(leaves, extra_values)
        self.accepted_shapes.add(shapes)

    def _check_tensor(self, path: str, example: Tensor, sizes: Mapping[int, Any], leaf: Any) -> None:
        def fixed(shape: Sequence[int]) -> list[int | None]:
            return [None if dim in sizes else size for dim, size in enumerate(shape)]

        if not isinstance(leaf, Tensor) or fixed(leaf.shape) != fixed(example.shape):
            actual = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            no_open_rows = (
                "it is none of those whose rows may differ. Say Replicate() if microbatches take it whole; if not, "
                "take an example with as many rows as a microbatch has, or ask x.shape[0] for its rows, which len(x) "
                "and list(x) fix."
            )
            raise ValueError(
                f"{path} was {tuple(example.shape)} when {self.who} was traced, found {actual}: "
                f"{'only rows may differ.' if 0 in sizes else no_open_rows} Call {self.door} again for another shape."
            )
        if leaf.dtype != example.dtype:
            traced_dtype, actual_dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (example, leaf))
            raise ValueError(
                f"{path} was {traced_dtype} when {self.who} was traced, found {actual_dtype}. Cast it, or call "
                f"{self.door} again for another dtype."
            )

    def _check_open_sizes(self, leaves: Sequence[Any], extra_values: Sequence[Any]) -> None:
        """Check that each symbol of the trace is one number, and that the guards hold for these numbers."""
        # 1) Solve for the symbols. An open size is an expression such as s0 or 2*s0; those that are a bare symbol say
        #    its number, the first leaf in order last, so that it wins.
        named_values = (
            *zip(self.sizes[len(self.example) :], extra_values, repeat("the last stage's output")),
            *zip(self.sizes, leaves, (path for path, _ in self.example), strict=False),
        )
        open_dims = [(expr, x.shape[dim], path, dim) for sizes, x, path in named_values for dim, expr in sizes.items()]
        places = {expr: (size, path, dim) for expr, size, path, dim in reversed(open_dims) if expr.is_Symbol}
        size_by_symbol = {symbol: size for symbol, (size, *_) in places.items()}
        # 2) Every other size must be what its expression then gives.
        for expr, size, path, dim in open_dims:
            if expr.free_symbols <= size_by_symbol.keys() and (expected := expr.subs(size_by_symbol)) != size:
                other_size, other_path, _ = places[min(expr.free_symbols, key=str)]
                noun = "rows" if dim == 0 else f"in dimension {dim}"
                raise ValueError(
                    f"{path} has {size} {noun}, expected {expected} to go with the {other_size} of {other_path}, as in "
                    f"x + y. Cut both alike, or call {self.door} on such an example."
                )
        # 3) The guards must hold. A guard with symbols of the other half of the batch is checked there.
        for guard in self.guards:
            if guard.free_symbols <= size_by_symbol.keys() and not guard.subs(size_by_symbol):
                symbols = sorted(guard.free_symbols, key=lambda symbol: places[symbol][1])
                text, has_lengths = str(guard), any(places[symbol][2] for symbol in symbols)
                for symbol in symbols if len(symbols) > 1 or has_lengths else ():
                    _, path, dim = places[symbol]
                    text = text.replace(str(symbol), f"{path}.shape[{dim}]" if dim else f"len({path})")
                sizes_text = " and ".join(str(size_by_symbol[symbol]) for symbol in symbols)
                sizes_text = f"sizes {sizes_text}" if has_lengths else f"{sizes_text} rows"
                condition = with_rows_named(text)
                raise ValueError(
                    f"{self.who} takes another branch for {sizes_text} than for the example: {condition} is false."
                )
