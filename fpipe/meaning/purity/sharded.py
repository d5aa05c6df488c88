"""Convert a DTensor to this process's shard and back.

    w = DTensor(shard, mesh, [Shard(0)])     --> local_shard -->     shard     --> to_dtensor -->     w

A graph takes and returns shards. While it is traced, the stage is called with DTensors made of the shards, so the
collectives by which torch computes with them become ops of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Sharding(NamedTuple):
    """The mesh, placements and global geometry of a DTensor: all of it but the shard."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def to_dtensor(self, shard: Tensor) -> Tensor:
        """Return the DTensor whose shard in this process is `shard`."""
        # Imported here: the module takes long to import, and most programs have no DTensor.
        from torch.distributed.tensor import DTensor

        geometry = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(shard, self.mesh, self.placements, run_check=False, **geometry)  # pyright: ignore[reportArgumentType]


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a DTensor."""
    # There is no DTensor before its module is imported, which takes long: look for the module rather than import it.
    if type(leaf) in _COMMON_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


_COMMON_TYPES = (Tensor, nn.Parameter, int, float, bool, type(None))


def shards_rows(placement: Any) -> bool:
    """Whether a placement divides rows, dimension 0."""
    # _StridedShard has a split_factor: it divides rows that a later dimension of the mesh divides first (FSDP with TP).
    return placement.is_shard(0) or (hasattr(placement, "split_factor") and placement.dim == 0)


def is_collective(op: Any) -> bool:
    """Whether an op is a collective, which all processes of a group have to run in the same order."""
    return getattr(op, "namespace", "") in ("_c10d_functional", "_dtensor")


def sharding_of(leaf: Any) -> Sharding | None:
    """Return the sharding of a DTensor, or None for any other leaf."""
    if not is_sharded(leaf):
        return None
    return Sharding(leaf.device_mesh, tuple(leaf.placements), tuple(leaf.shape), leaf.stride())


def local_shard(leaf: Any) -> Any:
    """Return the shard of a DTensor, detached, and any other leaf unchanged."""
    return leaf.detach().to_local() if is_sharded(leaf) else leaf


def as_dtensor_like(param: Any, shard: Any) -> Any:
    """Return a shard as a DTensor that is sharded like the parameter, or unchanged if the parameter is no DTensor."""
    sharding = sharding_of(param)
    return shard if sharding is None or shard is None else sharding.to_dtensor(shard)


def redistribute_like(param: Any, grad: Any) -> Any:
    """Return a gradient with the placements of its parameter."""
    # DTensor may leave a gradient as pending sums (Partial) or replicated; optimizers want it placed as the parameter.
    if not is_sharded(param) or grad is None:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def refuse_sharded(leaves: Iterable[Any], subject: str) -> None:
    """Raise TypeError if a value that flows between stages is a DTensor; a rank can send only plain tensors."""
    if any(map(is_sharded, leaves)):
        raise TypeError(
            f"{subject} holds a DTensor; only parameters and buffers are sharded. Call .to_local(), or set "
            "use_local_output=True in the plan."
        )


# Check the dimensions of a mesh of processes: one counts the ranks of a program, another its replicas.


def mesh_dim_names(mesh: object, size_by_dim: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions; () without a mesh, which is fine if only ranks are asked for.

    Args:
        mesh: a DeviceMesh or None.
        size_by_dim: the dimensions that the mesh must have, with sizes for the error: {"dp": "replicas", "pp": 4}.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
        ValueError: the mesh lacks a dimension.
    """
    sizes = f"({', '.join(map(str, size_by_dim.values()))}{',' * (len(size_by_dim) == 1)})"
    repair = f"Say mesh=init_device_mesh(device, {sizes}, mesh_dim_names={tuple(size_by_dim)})"
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found {type(mesh).__name__}. "
            f"{repair}, or leave it out."
        )
    names = () if mesh is None else mesh.mesh_dim_names or ()
    missing = next((name for name in size_by_dim if name not in names), None)
    if missing is not None and (mesh is not None or len(size_by_dim) > 1):
        description = "there is no mesh" if mesh is None else f"the mesh has {', '.join(names) or 'none with a name'}"
        plural = "ranks" if missing == "pp" else "replicas"
        raise ValueError(
            f"the program has {plural} along dimension {missing!r} of a mesh, and {description}. {repair}."
        )
    return names
