"""Check the device of each rank of a process, and move tensors between devices without changing their strides.

devices=["cuda:0", "cuda:1"]        params[1]: cuda:1        y[0,0]>1 = SEND y[0,0] @ 0: from cuda:0 to cuda:1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.write_guard import storage_span
from fpipe.program import Output, Program, Value, parts_of

BATCH = ("inputs", "target")
Moves = Mapping[Value, tuple[torch.device, torch.device]]
"""The devices that a value travels from and to."""


def check_devices(devices: Sequence[Any], ranks: int) -> tuple[torch.device, ...]:
    """Return the device of each rank, with its index; raise ValueError unless there are as many as ranks."""
    if isinstance(devices, str) or len(devices) != ranks:
        raise ValueError(
            f"devices= has a device for each rank, such as ['cuda:0', 'cuda:1']; this program has {ranks} ranks, found "
            f"{devices!r}."
        )
    return tuple(map(_with_index, devices))


def _with_index(name: Any) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"devices= has {name!r}, which is no device of torch, such as 'cuda:0'.") from None
    has_index = device.type != "cpu" and device.index is not None
    # "cuda" alone is the current device: a tensor on it has the index.
    return device if has_index else torch.empty(0, device=device).device


def drop_duplicate_homes(program: Program, devices: Sequence[torch.device]) -> Program:
    """Return a program in which the homes of each input are on one device, and each output has one home.

    Inputs then reach ranks on other devices by transfers, as all other values do.
    """
    inputs = tuple(
        end._replace(homes=tuple(rank for rank in end.homes if devices[rank] == devices[end.homes[0]]))
        for end in program.inputs
    )
    outputs: dict[Value, Output] = {}
    for end in program.outputs:
        outputs.setdefault(end.name, end._replace(homes=end.homes[:1]))
    return Program.trusted(inputs, program.ops, tuple(outputs.values()))


def input_homes(program: Program, devices: Sequence[torch.device]) -> Mapping[Value, torch.device]:
    """Return the device of each input's home; {} if no devices are set."""
    return {end.value: devices[end.homes[0]] for end in program.inputs} if devices else {}


def leaf_home(value: Value, leaf: Any, home: torch.device | None) -> torch.device | None:
    """Return the device where a leaf of an input has to be, or None if it may be anywhere."""
    # Learning rate, loss scale and the step count of optimizer state are read by the host.
    counts = value.name == "opt" and not getattr(leaf, "ndim", 0)
    return None if counts or value.name in ("lr", "scale") else home


def check_at_home(value: Value, leaves: Iterable[Any], home: torch.device, *, example: bool = False) -> None:
    """Raise ValueError for parameters or state on another device than their rank's; meta is fine in an `example`."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not (example and leaf.is_meta))
    misplaced = next((leaf for leaf in tensors if leaf.device != home and leaf_home(value, leaf, home)), None)
    if misplaced is not None and value.name not in BATCH:
        raise ValueError(
            f"{value} (of shape {[*misplaced.shape]}) is on {misplaced.device}, and its rank computes on {home}: move "
            "that stage, or say other devices=."
        )


def find_moves(program: Program, devices: Sequence[torch.device]) -> Moves:
    """Return the values that travel between two devices, in a program in which every transfer is an op."""
    if not devices:
        return {}
    ops = [*parts_of(program.ops)]
    senders = {value: devices[op.rank] for op in ops if op.kind == "SEND" for value in op.writes}
    pairs = ((value, (senders[value], devices[op.rank])) for op in ops if op.kind == "RECV" for value in op.reads)
    return {value: pair for value, pair in pairs if pair[0] != pair[1]}


def bring_batch_leaf(leaf: Any, home: torch.device) -> Any:
    """Return a leaf of the batch on the device of its home."""
    # From pinned memory the copy to the device is asynchronous. It may run after the step has returned, when the caller
    # may already fill the batch with new rows: so such a leaf is copied on the host first.
    if not isinstance(leaf, Tensor) or leaf.device == home:
        return leaf
    is_pinned = leaf.device.type == "cpu" and home.type != "meta" and leaf.is_pinned()
    return move_tensor(torch.empty_like(leaf, pin_memory=True).copy_(leaf) if is_pinned else leaf, leaf.device, home)


def move_tensor(leaf: Any, source: torch.device, target: torch.device, *, is_queued: bool = False) -> Any:
    """Return a tensor on the target device with the same strides; leaves on other devices than `source` unchanged.

    A copy to the CPU is complete on return, unless `is_queued`: then it is there when the stream has run the copy.
    """
    move = partial(Tensor.to, device=target, non_blocking=target.type != "cpu")
    return copy_tensors([leaf], source, copy_to_pinned if is_queued and target.type == "cpu" else move)[0]


def copy_tensors(leaves: Iterable[Any], source: torch.device, copy: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return leaves with copies, in the same strides, of the tensors on the source device."""
    # Tensor.to makes an expanded or overlapping tensor contiguous. A flat view from the first to the last element is
    # copied instead, and seen through the strides again; tensors that share that memory share the copy.
    copies, copy_by_memory = list[Any](), dict[Any, Tensor]()
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device == source:
            shape, stride = leaf.shape, leaf.stride()
            flat = leaf.detach().as_strided((storage_span(shape, stride),), (1,))
            key = () if leaf.is_meta else (flat.data_ptr(), len(flat), flat.dtype)
            if leaf.is_meta or key not in copy_by_memory:
                copy_by_memory[key] = copy(flat)
            leaf = copy_by_memory[key].as_strided(shape, stride).requires_grad_(leaf.requires_grad)
        copies.append(leaf)
    return copies


def copy_to_pinned(flat: Tensor) -> Tensor:
    """Copy a device's tensor to pinned memory asynchronously, in the order of the current stream."""
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)


def pin_leaves(leaves: Iterable[Any]) -> list[Any]:
    """Return leaves of the host in pinned memory, without copying leaves that are there already."""
    return [
        leaf if _is_pinned(leaf) else copy_tensors([leaf], torch.device("cpu"), Tensor.pin_memory)[0] for leaf in leaves
    ]


def _is_pinned(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_pinned()
