"""First values of single leaves of a net on meta, by the module that has each, or a function of name and tensor.

blocks.3.up.weight        -->        seed by (seed, "blocks.3.up");  Linear.reset_parameters on a copy that has memory

So a leaf has the same values wherever it is made, and whatever else is made there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.stages.keys import fold_in, seeded
from fpipe.torch_internals import ModuleDicts, held_by, version_of
from fpipe.torch_private.modules import hold
from fpipe.torch_private.processes import strided_shard

Fill = Callable[[str, Tensor], Any]
"""`init(name, tensor)` fills a leaf in place; it returns False for one that it leaves to the module."""


class FirstValues:
    """Makes the leaves of a net by a seed; `init` fills them in place of their modules."""

    def __init__(self, seed: int, init: Fill | None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"seed is a whole number, found {seed!r}.")
        if init is not None and not callable(init):  # pyright: ignore[reportUnnecessaryComparison]
            raise TypeError(f"init= is a function of name and tensor, found {init!r}.")
        self.seed, self.init, self.beyond = fold_in(seed), init, list[str]()
        # Leaves of one module come one after the other.
        self._reset: tuple[Any, ModuleDicts, Mapping[str, tuple[Tensor, int]]] | None = None

    def make(self, name: str, home: tuple[Any, str]) -> Tensor:
        """Return the values of a leaf, whose home is a module and its name there.

        They are those of `init`, else a copy of those that it has, else those of the module's `reset_parameters`.
        """
        (module, key), like = home, getattr(*home)
        if self.init is not None:
            leaf = _empty(like)
            version = version_of(leaf)
            with torch.no_grad(), seeded(fold_in(self.seed, *name.encode()), "init="):
                is_done = self.init(name, leaf) is not False
            if is_done and version_of(leaf) == version and not _is_filled(leaf):
                raise ValueError(f"init= leaves {name!r} as it is. Fill the tensor in place, or return False.")
            if is_done:
                return leaf
        if not like.is_meta:
            return like.detach().to(torch.get_default_device(), copy=True)
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(_unknown(name, module, "which has no reset_parameters()"))
        if self._reset is None or self._reset[0] is not module:
            self._reset = module, *self._reset_copy(module, name)
        _, after, before = self._reset
        if key in before and version_of(like) > version_of(before[key][0]) - before[key][1]:
            self.beyond.append(name)
        leaf = {**after.parameters, **after.buffers}.get(key)
        is_unwritten = leaf is before[key][0] and version_of(before[key][0]) == before[key][1]
        if leaf is None or leaf.shape != like.shape or (is_unwritten and not _is_filled(leaf)):
            raise ValueError(_unknown(name, module, "whose reset_parameters() leaves it as it is"))
        return leaf.detach()

    def warn(self) -> None:
        """Warn of leaves that were written more often when the net was made than their module's reset writes them."""
        if self.beyond:
            first, *more = self.beyond
            warnings.warn(
                f"{first!r}{f' and {len(more)} more have' if more else ' has'} values by reset_parameters() of the "
                "module; others that were given when the net was made were lost on meta. Give those by init=, a "
                "function of name and tensor, which returns False for what it leaves to the modules.",
                stacklevel=3,
            )

    def _reset_copy(self, module: nn.Module, name: str) -> tuple[ModuleDicts, Mapping[str, tuple[Tensor, int]]]:
        """Reset a copy of a module; return its tensors, and those that it had before, each with its version."""
        copied, (parameters, buffers, children) = object.__new__(type(module)), held_by(module)
        vars(copied).update(vars(module))  # copy.copy refuses a module that has parametrizations
        empty_parameters: dict[str, Tensor] = {
            key: nn.Parameter(_empty(x), x.requires_grad) for key, x in parameters.items() if x is not None
        }
        empty_buffers = {key: _empty(x) for key, x in buffers.items() if x is not None}
        hold(copied, children, {**parameters, **empty_parameters}, {**buffers, **empty_buffers})
        before = {key: (x, version_of(x)) for key, x in (empty_parameters | empty_buffers).items()}
        reset: Any = copied.reset_parameters
        with torch.no_grad(), seeded(fold_in(self.seed, *name.rpartition(".")[0].encode()), name):
            reset()
        return held_by(copied), before


def _is_filled(tensor: Tensor) -> bool:
    """Whether numbers were written, also by `.data`, which versions do not count."""
    return tensor.is_floating_point() and not bool(tensor.isnan().any())


def _empty(like: Tensor) -> Tensor:
    """Make a tensor of NaN on the default device, to see whether it gets filled."""
    leaf = torch.empty_like(like, device=torch.get_default_device(), requires_grad=False)
    return leaf.fill_(torch.nan) if like.is_floating_point() or like.is_complex() else leaf.zero_()


def _unknown(name: str, module: Any, why: str) -> str:
    is_buffer = name.rpartition(".")[2] in held_by(module).buffers
    return (
        f"{name!r} is on meta, and nothing gives it values: it belongs to a {type(module).__name__}, {why}. Say init=, "
        "a function of name and tensor that fills it in place, or give that module a reset_parameters()."
        + ' A constructor that makes a buffer with device="cpu" keeps its values.'
        * is_buffer
    )


# Share the parameters of a rank out among replicas, as a program takes them that `fpipe.shard` made.


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
    axis, *inner_axes = [*(mesh.mesh_dim_names or ())]
    local, submesh, placements, stride = leaf.detach().contiguous(), mesh[axis] if inner_axes else mesh, (), None
    if isinstance(leaf, DTensor):
        names = leaf.device_mesh.mesh_dim_names or ("tp",)
        if names != (*inner_axes,):
            raise TypeError(
                f"a parameter is a DTensor over {names} already. Where its parts are those of processes that share a "
                f"stage, fpipe.shard_params(params, mesh[{', '.join(map(repr, (axis, *names)))}]) cuts them on."
            )
        local, submesh, placements = leaf.to_local().detach().contiguous(), mesh, leaf.placements
        stride = leaf.stride()
    stride, placement = stride or local.stride(), Replicate()
    if local.ndim:
        rows = -(-len(local) // mesh.size(0))
        start = rows * mesh.get_local_rank(0)
        parts = prod(mesh.size(1 + axis) for axis, inner in enumerate(placements) if inner.is_shard(0))
        local, placement = local[start : start + rows], Shard(0) if parts == 1 else strided_shard(parts)
    shard: Any = DTensor.from_local(
        local.clone(), submesh, (placement, *placements), run_check=False, shape=leaf.shape, stride=stride
    )
    return shard.requires_grad_(leaf.requires_grad)
