"""Share the parameters of a rank out among replicas, as a program takes them that `fpipe.shard` made.

({"w": w[4, 3]}, None)        --> shard_params, on replica 0 of 2 -->        ({"w": DTensor(w[:2], Shard(0))}, None)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree


def shard_params(params: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """A replica's shards of some stages' parameters: rows as DTensor's `Shard(0)` cuts them, each in memory of its own.

    Nothing is sent: all replicas pass the same parameters, and each keeps its part. An optimizer over the shards keeps
    its state sharded too. Parameters of no dimension stay whole (`Replicate()`).

    Args:
        params: one entry for each stage, as `local_params` or `load_params` gives them: None for other ranks' stages.
        mesh: of one dimension, that of the replicas: `mesh["dp"]`.

    Raises:
        TypeError: the mesh is none of one dimension, or a parameter is a DTensor already.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "pp"))
    >>> (shards,) = shard_params(({"w": torch.ones(4, 3)},), mesh["dp"])
    >>> shards["w"].placements, shards["w"].to_local().shape
    ((Shard(dim=0),), torch.Size([4, 3]))
    >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"mesh is one dimension of a DeviceMesh, such as mesh['dp']; found {mesh!r}.")
    return tuple(tree.tree_map(partial(_shard, mesh=mesh), stage) for stage in params)


def _shard(leaf: Any, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # its import takes long

    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, DTensor):
        raise TypeError("a parameter is a DTensor already; shard_params takes the plain tensors of a rank.")
    whole = leaf.detach().contiguous()
    own, placement = whole.clone(), Replicate()
    if whole.ndim:
        count, number = mesh.size(), mesh.get_local_rank()
        most = -(-len(whole) // count)
        own, placement = whole[most * number : most * (number + 1)].clone(), Shard(0)
    made = DTensor.from_local(own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return made.requires_grad_(leaf.requires_grad)
