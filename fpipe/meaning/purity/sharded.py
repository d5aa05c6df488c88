"""Take a DTensor for what it is in one process: its own shard, and a rule for putting it together.

    w = DTensor(shard, mesh, [Shard(0)])        --> local_of -->        shard        --> whole -->        w

A graph is traced of shards. The stage is handed DTensors made of them, so what torch computes of those, and sends to
the other processes of the mesh, are ops of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Sharding(NamedTuple):
    """How shards make a DTensor: over which processes, and which part of it each one has."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def whole(self, shard: Tensor) -> Tensor:
        """The DTensor of which this process has this shard; its gradient is placed as it is."""
        from torch.distributed.tensor import DTensor

        known = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(shard, self.mesh, self.placements, run_check=False, **known)  # pyright: ignore[reportArgumentType]


def is_sharded(leaf: Any) -> bool:
    """Whether it is a DTensor. There is none before its module is imported, which takes long."""
    if type(leaf) in _COMMON:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


_COMMON = (Tensor, nn.Parameter, int, float, bool, type(None))


def is_by_rows(placement: Any) -> bool:
    """Whether rows are cut: of the whole, or of the part that a dimension behind it in the mesh leaves of rows."""
    return placement.is_shard(0) or (hasattr(placement, "split_factor") and placement.dim == 0)


def of_sharded(types: Iterable[type]) -> bool:
    """Whether a call is of DTensors, which a mode leaves to them, so that it sees the ops on their shards instead."""
    module = sys.modules.get("torch.distributed.tensor") if types else None
    return module is not None and any(issubclass(kind, module.DTensor) for kind in types)


def is_collective(op: Any) -> bool:
    """Whether an op waits for other processes, which have to run it too, and in the same order."""
    return getattr(op, "namespace", "") in ("_c10d_functional", "_dtensor")


def sharding_of(leaf: Any) -> Sharding | None:
    """How a DTensor is sharded; None of what is none."""
    if not is_sharded(leaf):
        return None
    return Sharding(leaf.device_mesh, tuple(leaf.placements), tuple(leaf.shape), leaf.stride())


def local_of(leaf: Any) -> Any:
    """The shard of a DTensor, without its graph; any other leaf as it is."""
    return leaf.detach().to_local() if is_sharded(leaf) else leaf


def sharded_as(param: Any, shard: Any) -> Any:
    """The DTensor of which this is the shard, where the parameter is one."""
    known = sharding_of(param)
    return shard if known is None or shard is None else known.whole(shard)


def placed_as(param: Any, grad: Any) -> Any:
    """A gradient over the processes that its parameter is over."""
    if not is_sharded(param) or grad is None:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def refuse_sharded(leaves: Iterable[Any], what: str) -> None:
    """A TypeError for what is no parameter, and so is each process's own."""
    if any(map(is_sharded, leaves)):
        raise TypeError(
            f"{what} holds a DTensor; only parameters and buffers are sharded, and what flows is each process's own "
            "tensor, which a rank can send. Call .to_local() or .full_tensor() there; parallelize_module's plans do "
            "where use_local_output is True."
        )


# The dimensions of a mesh of processes, which say which processes run the ranks of a program, and which replicas.


def dimensions(mesh: object, wanted: Mapping[str, object]) -> tuple[str, ...]:
    """The names of a mesh's dimensions, or of none where there is no mesh and none is wanted but that of the ranks.

    Args:
        mesh: what was handed in.
        wanted: how long each dimension is that it has to have, for the sentence: {"dp": "replicas", "pp": 4}.

    Raises:
        TypeError: the mesh is none.
        ValueError: it lacks a dimension.
    """
    sizes = f"({', '.join(map(str, wanted.values()))}{',' * (len(wanted) == 1)})"
    say = f"Say mesh=init_device_mesh(device, {sizes}, mesh_dim_names={tuple(wanted)})"
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found {type(mesh).__name__}. "
            f"{say}, or leave it out where the ranks are all processes."
        )
    names = () if mesh is None else mesh.mesh_dim_names or ()
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None and (mesh is not None or len(wanted) > 1):
        found = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
        of = "ranks" if missing == "pp" else "replicas"
        raise ValueError(f"the program has {of} along dimension {missing!r} of a mesh, and {found}. {say}.")
    return names
