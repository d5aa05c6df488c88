"""Say what a replica has of each sharded parameter, and what that is once it is gathered.

w: float32[5, 8] over 2 replicas        --> own --> float32[3, 8] of replica 0        --> whole -->        float32[5, 8]

Rows are cut as DTensor's Shard(0) cuts them: equal parts, the last ones shorter or empty. What is gathered may be a
part still, over dimensions of the mesh that share a stage ("tp"): the stage reads it as a DTensor over those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from fpipe.graphs.language.graph import Aval, Fact, in_own_storage
from fpipe.meaning.purity.sharded import Sharding, is_by_rows, is_sharded
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.in_place import places_by_leaf
from fpipe.runtimes.lowering.lowered import AbstractTree


class Share(NamedTuple):
    """The number of a replica among how many, along which axis of a mesh."""

    number: int
    replicas: int
    axis: str = "dp"


class Shared(NamedTuple):
    """A value that replicas share out: a replica's own part, and the whole."""

    own: AbstractTree
    whole: AbstractTree

    def scattered(self, op: Op, total: AbstractTree) -> AbstractTree:
        """Return a replica's part of a gradient, as that of its parameter."""
        pairs = zip(self.own.leaves, total.leaves, strict=True)
        parts = (None if grad is None else _cast(op, own.aval, grad.aval) for own, grad in pairs)
        return total._replace(leaves=tuple(parts))


def state_of(shared: Shared, state: AbstractTree) -> AbstractTree:
    """Return a replica's part of an optimizer's state: what is as large as a parameter has its rows."""
    leaves = [*state.leaves]
    for own, places in zip(shared.own.leaves, places_by_leaf(shared.own, state), strict=True):
        for at in places:
            if leaves[at].aval.shape:
                leaves[at] = _plain(own.aval, leaves[at].aval, own.aval.shape)
    return state._replace(leaves=tuple(leaves))


def shard_of(op: Op) -> Value:
    """Return the shard that a GATHER reads, or that a SCATTER makes the gradient of."""
    return Value("shard", op.stage, port=op.reads[0].port)


def gathered(op: Op, known: AbstractTree, shared: Shared | None) -> AbstractTree:
    """Return the parameters that a GATHER makes: in new memory, unless it hands on what it reads."""
    if shared is None and "cast" not in dict(op.how):
        return known
    leaves = (
        _cast(op, leaf.aval, leaf.aval, leaf.aval.sharding) if isinstance(leaf, Fact) else leaf for leaf in known.leaves
    )
    return known._replace(leaves=tuple(leaves))


def _cast(op: Op, like: Aval, other: Aval, sharding: Sharding | None = None) -> Fact:
    dtype = dict(op.how).get("cast") if other.dtype.is_floating_point else None
    return _plain(like, other if dtype is None else other._replace(dtype=getattr(torch, dtype)), None, sharding)


def rows_of_share(rows: int, share: Share) -> int:
    """Return how many of the rows of a parameter a replica has.

    >>> [rows_of_share(5, Share(number, 4)) for number in range(4)]
    [2, 2, 1, 0]
    """
    most = -(-rows // share.replicas)
    return max(0, min(most, rows - most * share.number))


def shared_of(abstract: AbstractTree, share: Share, who: str, paths: Sequence[str]) -> Shared:
    """Return both sides of a value that a step is handed as DTensors, or whole; ValueError for other placements."""
    own, whole = list[Any](), list[Any]()
    for path, leaf in zip(paths, abstract.leaves, strict=True):
        if not isinstance(leaf, Fact):
            own.append(leaf)
            whole.append(leaf)
            continue
        aval, sharding = leaf.aval, leaf.aval.sharding
        shape = aval.shape
        if sharding is not None and share.axis in (sharding.mesh.mesh_dim_names or ()):
            _refuse_other_placement(sharding, share, f"{who}{path}")
            sharding = _inside(sharding)
            shape = _local_shape(sharding)
        rows = (rows_of_share(shape[0], share), *shape[1:]) if shape else shape
        own.append(_plain(aval, aval, rows))
        whole.append(_plain(aval, aval, shape, sharding if sharding is not None and sharding.placements else None))
    return Shared(abstract._replace(leaves=tuple(own)), abstract._replace(leaves=tuple(whole)))


def refuse_shards(abstract: AbstractTree, who: str, paths: Sequence[str]) -> None:
    """Raise ValueError for shards that are handed to a step of one replica."""
    facts = zip(paths, abstract.leaves, strict=True)
    place = next((path for path, leaf in facts if isinstance(leaf, Fact) and leaf.aval.sharding is not None), None)
    if place is not None:
        raise ValueError(
            f"{who}{place} is a DTensor, and a program in one process runs one replica, whose shard is the whole: hand "
            "in plain tensors, .full_tensor(), or say runtime='distributed'."
        )


def is_share(leaf: Any, axis: str) -> bool:
    """Whether a leaf is a DTensor that replicas along an axis share out."""
    return is_sharded(leaf) and axis in (leaf.device_mesh.mesh_dim_names or ())


def _inside(sharding: Sharding) -> Sharding:
    """Return the sharding inside a stage: over all but the first dimension of the mesh."""
    _, *names = sharding.mesh.mesh_dim_names
    return sharding._replace(mesh=sharding.mesh[tuple(names)] if names else None, placements=sharding.placements[1:])


def _local_shape(sharding: Sharding) -> tuple[int, ...]:
    shape = [*sharding.shape]
    for at, placement in enumerate(sharding.placements):
        if placement.is_shard():
            share = Share(sharding.mesh.get_local_rank(at), sharding.mesh.size(at))
            shape[placement.dim] = rows_of_share(shape[placement.dim], share)
    return tuple(shape)


def _refuse_other_placement(sharding: Sharding, share: Share, who: str) -> None:
    names: tuple[str, ...] = sharding.mesh.mesh_dim_names or ()
    placement, *inside = sharding.placements
    fits = is_by_rows(placement) if sharding.shape else placement.is_replicate()
    if names.index(share.axis) or not fits or not all(one.is_shard() or one.is_replicate() for one in inside):
        placed = ", ".join(map(str, sharding.placements))
        raise ValueError(
            f"{who} is a DTensor placed ({placed}) over dimension {', '.join(map(repr, names))} of a mesh, and the "
            f"program shards it by rows, Shard(0), over {share.axis!r}: fpipe.shard_params(params, "
            f"mesh[{share.axis!r}]) makes such, of numbers Replicate(); dimensions inside a stage come behind it."
        )


def _plain(like: Aval, other: Aval, shape: tuple[int, ...] | None = None, sharding: Sharding | None = None) -> Fact:
    """Return a contiguous tensor of the shape of one aval and the dtype of another, in new memory."""
    shape = like.shape if shape is None else shape
    steps = tuple([*accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)][::-1]) if shape else ()
    return in_own_storage(other._replace(shape=shape, stride=steps, sharding=sharding))
