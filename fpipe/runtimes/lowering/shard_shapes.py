"""Compute the shapes of a replica's shard of each parameter, and of the parameter once it is gathered.

w: float32[5, 8] over 2 replicas     --> shard --> float32[3, 8] of replica 0     --> whole --> float32[5, 8]

Rows are cut as DTensor's Shard(0) cuts them: equal parts, the last ones shorter or empty. A gathered parameter may
still be a shard over further dimensions of the mesh, such as "tp": the stage then reads it as a DTensor over those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from fpipe.graphs.language.graph import Aval, Fact, fact_in_own_storage
from fpipe.meaning.purity.sharded import Sharding, is_sharded, shards_rows
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.in_place import nested_indices_by_leaf
from fpipe.runtimes.lowering.lowered import AbstractTree


class Share(NamedTuple):
    """The number of this replica, how many replicas there are, and the axis of the mesh that they are along."""

    number: int
    replicas: int
    axis: str = "dp"


class SharedValue(NamedTuple):
    """The abstract trees of a value that replicas share out: this replica's shard, and the whole."""

    shard: AbstractTree
    whole: AbstractTree

    def scatter_shapes(self, op: Op, total: AbstractTree) -> AbstractTree:
        """Return the result of a SCATTER: this replica's rows of a gradient."""
        pairs = zip(self.shard.leaves, total.leaves, strict=True)
        parts = (None if grad is None else _cast_fact(op, shard.aval, grad.aval) for shard, grad in pairs)
        return total._replace(leaves=tuple(parts))


def shard_state(shared: SharedValue, state: AbstractTree) -> AbstractTree:
    """Return this replica's part of an optimizer's state: its rows of each tensor that is as large as a parameter."""
    leaves = [*state.leaves]
    # Adam's exp_avg is as large as its parameter and is sharded with it; its step is a number, which all replicas keep.
    for shard_leaf, indices in zip(shared.shard.leaves, nested_indices_by_leaf(shared.shard, state), strict=True):
        for index in indices:
            if leaves[index].aval.shape:
                leaves[index] = _contiguous_fact(shard_leaf.aval, leaves[index].aval, shard_leaf.aval.shape)
    return state._replace(leaves=tuple(leaves))


def shard_of(op: Op) -> Value:
    """Return the shard that a GATHER reads, or that a SCATTER makes the gradient of."""
    return Value("shard", op.stage, port=op.reads[0].port)


def gather_shapes(op: Op, abstract: AbstractTree, shared: SharedValue | None) -> AbstractTree:
    """Return the result of a GATHER: parameters in new memory, or its operand if it neither gathers nor casts."""
    if shared is None and "cast" not in dict(op.options):
        return abstract
    leaves = (
        _cast_fact(op, leaf.aval, leaf.aval, leaf.aval.sharding) if isinstance(leaf, Fact) else leaf
        for leaf in abstract.leaves
    )
    return abstract._replace(leaves=tuple(leaves))


def _cast_fact(op: Op, layout: Aval, dtype_source: Aval, sharding: Sharding | None = None) -> Fact:
    dtype = dict(op.options).get("cast") if dtype_source.dtype.is_floating_point else None
    if dtype is not None:
        dtype_source = dtype_source._replace(dtype=getattr(torch, dtype))
    return _contiguous_fact(layout, dtype_source, None, sharding)


