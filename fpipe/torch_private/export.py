"""Read what `torch.export` writes into a graph: calls of graphs in other contexts, vmap, paths of modules."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage]

_HIGHER: Any = torch.ops.higher_order
GRAPH_CALLS: dict[Any, int] = {_HIGHER.wrap_with_set_grad_enabled: 1, _HIGHER.wrap_with_autocast: 4}
"""The ops that call a graph with gradients off, say, or under autocast, each with the number of its settings, which
come before the graph (2.13)."""
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The path in `nn_module_stack` of a node whose module is not known (2.13)."""


def is_of_vmap(node: fx.Node) -> bool:
    """Whether a node enters or leaves torch.vmap (2.13: a function of `torch._functorch.predispatch`)."""
    return getattr(node.target, "__module__", None) == "torch._functorch.predispatch"


def call_trees(exported: ExportedProgram, given: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
    """The arguments and the result of a call, as trees of these leaves (2.13: of `torch.utils._pytree`)."""
    in_spec: Any = exported.call_spec.in_spec
    out_spec: Any = exported.call_spec.out_spec
    return _pytree.tree_unflatten(given, in_spec), _pytree.tree_unflatten(results, out_spec)


def import_export() -> None:
    """Import what `torch.export` imports when it is first called, 1,300 modules (2.13)."""
    importlib.import_module("torch.export._trace")


@contextmanager
def quiet_export() -> Generator[None]:
    """Without the graph that torch prints where an export ends in an error. A tensor that a module remembers in a plain
    attribute is an error, but for the lists that an RNN has of its weights (2.13: the words of a warning)."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("error", "The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? \S*_flat_weights", UserWarning)
            yield
    finally:
        log.disabled = before
