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
    """Makes leaves of a net, by a seed; `init` fills them in place of their modules."""

    def __init__(self, seed: int, init: Fill | None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"seed is a whole number, found {seed!r}.")
        if init is not None and not callable(init):  # pyright: ignore[reportUnnecessaryComparison]
            raise TypeError(f"init= is a function of name and tensor, found {init!r}.")
        self.seed, self.init, self.beyond = fold_in(seed), init, list[str]()
        # Leaves of one module come one after the other.
        self._reset: tuple[Any, ModuleDicts, Mapping[str, tuple[Tensor, int]]] | None = None

    def make(self, name: str, home: tuple[Any, str]) -> Tensor:
        """The values of a leaf, of which a module and its name there are the home: by `init`, else a copy of those that
        it has, else by that module; a ValueError where nothing gives it values."""
        (owner, own), like = home, getattr(*home)
        if self.init is not None:
            made = _empty(like)
            before = version_of(made)
            with torch.no_grad(), seeded(fold_in(self.seed, *name.encode()), "init="):
                done = self.init(name, made) is not False
            if done and version_of(made) == before and not _is_filled(made):
                raise ValueError(f"init= leaves {name!r} as it is. Fill the tensor in place, or return False.")
            if done:
                return made
        if not like.is_meta:
            return like.detach().to(torch.get_default_device(), copy=True)
        if not callable(getattr(owner, "reset_parameters", None)):
            raise ValueError(_unknown(name, owner, "which has no reset_parameters()"))
        if self._reset is None or self._reset[0] is not owner:
            self._reset = owner, *self._copied(owner, name)
        _, now, before = self._reset
        if own in before and version_of(like) > version_of(before[own][0]) - before[own][1]:
            self.beyond.append(name)
        made = {**now.parameters, **now.buffers}.get(own)
        kept = made is before[own][0] and version_of(before[own][0]) == before[own][1]
        if made is None or made.shape != like.shape or (kept and not _is_filled(made)):
            raise ValueError(_unknown(name, owner, "whose reset_parameters() leaves it as it is"))
        return made.detach()

    def warn(self) -> None:
        """Say which leaves were written more often when the net was made than their module's reset writes them."""
        if self.beyond:
            first, *more = self.beyond
            warnings.warn(
                f"{first!r}{f' and {len(more)} more have' if more else ' has'} values by reset_parameters() of the "
                "module; others that were given when the net was made were lost on meta. Give those by init=, a "
                "function of name and tensor, which returns False for what it leaves to the modules.",
                stacklevel=3,
            )

    def _copied(self, owner: nn.Module, name: str) -> tuple[ModuleDicts, Mapping[str, tuple[Tensor, int]]]:
        """The own tensors of a copy of a module alone, reset; and those that it had before, each with its version."""
        copied, (parameters, buffers, children) = object.__new__(type(owner)), held_by(owner)
        vars(copied).update(vars(owner))  # copy.copy refuses a module that has parametrizations
        own: dict[str, Tensor] = {
            key: nn.Parameter(_empty(x), x.requires_grad) for key, x in parameters.items() if x is not None
        }
        held = {key: _empty(one) for key, one in buffers.items() if one is not None}
        hold(copied, children, {**parameters, **own}, {**buffers, **held})
        before = {key: (one, version_of(one)) for key, one in (own | held).items()}
        reset: Any = copied.reset_parameters
        with torch.no_grad(), seeded(fold_in(self.seed, *name.rpartition(".")[0].encode()), name):
            reset()
        return held_by(copied), before


def _is_filled(tensor: Tensor) -> bool:
    """Whether numbers were written where versions do not tell, by `.data`."""
    return tensor.is_floating_point() and not bool(tensor.isnan().any())


def _empty(like: Tensor) -> Tensor:
    """A tensor on the default device, of numbers that are none, to see whether it is filled."""
    made = torch.empty_like(like, device=torch.get_default_device(), requires_grad=False)
    return made.fill_(torch.nan) if like.is_floating_point() or like.is_complex() else made.zero_()


def _unknown(name: str, owner: Any, why: str) -> str:
    is_buffer = name.rpartition(".")[2] in held_by(owner).buffers
    return (
        f"{name!r} is on meta, and nothing gives it values: it belongs to a {type(owner).__name__}, {why}. Say init=, "
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
