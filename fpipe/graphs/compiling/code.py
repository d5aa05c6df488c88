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
    """A function of a list for each label that the graph reads; it gives a list for each that it writes.

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
    """Equal stages differ in what their names stand for, and not in their text."""
    return compile(text, f"<{name}>", "exec")


def source(graph: Graph, name: str = "run") -> str:
    """The text of that function, for people to read: numbers in it are numbers."""
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
    """The graph with numbers of arithmetic as tensors that torch need not make at each call: the bits are the same.

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
    """The number in a node as the tensor that torch would make of it.

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
    """For each op what nobody needs after it."""
    seen = {*kept, *graph.constants}
    found: list[list[Name]] = []
    for node in reversed(graph.nodes):
        last = [name for name in dict.fromkeys(node.reads) if name not in seen]
        last += [node.name] if node.name not in seen else []
        seen.update(last)
        found.append(last)
    return found[::-1]


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
    """An argument as Python has it; what has no text of its own gets a name."""
    if isinstance(arg, Name):
        return str(arg)
    if isinstance(arg, list | tuple):
        inner = ", ".join(_text(one, objects) for one in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner},)"
    if arg is None or isinstance(arg, bool | int | float | str | torch.dtype | torch.device | torch.layout):
        return repr(arg)
    if isinstance(arg, torch.memory_format):
        return str(arg)
    word = f"object_{len(objects)}"
    objects[word] = arg
    return word


def _fastest(node: Node, graph: Graph) -> Callable[..., Any]:
    """torch's own function for an op where one makes just this call: it takes about half the time of the op's object.

    Seen on one thread: `torch.mm` 1.2 us, `torch.ops.aten.mm.default` 2.0 us; `Tensor.t` 0.6 and 1.5 us.
    """
    op: Any = node.op
    if not isinstance(op, OpOverload):
        return op
    key = op, _kinds(node.args, graph), tuple((word, _kinds(arg, graph)) for word, arg in node.kwargs.items())
    if key not in _FASTEST:
        _FASTEST[key] = torch.enable_grad()(op) if op in _ASK_GRAD_MODE else _found(op, node, graph)
    return _FASTEST[key]


# Without grad mode this one runs another kernel, which keeps nothing for the backward.
_ASK_GRAD_MODE = (torch.ops.aten.mkldnn_rnn_layer.default,)
_FASTEST: dict[Any, Callable[..., Any]] = {}


def _kinds(arg: Any, graph: Graph) -> Any:
    """The key by which torch's functions choose an overload: types of arguments, and which tensors are 0-d."""
    if isinstance(arg, Name):
        return arg in graph.facts and (len(graph.facts[arg].aval.shape) == 0, "tensor")
    return (type(arg), *(_kinds(one, graph) for one in arg)) if isinstance(arg, list | tuple) else type(arg)


def _found(op: Any, node: Node, graph: Graph) -> Callable[..., Any]:
    name, _ = names_of(op)
    for place in NAMESPACES:
        found = getattr(place, name, None)
        if callable(found) and not hasattr(found, "__code__") and _same_call(found, node, graph):
            return found
    return handle_of(op)


class _Seen(Exception):
    """An op was called."""


class _Spy(TorchDispatchMode):
    """Stops at the first op that is called, and tells which."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func, args, kwargs or {})


def _same_call(function: Any, node: Node, graph: Graph) -> bool:
    """Whether a function, given the arguments of an op, calls that op with those arguments."""
    if not graph.facts.keys() >= {*node.reads}:
        return False
    args, kwargs = on_meta(node, graph)
    try:
        with torch.no_grad(), _Spy():
            function(*args, **kwargs)
    except _Seen as seen:
        called, found, more = seen.args
        return called is node.op and _equal(_spelt(node.op, found, more), _spelt(node.op, args, kwargs))
    except Exception:
        return False
    return False


def _spelt(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Each argument of a call by name, defaults too. No word on pinned memory is False, which torch's functions say."""
    arguments = arguments_of(op)
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    found |= dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return found | {"pin_memory": bool(found["pin_memory"])} if "pin_memory" in found else found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and one == other
