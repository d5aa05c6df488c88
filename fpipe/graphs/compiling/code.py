"""Generate Python code for a graph: one line an op, each tensor dropped after its last read.

    graph        --> source -->        def forward(hoisted, x):
                                           [w], [x_0] = hoisted, x
                                           x.clear()
                                           mm = aten_mm(x_0, w); del x_0
                                           return [mm],

A function takes lists of tensors and empties them, except those of parameters. If such a list has the last reference to
a tensor, its memory is free right after the op that reads it last, as inside autograd. Numbers are globals of the
function, not literals: so the code of an open graph is generated once, and each length has a function with its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count
from operator import getitem
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Graph, Name, Node, aval_of_tensor, fact_in_own_storage, meta_arguments
from fpipe.graphs.language.labels import is_kept_all_step, variable_name
from fpipe.graphs.tracing.open_sizes import SizedGraph, SizeNumbers
from fpipe.torch_internals import OpOverload, TorchDispatchMode, op_and_overload_names, schema_arguments
from fpipe.torch_private.dispatch import NAMESPACES, c_function_of, without_modes
from fpipe.torch_private.fx import is_expression


def compile_graph(graph: Graph, name: str = "run") -> Callable[..., Any]:
    """Compile a graph to a function that takes a list for each label that it reads and returns one for each it writes.

    >>> from fpipe.graphs.language.graph import Graph, Name, Node
    >>> double = Node(Name("y_0"), torch.ops.aten.add.Tensor, (Name("x_0"), Name("x_0")), {})
    >>> run = compile_graph(Graph((double,), {}, {}, {"x": (Name("x_0"),)}, {"y": (Name("y_0"),)}))
    >>> run([torch.ones(2)])
    ([tensor([2., 2.])],)
    """
    return OpenCode(SizedGraph(graph), name).with_numbers(SizeNumbers())


class OpenCode:
    """The code of a graph, from which each call of other sizes gets a function with its own numbers.

    Args:
        example: the graph, with the numbers of one call.
        name: the name of the function.
    """

    def __init__(self, example: SizedGraph, name: str) -> None:
        graph, self._name = _with_number_tensors(example.graph), name
        text, self._object_by_name = _generate(example._replace(graph=graph), name, spells_numbers=False)
        exec(_compile_text(text, name), self._object_by_name)
        self._names_by_expression = dict[Any, list[str]]()
        for object_name, x in self._object_by_name.items():
            if is_expression(x):
                self._names_by_expression.setdefault(x, []).append(object_name)

    def with_numbers(self, numbers: SizeNumbers) -> Callable[..., Any]:
        """Return the function for the sizes of a call; graphs without open sizes have one function."""
        function: Any = self._object_by_name[self._name]
        if not self._names_by_expression:
            return function
        # Functions share their code: only the globals differ.
        object_by_name = {**self._object_by_name}
        for expression, names in self._names_by_expression.items():
            object_by_name.update(dict.fromkeys(names, numbers(expression)))
        return FunctionType(function.__code__, object_by_name, self._name)


@lru_cache(maxsize=1024)
def _compile_text(text: str, name: str) -> CodeType:
    """Compile a text once: equal stages and other lengths differ in what names stand for, and not in their text."""
    return compile(text, f"<{name}>", "exec")


def source(graph: Graph, name: str = "run") -> str:
    """Return the text of a graph's function for people to read, with numbers as numbers."""
    return _generate(SizedGraph(graph), name, spells_numbers=True)[0]


