"""Write a graph as text that is equal wherever one function was traced, so that processes can compare it.

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

from fpipe.graphs.language.graph import Graph, Name, aval_of_tensor
from fpipe.meaning.purity.sharded import is_collective, local_shard
from fpipe.torch_internals import OpOverload, schema_arguments


def listing(graph: Graph) -> Iterator[str]:
    """Yield a line for each op of a graph, and for each label that it writes.

    Tensors that it reads are named by label and index, constants by number (`describe_constants` describes them), and
    the result of an op by the number of the op.
    """
    names: dict[Any, str] = {
        name: f"{label}[{index}]" for label, leaves in graph.reads.items() for index, name in enumerate(leaves)
    }
    names |= {name: f"held[{index}]" for index, name in enumerate(graph.constants)}
    names |= {node.name: f"%{index}" for index, node in enumerate(graph.nodes)}
    yield from (f"op {index}: {_call(*node[1:], names)}" for index, node in enumerate(graph.nodes))
    for label, leaves in graph.writes.items():
        yield f"{label}: {', '.join(_text(leaf, names) for leaf in leaves)}"


def describe_constants(tensors: Iterable[Any]) -> list[str] | None:
    """Return a line for each tensor, with its first numbers and a hash; None if a tensor has no data here.

    >>> describe_constants([torch.ones(2)])
    ['float32[2]: 1.0, 1.0 (hash 80b8fd6d)']
    """
    lines: list[str] = []
    for tensor in map(local_shard, tensors):
        if tensor.is_meta:
            return None
        # Lazy conjugation and negation are carried out first, so that equal numbers have equal bytes.
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        digest = hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()[:8]
        start_text = ", ".join(str(x) for x in flat[:_NUMBERS_SHOWN].tolist()) + ", .." * (len(flat) > _NUMBERS_SHOWN)
        lines.append(f"{aval_of_tensor(tensor)}: {start_text} (hash {digest})")
    return lines


_NUMBERS_SHOWN = 4


def _call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """Write an op with its arguments. Process groups are left out: each process names them otherwise."""
    named_args = [("", value) for value in args] + [(f"{keyword}=", value) for keyword, value in kwargs.items()]
    if is_collective(op):
        schema_pairs = zip((argument.name for argument in schema_arguments(op)), named_args, strict=False)
        named_args = [named_arg for name, named_arg in schema_pairs if name not in ("group_name", "src")]
    op_name = str(op) if isinstance(op, OpOverload) else str(getattr(op, "__name__", type(op).__name__))
    return f"{op_name}({', '.join(prefix + _text(value, names) for prefix, value in named_args)})"


def _text(argument: Any, names: Mapping[Any, str]) -> str:
    if isinstance(argument, Name):
        return names.get(argument, "?")
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_text(child, names) for child in argument)}]"
    if isinstance(argument, torch.device):
        return "device"
    if isinstance(argument, Tensor):
        return str(aval_of_tensor(argument))
    return repr(argument) if isinstance(argument, _PLAIN) else type(argument).__name__


_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.layout | torch.memory_format | Enum | None
