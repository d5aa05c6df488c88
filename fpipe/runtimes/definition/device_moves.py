"""Move values between the devices of ranks, with their strides.

devices=["cuda:0", "cuda:1"]        y[0,0]>1 = SEND y[0,0] @ 0        -->        y[0,0]>1: cuda:0 to cuda:1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.language.graph import span
from fpipe.program import Program, Value, parts_of

Moves = Mapping[Value, tuple[torch.device, torch.device]]
"""Of what is in flight between devices: from which, and to which."""


def moves_of(program: Program, devices: Sequence[torch.device]) -> Moves:
    """Find the values that travel between two devices, in a program in which every transfer is an op."""
    if not devices:
        return {}
    ops = [*parts_of(program.ops)]
    sent = {value: devices[op.rank] for op in ops if op.kind == "SEND" for value in op.writes}
    both = ((value, (sent[value], devices[op.rank])) for op in ops if op.kind == "RECV" for value in op.reads)
    return {value: pair for value, pair in both if pair[0] != pair[1]}


def brought(leaf: Any, home: torch.device) -> Any:
    """A leaf of the batch on the device where it is wanted. One in pinned memory is copied there first: the copy to the
    device may run long after the step has returned, and the caller may fill the batch anew by then."""
    if not isinstance(leaf, Tensor) or leaf.device == home:
        return leaf
    held = leaf.device.type == "cpu" and home.type != "meta" and leaf.is_pinned()
    return moved(torch.empty_like(leaf, pin_memory=True).copy_(leaf) if held else leaf, leaf.device, home)


def moved(leaf: Any, home: torch.device, there: torch.device, *, queued: bool = False) -> Any:
    """A tensor at home as it is there, with its strides: kernels look at them. Anything else stays as it is. On a CPU
    it is there at once, unless it is `queued`: then whoever reads it waits for the stream."""
    away = partial(Tensor.to, device=there, non_blocking=there.type != "cpu")
    return copied([leaf], home, to_host if queued and there.type == "cpu" else away)[0]


def copied(leaves: Iterable[Any], home: torch.device, copy: Callable[[Tensor], Tensor]) -> list[Any]:
    """Leaves with copies in place of the tensors at home, with their strides. Each memory is copied once, as a tensor
    of one dimension."""
    found, made = list[Any](), dict[Any, Tensor]()
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device == home:
            shape, stride = leaf.shape, leaf.stride()
            flat = leaf.detach().as_strided((span(shape, stride),), (1,))
            key = () if leaf.is_meta else (flat.data_ptr(), len(flat), flat.dtype)
            if leaf.is_meta or key not in made:
                made[key] = copy(flat)
            leaf = made[key].as_strided(shape, stride).requires_grad_(leaf.requires_grad)
        found.append(leaf)
    return found


def to_host(flat: Tensor) -> Tensor:
    """A tensor of a device in pinned memory, once its stream is there."""
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)


def pinned(leaves: Iterable[Any]) -> list[Any]:
    """Leaves of the host in pinned memory: those that are there already, as they are."""
    return [leaf if _is_pinned(leaf) else copied([leaf], torch.device("cpu"), Tensor.pin_memory)[0] for leaf in leaves]


def _is_pinned(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_pinned()
