"""Let torch's inductor make machine code of a graph, for the shapes, strides and dtypes that it was traced for.

    graph  --> Kernel -->  rng --> masks (drawn by torch, one op after the other);  masks, x --> inductor's code --> y

Inductor fuses what autograd runs op by op. It computes the same to rounding, and not the same bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.compiling.code import compiled
from fpipe.graphs.language.graph import Graph, Name, Node, aval, renamed
from fpipe.graphs.language.labels import GENERATORS, is_lasting
from fpipe.graphs.tracing.draws import fill
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.torch_private.dispatch import compiled_by_inductor

_aten: Any = torch.ops.aten
_DRAWN = "drawn"

# Of a product that is added to a sum in place, inductor makes a copy of the sum, a product added to that, and a copy of
# it back. What a library's op writes in place stays in place: 4 percent of a W.
_OPS = torch.library.Library("fpipe", "FRAGMENT")
_OPS.define("add_product(Tensor(a!) total, Tensor one, Tensor two) -> ()")


def _add_product(total: Tensor, one: Tensor, two: Tensor) -> None:
    total.addmm_(one, two)


_OPS.impl("add_product", _add_product, "CompositeExplicitAutograd")
_ADD_PRODUCT: Any = torch.ops.fpipe.add_product.default


class Kernel:
    """A graph that inductor compiles at `compile()`; called as `compiled(graph)` is."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self._run: Callable[..., Any] | None = None

    def __call__(self, *lists: Any) -> Any:
        """Run the compiled code."""
        assert self._run is not None, f"{self.name} was not compiled"
        return self._run(*lists)

    def compile(self) -> None:
        """Compile it, unless it is compiled already."""
        if self._run is None:
            draws, rest = _drawn_apart(self.graph)
            run = _by_inductor(rest, self.name)
            self._run = run if draws is None else _after(compiled(draws, "draw"), [*rest.reads].index(_DRAWN), run)


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Compile kernels that are not compiled yet, with a line of progress on stderr that ends in how long it took."""
    waiting = [kernel for kernel in dict.fromkeys(kernels) if kernel._run is None]  # pyright: ignore[reportPrivateUsage]
    began, live = time.perf_counter(), sys.stderr.isatty()
    for at, kernel in enumerate(waiting):
        if live:
            print(f"\rfpipe compiles {kernel.name}: {at + 1} of {len(waiting)}", end="", file=sys.stderr, flush=True)
        kernel.compile()
    if waiting:
        seconds = time.perf_counter() - began
        print(f"{chr(13) * live}fpipe compiled {len(waiting)} graphs in {seconds:.1f} s", file=sys.stderr, flush=True)


def _drawn_apart(graph: Graph) -> tuple[Graph | None, Graph]:
    """Split off the ops that draw random numbers, from generators that no compiled code takes; the rest reads them."""
    if not graph.reads.get(GENERATORS):
        return None, graph
    drawing: list[Node] = []
    for node in graph.nodes:
        if isinstance(node.kwargs.get("generator"), Name):
            drawing += _from_shape(node, graph)
    made = [node.name for node in drawing if "generator" in node.kwargs]
    draws = replace(
        graph, nodes=tuple(drawing), reads={GENERATORS: graph.reads[GENERATORS]}, writes={_DRAWN: tuple(made)}
    )
    reads = {**graph.reads, GENERATORS: tuple(made)}
    reads = {_DRAWN if label == GENERATORS else label: leaves for label, leaves in reads.items()}
    nodes = tuple(node for node in graph.nodes if node.name not in made)
    return draws, replace(graph, nodes=nodes, reads=reads, drawn_on=())


def _from_shape(node: Node, graph: Graph) -> list[Node]:
    """Let an op that draws run before everything else: of the tensor that it fills it needs only the shape."""
    if node.op is fill:
        (shape, stride, dtype, device, *_), name = graph.facts[node.name].aval, Name(f"{node.name}_empty")
        options = {"dtype": dtype, "device": device}
        empty = Node(name, _aten.empty_strided.default, ([*shape], [*stride]), options)
        return [empty, Node(node.name, node.op, (name, *node.args[1:]), node.kwargs)]
    if any(name not in graph.reads[GENERATORS] for name in node.reads):
        raise RuntimeError(
            f"compile=True takes no {node.op.__name__}, whose random numbers depend on what is computed; say "
            "compile=False, or draw by torch.rand_like and its like."
        )
    return [node]


def _after(draw: Callable[..., Any], at: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws first; `run` reads what is drawn in the place `at` of the generators."""
    return lambda *lists: run(*lists[:at], *draw(lists[at]), *lists[at + 1 :])


