"""Compile a graph with torch's inductor, for the shapes, strides and dtypes that it was traced for.

    graph  --> Kernel -->  rng --> masks (drawn by torch, one op after the other);  masks, x --> inductor's code --> y

Inductor fuses ops that autograd runs one by one. It computes the same up to rounding, not the same bits.
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

from fpipe.graphs.compiling.code import compile_graph
from fpipe.graphs.language.graph import Graph, Name, Node, aval_of_tensor, substitute_names
from fpipe.graphs.language.labels import GENERATORS, is_kept_all_step
from fpipe.graphs.tracing.higher_order_ops import FlexAttentionBackward
from fpipe.graphs.tracing.random_ops import fill
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.torch_private.dispatch import compile_with_inductor

_aten: Any = torch.ops.aten
_DRAWN = "drawn"

# For a product that is added to a sum in place, inductor copies the sum, adds the product to the copy and copies it
# back. An op of a library that mutates an argument stays in place, which saves 4 percent of a W.
_OPS = torch.library.Library("fpipe", "FRAGMENT")
_OPS.define("add_product(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def _add_product(total: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    total.addmm_(lhs, rhs)


_OPS.impl("add_product", _add_product, "CompositeExplicitAutograd")
_ADD_PRODUCT: Any = torch.ops.fpipe.add_product.default


class Kernel:
    """The function of a graph, which runs op by op until inductor compiles it at `compile()`."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self._run: Callable[..., Any] | None = None
        self._uncompiled: Callable[..., Any] | None = None

    def __call__(self, *lists: Any) -> Any:
        """Run the code on lists of leaves."""
        if self._run is not None:
            return self._run(*lists)
        self._uncompiled = self._uncompiled or compile_graph(self.graph, self.name[0])
        return self._uncompiled(*lists)

    def compile(self) -> None:
        """Compile the graph, unless it is compiled already."""
        if self._run is None:
            draws, compiled_part = _split_draws(self.graph)
            run = _compile_by_inductor(compiled_part, self.name)
            if draws is not None:
                run = _with_draws_first(compile_graph(draws, "draw"), [*compiled_part.reads].index(_DRAWN), run)
            self._run, self._uncompiled = run, None


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Compile kernels that are not compiled yet, with a line of progress on stderr that ends in how long it took."""
    uncompiled = [kernel for kernel in dict.fromkeys(kernels) if kernel._run is None]  # pyright: ignore[reportPrivateUsage]
    start, is_terminal = time.perf_counter(), sys.stderr.isatty()
    count = len(uncompiled)
    for number, kernel in enumerate(uncompiled, start=1):
        if is_terminal:
            print(f"\rfpipe compiles {kernel.name}: {number} of {count}", end="", file=sys.stderr, flush=True)
        kernel.compile()
    if uncompiled:
        seconds, carriage_return = time.perf_counter() - start, "\r" * is_terminal
        print(f"{carriage_return}fpipe compiled {count} graphs in {seconds:.1f} s", file=sys.stderr, flush=True)


def _split_draws(graph: Graph) -> tuple[Graph | None, Graph]:
    """Split a graph into its draws of random numbers (None without any) and the rest, which reads these."""
    # Compiled code takes no generators.
    if not graph.reads.get(GENERATORS):
        return None, graph
    draw_nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node.kwargs.get("generator"), Name):
            draw_nodes += _draw_from_shape(node, graph)
    drawn_names = [node.name for node in draw_nodes if "generator" in node.kwargs]
    draws = replace(
        graph, nodes=tuple(draw_nodes), reads={GENERATORS: graph.reads[GENERATORS]}, writes={_DRAWN: tuple(drawn_names)}
    )
    reads = {**graph.reads, GENERATORS: tuple(drawn_names)}
    reads = {_DRAWN if label == GENERATORS else label: leaves for label, leaves in reads.items()}
    nodes = tuple(node for node in graph.nodes if node.name not in drawn_names)
    return draws, replace(graph, nodes=nodes, reads=reads, generator_devices=())


def _draw_from_shape(node: Node, graph: Graph) -> list[Node]:
    """Return a draw as ops that can run first: it needs only the shape of the tensor that it fills."""
    if node.op is fill:
        (shape, stride, dtype, device, *_), name = graph.facts[node.name].aval, Name(f"{node.name}_empty")
        options = {"dtype": dtype, "device": device}
        empty = Node(name, _aten.empty_strided.default, ([*shape], [*stride]), options)
        return [empty, Node(node.name, node.op, (name, *node.args[1:]), node.kwargs)]
    if any(name not in graph.reads[GENERATORS] for name in node.reads):
        raise RuntimeError(
            f"compile=True takes no {node.op.__name__}, whose random numbers depend on what is computed; say "
            "compile=False, or draw by torch.rand_like."
        )
    return [node]


def _with_draws_first(draw: Callable[..., Any], index: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws first, and hands the numbers to `run` instead of the generators at `index`."""
    return lambda *lists: run(*lists[:index], *draw(lists[index]), *lists[index + 1 :])


