"""Say on which device each rank of a process computes, and what travels between them.

devices=["cuda:0", "cuda:1"]        y[0,0]>1 = SEND y[0,0] @ 0        -->        y[0,0]>1: cuda:0 to cuda:1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.graph import span
from fpipe.program import Output, Program, Value, parts_of

Moves = Mapping[Value, tuple[torch.device, torch.device]]
"""Of what is in flight between devices: from which, and to which."""

BATCH = ("inputs", "target")


def devices_of(devices: Sequence[Any], ranks: int) -> tuple[torch.device, ...]:
    """The device of each rank, with its number.

    Raises:
        ValueError: there are not as many as ranks.
    """
    if isinstance(devices, str) or len(devices) != ranks:
        raise ValueError(
            f"devices= has a device for each rank, such as ['cuda:0', 'cuda:1']; this program has {ranks} ranks, found "
            f"{devices!r}."
        )
    return tuple(map(_numbered, devices))


def _numbered(said: Any) -> torch.device:
    device = torch.device(said)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        return device
    return torch.empty(0, device=device).device


def on_devices(program: Program, devices: Sequence[torch.device]) -> Program:
    """The program with one home of each input, or several on one device, and one of each output: to other devices the
    values travel as all do."""
    inputs = tuple(
        end._replace(homes=tuple(rank for rank in end.homes if devices[rank] == devices[end.homes[0]]))
        for end in program.inputs
    )
    outputs: dict[Value, Output] = {}
    for end in program.outputs:
        outputs.setdefault(end.name, end._replace(homes=end.homes[:1]))
    return Program.trusted(inputs, program.ops, tuple(outputs.values()))


def moves_of(program: Program, devices: Sequence[torch.device]) -> Moves:
    """What of a program in which every transfer is an op travels between two devices."""
    if not devices:
        return {}
    ops = [*parts_of(program.ops)]
    sent = {value: devices[op.rank] for op in ops if op.kind == "SEND" for value in op.writes}
    ways = ((value, (sent[value], devices[op.rank])) for op in ops if op.kind == "RECV" for value in op.reads)
    return {value: way for value, way in ways if way[0] != way[1]}


def homes_of(program: Program, devices: Sequence[torch.device]) -> Mapping[Value, torch.device]:
    """Where each input is wanted."""
    return {end.value: devices[end.homes[0]] for end in program.inputs} if devices else {}


def check_at_home(value: Value, leaves: Iterable[Any], home: torch.device, *, example: bool = False) -> None:
    """A ValueError for parameters or a state that are not on their rank's device; a batch is brought there. What of an
    `example` has no data stands for what is at home."""
    found = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not (example and leaf.is_meta))
    away = next((leaf for leaf in found if leaf.device != home), None)
    if away is not None and value.name not in BATCH:
        raise ValueError(
            f"{value} (of shape {[*away.shape]}) is on {away.device}, and its rank computes on {home}: move that stage "
            "there before the step, or say other devices=."
        )


def brought(leaf: Any, home: torch.device) -> Any:
    """A leaf of the batch on the device where it is wanted."""
    return moved(leaf, leaf.device, home) if isinstance(leaf, Tensor) and leaf.device != home else leaf


def moved(leaf: Any, home: torch.device, there: torch.device, *, queued: bool = False) -> Any:
    """A tensor at home as it is there, with its strides: kernels look at them. Anything else stays as it is. On a CPU
    it is there at once, unless it is `queued`: then whoever reads it waits for the stream."""
    if not isinstance(leaf, Tensor) or leaf.device != home:
        return leaf
    shape, stride = leaf.shape, leaf.stride()
    flat = leaf.detach().as_strided((span(shape, stride),), (1,)).to(there, non_blocking=queued or there.type != "cpu")
    return flat.as_strided(shape, stride).requires_grad_(leaf.requires_grad)