def rows_of_share(rows: int, share: Share) -> int:
    """Return how many of the rows of a parameter a replica has.

    >>> [rows_of_share(5, Share(number, 4)) for number in range(4)]
    [2, 2, 1, 0]
    """
    full_part = -(-rows // share.replicas)
    return max(0, min(full_part, rows - full_part * share.number))


def share_out(abstract: AbstractTree, share: Share, name: str, paths: Sequence[str]) -> SharedValue:
    """Return the shard and the whole of a value that a step is handed, as DTensors or whole tensors.

    Raises:
        ValueError: a DTensor that is not placed by rows over the axis of the replicas.
    """
    shards, wholes = list[Any](), list[Any]()
    for path, leaf in zip(paths, abstract.leaves, strict=True):
        if not isinstance(leaf, Fact):
            shards.append(leaf)
            wholes.append(leaf)
            continue
        aval, sharding = leaf.aval, leaf.aval.sharding
        shape = aval.shape
        # A DTensor over the replicas: the stage sees the dimensions of the mesh behind them, such as "tp", and a shape
        # that is whole over the replicas and local over those.
        if sharding is not None and share.axis in (sharding.mesh.mesh_dim_names or ()):
            _refuse_other_placement(sharding, share, f"{name}{path}")
            sharding = _inner_sharding(sharding)
            shape = _local_shape(sharding)
        rows = (rows_of_share(shape[0], share), *shape[1:]) if shape else shape
        shards.append(_contiguous_fact(aval, aval, rows))
        inner_sharding = sharding if sharding is not None and sharding.placements else None
        wholes.append(_contiguous_fact(aval, aval, shape, inner_sharding))
    return SharedValue(abstract._replace(leaves=tuple(shards)), abstract._replace(leaves=tuple(wholes)))


def refuse_shards(abstract: AbstractTree, name: str, paths: Sequence[str]) -> None:
    """Raise ValueError for shards that are handed to a step of one replica."""
    pairs = zip(paths, abstract.leaves, strict=True)
    sharded_paths = (path for path, leaf in pairs if isinstance(leaf, Fact) and leaf.aval.sharding is not None)
    sharded_path = next(sharded_paths, None)
    if sharded_path is not None:
        raise ValueError(
            f"{name}{sharded_path} is a DTensor, and one process runs one replica. Hand in its .full_tensor(), or say "
            "runtime='distributed'."
        )


def is_share(leaf: Any, axis: str) -> bool:
    """Whether a leaf is a DTensor that replicas along an axis share out."""
    return is_sharded(leaf) and axis in (leaf.device_mesh.mesh_dim_names or ())


def _inner_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding inside a stage: over all but the first dimension of the mesh."""
    _, *names = sharding.mesh.mesh_dim_names
    return sharding._replace(mesh=sharding.mesh[tuple(names)] if names else None, placements=sharding.placements[1:])


def _local_shape(sharding: Sharding) -> tuple[int, ...]:
    shape = [*sharding.shape]
    for mesh_dim, placement in enumerate(sharding.placements):
        if placement.is_shard():
            share = Share(sharding.mesh.get_local_rank(mesh_dim), sharding.mesh.size(mesh_dim))
            shape[placement.dim] = rows_of_share(shape[placement.dim], share)
    return tuple(shape)


def _refuse_other_placement(sharding: Sharding, share: Share, name: str) -> None:
    mesh_dims: tuple[str, ...] = sharding.mesh.mesh_dim_names or ()
    placement, *inner_placements = sharding.placements
    fits = shards_rows(placement) if sharding.shape else placement.is_replicate()
    fits_inside = all(x.is_shard() or x.is_replicate() for x in inner_placements)
    is_first_dim = mesh_dims.index(share.axis) == 0
    if not (is_first_dim and fits and fits_inside):
        placed = ", ".join(map(str, sharding.placements))
        raise ValueError(
            f"{name} is placed ({placed}) over {', '.join(map(repr, mesh_dims))}, and the program shards it by rows, "
            f"Shard(0), over {share.axis!r}, numbers Replicate(), and other dimensions behind it: use "
            f"fpipe.shard_params(params, mesh[{share.axis!r}])."
        )


def _contiguous_fact(
    layout: Aval, dtype_source: Aval, shape: tuple[int, ...] | None = None, sharding: Sharding | None = None
) -> Fact:
    """Return a contiguous tensor of the shape of `layout` and the dtype and device of `dtype_source`, in new memory."""
    # Strides from the last dim to the first: 1, then products of the sizes behind. A size of 0 counts as 1 (torch).
    shape = layout.shape if shape is None else shape
    stride = tuple([*accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)][::-1]) if shape else ()
    return fact_in_own_storage(dtype_source._replace(shape=shape, stride=stride, sharding=sharding))
