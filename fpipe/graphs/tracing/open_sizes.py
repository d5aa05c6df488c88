"""Trace a stage once for many sizes: with symbols for the sizes in which two calls differ, and guards on them.

    x: f32[1, 40], then f32[1, 41]    -->    trace(x: f32[1, s]), guards such as s <= 512    --> fill(s=57)    --> graph

An open trace is made by the second call that differs from a first one in numbers alone. Later calls evaluate its guards
and get a `SizedGraph`: the open graph, which they share, and numbers for its symbols. The graph is cut, and its code
generated, with symbols. Only facts of tensors, and the numbers that code hands to ops, are filled in for each call. A
trace is opened only if it gives the first call's closed graph when it is filled with that call's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fpipe.graphs.language.graph import Aval, Fact, Graph, Name, Node, Outline
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.torch_private.fx import (
    evaluate_expression,
    fixes_symbol,
    is_expression,
    new_symbol,
    new_symbols,
    noted_guards,
    open_size,
    rename_symbols,
    unique_symbols,
)

Leaves = Sequence[Any]
Groups = tuple[tuple[str, tuple[Any, ...]], ...]
T = TypeVar("T", Graph, Outline)


class TensorLayout(NamedTuple):
    """The sizes and strides of a tensor: numbers, or expressions of symbols."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]


def split_layouts(groups: Groups) -> tuple[Groups, list[TensorLayout]]:
    """Split labelled leaves into leaves without sizes, which calls must have in common, and the layouts of avals."""
    avals = (leaf for _, leaves in groups for leaf in leaves if isinstance(leaf, Aval))
    return _with_layouts(groups, lambda aval: TensorLayout((-1,) * len(aval.shape), ())), [
        TensorLayout(*x[:2]) for x in avals
    ]


def _with_layouts(groups: Groups, layout_of: Callable[[Aval], TensorLayout]) -> Groups:
    def with_layout(leaf: Any) -> Any:
        return leaf._replace(**layout_of(leaf)._asdict()) if isinstance(leaf, Aval) else leaf

    return tuple((label, tuple(map(with_layout, leaves))) for label, leaves in groups)


class Symbols:
    """Symbols of torch for sizes, which open traces of one lowering share: one for each pair of sizes."""

    def __init__(self) -> None:
        self.shape_env = new_symbols()
        self.by_pair: dict[tuple[int, int], Any] = {}

    def symbol(self, size: int, new_size: int) -> Any:
        """Return the symbol of a size that two calls differ in."""
        # Kernels and views of tensors without elements, or with one row, differ from all others.
        if min(size, new_size) < 2:
            raise Untraceable("a size of 0 or 1 differs")
        if (size, new_size) not in self.by_pair:
            self.by_pair[size, new_size] = new_symbol(self.shape_env, f"size_{len(self.by_pair)}", new_size)
        return self.by_pair[size, new_size]


