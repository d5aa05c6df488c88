"""Run each operation of a graph that is cut in the mode it was written down in: gradients on or off, autocast blocks.

autocast: [a  MARK  b]        -->        autocast: [a]    autocast: [b]
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

_AMP: Any = torch.amp.autocast_mode
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
SIZE: Any = torch.ops.aten.sym_size.int
_SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


class Mode(NamedTuple):
    """Whether gradients are on, and which autocast blocks are open, from the outermost in."""

    grad: bool
    casts: tuple[fx.Node, ...]


PLAIN = Mode(True, ())


def modes_of(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """The mode that each operation runs in. So each part runs its own in it, wherever the block began or ends."""
    mode, modes = PLAIN, dict[fx.Node, Mode]()
    for node in graph.nodes:
        if not switches(node):
            if node.op == "call_function" and node.target is not SIZE:
                modes[node] = mode
        elif getattr(node.target, "__name__", "") == "_set_grad_enabled":
            mode = mode._replace(grad=bool(node.args[0]))
        elif getattr(node.target, "__name__", "") == "_enter_autocast":
            mode = mode._replace(casts=(*mode.casts, node))
        else:
            mode = mode._replace(casts=tuple(one for one in mode.casts if one is not node.args[0]))
    return modes


@contextmanager
def as_found() -> Generator[None]:
    """Blocks that an error leaves open are closed: what runs next would run inside of them."""
    before = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    cached, grad, depth = torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), _depth()
    try:
        yield
    except BaseException:
        for device, on, dtype in before:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.set_grad_enabled(grad)
        while _depth() > depth:
            torch.autocast_decrement_nesting()
        raise


_DEVICES = ("cpu", "cuda")


def _depth() -> int:
    """How many autocast blocks are open."""
    found = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return found


class Switch:
    """Switches modes in a graph that is made, where one operation runs in another than the one before."""

    def __init__(self, made: fx.Graph) -> None:
        self.made, self.mode, self.open = made, PLAIN, list[fx.Node]()

    def to(self, mode: Mode) -> None:
        """Go on in this mode."""
        same = 0
        for one, other in zip(self.mode.casts, mode.casts, strict=False):
            if one is not other:
                break
            same += 1
        while len(self.open) > same:
            self.made.call_function(_AMP._exit_autocast, (self.open.pop(),))
        for block in mode.casts[same:]:
            self.open.append(self.made.node_copy(block))
        if mode.grad != self.mode.grad:
            self.made.call_function(_C._set_grad_enabled, (mode.grad,))
        self.mode = mode


def switches(node: fx.Node) -> bool:
    """Whether a node begins or ends a block, and computes nothing."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES
