"""Make the first values of a net on meta, leaf by leaf: by the module that has it, or by a function of the caller.

blocks.3.up.weight        -->        seed by (seed, "blocks.3.up");  Linear.reset_parameters on a copy that has memory

The random numbers of a leaf follow from a seed and its module's name alone. So it has the same values on every rank, in
every cut, whatever else is made there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.purity.keys import fold_in, with_seed
from fpipe.torch_internals import ModuleDicts, direct_members, version_of, warn
from fpipe.torch_private.modules import set_module_dicts
from fpipe.torch_private.processes import strided_shard

Fill = Callable[[str, Tensor], Any]
"""`init(name, tensor)` fills a leaf in place; it returns False for one that it leaves to the module."""


class FirstValues:
    """A maker of the first values of a net's leaves from a seed, by `init` or by the modules that have them."""

    def __init__(self, seed: int, init: Fill | None) -> None:
        self.seed, self.init, self.rewritten_names = fold_in(seed), init, list[str]()
        # The module that was reset last, with its tensors after and before: leaves of one module follow each other.
        self._reset: tuple[Any, ModuleDicts, Mapping[str, tuple[Tensor, int]]] | None = None

    def make(self, name: str, home: tuple[Any, str]) -> Tensor:
        """Return the values of a leaf, whose home is (module, attribute)."""
        # They are those of `init`, else a copy of those that it has, else those of the module's `reset_parameters`.
        (module, key), net_tensor = home, getattr(*home)
        # 1) The caller's function comes first. A leaf that it neither returns False for nor fills is a mistake.
        if self.init is not None:
            leaf = _nan_like(net_tensor)
            version = version_of(leaf)
            with torch.no_grad(), with_seed(fold_in(self.seed, *name.encode()), "init="):
                is_done = self.init(name, leaf) is not False
            if is_done and version_of(leaf) == version and not _is_filled(leaf):
                raise ValueError(f"init= leaves {name!r} as it is. Fill the tensor in place, or return False.")
            if is_done:
                return leaf
        # 2) A leaf with values, as of a pretrained part, keeps them.
        if not net_tensor.is_meta:
            return net_tensor.detach().to(torch.get_default_device(), copy=True)
        # 3) Otherwise the module resets a copy of itself, once for all its leaves.
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(_no_values_message(name, module, "which has no reset_parameters()"))
        if self._reset is None or self._reset[0] is not module:
            self._reset = module, *self._reset_copy(module, name)
        _, reset_dicts, old_tensors = self._reset
        # torch counts writes in place: a leaf of the net that was written more often than reset_parameters() writes
        # it had values from a constructor or another module, which are lost on meta.
        if key in old_tensors and version_of(net_tensor) > version_of(old_tensors[key][0]) - old_tensors[key][1]:
            self.rewritten_names.append(name)
        leaf = {**reset_dicts.parameters, **reset_dicts.buffers}.get(key)
        is_unwritten = leaf is old_tensors[key][0] and version_of(old_tensors[key][0]) == old_tensors[key][1]
        if leaf is None or leaf.shape != net_tensor.shape or (is_unwritten and not _is_filled(leaf)):
            raise ValueError(_no_values_message(name, module, "whose reset_parameters() leaves it as it is"))
        return leaf.detach()

    def warn(self) -> None:
        """Warn of leaves whose values from the making of the net, other than by reset_parameters(), were lost."""
        if self.rewritten_names:
            first_name, *more_names = self.rewritten_names
            warn(
                f"{first_name!r}{f' and {len(more_names)} more have' if more_names else ' has'} values by "
                "reset_parameters() of the module; others that were given when the net was made were lost on meta. "
                "Give those by init=, a function of name and tensor, which returns False for other leaves.",
                stacklevel=3,
            )

    def _reset_copy(self, module: nn.Module, name: str) -> tuple[ModuleDicts, Mapping[str, tuple[Tensor, int]]]:
        """Reset a copy of a module; return its tensors, and the old ones each with its version."""
        # The module itself stays on meta. Its copy has memory filled with NaN, to see what reset_parameters() fills.
        module_copy, (parameters, buffers, children) = object.__new__(type(module)), direct_members(module)
        vars(module_copy).update(vars(module))  # copy.copy refuses a module that has parametrizations
        empty_parameters: dict[str, Tensor] = {
            key: nn.Parameter(_nan_like(x), x.requires_grad) for key, x in parameters.items() if x is not None
        }
        empty_buffers = {key: _nan_like(x) for key, x in buffers.items() if x is not None}
        set_module_dicts(module_copy, children, {**parameters, **empty_parameters}, {**buffers, **empty_buffers})
        old_tensors = {key: (x, version_of(x)) for key, x in (empty_parameters | empty_buffers).items()}
        reset: Any = module_copy.reset_parameters
        with torch.no_grad(), with_seed(fold_in(self.seed, *name.rpartition(".")[0].encode()), name):
            reset()
        return direct_members(module_copy), old_tensors


def _is_filled(tensor: Tensor) -> bool:
    """Whether numbers were written, also by `.data`, which torch's version counters do not count."""
    return tensor.is_floating_point() and not bool(tensor.isnan().any())


def _nan_like(net_tensor: Tensor) -> Tensor:
    """Make a tensor of NaN on the default device, so that it shows whether it gets filled."""
    leaf = torch.empty_like(net_tensor, device=torch.get_default_device(), requires_grad=False)
    return leaf.fill_(torch.nan) if net_tensor.is_floating_point() or net_tensor.is_complex() else leaf.zero_()


def _no_values_message(name: str, module: Any, reason: str) -> str:
    is_buffer = name.rpartition(".")[2] in direct_members(module).buffers
    return (
        f"{name!r} is on meta, and nothing gives it values: it belongs to a {type(module).__name__}, {reason}. "
        "Fill it by init=, or give that module a reset_parameters()."
        + ' A constructor that makes a buffer with device="cpu" keeps its values.'
        * is_buffer
    )


# Shard the parameters of a rank over its replicas, as programs of `fpipe.shard` take them.


def shard_params(params: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return this replica's shards of parameters: DTensors of rows as `Shard(0)` cuts them, in memory of their own.

    Nothing is sent: all replicas pass the same parameters, and each copies its part. An optimizer over the shards keeps
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
    if not mesh.mesh_dim_names:
        raise TypeError(f"mesh is a DeviceMesh's dimension, such as mesh['dp']; found {mesh!r}.")
    if "pp" in mesh.mesh_dim_names:
        raise TypeError("dimension 'pp' of the mesh has the ranks of a program: hand in mesh['dp'], that of replicas.")
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
                f"a parameter is a DTensor over {names} already. Say "
                f"fpipe.shard_params(params, mesh[{', '.join(map(repr, (axis, *names)))}]) to cut its parts."
            )
        local, submesh, placements = leaf.to_local().detach().contiguous(), mesh, leaf.placements
        stride = leaf.stride()
    stride, placement = stride or local.stride(), Replicate()
    if local.ndim:
        # Shard(0) gives each replica ceil(n / replicas) rows, the last ones fewer or none. Where dimension 0 is sharded
        # over inner axes already, the rows of the replicas lie strided in the whole, as fully_shard places them.
        rows = -(-len(local) // mesh.size(0))
        start = rows * mesh.get_local_rank(0)
        parts = prod(mesh.size(1 + axis) for axis, p in enumerate(placements) if p.is_shard(0))
        local, placement = local[start : start + rows], Shard(0) if parts == 1 else strided_shard(parts)
    shard: Any = DTensor.from_local(
        local.clone(), submesh, (placement, *placements), run_check=False, shape=leaf.shape, stride=stride
    )
    return shard.requires_grad_(leaf.requires_grad)
