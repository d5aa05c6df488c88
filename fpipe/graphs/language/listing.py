"""Write a graph down as lines that are the same wherever the same function was traced, so that processes compare them.

    y = tanh(x @ w)        -->        op 0: aten.mm.default(x[0], params[0])   op 1: aten.tanh.default(%0)   y: %1

What may differ between processes that agree is left out: names, devices, groups of processes, memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import Graph, Name, aval
from fpipe.meaning.purity.sharded import is_collective, local_of
from fpipe.torch_internals import OpOverload, arguments_of


def listing(graph: Graph) -> Iterator[str]:
    """The ops with their arguments, and what it writes.

    Tensors that it reads go by their label and place, those that its code holds on to by their number (`held`
    describes them), and what an op writes by the op's number.
    """
    names: dict[Any, str] = {
        name: f"{label}[{at}]" for label, leaves in graph.reads.items() for at, name in enumerate(leaves)
    }
    names |= {name: f"held[{at}]" for at, name in enumerate(graph.constants)}
    names |= {node.name: f"%{at}" for at, node in enumerate(graph.nodes)}
    yield from (f"op {at}: {_call(*node[1:], names)}" for at, node in enumerate(graph.nodes))
    for label, leaves in graph.writes.items():
        yield f"{label}: {', '.join(_text(leaf, names) for leaf in leaves)}"


def held(tensors: Iterable[Any]) -> list[str] | None:
    """Tensors with their data, in a line each; None where one of them has no data here.

    >>> held([torch.ones(2)])
    ['float32[2]: 1.0, 1.0 (hash 80b8fd6d)']
    """
    found: list[str] = []
    for tensor in map(local_of, tensors):
        if tensor.is_meta:
            return None
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        data = hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()[:8]
        first = ", ".join(str(number) for number in flat[:_SHOWN].tolist()) + ", .." * (len(flat) > _SHOWN)
        found.append(f"{aval(tensor)}: {first} (hash {data})")
    return found


_SHOWN = 4


def _call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """An op with its arguments. A group of processes is called otherwise in each of them."""
    given = [("", arg) for arg in args] + [(f"{word}=", arg) for word, arg in kwargs.items()]
    if is_collective(op):
        known = zip((one.name for one in arguments_of(op)), given, strict=False)
        given = [one for name, one in known if name not in ("group_name", "src")]
    what = str(op) if isinstance(op, OpOverload) else str(getattr(op, "__name__", type(op).__name__))
    return f"{what}({', '.join(word + _text(arg, names) for word, arg in given)})"


def _text(arg: Any, names: Mapping[Any, str]) -> str:
    if isinstance(arg, Name):
        return names.get(arg, "?")
    if isinstance(arg, list | tuple):
        return f"[{', '.join(_text(one, names) for one in arg)}]"
    if isinstance(arg, torch.device):
        return "device"
    if isinstance(arg, Tensor):
        return str(aval(arg))
    return repr(arg) if isinstance(arg, _PLAIN) else type(arg).__name__


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.layout | torch.memory_format | Enum | None