class OpenSizes:
    """The open sizes of one trace, with the sizes of the call that made it.

    Args:
        symbols: the symbols.
        layouts, new_layouts: the layouts of two calls. A pair of sizes that differ is a symbol, for all tensors.

    Raises:
        Untraceable: a size of 0 or 1 differs, or a stride that is no product of sizes.
    """

    def __init__(self, symbols: Symbols, layouts: Sequence[TensorLayout], new_layouts: Sequence[TensorLayout]) -> None:
        self.symbols, self.shape_env = symbols, symbols.shape_env
        self.layouts = [*map(self._open_layout, layouts, new_layouts)]
        self.example = {symbol: new_size for (_, new_size), symbol in symbols.by_pair.items()}
        self.guards: tuple[Any, ...] = ()

    def _open_layout(self, layout: TensorLayout, new_layout: TensorLayout) -> TensorLayout:
        shape = tuple(
            a if a == b else self.symbols.symbol(a, b) for a, b in zip(layout.shape, new_layout.shape, strict=True)
        )
        stride = [*layout.stride]
        # From the innermost dimension: a stride is that of another dimension, times its size.
        dims = sorted(range(len(shape)), key=lambda dim: layout.stride[dim])
        for position, dim in enumerate(dims):
            if layout.stride[dim] != new_layout.stride[dim]:
                products = (
                    stride[factor_dim] * shape[factor_dim]
                    for factor_dim in dims[:position]
                    if layout.stride[factor_dim] * layout.shape[factor_dim] == layout.stride[dim]
                    and new_layout.stride[factor_dim] * new_layout.shape[factor_dim] == new_layout.stride[dim]
                )
                stride[dim] = next(products, None)
                if stride[dim] is None:
                    raise Untraceable("a stride differs that is no product of sizes")
        return TensorLayout(shape, tuple(stride))

    def size(self, size: Any) -> Any:
        """Return the open size of torch for an expression; numbers are themselves."""
        if not is_expression(size):
            return size
        return open_size(self.shape_env, size, evaluate_expression(size, self.example))

    def empty(self, aval: Aval) -> Aval:
        """Return an aval whose sizes torch can allocate: in place of expressions its open sizes."""
        return aval._replace(shape=tuple(map(self.size, aval.shape)), stride=tuple(map(self.size, aval.stride)))

    @contextmanager
    def tracing(self) -> Generator[None]:
        """Trace with these sizes, and note the guards of the trace."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
        symbols = {size for layout in self.layouts for size in layout.shape if is_expression(size)}
        guards = [guard for guard in noted_guards(self.shape_env) if not symbols.isdisjoint(guard.free_symbols)]
        if any(guard.free_symbols - symbols for guard in guards):
            raise Untraceable("its sizes are bound to those of another call")
        if any(map(fixes_symbol, guards)):
            raise Untraceable("it reads a size as a number")
        self.guards = tuple(guards)

    def rename_symbols(self) -> _Renaming:
        """Give these sizes symbols that no other trace has; return the renaming."""
        symbols = {size for layout in self.layouts for size in layout.shape if is_expression(size)}
        renaming = _Renaming(unique_symbols(symbols))
        self.layouts = [TensorLayout(*map(renaming, layout)) for layout in self.layouts]
        self.guards = renaming(self.guards)
        return renaming

    def bind(self, layouts: Sequence[TensorLayout]) -> SizeNumbers | None:
        """Return the numbers of a call with these layouts; None if this trace does not cover it."""
        value_by_symbol: dict[Any, int] = {}
        for opened, layout in zip(self.layouts, layouts, strict=True):
            for size, number in zip(opened.shape, layout.shape, strict=True):
                if is_expression(size):
                    if number < 2 or value_by_symbol.setdefault(size, number) != number:
                        return None
                elif size != number:
                    return None
        numbers = SizeNumbers(value_by_symbol)
        strides = (
            (a, b) for x, y in zip(self.layouts, layouts, strict=True) for a, b in zip(x.stride, y.stride, strict=True)
        )
        if any(numbers(stride) != number for stride, number in strides) or not all(map(numbers, self.guards)):
            return None
        return numbers


_CURRENT: ContextVar[OpenSizes | None] = ContextVar("open sizes", default=None)


def current_open_sizes() -> OpenSizes | None:
    """Return the open sizes of the trace that is being made, if it has any."""
    return _CURRENT.get()


class _SizeSubstitution:
    """Puts something in for the expressions in facts, nodes and graphs, for each expression once."""

    def __init__(self, substitute: Callable[[Any], Any]) -> None:
        self.substitute = substitute
        self.value_by_expression: dict[Any, Any] = {}

    def __call__(self, x: Any) -> Any:
        """Substitute in an expression, or in a list or tuple of arguments; anything else is itself."""
        if isinstance(x, list | tuple):
            return (list if isinstance(x, list) else tuple)(map(self, x))
        if not is_expression(x):
            return x
        if x not in self.value_by_expression:
            self.value_by_expression[x] = self.substitute(x)
        return self.value_by_expression[x]

    def fact(self, fact: Fact) -> Fact:
        """Substitute in the sizes and strides of a tensor."""
        aval, storage, size, offset, lazy = fact
        shape, stride = self(tuple(aval.shape)), self(tuple(aval.stride))
        return Fact(aval._replace(shape=shape, stride=stride), storage, self(size), self(offset), lazy)

    def node(self, node: Node) -> Node:
        """Substitute in the arguments of an op."""
        return Node(node.name, node.op, self(node.args), {name: self(x) for name, x in node.kwargs.items()})

    def trace(self, traced: T) -> T:
        """Substitute in a graph or an outline."""
        if isinstance(traced, Outline):
            return replace(
                traced, reads=self._side(traced.reads), writes=self._side(traced.writes), numbers=self(traced.numbers)
            )
        # Storage numbers are compared within a graph only, so that filled graphs may share them.
        facts = {name: self.fact(fact) for name, fact in traced.facts.items()}
        writes = {label: self(leaves) for label, leaves in traced.writes.items()}
        return replace(traced, nodes=tuple(map(self.node, traced.nodes)), facts=facts, writes=writes)

    def _side(self, leaves_by_label: Mapping[str, Leaves]) -> dict[str, list[Any]]:
        return {
            label: [self.fact(x) if isinstance(x, Fact) else self(x) for x in leaves]
            for label, leaves in leaves_by_label.items()
        }


class _Renaming(_SizeSubstitution):
    """Puts new symbols in for symbols."""

    def __init__(self, symbols: Mapping[Any, Any]) -> None:
        super().__init__(partial(rename_symbols, new_symbols=symbols))


class SizeNumbers(_SizeSubstitution):
    """The numbers of one call for the symbols of open traces, which it puts in for them.

    Those of calls with equal sizes are equal.
    """

    def __init__(self, number_by_symbol: Mapping[Any, int] | None = None) -> None:
        self.number_by_symbol = {**(number_by_symbol or {})}
        self._facts = dict[tuple[Graph, Name], Fact]()
        super().__init__(partial(evaluate_expression, value_by_symbol=self.number_by_symbol))

    def fact_of(self, graph: Graph, name: Name) -> Fact:
        """Return the fact of a tensor of a graph, with numbers; microbatches of equal sizes share it."""
        if (graph, name) not in self._facts:
            self._facts[graph, name] = self.fact(graph.facts[name])
        return self._facts[graph, name]

    def __or__(self, numbers: SizeNumbers) -> SizeNumbers:
        """Return the numbers for the symbols of two traces."""
        return SizeNumbers(self.number_by_symbol | numbers.number_by_symbol)

    def __eq__(self, numbers: object) -> bool:
        """Whether symbols and numbers are the same."""
        return isinstance(numbers, SizeNumbers) and self.number_by_symbol == numbers.number_by_symbol

    def __hash__(self) -> int:
        """Return a hash of the numbers."""
        return hash(frozenset(self.number_by_symbol.items()))


class SizedGraph(NamedTuple):
    """A graph, which calls of different sizes share if it is open, and the numbers of one call for its symbols."""

    graph: Graph
    numbers: SizeNumbers = SizeNumbers()

    def filled(self) -> Graph:
        """Return the graph with numbers in place of expressions."""
        return self.numbers.trace(self.graph) if self.numbers.number_by_symbol else self.graph


def canonical_parts(traced: Graph | Outline) -> Any:
    """Return the parts of a graph or outline that equal ones have in common, with names and storages numbered."""
    numbers: dict[Any, int] = {}

    def canonical(x: Any) -> Any:
        if isinstance(x, Fact):
            return canonical(x.aval), numbers.setdefault(x.storage, len(numbers)), x[2:]
        if isinstance(x, Aval):
            # Nobody steps along a dimension of size 1, where `expand` of symbols has another stride than of numbers.
            stride = tuple(0 if size == 1 else dim_stride for size, dim_stride in zip(x.shape, x.stride, strict=True))
            return repr((tuple(x.shape), stride, *x[2:]))
        if isinstance(x, Name):
            return numbers.setdefault(x, len(numbers))
        if isinstance(x, Mapping):
            mapping: Mapping[Any, Any] = x
            return [(canonical(key), canonical(value)) for key, value in mapping.items()]
        return [*map(canonical, x)] if isinstance(x, list | tuple) else x if callable(x) else repr(x)

    if isinstance(traced, Outline):
        return canonical([traced.reads, traced.writes, traced.ran, traced.numbers]), traced.has_python_gradient
    nodes = [(node.name, node.op, node.args, node.kwargs, traced.facts.get(node.name)) for node in traced.nodes]
    inputs = [(name, traced.facts.get(name)) for name in traced.inputs()]
    return canonical([traced.reads, inputs, [*traced.constants], nodes, traced.writes, traced.ran])


class Opening(Generic[T]):
    """The traces of calls that differ in sizes alone: the first one closed, and then open ones."""

    def __init__(self) -> None:
        self.closed_trace: tuple[list[TensorLayout], T] | None = None
        self.open_traces: list[tuple[OpenSizes, T]] = []
        self.is_closed = False  # whether a trace could not be opened, and further sizes will need one each

    def find(self, layouts: list[TensorLayout]) -> tuple[T, SizeNumbers] | None:
        """Return the open trace that covers a call, and the numbers of the call; None if there is none."""
        bound = ((open_trace, sizes.bind(layouts)) for sizes, open_trace in self.open_traces)
        return next(((open_trace, numbers) for open_trace, numbers in bound if numbers is not None), None)

    def trace(
        self, symbols: Symbols, layouts: list[TensorLayout], close: Callable[[], T], open_up: Callable[[OpenSizes], T]
    ) -> tuple[T, SizeNumbers]:
        """Trace a call that no open trace covers: with open sizes where that is possible, else closed."""
        self.is_closed = len(self.open_traces) >= _MAX_OPEN_TRACES
        if self.closed_trace is None or self.is_closed:
            closed = close()
            self.closed_trace = self.closed_trace or (layouts, closed)
            return closed, SizeNumbers()
        # Whatever stops an open trace, such as a size that Python reads as a number, leaves the closed one.
        # Torch's symbols fail in many ways. The closed trace that follows raises the stage's own mistakes.
        with suppress(Exception):
            first_layouts, first_trace = self.closed_trace
            sizes = OpenSizes(symbols, first_layouts, layouts)
            self.is_closed = True
            with sizes.tracing():
                torch_trace = open_up(sizes)
            open_trace = sizes.rename_symbols().trace(torch_trace)
            numbers, first_numbers = sizes.bind(layouts), sizes.bind(first_layouts)
            if numbers is not None:
                # Guards may leave the first call out, as where kernels change between the two: compare this one.
                pair = (
                    (numbers.trace(open_trace), close())
                    if first_numbers is None
                    else (first_numbers.trace(open_trace), first_trace)
                )
                if _are_equal(*pair):
                    self.is_closed = False
                    self.open_traces.append((sizes, open_trace))
                    return open_trace, numbers
        self.closed_trace = layouts, close()
        return self.closed_trace[1], SizeNumbers()


_MAX_OPEN_TRACES = 4


def _are_equal(filled: Graph | Outline, closed: Graph | Outline) -> bool:
    if isinstance(filled, Graph) and isinstance(closed, Graph):
        constants = zip(filled.constants.values(), closed.constants.values(), strict=False)
        if not all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in constants):
            return False
    return canonical_parts(filled) == canonical_parts(closed)


def with_open_layouts(groups: Groups, layouts: Sequence[TensorLayout]) -> Groups:
    """Put layouts into labelled leaves, in the order of `split_layouts`."""
    remaining = iter(layouts)
    return _with_layouts(groups, lambda _: next(remaining))
