"""Trace a whole function alike by any tracer: without generators of its own, checkpoints, and writes to literals."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fpipe import tree
from fpipe.meaning.stages.way_back import partly_python
from fpipe.torch_private import checkpoint


class OnlyTraceable(TorchFunctionMode):
    """Refuses what is in no trace above autograd: random numbers from a generator, hooks of gradients, inference mode,
    and derivatives that the function takes itself where the tracer sees nothing of their operations.

    Attributes:
        in_python: whether a gradient of what the function returned is computed by Python.
    """

    def __init__(self, who: str, derivatives: bool) -> None:
        super().__init__()
        self.who, self.derivatives, self.in_python = who, derivatives, False

    def returned(self, results: Any) -> Any:
        """Look at the results of the function, and return them."""
        self.in_python |= partly_python(tree.leaves(results), custom_ops=False)
        return results

    def warn(self, stacklevel: int) -> None:
        """Warn of a gradient that the trace does not have."""
        if self.in_python:
            warnings.warn(
                f"{self.who} computes a gradient in Python (a custom autograd.Function, or a hook of a module), and a "
                "trace above autograd has only its forward, which stages differentiate. Compare gradients by "
                "fpipe.verify, or use from_sequential or from_functions.",
                stacklevel=stacklevel,
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not self.derivatives:
            raise ValueError(f"{self.who} calls torch.autograd.grad or torch.func, which only from_functions can trace")
        if func is Tensor.register_hook or torch.is_inference_mode_enabled():
            raise ValueError(
                f"{self.who} registers a hook of a gradient, or computes in inference_mode, which no trace above "
                "autograd captures. Use no_grad for the last, or from_functions."
            )
        if (kwargs or {}).get("generator") is not None:
            name = getattr(func, "__name__", "")
            raise ValueError(
                f"{self.who} draws from a generator of its own ({name}), which is in no key; draw without it."
            )
        if func is torch.tensor and _device(kwargs or {}).type == "meta":  # its numbers would be lost
            return func(*args, **{**(kwargs or {}), "device": "cpu"}).to("meta")
        return func(*args, **(kwargs or {}))


def _device(kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


def without_checkpoints() -> AbstractContextManager[None]:
    """Meanwhile torch.utils.checkpoint only calls its function, since a trace would lose gradients of what is in two of
    them; the old way, a backward within a backward, is refused."""

    def refuse() -> Any:
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=True) has a backward that no trace above autograd captures; say "
            "use_reentrant=False, or leave it out and let fpipe.checkpoint() recompute"
        )

    return checkpoint.without_checkpoints(refuse)


def make_literals_pure(graph: fx.Graph) -> None:
    """torch.tensor(4) is traced as a copy that is then detached in place, though nothing is mutated."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        (copy,) = node.args
        if isinstance(copy, fx.Node) and copy.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)
