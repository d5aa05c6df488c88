"""Say on which device each rank of a process computes, and so where what a step is handed is at home.

devices=["cuda:0", "cuda:1"]        params[1] @ 1        -->        params[1]: cuda:1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.program import Output, Program, Value

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


def homes_of(program: Program, devices: Sequence[torch.device]) -> Mapping[Value, torch.device]:
    """Where each input is wanted."""
    return {end.value: devices[end.homes[0]] for end in program.inputs} if devices else {}


def home_of(value: Value, leaf: Any, home: torch.device | None) -> torch.device | None:
    """Where a leaf of an input is wanted, or None where it may be anywhere: the host reads the numbers of an update."""
    counts = value.name == "opt" and not getattr(leaf, "ndim", 0)
    return None if counts or value.name in ("lr", "scale") else home


def check_at_home(value: Value, leaves: Iterable[Any], home: torch.device, *, example: bool = False) -> None:
    """A ValueError for parameters or a state that are not on their rank's device; a batch is brought there. What of an
    `example` has no data stands for what is at home."""
    found = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not (example and leaf.is_meta))
    away = next((leaf for leaf in found if leaf.device != home and home_of(value, leaf, home)), None)
    if away is not None and value.name not in BATCH:
        raise ValueError(
            f"{value} (of shape {[*away.shape]}) is on {away.device}, and its rank computes on {home}: move that stage "
            "there before the step, or say other devices=."
        )
