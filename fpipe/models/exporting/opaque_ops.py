"""Hold Python in a graph above autograd as one op each: a call of a module, or of a custom autograd.Function.

y = Reversed.apply(h, 2.0)        -->        y = OPAQUE([h], [], "Reversed 5e3f..")        runs Reversed.apply(h, 2.0)

Outside the export the op runs its Python under autograd. So the gradient of a Function is its own, not the derivative
of its forward, and a stage with such an op is traced or not by what its Python does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from fpipe import tree
from fpipe.torch_internals import version_of
from fpipe.torch_private.dispatch import intercept_functions

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] operands, Tensor[] module_tensors, str name) -> Tensor[]")


CALLS_KEY = "fpipe_calls"
"""The key in the meta of a traced graph under which it keeps the calls of its ops alive."""


class Call(Protocol):
    """The Python behind an op: its module by path, if it has one, and its floating-point operations on the example."""

    name: str
    flops: int

    @property
    def module_by_path(self) -> Mapping[str, nn.Module]:
        """The module that it calls."""
        ...

    def results(self, operands: Sequence[Tensor], module_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors among its results, on input tensors and on the tensors of its module."""
        ...


class FunctionCall:
    """A call of a custom autograd.Function. Arguments that are no tensors are the same in each step."""

    flops = 0
    module_by_path: Mapping[str, nn.Module] = MappingProxyType({})

    def __init__(self, function: type, args: Any) -> None:
        self.function: Any = function
        self.args, self.spec = _with_placeholders(args)
        self.result_leaves, self.result_spec = list[Any](), None
        self.name = register_call(self, function.__name__)

    def results(self, operands: Sequence[Tensor], module_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply the Function, whose gradient autograd then takes from its backward."""
        versions = [*map(version_of, operands)]
        args, kwargs = with_tensors(self.args, self.spec, iter(operands))
        results = self.function.apply(*args, **kwargs)
        if [*map(version_of, operands)] != versions:
            raise ValueError(f"{self.function.__name__} writes its input in place; let its forward return a new tensor")
        self.result_leaves, self.result_spec = _with_placeholders(results)
        return [leaf for leaf in tree.leaves(results) if isinstance(leaf, Tensor)]


def apply_as_ops(calls: list[FunctionCall]) -> AbstractContextManager[None]:
    """Let each custom autograd.Function be an op in this context; the caller has to keep the collected calls alive."""

    def apply(function: type, args: Any, kwargs: Any) -> Any:
        leaves = tree.leaves((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A symbolic size is no constant of the call: the trace then goes through the forward, and a warning says so.
        if not operands or any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves):
            return NotImplemented
        call = FunctionCall(function, (args, kwargs))
        calls.append(call)
        tensors = iter(OPAQUE(operands, [], call.name))
        return with_tensors(call.result_leaves, call.result_spec, tensors)

    return intercept_functions(apply)


def as_meta_leaves(values: Any) -> tuple[list[Any], Any]:
    """Flatten values, with tensors on meta in place of tensors."""
    leaves, spec = tree.flatten(values)
    return [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


# Holds the place of a tensor. A tensor of the trace itself, kept in a call, would count as leaked.
_PLACEHOLDER = torch.empty(0)


def _with_placeholders(values: Any) -> tuple[list[Any], Any]:
    leaves, spec = tree.flatten(values)
    return [_PLACEHOLDER if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def with_tensors(leaves: Iterable[Any], spec: Any, tensors: Iterator[Tensor]) -> Any:
    """Unflatten leaves, with these tensors in place of those without data."""
    return tree.unflatten(spec, [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


_CALL_BY_NAME: WeakValueDictionary[str, Call] = WeakValueDictionary()
"""Calls by the name in their op. Weak: a call lives as long as a stage that runs it."""


def register_call(call: Call, label: str) -> str:
    """Return a new name for a call, by which its op finds it."""
    # Unique, so that a copy of a stage finds its own copy of a module.
    name = f"{label} {uuid4()}"
    _CALL_BY_NAME[name] = call
    return name


def _run_opaque(operands: list[Tensor], module_tensors: list[Tensor], name: str) -> list[Tensor]:
    return _CALL_BY_NAME[name].results(operands, module_tensors)


_LIBRARY.impl("opaque", _run_opaque, "CompositeImplicitAutograd")
OPAQUE: Any = torch.ops.fpipe.opaque.default
"""The op that stands for Python in a graph."""


def opaque_call_of(node: fx.Node) -> Call:
    """Return the call that a node stands for."""
    return _CALL_BY_NAME[str(node.args[2])]


def opaque_calls_of(graph: fx.Graph) -> list[Call]:
    """Return the opaque calls in a graph, which the owner of the graph has to keep alive."""
    return [opaque_call_of(node) for node in graph.find_nodes(op="call_function", target=OPAQUE)]


def rename_calls(module: fx.GraphModule, calls: Sequence[Call]) -> None:
    """Let the ops of a copied graph find the copies of their calls."""
    for node, call in zip(module.graph.find_nodes(op="call_function", target=OPAQUE), calls, strict=True):
        call.name = register_call(call, call.name.rpartition(" ")[0])
        node.args = (*node.args[:2], call.name)
    module.recompile()
