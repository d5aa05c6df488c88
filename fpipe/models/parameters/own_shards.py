"""Share the parameters of a rank out among replicas, as a program takes them that `fpipe.shard` made.

({"w": w[4, 3]}, None)        --> shard_params, on replica 0 of 2 -->        ({"w": DTensor(w[:2], Shard(0))}, None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.torch_private.processes import strided_shard


def shard_params(params: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """A replica's shards of some stages' parameters: rows as DTensor's `Shard(0)` cuts them, each in memory of its own.

    Nothing is sent: all replicas pass the same parameters, and each keeps its part. An optimizer over the shards keeps
    its state sharded too. Parameters of no dimension stay whole (`Replicate()`).

    Args:
        params: one entry for each stage, as `local_params` or `load_params` gives them: None for other ranks' stages.
        mesh: of the dimension of the replicas, `mesh["dp"]`; and of those behind it over which parameters are DTensors
            already, `mesh["dp", "tp"]`: each process's part of these is cut, as `fully_shard` does.

    Raises:
        TypeError: it is no mesh, or one with the ranks of the program too; params are a net; a parameter is a DTensor
            over other dimensions.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "pp"))
    >>> (shards,) = shard_params(({"w": torch.ones(4, 3)},), mesh["dp"])
    >>> shards["w"].placements, shards["w"].to_local().shape
    ((Shard(dim=0),), torch.Size([4, 3]))
    >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"mesh is a dimension of a DeviceMesh, such as mesh['dp']; found {mesh!r}.")
    if "pp" in mesh.mesh_dim_names:
        raise TypeError("dimension 'pp' of the mesh has the ranks of a program: hand in mesh['dp'], that of replicas.")
    if isinstance(params, nn.Module | Tensor | Mapping):
        raise TypeError(
            f"params have one entry for each stage, as load_params or local_params gives them; found a "
            f"{type(params).__name__}."
        )
    return tuple(tree.tree_map(partial(_shard, mesh=mesh), stage) for stage in params)


def _shard(leaf: Any, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # its import takes long

    if not isinstance(leaf, Tensor):
        return leaf
    axis, *inside = [*(mesh.mesh_dim_names or ())]
    own, over, placements, stride = leaf.detach().contiguous(), mesh[axis] if inside else mesh, (), None
    if isinstance(leaf, DTensor):
        names = leaf.device_mesh.mesh_dim_names or ("tp",)
        if names != (*inside,):
            raise TypeError(
                f"a parameter is a DTensor over {names} already. Where its parts are those of processes that share a "
                f"stage, fpipe.shard_params(params, mesh[{', '.join(map(repr, (axis, *names)))}]) cuts them on."
            )
        own, over, placements, stride = leaf.to_local().detach().contiguous(), mesh, leaf.placements, leaf.stride()
    shape, stride, placement = leaf.shape, stride or own.stride(), Replicate()
    if own.ndim:
        most = -(-len(own) // mesh.size(0))
        at = most * mesh.get_local_rank(0)
        parts = prod(mesh.size(1 + n) for n, one in enumerate(placements) if one.is_shard(0))
        own, placement = own[at : at + most], Shard(0) if parts == 1 else strided_shard(parts)
    made: Any = DTensor.from_local(
        own.clone(), over, (placement, *placements), run_check=False, shape=shape, stride=stride
    )
    return made.requires_grad_(leaf.requires_grad)
