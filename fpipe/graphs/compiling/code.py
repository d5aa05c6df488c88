"""Make Python of a graph: one line an op, each tensor dropped after its last read.

    graph        --> source -->        def forward(ready, x):
                                           [w], [x_0] = ready, x
                                           x.clear()
                                           mm = aten_mm(x_0, w); del x_0
                                           return [mm],

A function is handed lists of tensors and empties them, those of parameters aside: whoever gives the last reference
away in such a list frees a tensor right after the op that reads it last, as autograd does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count
from operator import getitem
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Graph, Name, Node, aval, in_own_storage, on_meta
from fpipe.graphs.language.labels import is_lasting, variable
from fpipe.torch_internals import OpOverload, TorchDispatchMode, arguments_of, names_of
from fpipe.torch_private.dispatch import NAMESPACES, handle_of, without_modes


def compiled(graph: Graph, name: str = "run") -> Callable[..., Any]:
    """Compile a graph to a function of a list for each label that it reads, which gives one for each that it writes.

    >>> from fpipe.graphs.language.graph import Graph, Name, Node
    >>> double = Node(Name("y_0"), torch.ops.aten.add.Tensor, (Name("x_0"), Name("x_0")), {})
    >>> run = compiled(Graph((double,), {}, {}, {"x": (Name("x_0"),)}, {"y": (Name("y_0"),)}))
    >>> run([torch.ones(2)])
    ([tensor([2., 2.])],)
    """
    text, objects = _written(_with_ready_numbers(graph), name)
    exec(_code(text, name), objects)
    return objects[name]


@lru_cache(maxsize=1024)
def _code(text: str, name: str) -> CodeType:
    """Compile a text once: equal stages differ in what their names stand for, and not in their text."""
    return compile(text, f"<{name}>", "exec")


def source(graph: Graph, name: str = "run") -> str:
    """Return the text of a graph's function, for people to read: numbers in it are numbers."""
    return _written(graph, name)[0]


def _written(graph: Graph, name: str) -> tuple[str, dict[str, Any]]:
    objects: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    labels = {label: variable(label) for label in graph.reads}
    lines = [f"def {name}({', '.join(labels.values())}):"]
    results = {leaf for leaves in graph.writes.values() for leaf in leaves if isinstance(leaf, Name)}
    needed = results.union(*(node.reads for node in graph.nodes))
    for label, leaves in graph.reads.items():
        words = [leaf if leaf in needed else "_" for leaf in leaves]
        kept = is_lasting(label)
        if words and {*words} != {"_"}:
            drop = "; del _" if "_" in words and not kept else ""
            lines.append(f"    [{', '.join(words)}] = {labels[label]}{drop}")
    cleared = [word for label, word in labels.items() if not is_lasting(label)]
    lines += ["    " + "; ".join(f"{word}.clear()" for word in cleared)] if cleared else []
    kept = {leaf for label, leaves in graph.reads.items() if is_lasting(label) for leaf in leaves}
    dead = _last_reads(graph, results | kept)
    for node, names in zip(graph.nodes, dead, strict=True):
        line = f"    {node.name} = {_call(node, graph, objects)}"
        lines.append(line + (f"; del {', '.join(names)}" if names else ""))
    objects |= {str(constant): tensor for constant, tensor in graph.constants.items()}
    written = [f"[{', '.join(_text(leaf, objects) for leaf in leaves)}]" for leaves in graph.writes.values()]
    lines.append(f"    return {', '.join(written)}{',' if len(written) == 1 else ''}" if written else "    return ()")
    return "\n".join(lines), objects


_aten: Any = torch.ops.aten
_ARITHMETIC = {
    op: packet.Tensor
    for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div)
    for op in (packet.Tensor, packet.Scalar)
}
_EXACT = 1 << 53


def _with_ready_numbers(graph: Graph) -> Graph:
    """Replace numbers of arithmetic by tensors, which torch then need not make at each call: the bits are the same.

    Seen on one thread: `torch.div(x, 0.5)` 2.8 us, with the number in a tensor 1.3 us.
    """
    constants, facts, nodes = dict(graph.constants), dict(graph.facts), list[Node]()
    for node in graph.nodes:
        number = _ready(node, graph)
        if number is None:
            nodes.append(node)
        else:
            name = Name(f"number_{len(constants)}")
            constants[name], facts[name] = number, in_own_storage(aval(number))
            nodes.append(Node(node.name, _ARITHMETIC[node.op], (node.args[0], name), {}))
    return replace(graph, nodes=tuple(nodes), constants=constants, facts=facts)