def _compile_by_inductor(graph: Graph, name: str) -> Callable[..., Any]:
    inputs = [leaf for leaves in graph.reads.values() for leaf in leaves if leaf is not None]
    example: list[Any] = [*(graph.facts[leaf].aval.empty().zero_() for leaf in inputs), *graph.constants.values()]
    try:
        with raw_ops():
            run = compile_with_inductor(_as_fx(graph, inputs), example)
            _check_results(graph, name, run(*example))
    except Exception as error:
        raise RuntimeError(
            f"compile=True: torch's inductor cannot compile {name} ({type(error).__name__}: {str(error)[:300]}). It "
            "needs g++ on the CPU, and a backend on other devices."
        ) from error
    return _on_lists(graph, run)


def _as_fx(graph: Graph, inputs: Sequence[Name]) -> fx.GraphModule:
    """Return a graph as an fx module of tensors to tensors, which inductor takes."""
    fx_graph, root = fx.Graph(), torch.nn.Module()
    node_by_name: dict[Name, fx.Node] = {leaf: fx_graph.placeholder(str(leaf)) for leaf in (*inputs, *graph.constants)}
    for node in graph.nodes:
        args = substitute_names(node.args, node_by_name)
        # A product that `add_into_sums` adds to a sum.
        if node.op is _aten.addmm.out and node.kwargs == {"out": node.args[0]}:
            fx_graph.call_function(_ADD_PRODUCT, args)
            node_by_name[node.name] = node_by_name[node.args[0]]
        # Inductor leaves out the assert without a message.
        elif node.op is _aten._assert_async.default:
            fx_graph.call_function(_aten._assert_async.msg, (*args, _ASSERT_MESSAGE))
        else:
            kwargs = {keyword: substitute_names(argument, node_by_name) for keyword, argument in node.kwargs.items()}
            op = node.op.op if isinstance(node.op, FlexAttentionBackward) else node.op
            node_by_name[node.name] = fx_graph.call_function(op, _with_submodules(args, fx_graph, root), kwargs)
    fx_graph.output(tuple(node_by_name[leaf] for leaf in _results(graph)))
    return fx.GraphModule(root, fx_graph)


def _with_submodules(argument: Any, graph: fx.Graph, root: torch.nn.Module) -> Any:
    """Return the argument of an op with a node of `root` in the place of each graph that a higher-order op calls."""
    if isinstance(argument, fx.GraphModule):
        name = f"function_{len([*root.children()])}"
        root.add_module(name, argument)
        return graph.get_attr(name)
    if isinstance(argument, list | tuple):
        return type(argument)(_with_submodules(part, graph, root) for part in argument)
    return argument


_ASSERT_MESSAGE = "Expected Tensor with single nonzero value, but got zero"


def _results(graph: Graph) -> list[Name]:
    return [leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)]


def _check_results(graph: Graph, name: str, tensors: Sequence[Tensor]) -> None:
    """Raise unless results have the traced avals, and share memory only where the trace does."""
    facts = [graph.facts[leaf] for leaf in _results(graph)]
    for fact, tensor in zip(facts, tensors, strict=True):
        if aval_of_tensor(tensor) != fact.aval._replace(wants_grad=False):
            raise RuntimeError(f"it gives {aval_of_tensor(tensor)} with strides {tensor.stride()} for {fact.aval}")
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    for i, j in combinations(range(len(tensors)), 2):
        if storages[i] == storages[j] != 0 and facts[i].storage != facts[j].storage:
            raise RuntimeError("two of its results share memory that autograd's do not share")


def _on_lists(graph: Graph, run: Callable[..., Any]) -> Callable[..., Any]:
    # Compiled code takes and returns flat tensors. What is known now is kept out of the call: which leaves of each list
    # it reads (mostly all), which lists it empties, and whether results have leaves that are no tensors.
    constants = [*graph.constants.values()]
    reads = [[index for index, leaf in enumerate(leaves) if leaf is not None] for leaves in graph.reads.values()]
    reads_all = [len(indices) == len(leaves) for indices, leaves in zip(reads, graph.reads.values(), strict=True)]
    is_kept = [is_kept_all_step(label) for label in graph.reads]
    plan = [*zip(reads, reads_all, is_kept, strict=True)]
    writes = [[*leaves] for leaves in graph.writes.values()]
    writes_only_tensors = all(isinstance(leaf, Name) for leaves in writes for leaf in leaves)
    sizes = [len(leaves) for leaves in writes]

    def run_on_lists(*lists: Any) -> Any:
        inputs: list[Any] = []
        for leaves, (indices, reads_whole_list, keeps_list) in zip(lists, plan, strict=True):
            inputs += leaves if reads_whole_list else [leaves[index] for index in indices]
            if not keeps_list:
                leaves.clear()
        results = iter(run(*inputs, *constants))
        if writes_only_tensors:
            return tuple([next(results) for _ in range(size)] for size in sizes)
        return tuple([next(results) if isinstance(leaf, Name) else leaf for leaf in leaves] for leaves in writes)

    return run_on_lists
