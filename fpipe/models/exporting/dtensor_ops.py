"""Ops of a graph that create DTensors from shards, redistribute them and take their shards.

    redistribute        -->        take the shard, all_reduce, make a DTensor of it

Over a mesh of one dimension most redistributes are one collective, forward or backward, between steps that only copy
local data; the backward of from_local may be one too. The placements before and after, and those of the gradient, say
which. A collective of its own can run as a stage next to computation (`graphs/tracing/collective_stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.torch_private.processes import axis_of

Step = Callable[[Any], Any]
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("dtensor(Tensor x, str name) -> Tensor")
_STEPS: dict[str, Step] = {}


def _run_step(x: Tensor, name: str) -> Tensor:
    return _STEPS[name](x)


_LIBRARY.impl("dtensor", _run_step, "CompositeImplicitAutograd")
DTENSOR: Any = torch.ops.fpipe.dtensor.default
"""The op in a graph that runs a registered step on a tensor, which it finds by name."""


def register_step(step: Step, name: str) -> str:
    """Register a step and return its name.

    Equal steps have equal names, so equal stages have equal graphs and share their traces.
    """
    _STEPS.setdefault(name, step)
    return name


def forget_steps(names: Iterable[str]) -> None:
    """Remove the steps that are registered under these names."""
    for name in names:
        del _STEPS[name]


def collective_of(node: fx.Node) -> CollectiveStage | None:
    """Return the collective that a node runs; None for other nodes."""
    step: Any = getattr(_STEPS[str(node.args[1])], "func", None) if node.target is DTENSOR else None
    return step if isinstance(step, CollectiveStage) else None


class _FromLocal(torch.autograd.Function):
    """DTensor.from_local with `grad_placements`, an argument that torch 2.11 lacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any, placements: Any, grad_placements: Any) -> Any:
        from torch.distributed.tensor import DTensor

        # The gradient arrives as a DTensor in placements of torch's choice; the backward redistributes it to these.
        ctx.grad_placements = grad_placements
        return DTensor.from_local(x, mesh, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].redistribute(placements=ctx.grad_placements).to_local(), None, None, None


def _make_dtensor(x: Tensor, mesh: Any, placements: Any, grad_placements: Any, dim: int = 0, parts: int = 1) -> Any:
    """Make a DTensor of a shard, after moving `parts` chunks from dim 0 to `dim`."""
    # Collectives concatenate the shards of the processes along dim 0, whatever dimension is sharded.
    return _FromLocal.apply(torch.cat(x.chunk(parts), dim) if dim else x, mesh, placements, grad_placements)


def _take_shard(x: Any, grad_placements: Any, dim: int = 0, parts: int = 1) -> Tensor:
    """Return the shard of a DTensor, after moving `parts` chunks of `dim` to dim 0."""
    local = x.to_local(grad_placements=grad_placements)
    return torch.cat(local.chunk(parts, dim)) if dim else local


def _redistribute(x: Any, mesh: Any, placements: Any) -> Any:
    return x.redistribute(mesh, placements)