def _ready(node: Node, graph: Graph) -> Tensor | None:
    """Return the number in a node as the tensor that torch would make of it.

    Not for dtypes of fewer bits than float32: with those torch computes with the number as it was written. Nor for
    numbers so small that torch may be told to take them for 0 (`torch.set_flush_denormal`).
    """
    if node.op not in _ARITHMETIC or len(node.args) != 2 or node.kwargs or node.args[0] not in graph.facts:
        return None
    known, number = graph.facts[node.args[0]].aval, node.args[1]
    if not known.shape or known.dtype not in (torch.float32, torch.float64) or type(number) not in (int, float):
        return None
    if (type(number) is int and abs(number) > _EXACT) or 0 < abs(number) < torch.finfo(known.dtype).tiny:
        return None
    with without_modes():  # the caller may be under one that makes fake tensors
        return torch.tensor(number, dtype=torch.float64, device="cpu").to(known.dtype)


def _last_reads(graph: Graph, kept: set[Name]) -> list[list[Name]]:
    seen = {*kept, *graph.constants}
    last_reads: list[list[Name]] = []
    for node in reversed(graph.nodes):
        last = [name for name in dict.fromkeys(node.reads) if name not in seen]
        last += [node.name] if node.name not in seen else []
        seen.update(last)
        last_reads.append(last)
    return last_reads[::-1]


def _call(node: Node, graph: Graph, objects: dict[str, Any]) -> str:
    if node.op is getitem:
        return f"{node.args[0]}[{node.args[1]}]"
    call = _fastest(node, graph)
    plain = f"aten_{node.op.__name__.split('.')[0]}"
    words = chain([plain], (f"{plain}_{k}" for k in count(2)))
    word = next(word for word in words if objects.get(word, call) is call)
    objects[word] = call
    args = [_text(arg, objects) for arg in node.args]
    return f"{word}({', '.join([*args, *(f'{key}={_text(arg, objects)}' for key, arg in node.kwargs.items())])})"


def _text(arg: Any, objects: dict[str, Any]) -> str:
    """Write an argument as Python has it; an object without a text gets a name."""
    if isinstance(arg, Name):
        return str(arg)
    if isinstance(arg, list | tuple):
        inner = ", ".join(_text(item, objects) for item in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner},)"
    if arg is None or isinstance(arg, bool | int | float | str | torch.dtype | torch.device | torch.layout):
        return repr(arg)
    if isinstance(arg, torch.memory_format):
        return str(arg)
    word = f"object_{len(objects)}"
    objects[word] = arg
    return word


def _fastest(node: Node, graph: Graph) -> Callable[..., Any]:
    """Return torch's own function for an op if it makes just this call, in about half the time of the op's object.

    Seen on one thread: `torch.mm` 1.2 us, `torch.ops.aten.mm.default` 2.0 us; `Tensor.t` 0.6 and 1.5 us.
    """
    op: Any = node.op
    if not isinstance(op, OpOverload):
        return op
    key = op, _kinds(node.args, graph), tuple((word, _kinds(arg, graph)) for word, arg in node.kwargs.items())
    if key not in _FASTEST:
        _FASTEST[key] = torch.enable_grad()(op) if op in _ASK_GRAD_MODE else _lookup(op, node, graph)
    return _FASTEST[key]


# Without grad mode this one runs another kernel, which keeps nothing for the backward.
_ASK_GRAD_MODE = (torch.ops.aten.mkldnn_rnn_layer.default,)
_FASTEST: dict[Any, Callable[..., Any]] = {}


def _kinds(arg: Any, graph: Graph) -> Any:
    """Return what torch's functions choose an overload by: types of arguments, and which tensors are 0-d."""
    if isinstance(arg, Name):
        return arg in graph.facts and (len(graph.facts[arg].aval.shape) == 0, "tensor")
    return (type(arg), *(_kinds(item, graph) for item in arg)) if isinstance(arg, list | tuple) else type(arg)


def _lookup(op: Any, node: Node, graph: Graph) -> Callable[..., Any]:
    name, _ = names_of(op)
    for namespace in NAMESPACES:
        function = getattr(namespace, name, None)
        if callable(function) and not hasattr(function, "__code__") and _same_call(function, node, graph):
            return function
    return handle_of(op)


class _Called(Exception):
    """An op was called with these arguments."""


class _FirstCall(TorchDispatchMode):
    """Raises _Called at the first op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Called(func, args, kwargs or {})


def _same_call(function: Any, node: Node, graph: Graph) -> bool:
    """Whether a function, given the arguments of an op, calls that op with those arguments."""
    if not graph.facts.keys() >= {*node.reads}:
        return False
    args, kwargs = on_meta(node, graph)
    try:
        with torch.no_grad(), _FirstCall():
            function(*args, **kwargs)
    except _Called as call:
        op, called_args, called_kwargs = call.args
        return op is node.op and _equal(
            _arguments_by_name(op, called_args, called_kwargs), _arguments_by_name(op, args, kwargs)
        )
    except Exception:
        return False
    return False


def _arguments_by_name(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return each argument of a call by name, with defaults; torch's functions pass pin_memory=False for None."""
    arguments = arguments_of(op)
    values = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    values |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return values | {"pin_memory": bool(values["pin_memory"])} if "pin_memory" in values else values


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b