def _generate(sized_graph: SizedGraph, name: str, spells_numbers: bool) -> tuple[str, dict[str, Any]]:
    graph = sized_graph.graph
    # `object_by_name` are the globals of the function: whatever its text names and cannot, or does not, spell.
    object_by_name: dict[str, Any] = {"torch": torch, "device": torch.device}
    variable_by_label = {label: variable_name(label) for label in graph.reads}
    lines = [f"def {name}({', '.join(variable_by_label.values())}):"]
    results = {leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    needed = results.union(*(node.reads for node in graph.nodes))
    # 1. Unpack the leaves that are needed, and drop the others; then empty the lists.
    for label, leaves in graph.reads.items():
        unpacked = [leaf if leaf in needed else "_" for leaf in leaves]
        is_kept = is_kept_all_step(label)
        if unpacked and {*unpacked} != {"_"}:
            drop = "; del _" if "_" in unpacked and not is_kept else ""
            lines.append(f"    [{', '.join(unpacked)}] = {variable_by_label[label]}{drop}")
    cleared_names = [variable for label, variable in variable_by_label.items() if not is_kept_all_step(label)]
    lines += ["    " + "; ".join(f"{variable}.clear()" for variable in cleared_names)] if cleared_names else []
    # 2. A line for each op, with a `del` of the names that it reads last.
    kept_leaves = {leaf for label, leaves in graph.reads.items() if is_kept_all_step(label) for leaf in leaves}
    dying_by_node = _last_reads(graph, results | kept_leaves)
    for node, names in zip(graph.nodes, dying_by_node, strict=True):
        line = f"    {node.name} = {_call_text(node, sized_graph, object_by_name, spells_numbers)}"
        lines.append(line + (f"; del {', '.join(names)}" if names else ""))
    object_by_name |= {str(constant): tensor for constant, tensor in graph.constants.items()}
    # 3. A tuple of lists.
    texts = [
        f"[{', '.join(_argument_text(x, object_by_name, spells_numbers) for x in leaves)}]"
        for leaves in graph.writes.values()
    ]
    lines.append(f"    return {', '.join(texts)}{',' if len(texts) == 1 else ''}" if texts else "    return ()")
    return "\n".join(lines), object_by_name


_aten: Any = torch.ops.aten
_ARITHMETIC = {op: p.Tensor for p in (_aten.add, _aten.sub, _aten.mul, _aten.div) for op in (p.Tensor, p.Scalar)}
# Larger integers are not exact in float64.
_MAX_EXACT_INT = 1 << 53


def _with_number_tensors(graph: Graph) -> Graph:
    """Replace the numbers of arithmetic ops by tensors, which torch would make in each call; the bits are the same."""
    # Measured on one thread: `torch.div(x, 0.5)` 2.8 us, with the number in a tensor 1.3 us.
    constants, facts, nodes = dict(graph.constants), dict(graph.facts), list[Node]()
    for node in graph.nodes:
        number = _number_tensor(node, graph)
        if number is None:
            nodes.append(node)
        else:
            name = Name(f"number_{len(constants)}")
            constants[name], facts[name] = number, fact_in_own_storage(aval_of_tensor(number))
            nodes.append(Node(node.name, _ARITHMETIC[node.op], (node.args[0], name), {}))
    return replace(graph, nodes=tuple(nodes), constants=constants, facts=facts)


def _number_tensor(node: Node, graph: Graph) -> Tensor | None:
    """Return the number in an arithmetic node as the tensor that torch would make of it, or None."""
    # None for dtypes of fewer bits than float32, where torch computes with the number in full precision; and for
    # subnormal numbers, which torch may take for 0 (`torch.set_flush_denormal`).
    if node.op not in _ARITHMETIC or len(node.args) != 2 or node.kwargs or node.args[0] not in graph.facts:
        return None
    operand, number = graph.facts[node.args[0]].aval, node.args[1]
    if not operand.shape or operand.dtype not in (torch.float32, torch.float64) or type(number) not in (int, float):
        return None
    if (type(number) is int and abs(number) > _MAX_EXACT_INT) or 0 < abs(number) < torch.finfo(operand.dtype).tiny:
        return None
    # The caller may be under a mode that makes fake tensors.
    with without_modes():
        return torch.tensor(number, dtype=torch.float64, device="cpu").to(operand.dtype)


def _last_reads(graph: Graph, kept_leaves: set[Name]) -> list[list[Name]]:
    # From the last op to the first: a name that was not seen yet is read here for the last time. A result that nobody
    # reads dies where it is written.
    read_later = {*kept_leaves, *graph.constants}
    last_reads: list[list[Name]] = []
    for node in reversed(graph.nodes):
        dying = [name for name in dict.fromkeys(node.reads) if name not in read_later]
        dying += [node.name] if node.name not in read_later else []
        read_later.update(dying)
        last_reads.append(dying)
    return last_reads[::-1]


def _call_text(node: Node, sized_graph: SizedGraph, object_by_name: dict[str, Any], spells_numbers: bool) -> str:
    if node.op is getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    call = _fastest_call(sized_graph.numbers.node(node), sized_graph)
    # Overloads of an op may be different functions: aten_add, aten_add_2, and so on.
    base = f"aten_{node.op.__name__.split('.')[0]}"
    names = chain([base], (f"{base}_{k}" for k in count(2)))
    name = next(name for name in names if object_by_name.get(name, call) is call)
    object_by_name[name] = call
    arguments = [_argument_text(argument, object_by_name, spells_numbers) for argument in node.args]
    arguments += [
        f"{keyword}={_argument_text(argument, object_by_name, spells_numbers)}"
        for keyword, argument in node.kwargs.items()
    ]
    return f"{name}({', '.join(arguments)})"


def _argument_text(argument: Any, object_by_name: dict[str, Any], spells_numbers: bool) -> str:
    """Write an argument in Python; an object that has no literal gets a name in `object_by_name`."""
    if isinstance(argument, Name):
        return str(argument)
    if isinstance(argument, list | tuple):
        children = ", ".join(_argument_text(child, object_by_name, spells_numbers) for child in argument)
        return f"[{children}]" if isinstance(argument, list) else f"({children}{',' if argument else ''})"
    # A number gets a name too, by its place, as it may follow from a length: graphs of other lengths then have equal
    # texts, whose compiled code they share.
    is_spelled = spells_numbers or type(argument) not in (int, float)
    plain_types = bool | int | float | str | torch.dtype | torch.device | torch.layout
    if argument is None or (isinstance(argument, plain_types) and is_spelled):
        return repr(argument)
    if isinstance(argument, torch.memory_format):
        return str(argument)
    name = f"object_{len(object_by_name)}"
    object_by_name[name] = argument
    return name


def _fastest_call(node: Node, sized_graph: SizedGraph) -> Callable[..., Any]:
    """Return a function of torch that makes just this call of an op, in about half the time of the op's object."""
    # Measured on one thread: `torch.mm` 1.2 us, `torch.ops.aten.mm.default` 2.0 us; `Tensor.t` 0.6 and 1.5 us.
    op, (graph, numbers) = node.op, sized_graph
    if not isinstance(op, OpOverload):
        return op
    keyword_keys = tuple((keyword, _overload_key(argument, graph)) for keyword, argument in node.kwargs.items())
    key = op, _overload_key(node.args, graph), keyword_keys
    if key not in _FASTEST:
        facts = {name: numbers.fact(graph.facts[name]) for name in node.reads if name in graph.facts}
        graph = replace(graph, facts=facts)
        _FASTEST[key] = torch.enable_grad()(op) if op in _ASK_GRAD_MODE else _find_torch_function(op, node, graph)
    return _FASTEST[key]


# Without grad mode this one runs another kernel, which keeps nothing for the backward.
_ASK_GRAD_MODE = (torch.ops.aten.mkldnn_rnn_layer.default,)
_FASTEST: dict[Any, Callable[..., Any]] = {}


def _overload_key(x: Any, graph: Graph) -> Any:
    """Return the properties by which torch's functions choose an overload: types, and which tensors are 0-d."""
    if isinstance(x, Name):
        return x in graph.facts and (len(graph.facts[x].aval.shape) == 0, "tensor")
    return (type(x), *(_overload_key(child, graph) for child in x)) if isinstance(x, list | tuple) else type(x)


def _find_torch_function(op: Any, node: Node, graph: Graph) -> Callable[..., Any]:
    name, _ = op_and_overload_names(op)
    for namespace in NAMESPACES:
        function = getattr(namespace, name, None)
        if callable(function) and not hasattr(function, "__code__") and _makes_same_call(function, node, graph):
            return function
    return c_function_of(op)


class _OpCalled(Exception):
    """Carries the op and arguments of a call."""


class _StopAtFirstOp(TorchDispatchMode):
    """Raises _OpCalled at the first op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _OpCalled(func, args, kwargs or {})


def _makes_same_call(function: Any, node: Node, graph: Graph) -> bool:
    """Whether a function, called with the arguments of an op, calls that op with those arguments."""
    # Call it on meta tensors under a mode that stops at the first op and tells which one that was.
    if not graph.facts.keys() >= {*node.reads}:
        return False
    args, kwargs = meta_arguments(node, graph)
    try:
        with torch.no_grad(), _StopAtFirstOp():
            function(*args, **kwargs)
    except _OpCalled as first_call:
        op, called_args, called_kwargs = first_call.args
        return op is node.op and _are_equal(
            _arguments_by_name(op, called_args, called_kwargs), _arguments_by_name(op, args, kwargs)
        )
    except Exception:
        return False
    return False


def _arguments_by_name(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included; torch's functions pass pin_memory=False for None."""
    arguments = schema_arguments(op)
    values = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    values |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return values | {"pin_memory": bool(values["pin_memory"])} if "pin_memory" in values else values


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return type(a) is type(b) and a == b
