"""Trace a whole function alike by any tracer: without generators of its own, checkpoints, and writes to literals."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fpipe.torch_private import checkpoint


class OnlyTraceable(TorchFunctionMode):
    """Refuses random numbers from a generator, which follow from no key, and derivatives that the function takes itself
    where the tracer sees nothing of their operations."""

    def __init__(self, who: str, derivatives: bool) -> None:
        super().__init__()
        self.who, self.derivatives = who, derivatives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not self.derivatives:
            raise ValueError(f"{self.who} calls torch.autograd.grad or torch.func, which only from_functions can trace")
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