@dataclass
class DTensorCall:
    """A call of from_local, redistribute or to_local in a net.

    Args:
        mesh: the device mesh of the DTensor.
        source, target: its placements before and after the call; None where it is a plain tensor.
        requested_placements: the placements that the net requests for the gradient.
        is_even: whether all processes have shards of the same size.
        grad_placements: the placements of the gradient, once a backward has shown them.
    """

    mesh: Any
    source: Any
    target: Any
    requested_placements: Any = None
    is_even: bool = True
    grad_placements: Any = None

    def record_gradient(self, gradient: Any) -> None:
        """Record the placements of the gradient that arrived."""
        self.grad_placements = tuple(gradient.placements)

    def register_steps(self, shape: list[Any]) -> list[tuple[str, list[Any]]]:
        """Register the steps that make up this call, and return their names, each with the shape of its result."""
        groups = [mesh_group.group_name for mesh_group in self.mesh.get_all_groups()]
        return [
            (register_step(step, f"{step} over {groups}"), step_shape)
            for step, step_shape in self._steps_of_call(shape)
        ]

    def _steps_of_call(self, shape: list[Any]) -> list[tuple[Step, list[Any]]]:
        """Return the steps that make up this call, each with the shape of its result."""
        if self.target is None:  # to_local
            grad_placements = self.requested_placements or _default_grad_placements(self.source)
            return [(partial(_take_shard, grad_placements=grad_placements), shape)]
        if kind := self._collective_kind(self.source or self.target, self.target):
            return self._collective_steps(kind, shape)
        if self.source is None:  # from_local
            grad_placements = self.requested_placements or _default_grad_placements(self.target)
            make_dtensor = partial(
                _make_dtensor, mesh=self.mesh, placements=self.target, grad_placements=grad_placements
            )
            return [(make_dtensor, shape)]
        # A redistribute that is no single collective is left to torch.
        return [(partial(_redistribute, mesh=self.mesh, placements=self.target), shape)]

    def _collective_steps(self, kind: str, shape: list[Any]) -> list[tuple[Step, list[Any]]]:
        """Return a collective between two local steps, each with the shape of its result."""
        # The shard that is taken has the chunks that the collective splits along dim 0, and the DTensor is made of the
        # chunks that it has joined along dim 0. A from_local starts with the collective: it is called with a shard.
        mesh, source, target = self.mesh, self.source or self.target, self.target
        group, size = mesh.get_group(), mesh.size()
        axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else axis_of(group)
        split_dim, join_dim = (placements[0].dim if placements[0].is_shard() else 0 for placements in (target, source))
        take_shard = partial(_take_shard, grad_placements=_default_grad_placements(source), dim=split_dim, parts=size)
        collective = partial(CollectiveStage(kind, axis, group.group_name, size, group.rank()), None)
        make_dtensor = partial(
            _make_dtensor,
            mesh=mesh,
            placements=target,
            grad_placements=self.grad_placements or _default_grad_placements(target),
            dim=join_dim,
            parts=size,
        )
        taking = [] if self.source is None else [(take_shard, _stacked_shape(size, source[0], shape, split_dim))]
        return [*taking, (collective, _stacked_shape(size, target[0], shape, join_dim)), (make_dtensor, shape)]

    def _collective_kind(self, source: Any, target: Any) -> str | None:
        """Return the kind of the one collective that this call is; None if it is something else."""
        grad_placements = self.grad_placements or _default_grad_placements(target)
        # Uneven shards are padded by torch, which a plain collective does not do; and a gradient that is sharded
        # otherwise than the result would need a collective of its own.
        if (
            self.mesh.ndim > 1
            or not self.is_even
            or self.requested_placements
            or (grad_placements[0].is_shard() and grad_placements != target)
        ):
            return None
        return _KIND_BY_LETTERS.get("".join(_placement_letter(x) for (x,) in (source, target, grad_placements)))


_KIND_BY_LETTERS = {
    "PRP": "all_reduce",
    "PRR": "reduce",
    "PSS": "reduce_scatter",
    "SRP": "all_gather",
    "SRR": "gather",
    "RSS": "scatter",
    "RRP": "copy",
}
"""Kinds by three letters, for the placement before, after, and of the gradient after: partial sum (P), shard (S),
replicated (R)."""


def _placement_letter(placement: Any) -> str:
    from torch.distributed.tensor import Partial

    # A partial maximum, say, is no sum, and none of the collectives here.
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "P"
    return "R" if placement.is_replicate() else "S" if placement.is_shard() else "?"


def _default_grad_placements(placements: Any) -> Any:
    """Return the placements that torch gives to the gradient of a tensor: its own, but replicated for partial sums."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _stacked_shape(count: int, placement: Any, shape: list[Any], dim: int) -> list[Any]:
    """Return the shape of a shard, or of the whole tensor, whose chunks of `dim` are moved to dim 0."""
    stacked_shape = [*shape]
    if placement.is_shard():
        stacked_shape[placement.dim] //= count
    if dim:
        stacked_shape[0], stacked_shape[dim] = stacked_shape[0] * count, stacked_shape[dim] // count
    return stacked_shape