def _by_inductor(graph: Graph, name: str) -> Callable[..., Any]:
    inputs = [leaf for leaves in graph.reads.values() for leaf in leaves if leaf is not None]
    example: list[Any] = [*(graph.facts[leaf].aval.empty().zero_() for leaf in inputs), *graph.constants.values()]
    try:
        with raw_ops():
            run = compiled_by_inductor(_as_fx(graph, inputs), example)
            _check(graph, name, run(*example))
    except Exception as error:
        raise RuntimeError(
            f"compile=True: torch's inductor cannot compile {name} ({type(error).__name__}: {str(error)[:300]}). On "
            "the CPU it needs a C++ compiler, such as g++; say compile=False to run it uncompiled."
        ) from error
    return _in_lists(graph, run)


def _as_fx(graph: Graph, inputs: Sequence[Name]) -> fx.GraphModule:
    """Return a graph as torch's tools know it: tensors in, tensors out."""
    torchs = fx.Graph()
    node_by_name: dict[Name, fx.Node] = {leaf: torchs.placeholder(str(leaf)) for leaf in (*inputs, *graph.constants)}
    for node in graph.nodes:
        args = renamed(node.args, node_by_name)
        if node.op is _aten.addmm.out and node.kwargs == {"out": node.args[0]}:  # as `adding` writes it
            torchs.call_function(_ADD_PRODUCT, args)
            node_by_name[node.name] = node_by_name[node.args[0]]
        elif node.op is _aten._assert_async.default:  # inductor leaves out the one without a message
            torchs.call_function(_aten._assert_async.msg, (*args, _NOT_TRUE))
        else:
            kwargs = {word: renamed(arg, node_by_name) for word, arg in node.kwargs.items()}
            node_by_name[node.name] = torchs.call_function(node.op, args, kwargs)
    torchs.output(tuple(node_by_name[leaf] for leaf in _results(graph)))
    return fx.GraphModule(torch.nn.Module(), torchs)


_NOT_TRUE = "Expected Tensor with single nonzero value, but got zero"


def _results(graph: Graph) -> list[Name]:
    return [leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)]


def _check(graph: Graph, name: str, found: Sequence[Tensor]) -> None:
    """Raise unless results are as traced and share no other memory: instructions rely on that."""
    wanted = [graph.facts[leaf] for leaf in _results(graph)]
    for known, tensor in zip(wanted, found, strict=True):
        if aval(tensor) != known.aval._replace(wants=False):
            raise RuntimeError(f"it gives {aval(tensor)} with strides {tensor.stride()} for {known.aval}")
    storages = [tensor.untyped_storage().data_ptr() for tensor in found]
    for one, other in combinations(range(len(found)), 2):
        if storages[one] == storages[other] != 0 and wanted[one].storage != wanted[other].storage:
            raise RuntimeError("two of its results share memory that autograd's do not share")


def _in_lists(graph: Graph, run: Callable[..., Any]) -> Callable[..., Any]:
    constants = [*graph.constants.values()]
    reads = [[at for at, leaf in enumerate(leaves) if leaf is not None] for leaves in graph.reads.values()]
    whole = [len(places) == len(leaves) for places, leaves in zip(reads, graph.reads.values(), strict=True)]
    kept = [is_lasting(label) for label in graph.reads]
    plan = [*zip(reads, whole, kept, strict=True)]
    writes = [[*leaves] for leaves in graph.writes.values()]
    plain = all(isinstance(leaf, Name) for leaves in writes for leaf in leaves)
    sizes = [len(leaves) for leaves in writes]

    def called(*lists: Any) -> Any:
        given: list[Any] = []
        for leaves, (places, every, lasting) in zip(lists, plan, strict=True):
            given += leaves if every else [leaves[at] for at in places]
            if not lasting:
                leaves.clear()
        made = iter(run(*given, *constants))
        if plain:
            return tuple([next(made) for _ in range(size)] for size in sizes)
        return tuple([next(made) if isinstance(leaf, Name) else leaf for leaf in leaves] for leaves in writes)

    return called
