"""Say on which device each rank of a process computes, and move what it is handed and sent there, with its strides.

devices=["cuda:0", "cuda:1"]        params[1]: cuda:1        y[0,0]>1 = SEND y[0,0] @ 0: from cuda:0 to cuda:1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.own_memory import span
from fpipe.program import Output, Program, Value, parts_of

BATCH = ("inputs", "target")
Moves = Mapping[Value, tuple[torch.device, torch.device]]
"""Of what is in flight between devices: from which, and to which."""


def devices_of(devices: Sequence[Any], ranks: int) -> tuple[torch.device, ...]:
    """The device of each rank, with its number; a ValueError if there are not as many as ranks."""
    if isinstance(devices, str) or len(devices) != ranks:
        raise ValueError(
            f"devices= has a device for each rank, such as ['cuda:0', 'cuda:1']; this program has {ranks} ranks, found "
            f"{devices!r}."
        )
    return tuple(map(_numbered, devices))


def _numbered(said: Any) -> torch.device:
    device = torch.device(said)
    known = device.type != "cpu" and device.index is not None
    return device if known else torch.empty(0, device=device).device


def on_devices(program: Program, devices: Sequence[torch.device]) -> Program:
    """The program with homes of each input on one device, and one of each output: to others values travel as all do."""
    inputs = tuple(
        end._replace(homes=tuple(rank for rank in end.homes if devices[rank] == devices[end.homes[0]]))
        for end in program.inputs
    )
    outputs: dict[Value, Output] = {}
    for end in program.outputs:
        outputs.setdefault(end.name, end._replace(homes=end.homes[:1]))
    return Program.trusted(inputs, program.ops, tuple(outputs.values()))


def homes_of(program: Program, devices: Sequence[torch.device]) -> Mapping[Value, torch.device]:
    """Where each input is wanted."""
    return {end.value: devices[end.homes[0]] for end in program.inputs} if devices else {}


def home_of(value: Value, leaf: Any, home: torch.device | None) -> torch.device | None:
    """Where a leaf of an input is wanted, or None where it may be anywhere: the host reads the numbers of an update."""
    counts = value.name == "opt" and not getattr(leaf, "ndim", 0)
    return None if counts or value.name in ("lr", "scale") else home


def check_at_home(value: Value, leaves: Iterable[Any], home: torch.device, *, example: bool = False) -> None:
    """A ValueError for parameters or a state away from their rank's device; meta tensors of an `example` stand for what
    is there."""
    found = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not (example and leaf.is_meta))
    away = next((leaf for leaf in found if leaf.device != home and home_of(value, leaf, home)), None)
    if away is not None and value.name not in BATCH:
        raise ValueError(
            f"{value} (of shape {[*away.shape]}) is on {away.device}, and its rank computes on {home}: move that stage "
            "there before the step, or say other devices=."
        )


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
    """A tensor at home as it is there, with its strides; on a CPU at once, unless it is `queued` for who reads it."""
    away = partial(Tensor.to, device=there, non_blocking=there.type != "cpu")
    return copied([leaf], home, to_host if queued and there.type == "cpu" else away)[0]


def copied(leaves: Iterable[Any], home: torch.device, copy: Callable[[Tensor], Tensor]) -> list[Any]:
    """Leaves with copies in place of the tensors at home, with their strides; each memory is copied once, and flat."""
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
